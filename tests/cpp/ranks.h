// Ranks as threads of one process, so that a sanitizer sees every access of every rank: control
// segments on the heap, blocks of one or several threads, random stalls, and ways to break the
// protocol that a test has to notice.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "host.h"
#include "lines.h"

namespace fastreduce::test {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  std::uint32_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>(state_ >> 33);
  }
  std::uint32_t below(std::uint32_t limit) { return next() % limit; }

 private:
  std::uint64_t state_;
};

// Now and then lets the other threads go first.
class Stalls {
 public:
  explicit Stalls(std::uint64_t seed) : random_(seed) {}
  void perhaps(std::uint32_t of) {
    const std::uint32_t drawn = random_.below(of);
    if (drawn == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(10 + random_.below(100)));
    else if (drawn < 4)
      std::this_thread::yield();
  }

 private:
  Random random_;
};

struct Shape {
  int world = 2;
  int blocks = 1;
  int threads = 1;  // of a block
  std::uint32_t first_epoch = 0;
  bool sleeps = false;  // waits go to sleep at once
  std::size_t slot_bytes = 0;
  std::size_t stage_bytes = 0;
  std::size_t inbox_bytes = 0;
};

enum class Action {
  none,
  skip_wait,          // wait() returns at once
  wait_for_less,      // wait() is content with one count less
  relaxed_wait,       // wait() sees the flag, and orders nothing behind it
  relaxed_signal,     // signal() orders nothing before the flag
  early_signal,       // signal() tells of the next step, too
  no_block_barrier,   // all() does not wait for the block's other threads
  same_slot,          // one slot instead of two
  same_announcement,  // one announcement instead of two
  same_inbox,         // one greeting and one inbox instead of two
  no_line,            // arrived() says so at once
  relaxed_line,       // arrived() orders nothing behind it
  short_segment,      // the control segment ends a cache line early
  misaligned,         // tensors begin within an element
};
enum class Word { any, announcement, step, tail, head };

struct Sabotage {
  const char* name;
  Action action;
  Word word;
};

constexpr Sabotage kSabotages[] = {
    {"none", Action::none, Word::any},
    {"no_enter", Action::skip_wait, Word::announcement},
    {"no_barrier", Action::skip_wait, Word::step},
    {"no_tail", Action::skip_wait, Word::tail},
    {"no_head", Action::skip_wait, Word::head},
    {"less_step", Action::wait_for_less, Word::step},
    {"less_tail", Action::wait_for_less, Word::tail},
    {"less_head", Action::wait_for_less, Word::head},
    {"relaxed_wait", Action::relaxed_wait, Word::any},
    {"relaxed_enter", Action::relaxed_signal, Word::announcement},
    {"relaxed_step", Action::relaxed_signal, Word::step},
    {"relaxed_tail", Action::relaxed_signal, Word::tail},
    {"relaxed_head", Action::relaxed_signal, Word::head},
    {"early_enter", Action::early_signal, Word::announcement},
    {"early_step", Action::early_signal, Word::step},
    {"early_tail", Action::early_signal, Word::tail},
    {"early_head", Action::early_signal, Word::head},
    {"no_block_barrier", Action::no_block_barrier, Word::any},
    {"same_slot", Action::same_slot, Word::any},
    {"same_announcement", Action::same_announcement, Word::any},
    {"same_inbox", Action::same_inbox, Word::any},
    {"no_line", Action::no_line, Word::any},
    {"relaxed_line", Action::relaxed_line, Word::any},
    {"short_segment", Action::short_segment, Word::any},
    {"misaligned", Action::misaligned, Word::any},
};

// Which of a segment's words a flag is.
inline Word word_of(const View& view, const Flag& flag) {
  const auto* at = reinterpret_cast<const char*>(&flag);
  const Layout& layout = view.layout;
  for (int p = 0; p < view.world(); ++p) {
    if (at < view.area[p] || at >= view.area[p] + layout.bytes()) continue;
    const std::size_t offset = at - view.area[p];
    if (offset < layout.states()) return Word::announcement;
    const std::size_t of_a_kind = static_cast<std::size_t>(layout.blocks) * layout.world;
    const std::size_t kind = (offset - layout.lines()) / sizeof(Line) / of_a_kind;
    return kind == 0 ? Word::step : kind == 1 ? Word::tail : Word::head;
  }
  return Word::any;
}

// What came of a run: the first thing that went wrong, after which all ranks stop.
class Outcome {
 public:
  enum Code { fine = 0, wrong = 2, gave_up = 3 };

  void fail(Code code, const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (code_ == fine) {
      code_ = code;
      text_ = text;
    }
    stop_ = Failure::closed;
  }
  const std::atomic<Failure>& stop() const { return stop_; }
  Code code() const { return code_; }
  const std::string& text() const { return text_; }

