// What a block of a kernel does around its protocol: it opens the call, knows when waiting is in
// vain and tells the host and the peers, and counts the call once all blocks are through.
//
// A Target is what differs between a GPU and threads that play one:
//   int index(), count(), thread(), threads(), bool all(bool)    as in signal.h
//   BlockShared& shared()                 memory of this block
//   std::uint64_t nanoseconds()           a clock
//   bool first(std::uint32_t& word)       sets it; whether it was 0
//   std::uint32_t count_up(std::uint32_t& word)   the new value; what was written before is seen
//                                         by who counts later
//   std::uint32_t look(const std::uint32_t& word)   what another block may write
#pragma once

#include "cuda.h"

namespace fastreduce {

// What the threads of a block share. Nothing initialises it.
struct BlockShared {
  const Launch* launch;
  alignas(Call) char calls[kMaxRanks * sizeof(Call)];
  void* peers[kMaxRanks];  // every rank's tensor
  const char* from[kMaxRanks];
  char* to[kMaxRanks];
  // The call's factors in every accumulator's type, see Scale.
  float single[kMaxRanks];
  double twice[kMaxRanks];
  double total;                                 // of the ranks' weights
  alignas(Coding) char coding[sizeof(Coding)];  // of an encoded call, with this rank's factor
  double after;
  std::int64_t divisor;
};

FR_FN Scale<float> factors_of(const BlockShared& shared, const Scale<float>*) {
  return {shared.single, static_cast<float>(shared.after)};
}
FR_FN Scale<double> factors_of(const BlockShared& shared, const Scale<double>*) {
  return {shared.twice, shared.after};
}
template <class A>
FR_FN Divisor<A> factors_of(const BlockShared& shared, const Divisor<A>*) {
  return {static_cast<A>(shared.divisor)};
}

inline namespace FR_ISA {

// On a GPU a Target has no members, and the block can be made anew wherever it is used.
template <class Target>
class DeviceBlock : public Target {
 public:
  static constexpr bool kPacks = true;

  DeviceBlock() = default;
  explicit DeviceBlock(const Target& target) : Target(target) {}

  FR_BLOCK bool packs() const { return true; }
  FR_BLOCK Progress& progress() { return launch(*this).state->progress[this->index()]; }
  FR_BLOCK Call* calls() { return reinterpret_cast<Call*>(this->shared().calls); }

  FR_BLOCK void signal(Flag& flag, std::uint32_t value) { store_release(&flag.value, value); }
  FR_BLOCK bool wait(Flag& flag, std::uint32_t value, int peer, Phase phase) {
    Pause counted = pause();
    for (;;) {
      const std::uint32_t seen = load_acquire(&flag.value);
      if (reached(seen, value)) return true;
      if (!more(counted, peer, phase, value, seen)) return false;
    }
  }

  template <bool Acquire>
  FR_BLOCK bool arrived(const DataLine* line, std::uint32_t epoch, std::uint64_t& data,
                        std::uint32_t& seen) {
    return load_line<Acquire>(line, epoch, data, seen);
  }

  struct Pause {
    std::uint32_t polls = 0;
    std::uint64_t begin = 0;
    std::uint64_t looked = 0;
    bool last = false;  // there is no hope, unless the next poll brings it
  };
  FR_BLOCK Pause pause() const { return {}; }

  // Looks at the clock now and then, and after that less often whether there is still hope. What a
  // peer did before it left still counts: so the caller polls once more after that look.
  FR_BLOCK bool more(Pause& pause, int peer, Phase phase, std::uint32_t expected,
                     std::uint32_t seen) {
    if (pause.last) {
      hopeless(*this, true, pause.looked - pause.begin, peer, phase, expected, seen);
      return false;
    }
    if (++pause.polls % kPollsPerLook != 0) return true;
    const std::uint64_t now = this->nanoseconds();
    if (pause.begin == 0) pause.begin = pause.looked = now;
    if (now - pause.looked < kLookNanoseconds) return true;
    pause.looked = now;
    pause.last = hopeless(*this, false, now - pause.begin, peer, phase, expected, seen);
    return true;
  }

  FR_BLOCK void differs(int peer, const Difference& difference) {
    if (this->thread() != 0 || !this->first(launch(*this).state->failed)) return;
    FailureRecord record = blank(*this, Phase::enter);
    record.failure = Failure::mismatch;
    record.field = difference.field;
    record.peer = peer;
    record.expected = difference.expected;
    record.seen = difference.seen;
    record.rank = -1;
    tell(*this, record);
  }

 private:
  static constexpr std::uint32_t kPollsPerLook = 64;
  static constexpr std::uint64_t kLookNanoseconds = 100000;

  static FR_BLOCK const Launch& launch(Target target) { return *target.shared().launch; }

  // Whether waiting for `peer` is in vain; with `declare`, also tells why.
  static FR_OUT_OF_LINE bool hopeless(Target target, bool declare, std::uint64_t waited, int peer,
                                      Phase phase, std::uint32_t expected, std::uint32_t seen) {
    const Launch& launch = *target.shared().launch;
    const Mailbox& mailbox = *launch.mailbox;
    const View& view = launch.view;
    if (target.look(launch.state->failed) != 0) return true;  // another block has told
    const int gone = failed_peer(view, epoch_after(launch.state->epoch));
    const std::uint32_t lost = load_acquire(&mailbox.lost[peer / 32]) >> peer % 32 & 1;
    const auto state = static_cast<State>(load_acquire(&view.state(view.rank, peer).value));
    Failure why = Failure::none;
    if (load_acquire(&mailbox.stop) != 0) {
      why = Failure::closed;
      peer = view.rank;
    } else if (gone >= 0) {
      why = Failure::closed;
    } else if (state == State::closed) {
      why = Failure::closed;
    } else if (lost != 0) {
      why = Failure::lost;
    } else if (waited >= launch.timeout_ns) {
      why = Failure::timeout;
    } else {
      return false;
    }
    if (!declare || !target.first(launch.state->failed)) return true;
    FailureRecord record = blank(target, phase);
    record.failure = why;
    record.peer = peer;
    record.expected = expected;
    record.seen = seen;
    // The first rank to give up knows best why.
    if (gone >= 0) record = view.failure(gone);
    // Other blocks, and peers, may be further than this one. But no block agrees to a call that is
    // another one on some rank.
    if (record.failure != Failure::mismatch)
      record.written = phase != Phase::enter || target.count() > 1 || launch.job.call.segment >= 0;
    tell(target, record);
    return true;
  }

  static FR_BLOCK FailureRecord blank(Target target, Phase phase) {
    const Launch& launch = *target.shared().launch;
    FailureRecord record;
    record.kind = launch.job.call.kind;
    record.phase = phase;
    record.rank = launch.view.rank;
    record.epoch = epoch_after(launch.state->epoch);
    return record;
  }

  static FR_BLOCK void tell(Target target, const FailureRecord& record) {
    const Launch& launch = *target.shared().launch;
    const View& view = launch.view;
    launch.mailbox->record = record;
    store_release(&launch.mailbox->failed, 1);
    view.failure(view.rank) = record;
    view.given_up(view.rank) = epoch_after(launch.state->epoch);
    for (int p = 0; p < view.world(); ++p)
      if (p != view.rank)
        store_ordered(&view.state(p, view.rank).value, static_cast<std::uint32_t>(State::failed));
  }
};

// Runs body(block, epoch), and counts the call once all blocks are through. After a failure nothing
// runs any more.
template <class Block, class Body>
FR_BLOCK void run_call(Block block, const Launch& launch, const Body& body) {
  DeviceState& state = *launch.state;
  if (block.thread() == 0) block.shared().launch = &launch;
  const std::uint32_t epoch = epoch_after(block.look(state.epoch));
  if (!block.all(block.look(state.failed) == 0)) return;
  body(block, epoch);
  block.all(true);
  if (block.thread() != 0) return;
  if (block.count_up(state.left) != static_cast<std::uint32_t>(block.count())) return;
  state.left = 0;
  state.epoch = epoch;
}

// After agree(): what every rank's input is multiplied by, and the sum, as all have told.
template <class Block>
FR_BLOCK void find_factors(Block& block, const Launch& launch) {
  BlockShared& shared = block.shared();
  const int world = launch.view.world();
  for (int p = block.thread(); p < world; p += block.threads())
    shared.twice[p] = weight_of(block.calls(), world, p);
  block.all(true);
  if (block.thread() == 0) {
    const double total = total_of(shared.twice, world);
    shared.total = total;
    shared.after = after_of(launch.job.call, total);
    shared.divisor = launch.job.call.op == Op::mean ? static_cast<std::int64_t>(total) : 1;
  }
  block.all(true);
  for (int p = block.thread(); p < world; p += block.threads()) {
    shared.twice[p] = factor_of(block.calls()[p]);
    shared.single[p] = static_cast<float>(shared.twice[p]);
  }
  block.all(true);
}

// After open(): where every rank's tensor lies, as each has told.
template <class Block>
FR_BLOCK void** find_peers(Block& block, const Launch& launch) {
  void** const peers = block.shared().peers;
  for (int p = block.thread(); p < launch.view.world(); p += block.threads()) {
    const Call& call = block.calls()[p];
    peers[p] = call.segment < 0 ? nullptr : launch.segments[call.segment].base[p] + call.offset;
  }
  block.all(true);
  return peers;
}

template <class Block, class Arithmetic>
FR_BLOCK void reduce_call(Block& block, const Launch& launch, const Arithmetic& arithmetic,
                          std::uint32_t epoch) {
  const Job& job = launch.job;
  if (!open(block, launch.view, job, epoch)) return;
  find_factors(block, launch);
  void* const* peers = find_peers(block, launch);
  // Where one rank's tensor is staged and another's is not, they are at no common address.
  if (job.call.algorithm == Algorithm::multimem && same_place(block, launch.view))
    multimem(block, launch.view, arithmetic,
             launch.segments[job.call.segment].everywhere + job.call.offset, job.call.count);
  else
    reduce_direct(block, launch.view, arithmetic, job, peers, epoch);
}

template <class Block, class Arithmetic>
FR_BLOCK void ring_call(Block& block, const Launch& launch, const Arithmetic& arithmetic,
                        std::uint32_t epoch) {
  const Job& job = launch.job;
  if (!open(block, launch.view, job, epoch)) return;
  find_factors(block, launch);
  ring(block, launch.view, arithmetic, static_cast<const char*>(job.in),
       static_cast<char*>(job.out), job.call.count);
}

template <class Block, class Arithmetic>
FR_BLOCK void low_latency_call(Block& block, const Launch& launch, const Arithmetic& arithmetic,
                               std::uint32_t epoch) {
  const Job& job = launch.job;
  greet(block, launch.view, epoch, job.call);
  low_latency(block, launch.view, arithmetic, epoch, job.call, static_cast<const char*>(job.in),
              static_cast<char*>(job.out), [&] { find_factors(block, launch); });
}

// coder_of(coding) makes what the protocol encodes with.
template <class Block, class CoderOf>
FR_BLOCK void encoded_call(Block& block, const Launch& launch, const CoderOf& coder_of,
                           std::uint32_t epoch) {
  const View& view = launch.view;
  bool complete = open(block, view, launch.job, epoch);
  if (complete) {
    find_factors(block, launch);
    auto* const coding = reinterpret_cast<Coding*>(block.shared().coding);
    if (block.thread() == 0) {
      *coding = launch.coding;
      coding->factor = encoded_factor(block.calls()[view.rank], view.world(), block.shared().total);
    }
    block.all(true);
    auto coder = coder_of(*coding);
    complete = encoded(block, view, coder);
  }
  // New residuals do not count either, then.
  if (!complete && block.thread() == 0) store_release(launch.coding.finite, 0);
}

template <class Block>
FR_BLOCK void transfer_call(Block& block, const Launch& launch, std::uint32_t epoch) {
  if (!open(block, launch.view, launch.job, epoch)) return;
  transfer_direct(block, launch.view, launch.job, find_peers(block, launch), epoch);
}

}  // namespace FR_ISA
}  // namespace fastreduce
