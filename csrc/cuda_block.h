// The Block of a CUDA kernel: its threads are the block's, its memory between calls lies on the
// device, and its waits end.
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
};

__shared__ BlockShared shared;

__device__ inline std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Has no members: it can be made anew wherever it is used.
class CudaBlock {
 public:
  static constexpr bool kPacks = true;

  __device__ bool packs() const { return true; }
  __device__ int index() const { return static_cast<int>(blockIdx.x); }
  __device__ int count() const { return static_cast<int>(gridDim.x); }
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return static_cast<int>(blockDim.x); }
  __device__ bool all(bool value) const { return __syncthreads_and(value) != 0; }
  __device__ Progress& progress() const { return shared.launch->state->progress[blockIdx.x]; }
  __device__ Call* calls() const { return reinterpret_cast<Call*>(shared.calls); }

  __device__ void signal(Flag& flag, std::uint32_t value) const {
    store_release(&flag.value, value);
  }
  __device__ bool wait(Flag& flag, std::uint32_t value, int peer, Phase phase) const {
    Pause counted = pause();
    for (;;) {
      const std::uint32_t seen = load_acquire(&flag.value);
      if (reached(seen, value)) return true;
      if (!more(counted, peer, phase, value, seen)) return false;
    }
  }

  template <bool Acquire>
  __device__ bool arrived(const DataLine* line, std::uint32_t epoch, std::uint64_t& data,
                          std::uint32_t& seen) const {
    return load_line<Acquire>(line, epoch, data, seen);
  }

  struct Pause {
    std::uint32_t polls = 0;
    std::uint64_t begin = 0;
    std::uint64_t looked = 0;
  };
  __device__ Pause pause() const { return {}; }

  // Looks at the clock now and then, and after that less often whether there is still hope.
  __device__ bool more(Pause& pause, int peer, Phase phase, std::uint32_t expected,
                       std::uint32_t seen) const {
    if (++pause.polls % kPollsPerLook != 0) return true;
    const std::uint64_t now = nanoseconds();
    if (pause.begin == 0) pause.begin = pause.looked = now;
    if (now - pause.looked < kLookNanoseconds) return true;
    pause.looked = now;
    return hopeful(now - pause.begin, peer, phase, expected, seen);
  }

  __device__ void differs(int peer, const Difference& difference) const {
    if (threadIdx.x != 0 || !first()) return;
    FailureRecord record = blank(Phase::enter);
    record.failure = Failure::mismatch;
    record.field = difference.field;
    record.peer = peer;
    record.expected = difference.expected;
    record.seen = difference.seen;
    record.rank = -1;
    tell(record);
  }

 private:
  static constexpr std::uint32_t kPollsPerLook = 64;
  static constexpr std::uint64_t kLookNanoseconds = 100000;

  static __device__ __noinline__ bool hopeful(std::uint64_t waited, int peer, Phase phase,
                                              std::uint32_t expected, std::uint32_t seen) {
    const Launch& launch = *shared.launch;
    const std::uint32_t stop = load_acquire(&launch.mailbox->stop);
    const int gone = failed_peer(launch.view);
    Failure why = Failure::none;
    if (*static_cast<volatile std::uint32_t*>(&launch.state->failed) != 0) {
      return false;  // another block has told
    } else if (stop != 0) {
      why = static_cast<Failure>(stop & 0xff);
      peer = static_cast<int>(stop >> 8) - 1;
    } else if (gone >= 0) {
      why = Failure::closed;
      peer = gone;
    } else if (load_acquire(&launch.view.state(launch.view.rank, peer).value) ==
               static_cast<std::uint32_t>(State::closed)) {
      why = Failure::closed;
    } else if (waited >= launch.timeout_ns) {
      why = Failure::timeout;
    } else {
      return true;
    }
    if (!first()) return false;
    FailureRecord record = blank(phase);
    record.failure = why;
    record.peer = peer;
    record.expected = expected;
    record.seen = seen;
    // The first rank to give up knows best why.
    if (gone >= 0) record = launch.view.failure(gone);
    // Other blocks, and peers, may be further than this one.
    record.written = phase != Phase::enter || gridDim.x > 1 || launch.job.call.segment >= 0;
    tell(record);
    return false;
  }

  static __device__ bool first() { return atomicCAS(&shared.launch->state->failed, 0u, 1u) == 0; }

  static __device__ FailureRecord blank(Phase phase) {
    FailureRecord record;
    record.kind = shared.launch->job.call.kind;
    record.phase = phase;
    record.rank = shared.launch->view.rank;
    record.epoch = epoch_after(shared.launch->state->epoch);
    return record;
  }

  static __device__ void tell(const FailureRecord& record) {
    const Launch& launch = *shared.launch;
    const View& view = launch.view;
    launch.mailbox->record = record;
    store_release(&launch.mailbox->failed, 1);
    view.failure(view.rank) = record;
    for (int p = 0; p < view.world(); ++p)
      if (p != view.rank)
        store_ordered(&view.state(p, view.rank).value, static_cast<std::uint32_t>(State::failed));
  }
};

}  // namespace fastreduce
