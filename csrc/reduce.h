// The arithmetic: elements, accumulators, the fixed summation tree, and the one rounding
// store. Nothing here waits or knows a rank.
//
// Order of summation: neighbours pairwise, level by level, an odd one out carried up. Over n
// inputs that is tree(first p) + tree(rest) with p the largest power of two below n, which is
// how it is written below. Plain C++ loops; the compiler vectorises them per instruction set.
#pragma once

#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "schedule.h"
#include "target.h"

namespace fastreduce {
inline namespace FR_ISA {

// Types of their own, yet scalars: arrays of structs would not vectorise.
enum class Half : std::uint16_t {};
enum class BFloat16 : std::uint16_t {};

FR_FN std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

FR_FN float bits_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// load() widens exactly to the accumulator; store() rounds once, to nearest even.
template <class T>
struct Element {
  using Acc = T;
  static FR_FN Acc load(T value) { return value; }
  static FR_FN T store(Acc value) { return value; }
};

template <>
struct Element<BFloat16> {
  using Acc = float;
  static FR_FN float load(BFloat16 value) {
    return bits_float(static_cast<std::uint32_t>(value) << 16);
  }
  static FR_FN BFloat16 store(float value) {
    const std::uint32_t quiet_nan = (float_bits(value) >> 16) | 0x40u;
    return value != value ? static_cast<BFloat16>(quiet_nan) : store_reduced(value);
  }
  // For what arithmetic on widened values gives: the lower half of a NaN's bits is zero then
  // (it is an operand's or the processor's default), so rounding does not disturb it.
  static FR_FN BFloat16 store_reduced(float value) {
    const std::uint32_t bits = float_bits(value);
    return static_cast<BFloat16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

template <>
struct Element<Half> {
  using Acc = float;
  static FR_FN float load(Half value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7fffu;
    const std::uint32_t sign = (bits & 0x8000u) << 16;
    // 0.5 + magnitude * 2^-24 is exact, so the subnormal's value is the difference.
    const float subnormal = bits_float(0x3f000000u + magnitude) - 0.5f;
    const std::uint32_t normal = (magnitude << 13) + (112u << 23);
    const std::uint32_t special = (magnitude << 13) | 0x7f800000u;
    const std::uint32_t finite = magnitude < 0x400u ? float_bits(subnormal) : normal;
    return bits_float(sign | (magnitude >= 0x7c00u ? special : finite));
  }
  static FR_FN Half store(float value) {
    const std::uint32_t bits = float_bits(value);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t normal =
        (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 the unit in the last place of 0.5 is half's own, so the addition rounds.
    const std::uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
    const std::uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const std::uint32_t quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    const std::uint32_t special = magnitude > 0x7f800000u ? quiet_nan : 0x7c00u;
    return static_cast<Half>(sign | (magnitude >= 0x477ff000u ? special : finite));
  }
};

// Integers wrap, as torch's do; the mean of integers needs the sum's true value (exact for
// the 32- and 8-bit types, modulo 2^64 for int64) and truncates towards zero.
template <>
struct Element<std::int32_t> {
  using Acc = std::int64_t;
  static FR_FN Acc load(std::int32_t value) { return value; }
  static FR_FN std::int32_t store(Acc value) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(value));
  }
};

template <>
struct Element<std::uint8_t> {
  using Acc = std::int32_t;
  static FR_FN Acc load(std::uint8_t value) { return value; }
  static FR_FN std::uint8_t store(Acc value) { return static_cast<std::uint8_t>(value); }
};

template <class T>
using AccOf = typename Element<T>::Acc;

struct Sum {
  template <class A>
  static FR_FN A apply(A a, A b) {
    return a + b;
  }
  static FR_FN std::int64_t apply(std::int64_t a, std::int64_t b) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  }
};

// A NaN on either side wins, as in torch.minimum; of two equal values the first stays.
struct Min {
  template <class A>
  static FR_FN A apply(A a, A b) {
    return b < a || b != b ? b : a;
  }
};

struct Max {
  template <class A>
  static FR_FN A apply(A a, A b) {
    return b > a || b != b ? b : a;
  }
};

// `before` multiplies every input in the accumulator, `after` the reduced value in the
// accumulator, ahead of the rounding store. A factor of 1 changes nothing. Integers know only
// a divisor.
template <class A>
struct Scale {
  A before = 1;
  A after = 1;
  FR_FN A input(A value) const { return value * before; }
  FR_FN A result(A value) const { return value * after; }
};

// A Scale whose `before` is 1.
template <class A>
struct Average {
  A after = 1;
  FR_FN A input(A value) const { return value; }
  FR_FN A result(A value) const { return value * after; }
};

template <class A>
struct Divisor {
  A by = 1;
  FR_FN A input(A value) const { return value; }
  FR_FN A result(A value) const { return by == 1 ? value : value / by; }
};

template <class A>
struct ScaleFor {
  using type = Scale<A>;
};
template <>
struct ScaleFor<std::int64_t> {
  using type = Divisor<std::int64_t>;
};
template <>
struct ScaleFor<std::int32_t> {
  using type = Divisor<std::int32_t>;
};
template <class T>
using ScaleOf = typename ScaleFor<AccOf<T>>::type;

template <class T>
FR_FN T store_reduced(AccOf<T> value) {
  if constexpr (std::is_same<T, BFloat16>::value)
    return Element<T>::store_reduced(value);
  else
    return Element<T>::store(value);
}

FR_FN constexpr int power_below(int n) {
  int p = 1;
  while (p * 2 < n) p *= 2;
  return p;
}

// The tree over inputs First to First + Count - 1, for element i.
template <class T, class Op, int First, int Count, class S>
FR_FN AccOf<T> tree_at(const T* const* from, std::size_t i, const S& scale) {
  if constexpr (Count == 1) {
    return scale.input(Element<T>::load(from[First][i]));
  } else {
    constexpr int kLeft = power_below(Count);
    return Op::apply(tree_at<T, Op, First, kLeft>(from, i, scale),
                     tree_at<T, Op, First + kLeft, Count - kLeft>(from, i, scale));
  }
}

// From `Count` inputs to `Stores` outputs, both known to the compiler: the pointers sit in
// registers and the value goes straight to every output.
template <class T, class Op, int Count, int Stores, class S>
void reduce_unrolled(T* const* to, const T* const* from, std::size_t n, const S& scale_of) {
  const S scale = scale_of;
  const T* in[Count];
  T* out[Stores];
  for (int k = 0; k < Count; ++k) in[k] = from[k];
  for (int k = 0; k < Stores; ++k) out[k] = to[k];
  FR_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const T value = store_reduced<T>(scale.result(tree_at<T, Op, 0, Count>(in, i, scale)));
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
      widen(carry, from[k] + base, m);
      FR_INDEPENDENT
      for (std::size_t i = 0; i < m; ++i) carry[i] = scale.input(carry[i]);
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
    if (scale.before == 1)
      return reduce_scaled<T, Op>(to, stores, from, count, n, Average<AccOf<T>>{scale.after});
  }
  reduce_scaled<T, Op>(to, stores, from, count, n, scale);
}

// The share of n elements that this thread of the block handles.
template <class T, class Block>
FR_FN Range share_of(Block& block, std::size_t n) {
  return chunk_of(n, block.threads(), block.thread(), sizeof(T));
}

// to[k][i] = store(after * tree over j of before * from[j][i]) for every k, by all threads of
// the block. An output may be one of the inputs; otherwise none overlap.
template <class T, class Op, class Block>
void reduce(Block& block, T* const* to, int stores, const T* const* from, int count, std::size_t n,
            const ScaleOf<T>& scale) {
  const Range share = share_of<T>(block, n);
  const T* in[kMaxRanks];
  T* out[kMaxRanks];
  for (int k = 0; k < count; ++k) in[k] = from[k] + share.begin;
  for (int k = 0; k < stores; ++k) out[k] = to[k] + share.begin;
  reduce_serial<T, Op>(out, stores, in, count, share.size(), scale);
}

template <class T, class Block>
void copy(Block& block, T* to, const T* from, std::size_t n) {
  const Range share = share_of<T>(block, n);
  if (to != from && share.size() != 0)
    std::memcpy(to + share.begin, from + share.begin, share.size() * sizeof(T));
}

// copy() with stores that go past the caches to memory: a reader in a far cache then fetches
// from memory and not out of this core's cache, and the store need not take the line from it.
template <class T, class Block>
void copy_streaming(Block& block, T* to, const T* from, std::size_t n) {
#if defined(__x86_64__)
  const Range share = share_of<T>(block, n);
  auto* target = reinterpret_cast<char*>(to + share.begin);
  const auto* source = reinterpret_cast<const char*>(from + share.begin);
  const std::size_t bytes = share.size() * sizeof(T);
  std::size_t i = 0;
  if (reinterpret_cast<std::uintptr_t>(target) % 16 == 0) {
    for (; i + 64 <= bytes; i += 64)
      for (std::size_t k = i; k < i + 64; k += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + k),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + k)));
  }
  std::memcpy(target + i, source + i, bytes - i);
  _mm_sfence();  // streaming stores are not ordered by the release of a flag
#else
  copy(block, to, from, n);
#endif
}

}  // namespace FR_ISA
}  // namespace fastreduce