 private:
  std::atomic<Failure> stop_{Failure::none};
  std::mutex mutex_;
  Code code_ = fine;
  std::string text_;
};

// A barrier of threads that also tells whether all of them said true.
class Gate {
 public:
  explicit Gate(int threads) : threads_(threads) {}
  bool all(bool value) {
    std::unique_lock<std::mutex> lock(mutex_);
    together_ = together_ && value;
    if (++arrived_ == threads_) {
      arrived_ = 0;
      result_ = together_;
      together_ = true;
      ++round_;
      open_.notify_all();
      return result_;
    }
    const unsigned round = round_;
    open_.wait(lock, [&] { return round_ != round; });
    return result_;
  }

 private:
  const int threads_;
  std::mutex mutex_;
  std::condition_variable open_;
  unsigned round_ = 0;
  int arrived_ = 0;
  bool together_ = true;
  bool result_ = true;
};

// A block of one thread as the host has it, or one as a GPU has it: several threads, which walk
// memory pack by pack. Either way with the host's way to signal and to wait.
class GroupBlock {
 public:
  static constexpr bool kPacks = true;

  GroupBlock(const Watch& watch, Progress& progress, int index, int count, int thread, int threads,
             Gate& gate, Call* calls)
      : host_(watch, progress, index, count),
        watch_(watch),
        thread_(thread),
        threads_(threads),
        gate_(gate),
        calls_(calls) {}

  int index() const { return host_.index(); }
  int count() const { return host_.count(); }
  int thread() const { return thread_; }
  int threads() const { return threads_; }
  bool packs() const { return threads_ > 1; }
  bool all(bool value) { return threads_ == 1 ? value : gate_.all(value); }
  Progress& progress() const { return host_.progress(); }
  void signal(Flag& flag, std::uint32_t value) { host_.signal(flag, value); }
  bool wait(Flag& flag, std::uint32_t value, int peer, Phase phase) {
    return host_.wait(flag, value, peer, phase);
  }
  const FailureRecord& failure() const {
    return failure_.failure == Failure::none ? host_.failure() : failure_;
  }

  template <bool Acquire>
  bool arrived(const DataLine* line, std::uint32_t epoch, std::uint64_t& data,
               std::uint32_t& seen) {
    return load_line<Acquire>(line, epoch, data, seen);
  }
  Clock::time_point pause() const { return Clock::now(); }
  bool more(Clock::time_point since, int, Phase, std::uint32_t expected, std::uint32_t seen) {
    std::this_thread::yield();
    if (*watch_.stop == Failure::none && Clock::now() - since < watch_.timeout) return true;
    failure_.failure = Failure::timeout;
    failure_.expected = expected;
    failure_.seen = seen;
    return false;
  }
  Call* calls() const { return calls_; }
  void differs(int peer, const Difference& difference) {
    failure_.failure = Failure::mismatch;
    failure_.field = difference.field;
    failure_.peer = peer;
    failure_.expected = difference.expected;
    failure_.seen = difference.seen;
  }

 private:
  HostBlock host_;
  FailureRecord failure_;
  const Watch& watch_;
  int thread_;
  int threads_;
  Gate& gate_;
  Call* calls_;
};

// Any Block, with stalls around its flags and, where asked, one thing wrong.
template <class Block>
class SabotagedBlock {
 public:
  static constexpr bool kPacks = Block::kPacks;

  SabotagedBlock(Block block, const View& view, const Sabotage& sabotage, Stalls& stalls,
                 Outcome& outcome)
      : block_(block), view_(view), sabotage_(sabotage), stalls_(stalls), outcome_(outcome) {}

  // Asked for wherever a step of a protocol begins, also where no flag is set.
  int index() const {
    stalls_.perhaps(64);
    return block_.index();
  }
  int count() const { return block_.count(); }
  int thread() const { return block_.thread(); }
  int threads() const { return block_.threads(); }
  bool packs() const { return block_.packs(); }
  bool all(bool value) {
    return sabotage_.action == Action::no_block_barrier ? value : block_.all(value);
  }
  Progress& progress() const { return block_.progress(); }

  void signal(Flag& flag, std::uint32_t value) {
    stalls_.perhaps(32);
    if (does(Action::relaxed_signal, flag))
      return __atomic_store_n(&flag.value, value, __ATOMIC_RELAXED);
    if (does(Action::early_signal, flag)) value += sabotage_.word == Word::announcement ? 2 : 1;
    block_.signal(flag, value);
  }

