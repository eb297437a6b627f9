// The words that ranks share: who has announced which call, who has come how far, who has
// given up. Every rank owns one Area that its peers map and write; a rank polls only its own.
//
// A Block is the group of threads that runs a protocol on its target:
//   int index(), count()            which block of the rank this is, of how many
//   int thread(), threads()         which thread of the block this is, of how many
//   bool all(bool)                  barrier of the block's threads; true if all said true
//   Progress& progress()            counters of this block, kept across calls
//   void signal(Flag&, value)       release-store a flag in a peer's area, wake its sleeper
//   bool wait(Flag&, value, peer, phase)   until the flag has reached value; false: given up
#pragma once

#include <cstring>
#include <new>

#include "schedule.h"
#include "target.h"

namespace fastreduce {

enum class Kind : std::uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  barrier,
  reduce_scatter_v,
  all_gather_v
};
enum class DType : std::uint8_t { float32, float64, float16, bfloat16, int32, int64, uint8 };
enum class Op : std::uint8_t { sum, mean, min, max };
enum class Algorithm : std::uint8_t { one_shot, two_shot, ring, low_latency, multimem, encoded };
enum class Phase : std::uint8_t { enter, reduce, gather, exit };

FR_FN std::size_t item_bytes(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::uint8:
      break;
  }
  return 1;
}

// What a rank says about a call before anyone touches memory. What comes before `segment` must
// be the same on all ranks; the rest is this rank's own.
struct Call {
  Kind kind = Kind::barrier;
  DType dtype = DType::float32;
  Op op = Op::sum;
  Algorithm algorithm = Algorithm::one_shot;
  std::int32_t root = 0;
  std::uint64_t count = 0;  // elements of a rank's smaller tensor
  std::uint32_t shape = 0;  // a checksum of the tensor's shape

  std::int32_t segment = -1;   // the caller's segment that holds it, or none
  std::uint64_t offset = 0;    // bytes into the segment
  double scale = 1.0;          // factor on this rank's input; 0 drops it
  double weight = -1;          // this rank's part of a mean's divisor, or one of the two below
  std::uint32_t messages = 0;  // control messages sent to peers before this call
};

// Not a weight: the rank counts as 1, as all others do; or it has nothing to contribute, and counts
// as 0 where others give weights and as 1 where they do not.
constexpr double kOrdinary = -1;
constexpr double kAbsent = -2;

// What ranks can disagree on, in the order in which they are compared.
enum class Field : std::uint32_t {
  none,
  kind,
  dtype,
  op,
  root,
  count,
  shape,
  algorithm,
  scale,
  weight
};

struct Difference {
  Field field = Field::none;
  std::uint64_t expected = 0;
  std::uint64_t seen = 0;
};

