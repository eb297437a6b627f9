// How one host thread measures what it stores; see norm.h.
#pragma once

#include "host_loops.h"
#include "norm.h"

namespace fastreduce {
inline namespace FR_ISA {

// Vectors of floats; of their halves as doubles.
#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif
constexpr std::size_t kFloats = kVectorBytes / sizeof(float);
constexpr std::size_t kDoubles = kVectorBytes / sizeof(double);
constexpr std::size_t kVectors = kLanes / kFloats;
using Doubles = double __attribute__((vector_size(kVectorBytes)));
using Floats = float __attribute__((vector_size(kVectorBytes)));
using FloatBits = std::uint32_t __attribute__((vector_size(kVectorBytes)));
using Shorts = std::uint16_t __attribute__((vector_size(kVectorBytes / 2)));

// Where gcc 12 takes apart what it is asked for, the instruction is named. A double holds the
// square of a float: to add it in one rounding gives the bits of two operations.
inline void add_squares(Doubles (&sums)[2], const Floats& values) {
#if defined(__AVX512F__)
  const auto low = __builtin_shufflevector(values, values, 0, 1, 2, 3, 4, 5, 6, 7);
  const auto high = __builtin_shufflevector(values, values, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512d a = _mm512_maskz_cvtps_pd(0xff, (__m256)low);
  const __m512d b = _mm512_maskz_cvtps_pd(0xff, (__m256)high);
  sums[0] = (Doubles)_mm512_fmadd_pd(a, a, (__m512d)sums[0]);
  sums[1] = (Doubles)_mm512_fmadd_pd(b, b, (__m512d)sums[1]);
#elif defined(__AVX2__)
  const __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)values));
  const __m256d b = _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)values, 1));
  sums[0] = (Doubles)_mm256_fmadd_pd(a, a, (__m256d)sums[0]);
  sums[1] = (Doubles)_mm256_fmadd_pd(b, b, (__m256d)sums[1]);
#else
  using Half = float __attribute__((vector_size(kVectorBytes / 2)));
  Half half[2];
  std::memcpy(half, &values, sizeof half);
  for (int k = 0; k < 2; ++k) {
    const Doubles wide = __builtin_convertvector(half[k], Doubles);
    sums[k] += wide * wide;
  }
#endif
}

inline FloatBits larger(const FloatBits& a, const FloatBits& b) {
#if defined(__AVX512F__)
  return (FloatBits)_mm512_maskz_max_epu32(0xffff, (__m512i)a, (__m512i)b);
#else
  return a > b ? a : b;
#endif
}

inline FloatBits to_words(const Shorts& values) {
#if defined(__AVX512F__)
  return (FloatBits)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)values);
#elif defined(__AVX2__)
  return (FloatBits)_mm256_cvtepu16_epi32((__m128i)values);
#else
  return __builtin_convertvector(values, FloatBits);
#endif
}

// Of words below 2^16.
inline Shorts to_shorts(const FloatBits& values) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)values);
#elif defined(__AVX2__)
  const __m128i low = _mm256_castsi256_si128((__m256i)values);
  return (Shorts)_mm_packus_epi32(low, _mm256_extracti128_si256((__m256i)values, 1));
#else
  return __builtin_convertvector(values, Shorts);
#endif
}

