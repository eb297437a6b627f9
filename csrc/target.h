// What a protocol needs from the machine it is compiled for: acquire / release access to a
// flag word that another rank writes, modular comparison of counters, and the macros that
// mark a function for its targets.
#pragma once

#include <cstddef>
#include <cstdint>

// FR_FN marks a small function that every target compiles, FR_BLOCK a template over a Block,
// FR_OUT_OF_LINE one that a GPU's protocols call in so many places that it is not inlined there.
// FR_UNROLL unrolls the next loop: on a GPU, an array stays in registers only if all its indices
// are known. FR_ROLLED keeps the next loop as it is, where code would only grow. FR_INDEPENDENT
// says that the iterations of the next loop may run in any order or at once: the pointers in it are
// either equal or disjoint, never shifted against each other. FR_EITHER stands before a template
// for every target whose argument may be for one of them only.
#if defined(__CUDACC__)
#define FR_EITHER _Pragma("nv_exec_check_disable")
#define FR_FN __host__ __device__ __forceinline__
#define FR_BLOCK __device__
#define FR_OUT_OF_LINE inline __device__ __noinline__
#define FR_INLINE __forceinline__
#if defined(__CUDA_ARCH__)
#define FR_UNROLL _Pragma("unroll")
#define FR_ROLLED _Pragma("unroll 1")
#else
#define FR_UNROLL
#define FR_ROLLED
#endif
#define FR_INDEPENDENT
#elif defined(__clang__)
#define FR_EITHER
#define FR_FN inline __attribute__((always_inline))
#define FR_BLOCK
#define FR_OUT_OF_LINE inline
#define FR_INLINE inline
#define FR_UNROLL _Pragma("unroll")
#define FR_ROLLED
#define FR_INDEPENDENT _Pragma("clang loop vectorize(assume_safety) interleave(enable)")
#else
#define FR_EITHER
#define FR_FN inline __attribute__((always_inline))
#define FR_BLOCK
#define FR_OUT_OF_LINE inline
#define FR_INLINE inline
#define FR_UNROLL _Pragma("GCC unroll 16")
#define FR_ROLLED
#define FR_INDEPENDENT _Pragma("GCC ivdep")
#endif

// The templates are compiled once per instruction set into one library. Each compilation
// names its own namespace, so that the linker cannot fold an AVX-512 instance into the one
// that runs on an older processor.
#ifndef FR_ISA
#define FR_ISA baseline
#endif

namespace fastreduce {

// A pointer, or a stream's handle, as Python passes it.
using Address = std::uintptr_t;

constexpr int kMaxRanks = 64;
constexpr int kMaxBlocks = 16;

// Two cache lines: processors prefetch lines in pairs, so neighbours 64 bytes apart still
// take each other's line away.
constexpr std::size_t kLineBytes = 128;

// On a GPU, the scope of an access to a flag is the whole system: its peers are other devices.
FR_FN std::uint32_t load_acquire(const std::uint32_t* word) {
#if defined(__CUDA_ARCH__)
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

FR_FN void store_release(std::uint32_t* word, std::uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

// Two ranks that each store their own word and then look at the other's: with these two, at least
// one sees what the other has stored. store_ordered() also releases, load_ordered() acquires.
FR_FN void store_ordered(std::uint32_t* word, std::uint32_t value) {
#if defined(__CUDA_ARCH__)
  store_release(word, value);
  asm volatile("fence.sc.sys;" ::: "memory");
#else
  __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST);
#endif
}

FR_FN std::uint32_t load_ordered(const std::uint32_t* word) {
#if defined(__CUDA_ARCH__)
  asm volatile("fence.sc.sys;" ::: "memory");
  return load_acquire(word);
#else
  return __atomic_load_n(word, __ATOMIC_SEQ_CST);
#endif
}

// Counters only grow and wrap at 2^32; two that are compared are less than 2^31 apart.
FR_FN bool reached(std::uint32_t seen, std::uint32_t target) {
  return static_cast<std::int32_t>(seen - target) >= 0;
}

}  // namespace fastreduce