  bool wait(Flag& flag, std::uint32_t value, int peer, Phase phase) {
    bool arrived = true;
    if (does(Action::relaxed_wait, flag))
      arrived = wait_relaxed(flag, value);
    else if (!does(Action::skip_wait, flag))
      arrived =
          block_.wait(flag, does(Action::wait_for_less, flag) ? value - 1 : value, peer, phase);
    if (!arrived) gave_up(peer, phase);
    stalls_.perhaps(32);
    return arrived;
  }

  template <bool Acquire>
  bool arrived(const DataLine* line, std::uint32_t epoch, std::uint64_t& data,
               std::uint32_t& seen) {
    if (sabotage_.action == Action::relaxed_line)
      return block_.template arrived<false>(line, epoch, data, seen);
    const bool there = block_.template arrived<Acquire>(line, epoch, data, seen);
    // A greeting that is not there would be one of another call.
    return there || (sabotage_.action == Action::no_line && !Acquire);
  }
  Clock::time_point pause() { return block_.pause(); }
  bool more(Clock::time_point since, int peer, Phase phase, std::uint32_t expected,
            std::uint32_t seen) {
    if (block_.more(since, peer, phase, expected, seen)) return true;
    gave_up(peer, phase);
    return false;
  }
  Call* calls() const { return block_.calls(); }
  void differs(int peer, const Difference& difference) {
    block_.differs(peer, difference);
    outcome_.fail(Outcome::wrong, "wrong result: rank " + std::to_string(peer) + " differs");
  }

 private:
  void gave_up(int peer, Phase phase) {
    const FailureRecord& why = block_.failure();
    outcome_.fail(Outcome::gave_up, "gave up: rank " + std::to_string(view_.rank) +
                                        " waiting for rank " + std::to_string(peer) + " in phase " +
                                        std::to_string(static_cast<int>(phase)) + ": expected " +
                                        std::to_string(why.expected) + ", saw " +
                                        std::to_string(why.seen));
  }
  bool does(Action action, const Flag& flag) const {
    return sabotage_.action == action &&
           (sabotage_.word == Word::any || sabotage_.word == word_of(view_, flag));
  }
  bool wait_relaxed(const Flag& flag, std::uint32_t value) const {
    while (!reached(__atomic_load_n(&flag.value, __ATOMIC_RELAXED), value)) {
      if (outcome_.stop() != Failure::none) return false;
      std::this_thread::yield();
    }
    return true;
  }

  Block block_;
  const View& view_;
  const Sabotage& sabotage_;
  Stalls& stalls_;
  Outcome& outcome_;
};

using TestBlock = SabotagedBlock<GroupBlock>;

// What the ranks do together, call after call. Everything is decided before the first of them;
// ranks tell each other nothing but through the protocol, for that would hide races.
class Exercise {
 public:
  virtual ~Exercise() = default;
  virtual int calls() const = 0;
  virtual bool one_block(int call) const = 0;
  // Whether run() opens the call itself, block by block, instead of a leader's enter().
  virtual bool greets(int call) const = 0;
  // By one thread of a rank, before the call is announced: fills inputs, poisons outputs.
  virtual void prepare(const View& view, std::uint32_t epoch, int call) = 0;
  // By all threads of the blocks that take part.
  virtual bool run(TestBlock& block, const View& view, std::uint32_t epoch, int call) = 0;
  // By one thread of a rank: what is wrong with its output, or nothing.
  virtual std::string check(int rank, int call) = 0;
};

// The ranks and their control segments.
class Ranks {
 public:
  Ranks(const Shape& shape, const Sabotage& sabotage, std::uint64_t seed)
      : shape_(shape), sabotage_(sabotage), seed_(seed) {
    Layout layout{shape.world, shape.blocks, shape.slot_bytes, shape.stage_bytes,
                  shape.inbox_bytes};
    for (int r = 0; r < shape.world; ++r) ranks_.push_back(std::make_unique<Rank>(shape));
    for (int r = 0; r < shape.world; ++r) {
      View& view = ranks_[r]->view;
      view.layout = layout;
      view.rank = r;
      for (int p = 0; p < shape.world; ++p) {
        if (r == 0) ranks_[p]->segment.reset(new_segment(layout));
        view.area[p] = ranks_[p]->segment.get();
      }
      initialise(view, shape.first_epoch);
    }
  }