FR_FN std::uint64_t bits_of(double value) {
  std::uint64_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

// The first thing in which two ranks' calls differ, if they do.
FR_FN Difference differ(const Call& a, const Call& b) {
  if (a.kind != b.kind) return {Field::kind, std::uint64_t(a.kind), std::uint64_t(b.kind)};
  if (a.dtype != b.dtype) return {Field::dtype, std::uint64_t(a.dtype), std::uint64_t(b.dtype)};
  if (a.op != b.op) return {Field::op, std::uint64_t(a.op), std::uint64_t(b.op)};
  if (a.root != b.root) return {Field::root, std::uint64_t(a.root), std::uint64_t(b.root)};
  if (a.count != b.count) return {Field::count, a.count, b.count};
  if (a.shape != b.shape) return {Field::shape, a.shape, b.shape};
  if (a.algorithm != b.algorithm)
    return {Field::algorithm, std::uint64_t(a.algorithm), std::uint64_t(b.algorithm)};
  // A switch adds what lies in memory.
  if (a.algorithm == Algorithm::multimem && bits_of(a.scale) != bits_of(b.scale))
    return {Field::scale, bits_of(a.scale), bits_of(b.scale)};
  return {};
}

// Whether some ranks' calls give weights and others' do not: the first rank that does not do as the
// first that does either, or -1.
FR_FN int differ_in_weights(const Call* calls, int world) {
  int first = -1;
  for (int p = 0; p < world; ++p) {
    if (calls[p].weight == kAbsent) continue;
    if (first < 0) first = p;
    if ((calls[p].weight >= 0) != (calls[first].weight >= 0)) return p;
  }
  return -1;
}

// One writer, one waiter. The waiter sets `sleeping` before it sleeps on `value`.
struct Flag {
  std::uint32_t value;
  std::uint32_t sleeping;
};

struct alignas(kLineBytes) Line {
  Flag flag;
};

// The flag counts epochs and is stored last: who sees it sees the call. Both share a cache
// line, so that one transfer brings both.
struct alignas(kLineBytes) Announcement {
  Flag flag;
  Call call;
};
static_assert(sizeof(Flag) + sizeof(Call) <= 64, "an announcement is one cache line");

// How far a block of this rank has come. Every counter has its flags in the peers' areas.
struct Progress {
  std::uint32_t steps = 0;     // barriers and pipeline steps completed, told to all peers
  std::uint32_t sent = 0;      // slots filled at the next neighbour
  std::uint32_t received = 0;  // slots emptied for the previous neighbour
};

enum class State : std::uint32_t { open, closed, failed };

enum class Failure : std::uint32_t {
  none,
  mismatch,     // ranks make different calls
  lost,         // a peer's process has ended
  closed,       // a peer closed its communicator, or this rank did
  timeout,      // the deadline passed
  interrupted,  // a signal handler of this rank raised
  sibling,      // another block of this rank gave up, and knows why
  broken        // this rank could not go on: no memory, no descriptor ...
};

// Why a rank gave up: while waiting for `peer` it expected a counter and saw another. For a
// mismatch: the field, rank 0's value as expected, the first differing peer's as seen.
struct FailureRecord {
  Failure failure = Failure::none;
  Field field = Field::none;
  Kind kind = Kind::barrier;
  Phase phase = Phase::enter;
  bool written = false;  // the call's output may have been written in part
  bool ran = false;      // by the rank that reports this: it has come to the end, but for a wait
  std::int32_t rank = -1;
  std::int32_t peer = -1;
  std::uint32_t epoch = 0;
  std::uint64_t expected = 0;
  std::uint64_t seen = 0;
};

// A call that could not be completed.
struct CallFailed {
  FailureRecord record;
  int rank;  // who reports it; record.rank is who found it
};

// Head of a rank's control segment; its lines and staging follow (see Layout).
struct alignas(kLineBytes) Head {
  // Why this rank gave up, perhaps in a peer's words, and in which call it did; written before its
  // peers' state words.
  FailureRecord failure;
  std::uint32_t given_up;
};

// Where things lie in every rank's control segment: the same on all ranks of a group.
struct Layout {
  int world = 1;
  int blocks = 1;
  std::size_t slot_bytes = 0;   // one-shot payload, twice: parity of the epoch
  std::size_t stage_bytes = 0;  // staging of one block for piecewise protocols
  std::size_t inbox_bytes = 0;  // payload of a message in lines; 0: nobody greets, see lines.h

  FR_FN std::size_t announcements() const { return sizeof(Head); }
  FR_FN std::size_t states() const {
    return announcements() + 2 * static_cast<std::size_t>(world) * sizeof(Announcement);
  }
  FR_FN std::size_t claims() const {
    return states() + static_cast<std::size_t>(world) * sizeof(Line);
  }
  FR_FN std::size_t lines() const {
    return claims() + static_cast<std::size_t>(world) * sizeof(Line);
  }
  FR_FN std::size_t slots() const {
    const std::size_t end = lines() + 3 * static_cast<std::size_t>(blocks) * world * sizeof(Line);
    return (end + 4095) / 4096 * 4096;
  }
  FR_FN std::size_t stages() const { return slots() + 2 * slot_bytes; }
  FR_FN std::size_t greetings() const { return stages() + blocks * stage_bytes; }
  FR_FN std::size_t inboxes() const {
    const std::size_t greeters =
        inbox_bytes == 0 ? 0 : 2 * static_cast<std::size_t>(blocks) * world;
    return greetings() + greeters * kLineBytes;
  }
  FR_FN std::size_t bytes() const { return inboxes() + 2 * inbox() * world; }

  // Of one writer and parity: a line carries as much data as not.
  FR_FN std::size_t inbox() const { return 2 * inbox_bytes; }
};

struct DataLine;

// A rank's view of its group: every rank's control segment, as mapped here.
struct View {
  Layout layout;
  int rank = 0;
  char* area[kMaxRanks] = {};

  FR_FN int world() const { return layout.world; }
  FR_FN FailureRecord& failure(int owner) const {
    return reinterpret_cast<Head*>(area[owner])->failure;
  }
  FR_FN std::uint32_t& given_up(int owner) const {
    return reinterpret_cast<Head*>(area[owner])->given_up;
  }
  FR_FN Announcement& announcement(int owner, int writer, std::uint32_t epoch) const {
    auto* first = reinterpret_cast<Announcement*>(area[owner] + layout.announcements());
    return first[(epoch & 1) * layout.world + writer];
  }
  // What `writer` says of itself: open, closed, failed.
  FR_FN Flag& state(int owner, int writer) const {
    return reinterpret_cast<Line*>(area[owner] + layout.states())[writer].flag;
  }
  // The last call in which `writer` meant to write into `owner`'s tensor.
  FR_FN Flag& claim(int owner, int writer) const {
    return reinterpret_cast<Line*>(area[owner] + layout.claims())[writer].flag;
  }
  // How many steps `writer`'s block has completed.
  FR_FN Flag& step(int owner, int block, int writer) const { return line(owner, 0, block, writer); }
  // How many slots of `owner`'s block its previous neighbour has filled.
  FR_FN Flag& tail(int owner, int block, int writer) const { return line(owner, 1, block, writer); }
  // How many of the slots that `owner`'s block has filled its next neighbour has emptied.
  FR_FN Flag& head(int owner, int block, int writer) const { return line(owner, 2, block, writer); }
  FR_FN char* slot(int owner, std::uint32_t epoch) const {
    return area[owner] + layout.slots() + (epoch & 1) * layout.slot_bytes;
  }
  FR_FN char* stage(int owner, int block) const {
    return area[owner] + layout.stages() + block * layout.stage_bytes;
  }
  // What `writer`'s block says of its call.
  FR_FN DataLine* greeting(int owner, int block, int writer, std::uint32_t epoch) const {
    const std::size_t number = ((epoch & 1) * layout.blocks + block) * layout.world + writer;
    return reinterpret_cast<DataLine*>(area[owner] + layout.greetings() + number * kLineBytes);
  }
  // What `writer` sends in a call.
  FR_FN DataLine* inbox(int owner, int writer, std::uint32_t epoch) const {
    const std::size_t number = (epoch & 1) * layout.world + writer;
    return reinterpret_cast<DataLine*>(area[owner] + layout.inboxes() + number * layout.inbox());
  }

 private:
  FR_FN Flag& line(int owner, int kind, int block, int writer) const {
    auto* first = reinterpret_cast<Line*>(area[owner] + layout.lines());
    return first[(kind * layout.blocks + block) * layout.world + writer].flag;
  }
};

// A rank's own area, zeroed, as it is before the first call: flags begin where the counters do,
// which count from `first`.
inline void initialise(const View& view, std::uint32_t first) {
  new (&view.failure(view.rank)) FailureRecord();
  for (int p = 0; p < view.world(); ++p) {
    view.announcement(view.rank, p, 0).flag.value = first;
    view.announcement(view.rank, p, 1).flag.value = first;
    view.claim(view.rank, p).value = first;
    for (int b = 0; b < view.layout.blocks; ++b) {
      view.step(view.rank, b, p).value = first;
      view.tail(view.rank, b, p).value = first;
      view.head(view.rank, b, p).value = first;
    }
  }
}

// A rank that gave up in call `epoch` or before, or -1. What it wrote before it did can be seen.
// Who gave up in a later call has done its part of this one, and so will all others: it is
// completed.
FR_FN int failed_peer(const View& view, std::uint32_t epoch) {
  for (int p = 0; p < view.world(); ++p)
    if (p != view.rank &&
        load_ordered(&view.state(view.rank, p).value) ==
            static_cast<std::uint32_t>(State::failed) &&
        reached(epoch, view.given_up(p)))
      return p;
  return -1;
}

// Between enter() and the first store into a peer's tensor. A rank may give up while it waits
// in enter(), and then its user has the tensor back. Each side stores its word and then looks at
// the other's: either this rank sees that the peer gave up, or the peer sees this claim and
// waits until this rank is done. Returns the peer that gave up, or -1.
FR_FN int claim_peers(const View& view, std::uint32_t epoch) {
  for (int p = 0; p < view.world(); ++p)
    if (p != view.rank) store_ordered(&view.claim(p, view.rank).value, epoch);
  return failed_peer(view, epoch);
}

inline namespace FR_ISA {

// Opens a call: everybody learns what everybody calls. On return every rank has announced
// `epoch`, so every rank has completed the call before it, and `calls` holds what they said.
//
// Two parities suffice: a rank announces epoch e + 2 only after it has seen every peer's
// e + 1, and a peer announces e + 1 only after it has read e.
template <class Block>
FR_BLOCK bool enter(Block& block, const View& view, std::uint32_t epoch, const Call& mine,
                    Call* calls) {
  const int world = view.world();
  for (int p = block.thread(); p < world; p += block.threads()) {
    if (p == view.rank) continue;
    Announcement& there = view.announcement(p, view.rank, epoch);
    there.call = mine;
    block.signal(there.flag, epoch);
  }
  bool seen = true;
  for (int p = block.thread(); p < world && seen; p += block.threads()) {
    if (p == view.rank) {
      calls[p] = mine;
      continue;
    }
    Announcement& here = view.announcement(view.rank, p, epoch);
    seen = block.wait(here.flag, epoch, p, Phase::enter);
    if (seen) calls[p] = here.call;
  }
  return block.all(seen);
}

// Tells every peer that this block has completed one more step.
template <class Block>
FR_BLOCK void advance(Block& block, const View& view) {
  block.all(true);
  const std::uint32_t done = block.progress().steps + 1;
  for (int p = block.thread(); p < view.world(); p += block.threads())
    if (p != view.rank) block.signal(view.step(p, block.index(), view.rank), done);
  block.all(true);
  if (block.thread() == 0) block.progress().steps = done;
}

// Waits until the same block of every peer has completed all but `lag` of our own steps.
template <class Block>
FR_BLOCK bool await(Block& block, const View& view, std::uint32_t lag, Phase phase) {
  block.all(true);
  const std::uint32_t target = block.progress().steps - lag;
  bool seen = true;
  for (int p = block.thread(); p < view.world() && seen; p += block.threads())
    if (p != view.rank) seen = block.wait(view.step(view.rank, block.index(), p), target, p, phase);
  return block.all(seen);
}

template <class Block>
FR_BLOCK bool barrier(Block& block, const View& view, Phase phase) {
  advance(block, view);
  return await(block, view, 0, phase);
}

}  // namespace FR_ISA
}  // namespace fastreduce
