// The host target: HostBlock runs the protocols on a thread, and waits.
#pragma once

#include <atomic>
#include <functional>

#include "bucket.h"
#include "optimizer.h"
#include "run.h"
#include "shared_memory.h"
#include "wire.h"

namespace fastreduce {

// Whoever sleeps wakes this often to look whether peers live and signals came.
constexpr std::chrono::milliseconds kLook{20};

// How long a wait polls before it yields its core, and yields before it sleeps.
struct Patience {
  std::chrono::nanoseconds spin{0};
  std::chrono::nanoseconds yield{0};
};

// What became of the time of a call.
struct Account {
  Clock::time_point begin;
  Clock::time_point end;
  Clock::duration waited{};       // for peers, by the calling thread
  int latest = -1;                // the peer whose beginning was waited for the longest, if any
  Clock::duration latest_wait{};  // and how long
};

// What a waiting block looks at beside its flag. A null `peers` watches nobody's life.
struct Watch {
  const View* view = nullptr;
  const Peers* peers = nullptr;
  const std::atomic<Failure>* stop = nullptr;   // why this rank wants no more, if so
  const std::atomic<bool>* siblings = nullptr;  // a block of this rank has given up
  const std::function<bool()>* interrupted = nullptr;
  Account* account = nullptr;  // where waits are noted, if they are
  Patience patience;
  Clock::duration timeout{};
  Kind kind = Kind::barrier;
  std::uint32_t epoch = 0;
};

class HostBlock {
 public:
  HostBlock(const Watch& watch, Progress& progress, int index, int count)
      : watch_(watch), progress_(progress), index_(index), count_(count) {}

  static constexpr bool kPacks = false;

  FR_FN int index() const { return index_; }
  FR_FN int count() const { return count_; }
  FR_FN int thread() const { return 0; }
  FR_FN int threads() const { return 1; }
  FR_FN bool all(bool value) const { return value; }
  FR_FN Progress& progress() const { return progress_; }

  FR_FN void signal(Flag& flag, std::uint32_t value) const {
    store_ordered(&flag.value, value);
    if (__builtin_expect(load_ordered(&flag.sleeping) != 0, 0)) wake(flag);
  }
  FR_FN bool wait(Flag& flag, std::uint32_t value, int peer, Phase phase) {
    return reached(load_acquire(&flag.value), value) || wait_slowly(flag, value, peer, phase);
  }

  const FailureRecord& failure() const { return failure_; }

 private:
  static void wake(Flag& flag);
  bool wait_slowly(Flag& flag, std::uint32_t value, int peer, Phase phase);
  bool wait_since(Clock::time_point begin, Flag& flag, std::uint32_t value, int peer, Phase phase);
  // Why this wait cannot end well, and whose fault that is.
  struct Reason {
    Failure failure;
    int peer;
  };
  Reason hopeless(int peer, Phase phase) const;

  const Watch& watch_;
  Progress& progress_;
  FailureRecord failure_;
  int index_;
  int count_;
};

// Between tensors of one dtype and a flat buffer; see bucket.h.
using BucketKernel = void (*)(HostBlock&, DType tensor, DType flat, void* buffer, const Piece*,
                              std::size_t, double scale);

struct Selection;

// What is compiled once per instruction set.
struct Kernels {
  const char* name;
  bool (*run)(HostBlock&, const View&, const Job&, std::uint32_t epoch);
  BucketKernel pack;
  BucketKernel unpack;
  // Whole messages of a wire format; see wire.h.
  void (*encode)(const Coding&, int chunk, char* to);
  void (*reduce)(const Coding&, const char* const* from, char* to);
  void (*decode)(const Coding&, int chunk, const char* from);
  // See topk.h.
  std::uint32_t (*select)(const Coding&, const Selection&, std::uint32_t expected, char* to);
  void (*combine)(const Coding&, std::uint64_t k, const char* const* from);
  // A rank's part of a tensor of so many elements; see norm.h.
  void (*measure)(const Measure&, int rank, int world, DType, const void* tensor, std::size_t);
  // A step of an optimizer, of parameters of a floating type; see optimizer.h.
  void (*update)(const Update&, DType);
};

// The best that this processor runs; FASTREDUCE_ISA names a lower one.
const Kernels& kernels();

}  // namespace fastreduce