inline Floats load_floats(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats load_floats(const BFloat16* from) {
  Shorts narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  const FloatBits bits = to_words(narrow) << 16;
  Floats values;
  std::memcpy(&values, &bits, sizeof values);
  return values;
}

// Of a part of a unit: the sum of its squares, the bits of the largest magnitude.
struct Counted {
  double sum;
  std::uint64_t most;
};

// The squares of a unit, by lane, and the largest magnitude.
class Squares {
 public:
  // Elements of the lanes from kFloats * v on.
  void add(std::size_t v, const Floats& values) {
    add_squares(sums_[v], values);
    FloatBits bits;
    std::memcpy(&bits, &values, sizeof bits);
    most_ = larger(most_, bits & 0x7fffffffu);
  }
  // An element of any lane.
  void add(std::size_t lane, double value) {
    Doubles& half = sums_[lane / kFloats][lane / kDoubles % 2];
    half[lane % kDoubles] += value * value;
    const std::uint64_t bits = magnitude_of_double(value);
    most_alone_ = most_alone_ < bits ? bits : most_alone_;
  }

  std::uint64_t most() const {
    std::uint32_t most = 0;
    for (std::size_t j = 0; j < kFloats; ++j) most = most < most_[j] ? most_[j] : most;
    const std::uint64_t bits = double_bits(bits_float(most));
    return bits < most_alone_ ? most_alone_ : bits;
  }
  double total() const {
    double lane[kLanes];
    std::memcpy(lane, sums_, sizeof lane);
    for (std::size_t width = kLanes / 2; width != 0; width /= 2)
      for (std::size_t j = 0; j < width; ++j) lane[j] += lane[j + width];
    return lane[0];
  }
  Counted counted() const { return {total(), most()}; }

 private:
  Doubles sums_[kVectors][2] = {};
  FloatBits most_ = {};
  std::uint64_t most_alone_ = 0;
};

// Calls visit(done, m) for the units of elements `index` to `index + n`, one after the other.
template <class Visit>
void each_unit(std::size_t index, std::size_t n, const Visit& visit) {
  for (std::size_t done = 0; done < n;) {
    const std::size_t left = kUnit - (index + done) % kUnit;
    const std::size_t m = n - done < left ? n - done : left;
    visit(done, m);
    done += m;
  }
}

// One block's part of a Measure.
class Gauge {
 public:
  Gauge(const Measure& measure, int block)
      : ends_(measure.ends),
        sections_(measure.sections),
        norms_(measure.norms + static_cast<std::size_t>(block) * measure.sections) {}

  // Elements `index` to `index + n` of the call's tensor, all in one unit. `counted`, if they have
  // been.
  template <class T>
  void unit(const T* values, std::size_t index, std::size_t n, const Counted* counted = nullptr) {
    if (section_ >= sections_ || index < start()) section_ = 0;
    while (section_ < sections_ && ends_[section_] <= index) ++section_;
    for (std::size_t done = 0; done < n && section_ < sections_;) {
      const std::uint64_t left = ends_[section_] - (index + done);
      const std::size_t m = n - done < left ? n - done : static_cast<std::size_t>(left);
      if (m == n && counted != nullptr && counted->most < kInfiniteDouble)
        count(*counted, 0);
      else
        alone(values + done, (index + done) % kUnit, m);
      done += m;
      if (m == left) ++section_;
    }
  }

  // The same of any range.
  template <class T>
  void range(const T* values, std::size_t index, std::size_t n) {
    each_unit(index, n,
              [&](std::size_t done, std::size_t m) { unit(values + done, index + done, m); });
  }

 private:
  std::uint64_t start() const { return section_ == 0 ? 0 : ends_[section_ - 1]; }

  void count(const Counted& counted, std::uint64_t nonfinite) {
    Norm& norm = norms_[section_];
    add_sum(norm, counted.sum);
    norm.most = norm.most < counted.most ? counted.most : norm.most;
    norm.nonfinite += nonfinite;
  }

  // From `lane` on, which counts from the unit's beginning.
  template <class T>
  void alone(const T* values, std::size_t lane, std::size_t n) {
    Squares squares;
    if constexpr (!std::is_same<T, double>::value) {
      alignas(64) float wide[kUnit];
      const float* from = wide;
      if constexpr (std::is_same<T, float>::value)
        from = values;
      else
        widen(wide, values, n);
      std::size_t i = 0;
      for (; i < n && (lane + i) % kLanes != 0; ++i) squares.add((lane + i) % kLanes, from[i]);
      for (; i + kLanes <= n; i += kLanes)
        for (std::size_t v = 0; v < kVectors; ++v)
          squares.add(v, load_floats(from + i + v * kFloats));
      for (; i < n; ++i) squares.add((lane + i) % kLanes, from[i]);
      const Counted counted = squares.counted();
      if (counted.most < kInfiniteDouble) return count(counted, 0);
    }
    odd(values, lane, n);
  }

  // Some are not finite, or all are double.
  template <class T>
  void odd(const T* values, std::size_t lane, std::size_t n) {
    Squares squares;
    std::uint64_t nonfinite = 0;
    std::uint64_t most = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const double value = Element<T>::load(values[i]);
      const std::uint64_t bits = magnitude_of_double(value);
      most = most < bits ? bits : most;
      if (bits < kInfiniteDouble)
        squares.add((lane + i) % kLanes, value);
      else
        ++nonfinite;
    }
    count({squares.total(), most}, nonfinite);
  }

  const std::uint64_t* ends_;
  std::size_t sections_;
  Norm* norms_;
  std::size_t section_ = 0;  // of the last unit
};

inline Floats times(const NoFactor&, const Floats& values) { return values; }
inline Floats times(const Factor<float>& factor, const Floats& values) {
  return factor.by == 0 ? Floats{} : values * factor.by;
}

