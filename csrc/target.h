// What a protocol needs from the machine it is compiled for: acquire / release access to a
// flag word that another rank writes, modular comparison of counters, and the macro that
// marks a function every target compiles.
#pragma once

#include <cstddef>
#include <cstdint>

#define FR_FN inline __attribute__((always_inline))

// The iterations of the next loop may run in any order or at once: the pointers in it are
// either equal or disjoint, never shifted against each other.
#if defined(__clang__)
#define FR_INDEPENDENT _Pragma("clang loop vectorize(assume_safety) interleave(enable)")
#else
#define FR_INDEPENDENT _Pragma("GCC ivdep")
#endif

// The templates are compiled once per instruction set into one library. Each compilation
// names its own namespace, so that the linker cannot fold an AVX-512 instance into the one
// that runs on an older processor.
#ifndef FR_ISA
#define FR_ISA baseline
#endif

namespace fastreduce {

constexpr int kMaxRanks = 64;
constexpr int kMaxBlocks = 16;

// Two cache lines: processors prefetch lines in pairs, so neighbours 64 bytes apart still
// take each other's line away.
constexpr std::size_t kLineBytes = 128;

FR_FN std::uint32_t load_acquire(const std::uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

FR_FN void store_release(std::uint32_t* word, std::uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

// A release store that is also ordered before every later load of this thread. A writer
// needs that order between its flag and its look at whether the reader sleeps.
FR_FN void store_ordered(std::uint32_t* word, std::uint32_t value) {
  __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST);
}

// Counters only grow and wrap at 2^32; two that are compared are less than 2^31 apart.
FR_FN bool reached(std::uint32_t seen, std::uint32_t target) {
  return static_cast<std::int32_t>(seen - target) >= 0;
}

}  // namespace fastreduce
