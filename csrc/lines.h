// Messages whose every 16 bytes tell by themselves that they have arrived: half of a line is data,
// half is the number of the call. Reader and writer need no flag beside them.
//
// A Block that reads lines also has
//   bool arrived<Acquire>(line, epoch, data, seen)   load_line()
//   Pause pause()                                    what counts the polls of one wait
//   bool more(Pause&, peer, phase, expected, seen)   whether to poll again; false: given up
//   Call* calls()                                    room for what every rank of the group calls
//   void differs(peer, Difference)                   gives up: ranks do not make the same call
#pragma once

#include <type_traits>

#include "signal.h"

namespace fastreduce {

// Two words of data, each stored together with the epoch in one 8-byte access.
struct alignas(16) DataLine {
  std::uint64_t half[2];
};

constexpr std::size_t kLineData = 8;  // bytes

// What memory holds before the first call must not look like a message of a call.
FR_FN std::uint32_t epoch_after(std::uint32_t epoch) { return epoch + 1 == 0 ? 2 : epoch + 1; }

// With `release`, what this thread wrote before, or saw written, is seen by who sees the line.
template <bool Release = false>
FR_FN void store_line(DataLine* line, std::uint64_t data, std::uint32_t epoch) {
  const std::uint64_t first = std::uint64_t(epoch) << 32 | (data & 0xffffffffu);
  const std::uint64_t second = std::uint64_t(epoch) << 32 | data >> 32;
#if defined(__CUDA_ARCH__)
  if constexpr (Release) asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(line), "l"(first), "l"(second)
               : "memory");
#else
  constexpr int kOrder = Release ? __ATOMIC_RELEASE : __ATOMIC_RELAXED;
  __atomic_store_n(&line->half[0], first, kOrder);
  __atomic_store_n(&line->half[1], second, kOrder);
#endif
}

// Whether the line of `epoch` is there. With `acquire`, so is what its writer released.
template <bool Acquire = false>
FR_FN bool load_line(const DataLine* line, std::uint32_t epoch, std::uint64_t& data,
                     std::uint32_t& seen) {
  std::uint64_t first, second;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(line)
               : "memory");
#else
  constexpr int kOrder = Acquire ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED;
  first = __atomic_load_n(&line->half[0], kOrder);
  second = __atomic_load_n(&line->half[1], kOrder);
#endif
  data = (first & 0xffffffffu) | second << 32;
  seen = static_cast<std::uint32_t>(first >> 32);
  const bool there = seen == epoch && static_cast<std::uint32_t>(second >> 32) == epoch;
#if defined(__CUDA_ARCH__)
  if constexpr (Acquire)
    if (there) asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
  return there;
}

// What a block says of its call to the same block of every peer: a Call, in five lines.
constexpr int kGreetingLines = 5;
static_assert(kGreetingLines * sizeof(DataLine) <= kLineBytes, "see Layout::inboxes()");

FR_FN void write_greeting(const Call& call, std::uint64_t (&lines)[kGreetingLines]) {
  lines[0] = std::uint64_t(call.kind) | std::uint64_t(call.dtype) << 8 |
             std::uint64_t(call.op) << 16 | std::uint64_t(call.algorithm) << 24 |
             std::uint64_t(call.shape) << 32;
  lines[1] = call.count;
  lines[2] = bits_of(call.scale);
  // Of a tensor within a segment, its first pack; one that does not begin on a pack has none.
  lines[3] = (call.offset / 16) << 32 | std::uint64_t(call.root) << 24 |
             (static_cast<std::uint32_t>(call.segment) & 0xffffffu);
  lines[4] = bits_of(call.weight);
}

