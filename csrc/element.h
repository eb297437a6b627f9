// The arithmetic of one element: types, accumulators, operations, the fixed summation tree, and
// the one rounding store. The same bits on every target.
//
// Order of summation: neighbours pairwise, level by level, an odd one out carried up. Over n
// inputs that is tree(first p) + tree(rest) with p the largest power of two below n, which is
// how it is written below.
#pragma once

#include <cstring>
#include <type_traits>

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

FR_FN std::uint64_t double_bits(double value) {
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

FR_FN double bits_double(std::uint64_t bits) {
  double value;
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
#if defined(__CUDA_ARCH__)
    std::uint16_t narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
    return static_cast<BFloat16>(narrow);
#else
    const std::uint32_t quiet_nan = (float_bits(value) >> 16) | 0x40u;
    return value != value ? static_cast<BFloat16>(quiet_nan) : store_reduced(value);
#endif
  }
  // For what arithmetic on widened values gives: on a processor the lower half of a NaN's bits is
  // zero then (it is an operand's or the default), so rounding does not disturb it. On a GPU it is
  // not: there, arithmetic gives 0x7fffffff.
  static FR_FN BFloat16 store_reduced(float value) {
#if defined(__CUDA_ARCH__)
    return store(value);
#else
    const std::uint32_t bits = float_bits(value);
    return static_cast<BFloat16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
  }
};

template <>
struct Element<Half> {
  using Acc = float;
  static FR_FN float load(Half value) {
#if defined(__CUDA_ARCH__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(static_cast<std::uint16_t>(value)));
    return wide;
#else
    const std::uint32_t bits = static_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7fffu;
    const std::uint32_t sign = (bits & 0x8000u) << 16;
    // 0.5 + magnitude * 2^-24 is exact, so the subnormal's value is the difference.
    const float subnormal = bits_float(0x3f000000u + magnitude) - 0.5f;
    const std::uint32_t normal = (magnitude << 13) + (112u << 23);
    const std::uint32_t special = (magnitude << 13) | 0x7f800000u;
    const std::uint32_t finite = magnitude < 0x400u ? float_bits(subnormal) : normal;
    return bits_float(sign | (magnitude >= 0x7c00u ? special : finite));
#endif
  }
  static FR_FN Half store(float value) {
#if defined(__CUDA_ARCH__)
    std::uint16_t narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
    return static_cast<Half>(narrow);
#else
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
#endif
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

// What multiplies an input in the accumulator. 0 drops it, whatever it holds: the mean over no
// samples is a NaN.
template <class A>
struct Factor {
  A by = 1;
  FR_FN A operator()(A value) const { return by == 0 ? A(0) : value * by; }
};

struct NoFactor {
  template <class A>
  FR_FN A operator()(A value) const {
    return value;
  }
};

// `before[k]` multiplies rank k's input in the accumulator, `after` the reduced value in the
// accumulator, ahead of the rounding store. Integers know only a divisor.
template <class A>
struct Scale {
  const A* before = nullptr;  // null: all are 1
  A after = 1;
  FR_FN Factor<A> of(int rank) const { return {before == nullptr ? A(1) : before[rank]}; }
  FR_FN A result(A value) const { return value * after; }
};

// A Scale without factors before.
template <class A>
struct Average {
  A after = 1;
  FR_FN NoFactor of(int) const { return {}; }
  FR_FN A result(A value) const { return value * after; }
};

template <class A>
struct Divisor {
  A by = 1;
  FR_FN NoFactor of(int) const { return {}; }
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

// The tree over leaf(First) to leaf(First + Count - 1).
template <class Op, int First, int Count, class Leaf>
FR_FN auto tree(const Leaf& leaf) {
  if constexpr (Count == 1) {
    return leaf(First);
  } else {
    constexpr int kLeft = power_below(Count);
    return Op::apply(tree<Op, First, kLeft>(leaf), tree<Op, First + kLeft, Count - kLeft>(leaf));
  }
}

}  // namespace FR_ISA
}  // namespace fastreduce