  void run(Exercise& exercise, Outcome& outcome) {
    std::vector<std::thread> threads;
    for (int r = 0; r < shape_.world; ++r)
      for (int b = 0; b < shape_.blocks; ++b)
        for (int t = 0; t < shape_.threads; ++t)
          threads.emplace_back([this, &exercise, &outcome, r, b, t] {
            take_part(exercise, outcome, *ranks_[r], b, t);
          });
    for (auto& thread : threads) thread.join();
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  struct Rank {
    explicit Rank(const Shape& shape)
        : progress(shape.blocks, {shape.first_epoch, shape.first_epoch, shape.first_epoch}),
          team(shape.blocks * shape.threads),
          greeted(shape.blocks, std::vector<Call>(shape.world)) {
      for (int b = 0; b < shape.blocks; ++b) gates.push_back(std::make_unique<Gate>(shape.threads));
    }
    std::unique_ptr<char, Free> segment;
    View view;
    Watch watch;
    std::vector<Progress> progress;
    std::vector<std::unique_ptr<Gate>> gates;  // of each block
    Gate team;                                 // of all blocks
    Call calls[kMaxRanks];                     // as announced by the leaders
    std::vector<std::vector<Call>> greeted;    // as each block has read them
  };

  char* new_segment(const Layout& layout) const {
    const std::size_t bytes = layout.bytes() - (sabotage_.action == Action::short_segment ? 64 : 0);
    void* memory = nullptr;
    if (::posix_memalign(&memory, 4096, bytes) != 0) throw std::bad_alloc();
    std::memset(memory, 0, layout.slots());
    const std::size_t lines = std::min(layout.greetings(), bytes);
    std::memset(static_cast<char*>(memory) + layout.slots(), 0xa5, lines - layout.slots());
    std::memset(static_cast<char*>(memory) + lines, 0, bytes - lines);
    return static_cast<char*>(memory);
  }

  static Call announced(int rank, int call) {
    Call said;
    said.count = static_cast<std::uint64_t>(call);
    said.offset = static_cast<std::uint64_t>(rank) << 32 | static_cast<std::uint64_t>(call) * 977u;
    return said;
  }

  std::string check_calls(const Rank& rank, int call) const {
    for (int p = 0; p < shape_.world; ++p)
      if (rank.calls[p].count != static_cast<std::uint64_t>(call) ||
          rank.calls[p].offset != announced(p, call).offset)
        return "rank " + std::to_string(rank.view.rank) + ", call " + std::to_string(call) +
               ": read another announcement of rank " + std::to_string(p);
    return "";
  }

  void take_part(Exercise& exercise, Outcome& outcome, Rank& rank, int index, int thread) {
    const View& view = rank.view;
    const bool leads = index == 0 && thread == 0;
    Stalls stalls(seed_ + 1000003u * view.rank + 1009u * index + thread);
    if (leads) {
      rank.watch.view = &view;
      rank.watch.stop = &outcome.stop();
      // One inbox for all calls loses messages: somebody waits in vain.
      rank.watch.timeout = std::chrono::seconds(sabotage_.action == Action::same_inbox ? 1 : 30);
      if (!shape_.sleeps) rank.watch.patience.yield = std::chrono::milliseconds(2);
    }
    const auto block_of = [&](int count) {
      return TestBlock(GroupBlock(rank.watch, rank.progress[index], index, count, thread,
                                  shape_.threads, *rank.gates[index], rank.greeted[index].data()),
                       view, sabotage_, stalls, outcome);
    };

    std::uint32_t epoch = shape_.first_epoch;
    for (int call = 0; call < exercise.calls(); ++call) {
      const std::uint32_t number = static_cast<std::uint32_t>(call) + 1;
      epoch = epoch_after(epoch);
      const std::uint32_t announcement_epoch =
          sabotage_.action == Action::same_announcement ? epoch + number : epoch;
      std::uint32_t slot_epoch = sabotage_.action == Action::same_slot ? 0 : epoch;
      if (sabotage_.action == Action::same_inbox) slot_epoch = 2 * number;

      if (leads) {
        stalls.perhaps(4);
        exercise.prepare(view, slot_epoch, call);
        rank.watch.epoch = announcement_epoch;
      }
      rank.team.all(true);

      // What a block does alone is ordered by its own barriers only.
      const int blocks = exercise.one_block(call) ? 1 : shape_.blocks;
      bool complete = true;
      const bool greets = exercise.greets(call);
      if (index == 0 && !greets) {
        TestBlock block = block_of(1);
        complete = enter(block, view, announcement_epoch, announced(view.rank, call), rank.calls);
      }
      if (blocks > 1 && !rank.team.all(complete)) return;
      if (index < blocks && complete) {
        TestBlock block = block_of(blocks);
        complete = exercise.run(block, view, slot_epoch, call);
      }
      if (!rank.team.all(complete)) return;

      if (leads) {
        std::string error = exercise.check(view.rank, call);
        if (error.empty() && !greets) error = check_calls(rank, call);
        if (!error.empty()) outcome.fail(Outcome::wrong, "wrong result: " + error);
        complete = error.empty();
      }
      if (!rank.team.all(complete)) return;
    }
  }

  const Shape shape_;
  const Sabotage& sabotage_;
  const std::uint64_t seed_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace fastreduce::test
