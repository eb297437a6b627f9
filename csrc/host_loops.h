// How one host thread walks a run of elements: plain loops, which the compiler vectorises once
// per instruction set.
#pragma once

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "element.h"

namespace fastreduce {
inline namespace FR_ISA {

// From `Count` inputs to `Stores` outputs, both known to the compiler: the pointers sit in
// registers and the value goes straight to every output.
template <class T, class Op, int Count, int Stores, class S>
void reduce_unrolled(T* const* to, const T* const* from, std::size_t n, const S& scale_of) {
  const S scale = scale_of;
  const T* in[Count];
  T* out[Stores];
  for (int k = 0; k < Count; ++k) in[k] = from[k];
  for (int k = 0; k < Stores; ++k) out[k] = to[k];
  decltype(scale.of(0)) factor[Count];
  for (int k = 0; k < Count; ++k) factor[k] = scale.of(k);
  FR_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const auto leaf = [&](int k) { return factor[k](Element<T>::load(in[k][i])); };
    const T value = store_reduced<T>(scale.result(tree<Op, 0, Count>(leaf)));
    for (int k = 0; k < Stores; ++k) out[k][i] = value;
  }
}

#if defined(__AVX512F__)
// All lanes. The forms without a mask name an undefined register, of which gcc 12 warns.
constexpr __mmask16 kAll = 0xffff;
#endif

// A whole run of elements to or from accumulators. Where the processor converts half in one
// instruction, compilers do not find it in a loop.
template <class T>
FR_FN void widen(AccOf<T>* to, const T* from, std::size_t n) {
  std::size_t i = 0;
#if defined(__AVX512F__)
  if constexpr (std::is_same<T, Half>::value)
    for (; i + 16 <= n; i += 16)
      _mm512_storeu_ps(to + i,
                       _mm512_maskz_cvtph_ps(
                           kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#elif defined(__F16C__)
  if constexpr (std::is_same<T, Half>::value)
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(
          to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  FR_INDEPENDENT
  for (std::size_t k = i; k < n; ++k) to[k] = Element<T>::load(from[k]);
}

template <class T>
FR_FN void narrow(T* to, const AccOf<T>* from, std::size_t n) {
  std::size_t i = 0;
#if defined(__AVX512F__)
  if constexpr (std::is_same<T, Half>::value)
    for (; i + 16 <= n; i += 16)
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(to + i),
          _mm512_maskz_cvtps_ph(kAll, _mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  if constexpr (std::is_same<T, Half>::value)
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  FR_INDEPENDENT
  for (std::size_t k = i; k < n; ++k) to[k] = Element<T>::store(from[k]);
}

constexpr std::size_t kTile = 512;  // elements that stay in the first-level cache

// Any number of inputs: a binary counter over tiles. Level l holds the sum of 2^l inputs;
// adding one input carries like adding one.
template <class T, class Op, class S>
void reduce_tiled(T* const* to, int stores, const T* const* from, int count, std::size_t n,
                  const S& scale) {
  using A = AccOf<T>;
  constexpr int kLevels = 7;
  static_assert((1 << kLevels) > kMaxRanks, "a level for every power of two of ranks");
  alignas(64) A tiles[kLevels + 1][kTile];
  alignas(64) T value[kTile];
  A* level[kLevels];
  for (int l = 0; l < kLevels; ++l) level[l] = tiles[l];
  A* carry = tiles[kLevels];
  for (std::size_t base = 0; base < n; base += kTile) {
    const std::size_t m = n - base < kTile ? n - base : kTile;
    for (int k = 0; k < count; ++k) {
      const auto factor = scale.of(k);
      widen(carry, from[k] + base, m);
      FR_INDEPENDENT
      for (std::size_t i = 0; i < m; ++i) carry[i] = factor(carry[i]);
      int l = 0;
      for (; (k >> l) & 1; ++l) {
        const A* left = level[l];
        FR_INDEPENDENT
        for (std::size_t i = 0; i < m; ++i) carry[i] = Op::apply(left[i], carry[i]);
      }
      A* const free = level[l];
      level[l] = carry;
      carry = free;
    }
    int lowest = 0;
    while (!((count >> lowest) & 1)) ++lowest;
    A* const total = level[lowest];
    for (int l = lowest + 1; l < kLevels; ++l) {
      if (!((count >> l) & 1)) continue;
      const A* left = level[l];
      FR_INDEPENDENT
      for (std::size_t i = 0; i < m; ++i) total[i] = Op::apply(left[i], total[i]);
    }
    FR_INDEPENDENT
    for (std::size_t i = 0; i < m; ++i) total[i] = scale.result(total[i]);
    narrow(value, total, m);
    for (int k = 0; k < stores; ++k) std::memcpy(to[k] + base, value, m * sizeof(T));
  }
}

template <class T, class Op, class S>
void reduce_scaled(T* const* to, int stores, const T* const* from, int count, std::size_t n,
                   const S& scale) {
  if constexpr (!std::is_same<T, Half>::value) {
    if (count == 2 && stores == 1) return reduce_unrolled<T, Op, 2, 1>(to, from, n, scale);
    if (count == 2 && stores == 2) return reduce_unrolled<T, Op, 2, 2>(to, from, n, scale);
    if (count == 4 && stores == 1) return reduce_unrolled<T, Op, 4, 1>(to, from, n, scale);
    if (count == 4 && stores == 4) return reduce_unrolled<T, Op, 4, 4>(to, from, n, scale);
  }
  reduce_tiled<T, Op>(to, stores, from, count, n, scale);
}

template <class T, class Op>
void reduce_serial(T* const* to, int stores, const T* const* from, int count, std::size_t n,
                   const ScaleOf<T>& scale) {
  if constexpr (std::is_same<ScaleOf<T>, Scale<AccOf<T>>>::value) {
    // The multiplication would cost a bfloat16 sum an eighth of its time.
    if (scale.before == nullptr)
      return reduce_scaled<T, Op>(to, stores, from, count, n, Average<AccOf<T>>{scale.after});
  }
  reduce_scaled<T, Op>(to, stores, from, count, n, scale);
}

// A copy whose stores go past the caches to memory, which need not take the line from a reader's.
inline void stream(char* to, const char* from, std::size_t bytes) {
  std::size_t i = 0;
#if defined(__x86_64__)
  if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
    for (; i + 64 <= bytes; i += 64)
      for (std::size_t k = i; k < i + 64; k += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + k),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k)));
    _mm_sfence();  // the release of a flag does not order streaming stores
  }
#endif
  if (i != bytes) std::memcpy(to + i, from + i, bytes - i);
}

}  // namespace FR_ISA
}  // namespace fastreduce
