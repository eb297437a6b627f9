// How a warp encodes and decodes: its lanes share a run, and what is computed of an element is
// computed anew wherever it is used, so that a lane holds nothing but what it works on. Warps share
// a launch's runs.
//
// Lanes is what differs between a GPU and what plays one:
//   std::uint32_t lane()                      0 to 31
//   std::uint32_t other(word, apart)          what lane() ^ apart has given
//   sync(), bool all(bool)                    as in codec.h
#pragma once

#include "cuda.h"
#include "packs.h"
#include "wire.h"

namespace fastreduce {
inline namespace FR_ISA {

FR_FN float load_float(DType dtype, const void* from, std::size_t i) {
  if (dtype == DType::float32) return static_cast<const float*>(from)[i];
  if (dtype == DType::float16) return Element<Half>::load(static_cast<const Half*>(from)[i]);
  return Element<BFloat16>::load(static_cast<const BFloat16*>(from)[i]);
}

FR_FN void store_float(DType dtype, void* to, std::size_t i, float value) {
  if (dtype == DType::float32)
    static_cast<float*>(to)[i] = value;
  else if (dtype == DType::float16)
    static_cast<Half*>(to)[i] = Element<Half>::store(value);
  else
    static_cast<BFloat16*>(to)[i] = Element<BFloat16>::store(value);
}

// A run of a residual, or of none.
struct Kept {
  const void* at;
  std::size_t begin;
  DType dtype;
  FR_FN float added(float value, std::size_t i) const {
    return at == nullptr ? value : value + load_float(dtype, at, begin + i);
  }
};

// A Team of 32, see codec.h and wire.h. Few: of at most kInFlight ranks.
template <class Lanes, bool Few>
class DeviceTeam : public Lanes {
 public:
  using Index = std::uint32_t;
  static constexpr bool kUnrolls = false;
  static constexpr bool kLands = false;

  DeviceTeam() = default;
  FR_FN explicit DeviceTeam(const Lanes& lanes) : Lanes(lanes) {}

  static FR_FN Index lanes() { return kLanes; }

  template <class Value>
  FR_BLOCK std::uint32_t max(Index n, const Value& value) const {
    std::uint32_t most = 0;
    for (Index i = this->lane(); i < n; i += kLanes) {
      const std::uint32_t here = value(i);
      most = most < here ? here : most;
    }
    return most_of(most);
  }

  // In the order of HostTeam::sum(): every lane its own elements, one after the other, and then
  // halves of the lanes. Both of a pair add the same two, so that all hold the same sum.
  template <class Value>
  FR_BLOCK float sum(Index n, const Value& value) const {
    float part = 0;
    for (Index i = this->lane(); i < n; i += kLanes) part += value(i);
    FR_UNROLL
    for (int apart = kLanes / 2; apart != 0; apart /= 2)
      part += bits_float(this->other(float_bits(part), apart));
    return part;
  }

  struct Contribution {
    Kept kept;
    const void* gradient;
    std::size_t at;
    DType dtype;
    Factor<float> factor;
    FR_FN float operator()(Index i) const {
      return kept.added(factor(load_float(dtype, gradient, at + i)), i);
    }
  };
  FR_BLOCK Contribution contribution(const Coding& coding, const Span& span, const void* residual,
                                     std::size_t begin, Index) const {
    return {{residual, begin, coding.residual_dtype},
            coding.gradient,
            span.offset + begin,
            coding.dtype,
            {coding.factor}};
  }

  template <class C, class From>
  struct Mean {
    Kept kept;
    From from;
    Index n;
    int count;
    float share;
    FR_BLOCK float operator()(Index i) const {
      const Place at = place_of<C>(n, i);
      return kept.added((Few ? few(at) : many(at)) * share, i);
    }

   private:
    // All at once, so that their loads are under way together.
    FR_BLOCK float few(Place at) const {
      float leaf[kInFlight];
      FR_UNROLL
      for (int k = 0; k < kInFlight; ++k) leaf[k] = k < count ? decoded<C>(from(k), at) : 0.0f;
      return tree_up_to<Sum, kInFlight>(leaf, count);
    }
    FR_BLOCK float many(Place at) const {
      Counter<Sum, float, kSenderLevels, 1> tree;
      FR_ROLLED
      for (int k = 0; k < count; ++k) {
        float carry[1] = {decoded<C>(from(k), at)};
        tree.add(k, carry);
      }
      float total[1] = {};
      tree.total(count, total);
      return total[0];
    }
  };
  template <class C, class From>
  FR_BLOCK Mean<C, From> mean(const Coding& coding, const From& from, const void* residual,
                              std::size_t begin, Index n) const {
    const int count = coding.plan.world;
    return {{residual, begin, coding.residual_dtype}, from, n, count, share_of(count)};
  }

  template <class R>
  struct Words {
    Noise noise;
    std::size_t begin;
    FR_FN std::uint32_t operator()(Index i) const {
      if constexpr (!R::kRandom) return 0;
      const Philox four = noise.four(begin + i);
      const std::uint32_t low = i & 1 ? four.word[1] : four.word[0];
      const std::uint32_t high = i & 1 ? four.word[3] : four.word[2];
      return i & 2 ? high : low;  // runs begin at multiples of 4
    }
  };
  template <class R>
  FR_BLOCK Words<R> words(const Noise& noise, std::size_t begin, Index) const {
    return {noise, begin};
  }

  template <class C, class Values>
  FR_BLOCK void keep(void* to, std::size_t begin, Index n, DType dtype, const char* record,
                     const Values& values, DType gradient) {
    decode<C>(*this, record, n, [=](Index i, float x) {
      store_float(dtype, to, begin + i, values(i) - stored(gradient, x));
    });
  }

  FR_BLOCK void carry(void* to, const void* from, std::size_t begin, Index n, DType dtype) const {
    for (Index i = this->lane(); i < n; i += kLanes)
      store_float(dtype, to, begin + i, load_float(dtype, from, begin + i));
  }

  template <class C>
  FR_BLOCK std::uint32_t give(const Coding& coding, std::size_t at, const char* record, Index n) {
    std::uint32_t most = 0;
    decode<C>(*this, record, n, [&](Index i, float x) {
      store_float(coding.dtype, coding.gradient, at + i, x);
      const std::uint32_t here = magnitude_of(x);
      most = most < here ? here : most;
    });
    return most_of(most);
  }

 private:
  static constexpr int kLanes = 32;

  FR_BLOCK std::uint32_t most_of(std::uint32_t most) const {
    FR_UNROLL
    for (int apart = kLanes / 2; apart != 0; apart /= 2) {
      const std::uint32_t here = this->other(most, apart);
      most = most < here ? here : most;
    }
    return most;
  }
};

// visit(codec, rounding) for a span's.
template <class Visit>
FR_BLOCK FR_INLINE void visit_span(const Span& span, const Visit& visit) {
  visit_format(span.format, [&](auto codec) {
    using C = decltype(codec);
    // Two formats are not rounded.
    if constexpr (!std::is_same<C, CodecFp32>::value && !std::is_same<C, CodecOneBit>::value)
      if (span.stochastic) return visit(codec, Stochastic{});
    visit(codec, Nearest{});
  });
}

// The runs of all messages that are warp number `warp`'s: visit(chunk, run).
template <class Visit>
FR_BLOCK FR_INLINE void each_run(const WireLaunch& launch, std::size_t warp, std::size_t warps,
                                 const Visit& visit) {
  const Plan& plan = launch.coding.plan;
  const Part* const messages = launch.messages;
  const std::size_t runs = messages[plan.world].runs;
  std::size_t chunk = 0;
  std::size_t span = 0;
  for (std::size_t index = warp; index < runs; index += warps) {
    chunk = part_with(messages, plan.world, index, chunk);
    const Run run = run_at(plan, static_cast<int>(chunk), index - messages[chunk].runs, span);
    span = run.span;
    visit(chunk, run);
  }
}

// All messages, one after the other, into `to`.
template <class Team>
FR_BLOCK FR_INLINE void encode_messages(Team& team, const WireLaunch& launch, std::size_t warp,
                                        std::size_t warps) {
  Coding coding = launch.coding;
  if (launch.factor != nullptr) coding.factor = *launch.factor;
  each_run(launch, warp, warps, [&](std::size_t chunk, const Run& run) {
    char* const record = launch.to + launch.messages[chunk].bytes + run.byte;
    visit_span(coding.plan.span[run.span], [&](auto codec, auto rounding) {
      encode_run<decltype(codec), decltype(rounding)>(team, coding, run, record);
    });
  });
}

// This rank's chunk, out of all ranks' messages, which lie `stride` bytes apart.
template <class Team>
FR_BLOCK FR_INLINE void reduce_messages(Team& team, const WireLaunch& launch, std::size_t warp,
                                        std::size_t warps) {
  const Coding& coding = launch.coding;
  const std::size_t runs = coding.plan.runs(coding.rank);
  std::size_t span = 0;
  for (std::size_t index = warp; index < runs; index += warps) {
    const Run run = run_at(coding.plan, coding.rank, index, span);
    span = run.span;
    const char* const first = launch.from + run.byte;
    const std::size_t stride = launch.stride;
    visit_span(coding.plan.span[span], [&](auto codec, auto rounding) {
      reduce_run<decltype(codec), decltype(rounding)>(
          team, coding, run, [=](int p) { return first + p * stride; }, launch.to + run.byte);
    });
  }
}

// All chunks, which lie `stride` bytes apart.
template <class Team>
FR_BLOCK FR_INLINE void decode_messages(Team& team, const WireLaunch& launch, std::size_t warp,
                                        std::size_t warps) {
  const Coding& coding = launch.coding;
  each_run(launch, warp, warps, [&](std::size_t chunk, const Run& run) {
    const char* const record = launch.from + chunk * launch.stride + run.byte;
    visit_format(coding.plan.span[run.span].format,
                 [&](auto codec) { decode_run<decltype(codec)>(team, coding, run, record); });
  });
}

// A Coding as encoded() uses it: piece by piece. Ranges are runs of a message, of which `to` and
// `from` hold just these; the warps of a block share them. Their Lanes also have
//   std::uint32_t warp(), warps()             which warp of the block this is, of how many
template <class Lanes>
class DeviceCoder {
 public:
  // Of a record, lanes read single bytes, one after the other, and some of them twice.
  static constexpr bool kGathers = true;

  FR_FN DeviceCoder(const Lanes& lanes, const Coding& coding) : lanes_(lanes), coding_(coding) {}

  FR_FN const Plan& plan() const { return coding_.plan; }
  static FR_FN constexpr bool lands() { return false; }

  FR_BLOCK void encode(int chunk, Range runs, char* to) const {
    encode(Team(lanes_), coding_, chunk, runs.begin, runs.end, to);
  }
  // from(p): rank p's.
  template <class From>
  FR_BLOCK void reduce(Range runs, const From& from, char* to) const {
    if (plan().world <= kInFlight)
      reduce(Team(lanes_), coding_, runs.begin, runs.end, from, to);
    else
      reduce(DeviceTeam<Lanes, false>(lanes_), coding_, runs.begin, runs.end, from, to);
  }
  FR_BLOCK void decode(int chunk, Range runs, const char* from) const {
    decode(Team(lanes_), coding_, chunk, runs.begin, runs.end, from);
  }

 private:
  using Team = DeviceTeam<Lanes, true>;

  // Functions for themselves: a protocol has registers of its own.
  static FR_OUT_OF_LINE void encode(Team team, const Coding& coding, int chunk, std::size_t begin,
                                    std::size_t end, char* to) {
    each(team, coding, chunk, begin, end, [&](const Run& run, std::size_t at) {
      visit_span(coding.plan.span[run.span], [&](auto codec, auto rounding) {
        encode_run<decltype(codec), decltype(rounding)>(team, coding, run, to + at);
      });
    });
  }
  template <class Of, class From>
  static FR_OUT_OF_LINE void reduce(Of team, const Coding& coding, std::size_t begin,
                                    std::size_t end, From from, char* to) {
    each(team, coding, coding.rank, begin, end, [&](const Run& run, std::size_t at) {
      visit_span(coding.plan.span[run.span], [&](auto codec, auto rounding) {
        reduce_run<decltype(codec), decltype(rounding)>(
            team, coding, run, [=](int p) { return from(p) + at; }, to + at);
      });
    });
  }
  static FR_OUT_OF_LINE void decode(Team team, const Coding& coding, int chunk, std::size_t begin,
                                    std::size_t end, const char* from) {
    each(team, coding, chunk, begin, end, [&](const Run& run, std::size_t at) {
      visit_format(coding.plan.span[run.span].format,
                   [&](auto codec) { decode_run<decltype(codec)>(team, coding, run, from + at); });
    });
  }

  // This warp's runs. Of every chunk another warp has the first one: there may be fewer than warps.
  template <class Visit>
  static FR_BLOCK FR_INLINE void each(const Lanes& lanes, const Coding& coding, int chunk,
                                      std::size_t begin, std::size_t end, const Visit& visit) {
    const std::uint32_t warps = lanes.warps();
    const auto before = static_cast<std::uint32_t>(chunk * (end - begin)) % warps;
    std::size_t index = begin + (lanes.warp() + warps - before) % warps;
    if (index >= end) return;
    const Run first = run_at(coding.plan, chunk, begin, 0);
    std::size_t span = first.span;
    for (; index < end; index += warps) {
      const Run run = run_at(coding.plan, chunk, index, span);
      span = run.span;
      visit(run, run.byte - first.byte);
    }
  }

  Lanes lanes_;
  const Coding& coding_;
};

}  // namespace FR_ISA
}  // namespace fastreduce