// What is stored of a reduced value, see store_reduced().
inline Floats rounded(const float*, const Floats& values) { return values; }
inline Floats rounded(const BFloat16*, const Floats& values) {
  FloatBits bits;
  std::memcpy(&bits, &values, sizeof bits);
  bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  Floats result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void store_floats(float* to, const Floats& values) {
  std::memcpy(to, &values, sizeof values);
}

inline void store_floats(BFloat16* to, const Floats& values) {
  FloatBits bits;
  std::memcpy(&bits, &values, sizeof bits);
  const Shorts narrow = to_shorts(bits >> 16);
  std::memcpy(to, &narrow, sizeof narrow);
}

// reduce_unrolled() of sums, and what is stored measured on the way: it is in registers, and the
// loop waits for memory. `index`: of the first element, which begins a unit.
template <int Count, int Stores, class T, class S>
void reduce_measured_unrolled(T* const* to, const T* const* from, std::size_t n, const S& scale_of,
                              std::size_t index, int own, Gauge& gauge) {
  const S scale = scale_of;
  const T* in[Count];
  T* out[Stores];
  for (int k = 0; k < Count; ++k) in[k] = from[k];
  for (int k = 0; k < Stores; ++k) out[k] = to[k];
  decltype(scale.of(0)) factor[Count];
  for (int k = 0; k < Count; ++k) factor[k] = scale.of(k);
  for (std::size_t base = 0; base < n; base += kUnit) {
    const std::size_t m = n - base < kUnit ? n - base : kUnit;
    Squares squares;
    std::size_t i = base;
    for (; i + kLanes <= base + m; i += kLanes) {
      FR_UNROLL
      for (std::size_t v = 0; v < kVectors; ++v) {
        const std::size_t at = i + v * kFloats;
        const auto leaf = [&](int k) { return times(factor[k], load_floats(in[k] + at)); };
        const Floats value = rounded(in[0], tree<Sum, 0, Count>(leaf) * scale.after);
        for (int k = 0; k < Stores; ++k) store_floats(out[k] + at, value);
        squares.add(v, value);
      }
    }
    for (; i < base + m; ++i) {
      const auto leaf = [&](int k) { return factor[k](Element<T>::load(in[k][i])); };
      const T value = store_reduced<T>(scale.result(tree<Sum, 0, Count>(leaf)));
      for (int k = 0; k < Stores; ++k) out[k][i] = value;
      squares.add(i % kLanes, static_cast<double>(Element<T>::load(value)));
    }
    const Counted counted = squares.counted();
    gauge.unit(out[own] + base, index + base, m, &counted);
  }
}

template <class T, class S>
bool reduce_measured_at_once(T* const* to, int stores, const T* const* from, int count,
                             std::size_t n, const S& scale, std::size_t index, int own,
                             Gauge& gauge) {
  if (count == 2 && stores == 1)
    reduce_measured_unrolled<2, 1>(to, from, n, scale, index, own, gauge);
  else if (count == 2 && stores == 2)
    reduce_measured_unrolled<2, 2>(to, from, n, scale, index, own, gauge);
  else if (count == 4 && stores == 1)
    reduce_measured_unrolled<4, 1>(to, from, n, scale, index, own, gauge);
  else if (count == 4 && stores == 4)
    reduce_measured_unrolled<4, 4>(to, from, n, scale, index, own, gauge);
  else
    return false;
  return true;
}

// reduce_serial() unit by unit; use(values, index, n) what is stored of each in to[own], elements
// of the tensor from `index` on, while it is in the first-level cache.
template <class T, class Op, class Use>
void reduce_units(T* const* to, int stores, const T* const* from, int count, std::size_t n,
                  const ScaleOf<T>& scale, std::size_t index, int own, const Use& use) {
  T* out[kMaxRanks];
  const T* in[kMaxRanks];
  each_unit(index, n, [&](std::size_t done, std::size_t m) {
    for (int k = 0; k < stores; ++k) out[k] = to[k] + done;
    for (int k = 0; k < count; ++k) in[k] = from[k] + done;
    reduce_serial<T, Op>(out, stores, in, count, m, scale);
    use(out[own], index + done, m);
  });
}

// reduce_serial(), and what is stored in to[own] measured.
template <class T, class Op>
void reduce_measured(T* const* to, int stores, const T* const* from, int count, std::size_t n,
                     const ScaleOf<T>& scale, std::size_t index, int own, Gauge& gauge) {
  constexpr bool kVectorised = std::is_same<T, float>::value || std::is_same<T, BFloat16>::value;
  if constexpr (kVectorised && std::is_same<Op, Sum>::value) {
    if (index % kUnit == 0) {
      const Average<float> average{scale.after};
      if (scale.before == nullptr
              ? reduce_measured_at_once(to, stores, from, count, n, average, index, own, gauge)
              : reduce_measured_at_once(to, stores, from, count, n, scale, index, own, gauge))
        return;
    }
  }
  reduce_units<T, Op>(
      to, stores, from, count, n, scale, index, own,
      [&](const T* values, std::size_t i, std::size_t m) { gauge.unit(values, i, m); });
}

}  // namespace FR_ISA
}  // namespace fastreduce
