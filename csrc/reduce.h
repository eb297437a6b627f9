// The arithmetic: elements, accumulators, the fixed summation tree, and the one rounding
// store. Nothing here waits or knows a rank.
//
// Order of summation: neighbours pairwise, level by level, an odd one out carried up. Over n
// inputs that is tree(first p) + tree(rest) with p the largest power of two below n, which is
// how it is written below. Plain C++ loops; the compiler vectorises them per instruction set.
#pragma once

#include <cstring>

#include "schedule.h"
#include "target.h"

namespace fastreduce {
inline namespace FR_ISA {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

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
    return bits_float(static_cast<std::uint32_t>(value.bits) << 16);
  }
  static FR_FN BFloat16 store(float value) {
    const std::uint32_t bits = float_bits(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<std::uint16_t>(is_nan ? quiet_nan : rounded)};
  }
};

template <>
struct Element<Half> {
  using Acc = float;
  static FR_FN float load(Half value) {
    const std::uint32_t magnitude = value.bits & 0x7fffu;
    const std::uint32_t sign = (value.bits & 0x8000u) << 16;
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
    return {static_cast<std::uint16_t>(sign | (magnitude >= 0x477ff000u ? special : finite))};
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
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) +
                                     static_cast<std::uint64_t>(b));
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
// accumulator, ahead of the rounding store. A factor of 1 is exact, so there is one path for
// floating types. Integers know only a divisor.
template <class A>
struct Scale {
  A before = 1;
  A after = 1;
  FR_FN A input(A value) const { return value * before; }
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

FR_FN constexpr int power_below(int n) {
  int p = 1;
  while (p * 2 < n) p *= 2;
  return p;
}

template <class T, class Op, int First, int Count>
struct Tree {
  static FR_FN AccOf<T> at(const T* const* from, std::size_t i, const ScaleOf<T>& scale) {
    constexpr int kLeft = power_below(Count);
    return Op::apply(Tree<T, Op, First, kLeft>::at(from, i, scale),
                     Tree<T, Op, First + kLeft, Count - kLeft>::at(from, i, scale));
  }
};

template <class T, class Op, int First>
struct Tree<T, Op, First, 1> {
  static FR_FN AccOf<T> at(const T* const* from, std::size_t i, const ScaleOf<T>& scale) {
    return scale.input(Element<T>::load(from[First][i]));
  }
};

// From `Count` inputs to `Stores` outputs, both known to the compiler: the pointers sit in
// registers and the value goes straight to every output.
template <class T, class Op, int Count, int Stores>
void reduce_unrolled(T* const* to, const T* const* from, std::size_t n, ScaleOf<T> scale) {
  const T* in[Count];
  T* out[Stores];
  for (int k = 0; k < Count; ++k) in[k] = from[k];
  for (int k = 0; k < Stores; ++k) out[k] = to[k];
  FR_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const T value = Element<T>::store(scale.result(Tree<T, Op, 0, Count>::at(in, i, scale)));
    for (int k = 0; k < Stores; ++k) out[k][i] = value;
  }
}

// Any number of inputs: a binary counter over small tiles that stay in the first-level
// cache. Level l holds the sum of 2^l inputs; adding one input carries like adding one.
template <class T, class Op>
void reduce_tiled(T* const* to, int stores, const T* const* from, int count, std::size_t n,
                  ScaleOf<T> scale) {
  using A = AccOf<T>;
  constexpr std::size_t kTile = 256;
  constexpr int kLevels = 7;  // 2^7 > kMaxRanks
  static_assert((1 << kLevels) > kMaxRanks, "a level for every power of two of ranks");
  A level[kLevels][kTile];
  A carry[kTile];
  T value[kTile];
  for (std::size_t base = 0; base < n; base += kTile) {
    const std::size_t m = n - base < kTile ? n - base : kTile;
    for (int k = 0; k < count; ++k) {
      const T* in = from[k] + base;
      FR_INDEPENDENT
      for (std::size_t i = 0; i < m; ++i) carry[i] = scale.input(Element<T>::load(in[i]));
      int l = 0;
      for (; (k >> l) & 1; ++l) {
        FR_INDEPENDENT
        for (std::size_t i = 0; i < m; ++i) carry[i] = Op::apply(level[l][i], carry[i]);
      }
      std::memcpy(level[l], carry, m * sizeof(A));
    }
    int lowest = 0;
    while (!((count >> lowest) & 1)) ++lowest;
    for (int l = lowest + 1; l < kLevels; ++l) {
      if (!((count >> l) & 1)) continue;
      FR_INDEPENDENT
      for (std::size_t i = 0; i < m; ++i)
        level[lowest][i] = Op::apply(level[l][i], level[lowest][i]);
    }
    FR_INDEPENDENT
    for (std::size_t i = 0; i < m; ++i)
      value[i] = Element<T>::store(scale.result(level[lowest][i]));
    for (int k = 0; k < stores; ++k) std::memcpy(to[k] + base, value, m * sizeof(T));
  }
}

template <class T, class Op>
void reduce_serial(T* const* to, int stores, const T* const* from, int count, std::size_t n,
                   const ScaleOf<T>& scale) {
  if (count == 2 && stores == 1) return reduce_unrolled<T, Op, 2, 1>(to, from, n, scale);
  if (count == 2 && stores == 2) return reduce_unrolled<T, Op, 2, 2>(to, from, n, scale);
  if (count == 4 && stores == 1) return reduce_unrolled<T, Op, 4, 1>(to, from, n, scale);
  if (count == 4 && stores == 2) return reduce_unrolled<T, Op, 4, 2>(to, from, n, scale);
  if (count == 4 && stores == 4) return reduce_unrolled<T, Op, 4, 4>(to, from, n, scale);
  reduce_tiled<T, Op>(to, stores, from, count, n, scale);
}

// The share of n elements that this thread of the block handles.
template <class T, class Block>
FR_FN Range share_of(Block& block, std::size_t n) {
  return chunk_of(n, block.threads(), block.thread(), sizeof(T));
}

// to[k][i] = store(after * tree over j of before * from[j][i]) for every k, by all threads of
// the block. An output may be one of the inputs; otherwise none overlap.
template <class T, class Op, class Block>
void reduce(Block& block, T* const* to, int stores, const T* const* from, int count,
            std::size_t n, const ScaleOf<T>& scale) {
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

}  // namespace FR_ISA
}  // namespace fastreduce
