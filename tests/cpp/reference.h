// What a reduction should give, written as directly as can be: one element at a time, in the
// order of summation that reduce.h (tree) and all_reduce.h (ring) document. Conversions of 16-bit
// types are done by arithmetic, not by moving bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "reduce.h"

namespace fastreduce::test {

inline float with_sign(bool negative, double magnitude) {
  return static_cast<float>(negative ? -magnitude : magnitude);
}

inline float widened(Half value) {
  const auto bits = static_cast<std::uint32_t>(value);
  const bool negative = bits >> 15 != 0;
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  if (exponent == 31) return bits_float(bits >> 15 << 31 | 0x7f800000u | bits << 22 >> 9);
  if (exponent == 0) return with_sign(negative, std::ldexp(fraction, -24));
  return with_sign(negative, std::ldexp(1024 + fraction, exponent - 25));
}

inline float widened(BFloat16 value) {
  const auto bits = static_cast<std::uint32_t>(value);
  const bool negative = bits >> 15 != 0;
  const int exponent = bits >> 7 & 255;
  const int fraction = bits & 127;
  if (exponent == 255) return bits_float(bits >> 15 << 31 | 0x7f800000u | bits << 25 >> 9);
  if (exponent == 0) return with_sign(negative, std::ldexp(fraction, -133));
  return with_sign(negative, std::ldexp(128 + fraction, exponent - 134));
}

inline float widened(float value) { return value; }
inline double widened(double value) { return value; }
inline std::int64_t widened(std::int32_t value) { return value; }
inline std::int64_t widened(std::uint8_t value) { return value; }

// To `fraction` bits, to nearest, ties to even; the exponent of the smallest normal number and
// that of the first number that is too large. A NaN stays one, quiet, with its upper bits.
inline std::uint16_t rounded(float value, int fraction, int smallest, int too_large) {
  const bool negative = std::signbit(value);
  const auto sign = static_cast<std::uint16_t>(negative ? 0x8000 : 0);
  const int infinity = (too_large - smallest + 1) << fraction;
  if (std::isnan(value)) {
    const std::uint32_t upper = (float_bits(value) & 0x7fffffu) >> (23 - fraction);
    return static_cast<std::uint16_t>(sign | infinity | upper | 1u << (fraction - 1));
  }
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return sign;
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity);
  const int exponent = std::max(std::ilogb(magnitude), smallest);
  // In units of the last place; a carry into the next exponent adds up as it should.
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, fraction - exponent)));
  const int bits = ((exponent - smallest) << fraction) + units;
  return static_cast<std::uint16_t>(sign | (bits < infinity ? bits : infinity));
}

template <class T, class A>
T narrowed(A value) {
  if constexpr (std::is_same<T, Half>::value)
    return static_cast<Half>(rounded(value, 10, -14, 16));
  else if constexpr (std::is_same<T, BFloat16>::value)
    return static_cast<BFloat16>(rounded(value, 7, -126, 128));
  else if constexpr (std::is_integral<T>::value)
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(value));  // wraps
  else
    return value;
}

// What arithmetic makes out of no number at all: of all NaNs the one whose bits every order of
// operands keeps.
inline double default_nan() {
  volatile double infinity = std::numeric_limits<double>::infinity();
  return infinity - infinity;
}

template <class A>
A combined(Sum, A a, A b) {
  return a + b;
}
template <class A>
A combined(Min, A a, A b) {
  if (a != a) return a;
  if (b != b) return b;
  return b < a ? b : a;
}
template <class A>
A combined(Max, A a, A b) {
  if (a != a) return a;
  if (b != b) return b;
  return b > a ? b : a;
}

// Neighbours pairwise, level by level, an odd one out carried up.
template <class Op, class A>
A in_tree(std::vector<A> level) {
  while (level.size() > 1) {
    std::vector<A> above;
    for (std::size_t i = 0; i + 1 < level.size(); i += 2)
      above.push_back(combined(Op(), level[i], level[i + 1]));
    if (level.size() % 2 != 0) above.push_back(level.back());
    level = std::move(above);
  }
  return level[0];
}

// One after the other, beginning behind the rank that ends up with the sum.
template <class Op, class A>
A in_ring(const std::vector<A>& inputs, std::size_t owner) {
  A total = inputs[(owner + 1) % inputs.size()];
  for (std::size_t k = 2; k <= inputs.size(); ++k)
    total = combined(Op(), total, inputs[(owner + k) % inputs.size()]);
  return total;
}

// The factors of a call: of every rank, unless it is 1, one of its own, and none of some ranks'
// inputs. Integers know only the divisor.
struct Factors {
  double before = 1;
  double after = 1;
  int divisor = 1;
  bool alike = false;  // one factor for all

  double of(int rank) const {
    if (before == 1 || alike) return before;
    return rank % 5 == 3 ? 0 : before + 0.1 * rank;
  }
};

template <class A>
A scaled_input(A value, const Factors& factors, int rank) {
  if constexpr (std::is_floating_point<A>::value) {
    const A factor = static_cast<A>(factors.of(rank));
    return factor == 0 ? 0 : value * factor;
  }
  return value;
}

template <class A>
A scaled_result(A value, const Factors& factors) {
  if constexpr (std::is_floating_point<A>::value)
    return value * static_cast<A>(factors.after);
  else
    return value / factors.divisor;
}

// The same as kernels take them.
template <class T>
class Scaled {
 public:
  using A = AccOf<T>;

  explicit Scaled(const Factors& factors) : factors_(factors) {
    for (int k = 0; k < kMaxRanks; ++k) before_[k] = static_cast<A>(factors.of(k));
  }
  ScaleOf<T> scale() const {
    if constexpr (std::is_floating_point<A>::value)
      return {factors_.before == 1 ? nullptr : before_, static_cast<A>(factors_.after)};
    else
      return {static_cast<A>(factors_.divisor)};
  }

 private:
  Factors factors_;
  A before_[kMaxRanks];
};

template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

}  // namespace fastreduce::test
