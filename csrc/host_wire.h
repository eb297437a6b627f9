// How one host thread encodes and decodes: a run at a time, through tiles that stay in the
// first-level cache, in loops that the compiler vectorises.
#pragma once

#include <utility>

#include "host_loops.h"
#include "wire.h"

namespace fastreduce {
inline namespace FR_ISA {

// A Team of one, see codec.h and wire.h.
class HostTeam {
 public:
  using Index = std::size_t;
  static constexpr bool kUnrolls = true;
  static constexpr bool kLands = true;

  struct Tile {
    const float* at;
    float operator()(std::size_t i) const { return at[i]; }
  };
  struct Words {
    const std::uint32_t* at;
    std::uint32_t operator()(std::size_t i) const { return at[i]; }
  };
  struct NoWords {
    std::uint32_t operator()(std::size_t) const { return 0; }
  };

  static constexpr std::size_t lane() { return 0; }
  static constexpr std::size_t lanes() { return 1; }
  static void sync() {}
  static bool all(bool value) { return value; }

  template <class Value>
  static std::uint32_t max(std::size_t n, const Value& value) {
    std::uint32_t most = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint32_t here = value(i);
      most = most < here ? here : most;
    }
    return most;
  }

  // In the order of 32 lanes.
  template <class Value>
  static float sum(std::size_t n, const Value& value) {
    constexpr std::size_t kLanes = 32;
    alignas(64) float part[kLanes] = {};
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
      for (std::size_t j = 0; j < kLanes; ++j) part[j] += value(i + j);
    for (std::size_t j = 0; i + j < n; ++j) part[j] += value(i + j);
    for (std::size_t width = kLanes / 2; width != 0; width /= 2)
      for (std::size_t j = 0; j < width; ++j) part[j] += part[j + width];
    return part[0];
  }

  // factor * gradient + residual of n elements.
  Tile contribution(const Coding& coding, const Span& span, const void* residual, std::size_t begin,
                    std::size_t n) {
    const auto load = [&](const auto* gradient) {
      gradient += span.offset + begin;
      using T = std::remove_const_t<std::remove_pointer_t<decltype(gradient)>>;
      if constexpr (std::is_same<T, float>::value)
        if (coding.factor == 1) return gradient;
      widen(values_, gradient, n);
      return static_cast<const float*>(values_);
    };
    const float* values =
        coding.dtype == DType::float32   ? load(static_cast<const float*>(coding.gradient))
        : coding.dtype == DType::float16 ? load(static_cast<const Half*>(coding.gradient))
                                         : load(static_cast<const BFloat16*>(coding.gradient));
    if (coding.factor != 1) {
      const Factor<float> factor{coding.factor};
      FR_INDEPENDENT
      for (std::size_t i = 0; i < n; ++i) values_[i] = factor(values[i]);
      values = values_;
    }
    return add(values, residual, begin, n, coding.residual_dtype);
  }

  // The mean over the ranks of the records from(p), plus the residual.
  template <class C, class From>
  Tile mean(const Coding& coding, const From& from, const void* residual, std::size_t begin,
            std::size_t n) {
    alignas(64) float tiles[kSenderLevels + 1][kMostOfRun];
    float* level[kSenderLevels];
    for (int l = 0; l < kSenderLevels; ++l) level[l] = tiles[l];
    float* carry = tiles[kSenderLevels];
    const int count = coding.plan.world;
    for (int k = 0; k < count; ++k) {
      int l = k & 1;
      if (l == 0) {
        decode<C>(*this, from(k), n, [=](std::size_t i, float x) { carry[i] = x; });
      } else {
        const float* const left = level[0];
        decode<C>(*this, from(k), n, [=](std::size_t i, float x) { carry[i] = left[i] + x; });
      }
      for (; (k >> l) & 1; ++l) {
        const float* const left = level[l];
        FR_INDEPENDENT
        for (std::size_t i = 0; i < n; ++i) carry[i] = left[i] + carry[i];
      }
      std::swap(level[l], carry);
    }
    int lowest = 0;
    while (!((count >> lowest) & 1)) ++lowest;
    float* const total = level[lowest];
    for (int l = lowest + 1; l < kSenderLevels; ++l) {
      if (!((count >> l) & 1)) continue;
      const float* const left = level[l];
      FR_INDEPENDENT
      for (std::size_t i = 0; i < n; ++i) total[i] = left[i] + total[i];
    }
    const float share = share_of(count);
    FR_INDEPENDENT
    for (std::size_t i = 0; i < n; ++i) values_[i] = total[i] * share;
    return add(values_, residual, begin, n, coding.residual_dtype);
  }

  template <class R>
  auto words(const Noise& noise, std::size_t begin, std::size_t n) {
    if constexpr (R::kRandom) {
      alignas(64) std::uint32_t part[4][kMostOfRun / 4];
      const Noise own = noise;
      const std::size_t fours = (n + 3) / 4;
      FR_INDEPENDENT
      for (std::size_t c = 0; c < fours; ++c) {
        const Philox four = own.four(begin + 4 * c);
        for (int k = 0; k < 4; ++k) part[k][c] = four.word[k];
      }
      for (std::size_t c = 0; c < fours; ++c)
        for (int k = 0; k < 4; ++k) words_[4 * c + k] = part[k][c];
      return Words{words_};
    } else {
      return NoWords{};
    }
  }

  // to[begin + i] = values(i) - what the record holds, as it is once stored in a gradient.
  template <class C>
  void keep(void* to, std::size_t begin, std::size_t n, DType dtype, const char* record,
            const Tile& values, DType gradient) {
    float* lost = difference_;
    if (dtype == DType::float32) lost = static_cast<float*>(to) + begin;
    const float* const in = values.at;
    if (gradient == DType::float32) {
      decode<C>(*this, record, n, [=](std::size_t i, float x) { lost[i] = in[i] - x; });
    } else {
      decode<C>(*this, record, n,
                [=](std::size_t i, float x) { lost[i] = in[i] - stored(gradient, x); });
    }
    if (dtype != DType::float32) narrow(static_cast<BFloat16*>(to) + begin, lost, n);
  }

  static void carry(void* to, const void* from, std::size_t begin, std::size_t n, DType dtype) {
    const std::size_t item = item_bytes(dtype);
    std::memcpy(static_cast<char*>(to) + begin * item,
                static_cast<const char*>(from) + begin * item, n * item);
  }

  // The gradient from `at` on becomes what the record holds; the largest magnitude.
  template <class C>
  std::uint32_t give(const Coding& coding, std::size_t at, const char* record, std::size_t n) {
    float* to = values_;
    if (coding.dtype == DType::float32) to = static_cast<float*>(coding.gradient) + at;
    decode<C>(*this, record, n, [=](std::size_t i, float x) { to[i] = x; });
    return put(coding, at, Tile{to}, n);
  }

  // The same of values, which may be in the gradient already.
  static std::uint32_t put(const Coding& coding, std::size_t at, const Tile& tile, std::size_t n) {
    const float* const values = tile.at;
    if (coding.dtype == DType::float32 && static_cast<float*>(coding.gradient) + at != values)
      std::memcpy(static_cast<float*>(coding.gradient) + at, values, n * sizeof(float));
    if (coding.dtype == DType::float16) narrow(static_cast<Half*>(coding.gradient) + at, values, n);
    if (coding.dtype == DType::bfloat16)
      narrow(static_cast<BFloat16*>(coding.gradient) + at, values, n);
    return max(n, [=](std::size_t i) { return magnitude_of(values[i]); });
  }

 private:
  Tile add(const float* values, const void* residual, std::size_t begin, std::size_t n,
           DType dtype) {
    if (residual == nullptr) return {values};
    if (dtype == DType::float32) {
      const float* const more = static_cast<const float*>(residual) + begin;
      FR_INDEPENDENT
      for (std::size_t i = 0; i < n; ++i) values_[i] = values[i] + more[i];
    } else {
      const BFloat16* const more = static_cast<const BFloat16*>(residual) + begin;
      FR_INDEPENDENT
      for (std::size_t i = 0; i < n; ++i) values_[i] = values[i] + Element<BFloat16>::load(more[i]);
    }
    return {values_};
  }

  alignas(64) float values_[kMostOfRun];
  alignas(64) float difference_[kMostOfRun];
  alignas(64) std::uint32_t words_[kMostOfRun];
};

// What is done with a run in one format, with one rounding.
struct RunVerbs {
  void (*encode)(HostTeam&, const Coding&, const Run&, char* to);
  void (*reduce)(HostTeam&, const Coding&, const Run&, const char* const* from, std::size_t at,
                 char* to);
  void (*decode)(HostTeam&, const Coding&, const Run&, const char* from);
};

template <class C, class R>
RunVerbs verbs() {
  return {[](HostTeam& team, const Coding& coding, const Run& run, char* to) {
            encode_run<C, R>(team, coding, run, to);
          },
          [](HostTeam& team, const Coding& coding, const Run& run, const char* const* from,
             std::size_t at, char* to) {
            reduce_run<C, R>(team, coding, run, [=](int p) { return from[p] + at; }, to);
          },
          [](HostTeam& team, const Coding& coding, const Run& run, const char* from) {
            decode_run<C>(team, coding, run, from);
          }};
}

// A Coding as the protocol uses it: piece by piece. Ranges are runs of a message, of which `to` and
// `from` hold just these.
class HostCoder {
 public:
  static constexpr bool kGathers = false;

