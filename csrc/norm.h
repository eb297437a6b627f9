// How large a reduced tensor is: the sum of its squares, its largest magnitude, how many of its
// elements are not finite. Every element is counted by one rank, as it stores it.
//
// The result does not depend on who counts what. Squares are added in double within units of kUnit
// elements, counted from the tensor's beginning: kLanes sums of every kLanes-th square, and the
// tree over those. A unit's sum is cut into multiples of 2^(30 t) for three neighbouring t, the
// highest of which fits the largest sum so far, and multiples are added as integers, which knows no
// order: what is dropped below is less than 2^-59 of the largest unit's sum for each unit.
#pragma once

#include "element.h"

namespace fastreduce {

// Of some elements of a tensor.
struct Norm {
  static constexpr int kBits = 30;
  static constexpr int kLowest = -28;  // of `top`
  static constexpr int kHighest = 30;  // above: the sum is beyond a double's range
  std::int64_t part[3] = {0, 0, 0};    // in multiples of 2^(kBits * top), and of the two below
  std::int64_t top = kLowest;          //
  std::uint64_t most = 0;              // the bits of the largest magnitude, as a double
  std::uint64_t nonfinite = 0;         // elements; not in the sum
};

// What a call is to measure: sections of its tensor one by one. Sections follow each other.
struct Measure {
  const std::uint64_t* ends = nullptr;  // of the sections, in elements
  std::size_t sections = 0;
  Norm* norms = nullptr;  // for every block one of every section; what is there is added to
};

inline namespace FR_ISA {

constexpr std::size_t kUnit = 1024;
constexpr std::size_t kLanes = 32;

constexpr std::uint64_t kInfiniteDouble = std::uint64_t{0x7ff} << 52;
FR_FN std::uint64_t magnitude_of_double(double value) {
  return double_bits(value) & ~(std::uint64_t{1} << 63);
}

// 2^exponent, of a normal number.
FR_FN double power_of_two(int exponent) {
  return bits_double(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

// Room for multiples of 2^(kBits * top).
FR_FN void raise(Norm& norm, std::int64_t top) {
  const std::int64_t by = top - norm.top;
  if (by <= 0) return;
  norm.part[2] = by == 1 ? norm.part[1] : by == 2 ? norm.part[0] : 0;
  norm.part[1] = by == 1 ? norm.part[0] : 0;
  norm.part[0] = 0;
  norm.top = top;
}

// A sum of squares, 0 or more.
FR_FN void add_sum(Norm& norm, double sum) {
  if (!(sum < power_of_two(Norm::kBits * Norm::kHighest))) return raise(norm, Norm::kHighest + 1);
  // The first t with sum < 2^(kBits t + kBits - 1): a part then stays below 2^29.
  const int exponent = static_cast<int>(double_bits(sum) >> 52) - 1023;
  const int over = exponent + 1 - (Norm::kBits - 1) - Norm::kBits * Norm::kLowest;
  const int above = over <= 0 ? 0 : (over + Norm::kBits - 1) / Norm::kBits;
  raise(norm, Norm::kLowest + above);
  if (norm.top > Norm::kHighest) return;
  double rest = sum;
  FR_UNROLL
  for (int k = 0; k < 3; ++k) {
    const int exponent_of_part = Norm::kBits * static_cast<int>(norm.top - k);
    const double rounder = 1.5 * power_of_two(52 + exponent_of_part);
    const double part = (rest + rounder) - rounder;
    rest = rest - part;
    norm.part[k] += static_cast<std::int64_t>(part * power_of_two(-exponent_of_part));
  }
}

FR_FN void merge(Norm& norm, Norm other) {
  raise(norm, other.top);
  raise(other, norm.top);
  FR_UNROLL
  for (int k = 0; k < 3; ++k) norm.part[k] += other.part[k];
  norm.most = norm.most < other.most ? other.most : norm.most;
  norm.nonfinite += other.nonfinite;
}

}  // namespace FR_ISA
}  // namespace fastreduce