FR_FN Call read_greeting(const std::uint64_t (&lines)[kGreetingLines]) {
  Call call;
  call.kind = static_cast<Kind>(lines[0] & 0xff);
  call.dtype = static_cast<DType>(lines[0] >> 8 & 0xff);
  call.op = static_cast<Op>(lines[0] >> 16 & 0xff);
  call.algorithm = static_cast<Algorithm>(lines[0] >> 24 & 0xff);
  call.shape = static_cast<std::uint32_t>(lines[0] >> 32);
  call.count = lines[1];
  std::memcpy(&call.scale, &lines[2], sizeof call.scale);
  call.offset = (lines[3] >> 32) * 16;
  call.root = static_cast<std::int32_t>(lines[3] >> 24 & 0xff);
  call.segment = static_cast<std::int32_t>(static_cast<std::uint32_t>(lines[3]) << 8) >> 8;
  std::memcpy(&call.weight, &lines[4], sizeof call.weight);
  return call;
}

inline namespace FR_ISA {

// Opens a call where no leader can announce it for all blocks. What this rank's block, or the
// kernels before it, wrote can be seen by who agrees.
//
// Two parities suffice, for greetings, slots and lines: a block greets for call e + 2 only after
// its rank has completed e + 1, for which a block of every peer greeted; and it greeted after all
// blocks of its rank had completed e.
template <class Block>
FR_BLOCK void greet(Block& block, const View& view, std::uint32_t epoch, const Call& mine) {
  block.all(true);
  for (int p = block.thread(); p < view.world(); p += block.threads()) {
    if (p == view.rank) continue;
    std::uint64_t lines[kGreetingLines] = {};
    write_greeting(mine, lines);
    DataLine* there = view.greeting(p, block.index(), view.rank, epoch);
    FR_UNROLL
    for (int i = 1; i < kGreetingLines; ++i) store_line(there + i, lines[i], epoch);
    store_line<true>(there, lines[0], epoch);
  }
}

// Waits for all greetings. False: given up, or some rank's call differs; then all ranks find the
// same two ranks and the same difference. On return block.calls() holds what they said.
template <class Block>
FR_BLOCK bool agree(Block& block, const View& view, std::uint32_t epoch, const Call& mine) {
  Call* const calls = block.calls();
  bool seen = true;
  for (int p = block.thread(); p < view.world() && seen; p += block.threads()) {
    if (p == view.rank) {
      calls[p] = mine;
      continue;
    }
    std::uint64_t lines[kGreetingLines] = {};
    const DataLine* here = view.greeting(view.rank, block.index(), p, epoch);
    auto pause = block.pause();
    std::uint32_t found = 0;
    const auto arrives = [&](const DataLine* line, std::uint64_t& data, auto acquire) {
      constexpr bool kAcquire = decltype(acquire)::value;
      while (!block.template arrived<kAcquire>(line, epoch, data, found))
        if (!block.more(pause, p, Phase::enter, epoch, found)) return false;
      return true;
    };
    seen = arrives(here, lines[0], std::true_type());
    FR_UNROLL
    for (int i = 1; i < kGreetingLines; ++i)
      seen = seen && arrives(here + i, lines[i], std::false_type());
    if (seen) calls[p] = read_greeting(lines);
  }
  if (!block.all(seen)) return false;
  Difference difference;
  int p = 1;
  for (; p < view.world(); ++p) {
    difference = differ(calls[0], calls[p]);
    if (difference.field != Field::none) break;
  }
  if (difference.field == Field::none) {
    p = differ_in_weights(calls, view.world());
    if (p < 0) return true;
    const bool seen = calls[p].weight >= 0;
    difference = {Field::weight, !seen, seen};
  }
  block.differs(p, difference);
  return false;
}

// After agree(): whether every rank's tensor lies at the same place of the same segment.
template <class Block>
FR_BLOCK bool same_place(Block& block, const View& view) {
  const Call* calls = block.calls();
  for (int p = 1; p < view.world(); ++p)
    if (calls[p].segment != calls[0].segment || calls[p].offset != calls[0].offset) return false;
  return true;
}

}  // namespace FR_ISA
}  // namespace fastreduce