  explicit HostCoder(const Coding& coding) : coding_(coding) {
    for (int f = 0; f < kFormats; ++f)
      visit_format(static_cast<Format>(f), [&](auto codec) {
        verbs_[f][0] = verbs<decltype(codec), Nearest>();
        verbs_[f][1] = verbs<decltype(codec), Stochastic>();
      });
  }

  const Plan& plan() const { return coding_.plan; }
  // Whether nothing comes back.
  bool lands() const { return coding_.lands; }

  void encode(int chunk, Range runs, char* to) {
    each(chunk, runs, [&](const Run& run, const RunVerbs& verbs, std::size_t at) {
      verbs.encode(team_, coding_, run, to + at);
    });
  }
  // from(p): rank p's.
  template <class From>
  void reduce(Range runs, const From& from, char* to) {
    const char* records[kMaxRanks];
    for (int p = 0; p < plan().world; ++p) records[p] = from(p);
    reduce_all(runs, records, to);
  }
  void reduce_all(Range runs, const char* const* from, char* to) {
    each(coding_.rank, runs, [&](const Run& run, const RunVerbs& verbs, std::size_t at) {
      verbs.reduce(team_, coding_, run, from, at, to + at);
    });
  }
  void decode(int chunk, Range runs, const char* from) {
    each(chunk, runs, [&](const Run& run, const RunVerbs& verbs, std::size_t at) {
      verbs.decode(team_, coding_, run, from + at);
    });
  }

 private:
  template <class Visit>
  void each(int chunk, Range runs, const Visit& visit) const {
    std::size_t span = 0;
    std::size_t first = 0;
    for (std::size_t index = runs.begin; index < runs.end; ++index) {
      const Run run = run_at(coding_.plan, chunk, index, span);
      if (index == runs.begin) first = run.byte;
      span = run.span;
      const Span& of = coding_.plan.span[span];
      visit(run, verbs_[static_cast<int>(of.format)][of.stochastic], run.byte - first);
    }
  }

  const Coding& coding_;
  HostTeam team_;
  RunVerbs verbs_[kFormats][2];
};

// Whole messages.
inline void encode_message(const Coding& coding, int chunk, char* to) {
  HostCoder(coding).encode(chunk, {0, coding.plan.runs(chunk)}, to);
}

inline void reduce_messages(const Coding& coding, const char* const* from, char* to) {
  HostCoder(coding).reduce_all({0, coding.plan.runs(coding.rank)}, from, to);
}

inline void decode_message(const Coding& coding, int chunk, const char* from) {
  HostCoder(coding).decode(chunk, {0, coding.plan.runs(chunk)}, from);
}

}  // namespace FR_ISA
}  // namespace fastreduce
