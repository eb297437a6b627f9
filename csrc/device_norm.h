// How a warp measures what has been reduced: a unit at a time, each lane what one of norm.h's lanes
// adds up. Sums of units are cut into the same multiples of powers of two, and every multiple is
// added in a place of its own, atomically: the highest of them is known only at the end.
//
// Lanes are those of device_wire.h; Atomics adds to, and raises, a word that others change, too.
#pragma once

#include "norm.h"
#include "signal.h"

namespace fastreduce {

// Of a section, zero at first.
struct NormBins {
  static constexpr int kBins = Norm::kHighest - (Norm::kLowest - 2) + 1;
  std::uint64_t bin[kBins];  // in multiples of 2^(kBits * (kLowest - 2 + index)); may be negative
  std::uint64_t above;       // the largest Norm::top, less kLowest
  std::uint64_t most;
  std::uint64_t nonfinite;
};

inline Norm norm_of(const NormBins& bins) {
  Norm norm;
  norm.top = Norm::kLowest + static_cast<std::int64_t>(bins.above);
  if (norm.top <= Norm::kHighest)
    for (int k = 0; k < 3; ++k)
      norm.part[k] = static_cast<std::int64_t>(bins.bin[bins.above + 2 - k]);
  norm.most = bins.most;
  norm.nonfinite = bins.nonfinite;
  return norm;
}

// Elements `begin` to `end` of a tensor, `begin` being a unit's first. All is in the device's
// memory.
struct NormLaunch {
  DType dtype = DType::float32;
  const void* tensor = nullptr;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  const std::uint64_t* ends = nullptr;  // of the sections, see Measure
  std::size_t sections = 0;
  NormBins* bins = nullptr;  // of every section; what is there is added to
};

inline namespace FR_ISA {

// What all lanes have together: the same on every lane.
template <class Lanes>
class WarpSum {
 public:
  explicit FR_FN WarpSum(const Lanes& lanes) : lanes_(lanes) {}

  FR_FN double sum(double value) const {
    FR_UNROLL
    for (int apart = 16; apart != 0; apart /= 2)
      value += bits_double(other(double_bits(value), apart));
    return value;
  }
  FR_FN std::uint64_t max(std::uint64_t value) const {
    FR_UNROLL
    for (int apart = 16; apart != 0; apart /= 2) {
      const std::uint64_t there = other(value, apart);
      value = value < there ? there : value;
    }
    return value;
  }
  FR_FN std::uint32_t count(std::uint32_t value) const {
    FR_UNROLL
    for (int apart = 16; apart != 0; apart /= 2) value += lanes_.other(value, apart);
    return value;
  }

 private:
  FR_FN std::uint64_t other(std::uint64_t word, int apart) const {
    const std::uint32_t low = lanes_.other(static_cast<std::uint32_t>(word), apart);
    const std::uint32_t high = lanes_.other(static_cast<std::uint32_t>(word >> 32), apart);
    return std::uint64_t{high} << 32 | low;
  }

  const Lanes& lanes_;
};

// See add_sum().
template <class Atomics>
FR_FN void add_to_bins(const Atomics& atomics, NormBins& bins, double sum) {
  Norm norm;
  add_sum(norm, sum);
  const auto above = static_cast<std::uint64_t>(norm.top - Norm::kLowest);
  atomics.raise(&bins.above, above);
  if (norm.top > Norm::kHighest) return;
  FR_UNROLL
  for (int k = 0; k < 3; ++k)
    if (norm.part[k] != 0)
      atomics.add(&bins.bin[above + 2 - k], static_cast<std::uint64_t>(norm.part[k]));
}

// Elements `begin` to `end`, all of one unit and one section.
template <class T, class Lanes, class Atomics>
FR_FN void measure_part(const Lanes& lanes, const Atomics& atomics, const T* tensor,
                        std::uint64_t begin, std::uint64_t end, NormBins& bins) {
  double sum = 0;
  std::uint64_t most = 0;
  std::uint32_t nonfinite = 0;
  const std::uint64_t row = begin / kLanes * kLanes;
  for (std::uint64_t i = row + lanes.lane(); i < end; i += kLanes) {
    if (i < begin) continue;
    const double value = Element<T>::load(tensor[i]);
    const std::uint64_t bits = magnitude_of_double(value);
    most = most < bits ? bits : most;
    if (bits < kInfiniteDouble)
      sum += value * value;
    else
      ++nonfinite;
  }
  const WarpSum<Lanes> warp(lanes);
  sum = warp.sum(sum);
  most = warp.max(most);
  nonfinite = warp.count(nonfinite);
  if (lanes.lane() != 0) return;
  add_to_bins(atomics, bins, sum);
  atomics.raise(&bins.most, most);
  if (nonfinite != 0) atomics.add(&bins.nonfinite, nonfinite);
}

// The units of warp number `warp`.
template <class T, class Lanes, class Atomics>
FR_FN void measure_units(const Lanes& lanes, const Atomics& atomics, const NormLaunch& launch,
                         std::size_t warp, std::size_t warps) {
  const T* const tensor = static_cast<const T*>(launch.tensor);
  for (std::uint64_t unit = launch.begin + warp * kUnit; unit < launch.end; unit += warps * kUnit) {
    const std::uint64_t end = unit + kUnit < launch.end ? unit + kUnit : launch.end;
    std::size_t low = 0;
    for (std::size_t high = launch.sections; low < high;) {
      const std::size_t middle = (low + high) / 2;
      if (launch.ends[middle] <= unit)
        low = middle + 1;
      else
        high = middle;
    }
    for (std::uint64_t at = unit; at < end && low < launch.sections; ++low) {
      const std::uint64_t after = launch.ends[low] < end ? launch.ends[low] : end;
      if (at < after) measure_part(lanes, atomics, tensor, at, after, launch.bins[low]);
      at = after;
    }
  }
}

template <class Lanes, class Atomics>
FR_FN void measure_on(const Lanes& lanes, const Atomics& atomics, const NormLaunch& launch,
                      std::size_t warp, std::size_t warps) {
  switch (launch.dtype) {
    case DType::float32:
      return measure_units<float>(lanes, atomics, launch, warp, warps);
    case DType::float64:
      return measure_units<double>(lanes, atomics, launch, warp, warps);
    case DType::float16:
      return measure_units<Half>(lanes, atomics, launch, warp, warps);
    default:
      return measure_units<BFloat16>(lanes, atomics, launch, warp, warps);
  }
}

}  // namespace FR_ISA
}  // namespace fastreduce
