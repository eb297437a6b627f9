// Wire formats: what a run of at most kMostOfRun floats becomes on its way between ranks, and back.
//
//   record   what a run is encoded as: a scale (float), where the format has one, then its
//            elements, padded to 4 bytes
//   plane    a run of n elements is cut into kPlanes stretches of `units` elements; unit j of the
//            record holds element j of every plane. So loops over j touch neighbours, for formats
//            of several elements to the byte, too.
//
//   fp32, bf16, fp16      one by one; what is finite stays finite: clipped to the largest
//   fp8_e4m3, fp8_e5m2    scale = max |x| / largest (448, 57344), element = x / scale in that type
//                         (Micikevicius et al. 2022, arXiv:2209.05433)
//   int8, int4            scale = max |x| / 127, / 7, element = x / scale as an integer
//   onebit                scale = mean |x|, element = the sign (Seide et al. 2014; with a scale for
//                         every block: Karimireddy et al. 2019, arXiv:1901.09847)
//
// A run with an inf or a NaN in it is decoded as NaN throughout, or bit by bit as it was. A scale
// of -0 says that a rank had nothing to send (not even what it had kept back), and so do elements
// that are all -0 where there is no scale.
//
// A Team is the threads that share a run: lane(), lanes(), sync(), all(bool), max(), sum(). It
// counts elements in its Index, and says with kUnrolls whether a unit's planes are to be handled at
// once.
#pragma once

#include "element.h"

namespace fastreduce {

enum class Format : std::uint8_t { fp32, bf16, fp16, fp8_e4m3, fp8_e5m2, int8, int4, onebit };
constexpr int kFormats = 8;

constexpr std::size_t kMostOfRun = 1024;
constexpr std::uint32_t kNan = 0x7fc00000u;
constexpr std::uint32_t kNegativeZero = 0x80000000u;
constexpr std::uint32_t kInfinity = 0x7f800000u;

inline namespace FR_ISA {

// Philox4x32-10: four random words of a key and a counter (Salmon et al. 2011, "Parallel random
// numbers: as easy as 1, 2, 3").
struct Philox {
  std::uint32_t word[4];
};

FR_FN Philox philox(std::uint32_t key0, std::uint32_t key1, std::uint32_t c0, std::uint32_t c1,
                    std::uint32_t c2, std::uint32_t c3) {
  FR_UNROLL
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t(0xd2511f53u) * c0;
    const std::uint64_t b = std::uint64_t(0xcd9e8d57u) * c2;
    c0 = std::uint32_t(b >> 32) ^ c1 ^ key0;
    c2 = std::uint32_t(a >> 32) ^ c3 ^ key1;
    c1 = std::uint32_t(b);
    c3 = std::uint32_t(a);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

// The random words of a message: of the element at `index` of the parameter `key`. Not used where a
// format rounds to the nearest.
struct Noise {
  std::uint64_t seed = 0;
  std::uint32_t key = 0;
  std::uint32_t step = 0;
  std::uint32_t stream = 0;  // of ranks, and of both ways

  FR_FN Philox four(std::uint64_t index) const {
    return philox(std::uint32_t(seed) ^ key, std::uint32_t(seed >> 32), std::uint32_t(index / 4),
                  std::uint32_t(index / 4 >> 32), step, stream);
  }
};

// 0 <= U < 1 of a random word.
FR_FN float uniform(std::uint32_t word) {
  return static_cast<float>(static_cast<std::int32_t>(word >> 8)) * 0x1p-24f;
}

FR_FN std::uint32_t magnitude_of(float value) { return float_bits(value) & 0x7fffffffu; }
FR_FN std::uint32_t sign_of(float value) { return float_bits(value) >> 31; }
FR_FN std::uint32_t least(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }

// How an element is rounded: to the nearest, ties to even; or up as often as it is nearer to the
// upper neighbour. `drop` rounds away the lowest bits of a float's magnitude, `count` gives a
// non-negative number as a whole one, `whole` any one of magnitude below 2^7.
struct Nearest {
  static constexpr bool kRandom = false;
  template <int Bits>
  static FR_FN std::uint32_t drop(std::uint32_t magnitude, std::uint32_t) {
    return (magnitude + ((1u << (Bits - 1)) - 1) + ((magnitude >> Bits) & 1u)) >> Bits;
  }
  static FR_FN std::uint32_t count(float value, std::uint32_t) {
    return float_bits(value + 0x1p23f) - 0x4b000000u;
  }
  static FR_FN std::int32_t whole(float value, std::uint32_t) {
    return static_cast<std::int32_t>(float_bits(value + 0x1.8p23f) - 0x4b400000u);
  }
};

struct Stochastic {
  static constexpr bool kRandom = true;
  template <int Bits>
  static FR_FN std::uint32_t drop(std::uint32_t magnitude, std::uint32_t word) {
    return (magnitude + (word >> (32 - Bits))) >> Bits;
  }
  static FR_FN std::uint32_t count(float value, std::uint32_t word) {
    return static_cast<std::uint32_t>(static_cast<std::int32_t>(value + uniform(word)));
  }
  static FR_FN std::int32_t whole(float value, std::uint32_t word) {
    return static_cast<std::int32_t>((value + 128.0f) + uniform(word)) - 128;
  }
};

// A float of 1 + E + M bits, by its magnitude's; E's bias is the usual one.
template <int E, int M, std::uint32_t Largest>
struct SmallFloat {
  static constexpr int kDropped = 23 - M;
  static constexpr int kBias = (1 << (E - 1)) - 1;
  static constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - kBias) << M;
  static constexpr std::uint32_t kLeastNormal = static_cast<std::uint32_t>(128 - kBias) << 23;
  // 1 over the smallest subnormal, and that.
  static constexpr float kPerUnit = static_cast<float>(1u << (kBias - 1 + M));
  static constexpr float kUnit = 1.0f / kPerUnit;
  static constexpr std::uint32_t kSign = 1u << (E + M);

  // Of a finite value.
  template <class R>
  static FR_FN std::uint32_t code(float value, std::uint32_t word) {
    const std::uint32_t magnitude = magnitude_of(value);
    const std::uint32_t normal = R::template drop<kDropped>(magnitude, word) - kRebias;
    const float small = bits_float(least(magnitude, kLeastNormal));
    const std::uint32_t subnormal = R::count(small * kPerUnit, word);
    const std::uint32_t rounded = magnitude < kLeastNormal ? subnormal : normal;
    return least(rounded, Largest) | (sign_of(value) << (E + M));
  }
  static FR_FN float value(std::uint32_t code) {
    const std::uint32_t magnitude = code & (kSign - 1);
    const float subnormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * kUnit;
    const std::uint32_t normal = (magnitude << kDropped) + (kRebias << kDropped);
    const std::uint32_t bits = magnitude < (1u << M) ? float_bits(subnormal) : normal;
    return bits_float(bits | (code & kSign) << (31 - E - M));
  }
};

// A codec: Unit holds kPlanes elements of kBits each. code() of a finite value over the scale, and
// value(); kLargest divides the largest magnitude of a run.
struct Plain {
  static constexpr bool kScaled = false;
  static constexpr int kPlanes = 1;
};

struct CodecFp32 : Plain {
  using Unit = std::uint32_t;
  template <class R>
  static FR_FN Unit code(float value, std::uint32_t) {
    return float_bits(value);
  }
  static FR_FN float value(Unit unit) { return bits_float(unit); }
};

struct CodecBf16 : Plain {
  using Unit = std::uint16_t;
  template <class R>
  static FR_FN Unit code(float value, std::uint32_t word) {
    const std::uint32_t magnitude = magnitude_of(value);
    const std::uint32_t rounded = least(R::template drop<16>(magnitude, word), 0x7f7fu);
    const std::uint32_t special = (magnitude >> 16) | (magnitude > kInfinity ? 0x40u : 0u);
    return static_cast<Unit>((magnitude >= kInfinity ? special : rounded) | sign_of(value) << 15);
  }
  static FR_FN float value(Unit unit) { return bits_float(static_cast<std::uint32_t>(unit) << 16); }
};

struct CodecFp16 : Plain {
  using Unit = std::uint16_t;
  using Small = SmallFloat<5, 10, 0x7bff>;
  template <class R>
  static FR_FN Unit code(float value, std::uint32_t word) {
    const std::uint32_t magnitude = magnitude_of(value);
    const std::uint32_t special = magnitude > kInfinity ? 0x7e00u : 0x7c00u;
    const std::uint32_t finite = Small::code<R>(value, word);
    return static_cast<Unit>(magnitude >= kInfinity ? special | sign_of(value) << 15 : finite);
  }
  static FR_FN float value(Unit unit) { return Element<Half>::load(static_cast<Half>(unit)); }
};

struct Scaled {
  static constexpr bool kScaled = true;
  static constexpr bool kMean = false;
  using Unit = std::uint8_t;
};

template <int E, int M, std::uint32_t Largest>
struct CodecFp8 : Scaled {
  static constexpr int kPlanes = 1;
  static constexpr int kBits = 8;
  using Small = SmallFloat<E, M, Largest>;
  static constexpr float kLargest = E == 4 ? 448.0f : 57344.0f;
  template <class R>
  static FR_FN std::uint32_t code(float value, std::uint32_t word) {
    return Small::template code<R>(value, word);
  }
  static FR_FN float value(std::uint32_t code) { return Small::value(code); }
};

template <int Bits>
struct CodecInt : Scaled {
  static constexpr int kPlanes = 8 / Bits;
  static constexpr int kBits = Bits;
  static constexpr std::int32_t kMost = (1 << (Bits - 1)) - 1;
  static constexpr float kLargest = static_cast<float>(kMost);
  template <class R>
  static FR_FN std::uint32_t code(float value, std::uint32_t word) {
    const std::int32_t whole = R::whole(value, word);
    const std::int32_t above = whole < kMost ? whole : kMost;
    return static_cast<std::uint32_t>(above > -kMost ? above : -kMost) & ((1u << Bits) - 1);
  }
  static FR_FN float value(std::uint32_t code) {
    return static_cast<float>(static_cast<std::int32_t>(code << (32 - Bits)) >> (32 - Bits));
  }
};

struct CodecOneBit : Scaled {
  static constexpr int kPlanes = 8;
  static constexpr int kBits = 1;
  static constexpr bool kMean = true;
  template <class R>
  static FR_FN std::uint32_t code(float value, std::uint32_t) {
    return sign_of(value);
  }
  static FR_FN float value(std::uint32_t code) { return bits_float(0x3f800000u | code << 31); }
};

// visit(codec{}) for a format's.
FR_EITHER
template <class Visit>
FR_FN auto visit_format(Format format, const Visit& visit) {
  switch (format) {
    case Format::bf16:
      return visit(CodecBf16{});
    case Format::fp16:
      return visit(CodecFp16{});
    case Format::fp8_e4m3:
      return visit(CodecFp8<4, 3, 0x7e>{});
    case Format::fp8_e5m2:
      return visit(CodecFp8<5, 2, 0x7b>{});
    case Format::int8:
      return visit(CodecInt<8>{});
    case Format::int4:
      return visit(CodecInt<4>{});
    case Format::onebit:
      return visit(CodecOneBit{});
    case Format::fp32:
      break;
  }
  return visit(CodecFp32{});
}

template <class C>
FR_FN std::size_t units_of(std::size_t n) {
  return (n + C::kPlanes - 1) / C::kPlanes;
}

// Bytes of a run's record.
template <class C>
FR_FN std::size_t record_bytes(std::size_t n) {
  const std::size_t units = units_of<C>(n) * sizeof(typename C::Unit);
  return (C::kScaled ? sizeof(float) : 0) + (units + 3) / 4 * 4;
}

FR_FN std::size_t record_bytes(Format format, std::size_t n) {
  return visit_format(format, [=](auto codec) { return record_bytes<decltype(codec)>(n); });
}

template <class C>
FR_FN auto units_in(char* record) {
  return reinterpret_cast<typename C::Unit*>(record + (C::kScaled ? sizeof(float) : 0));
}
template <class C>
FR_FN auto units_in(const char* record) {
  return reinterpret_cast<const typename C::Unit*>(record + (C::kScaled ? sizeof(float) : 0));
}

// Records begin on 4 bytes.
FR_FN float scale_in(const char* record) {
  float scale;
  std::memcpy(&scale, __builtin_assume_aligned(record, sizeof scale), sizeof scale);
  return scale;
}

FR_FN void put_word(char* record, std::size_t k, std::uint32_t word) {
  std::memcpy(__builtin_assume_aligned(record + 4 * k, sizeof word), &word, sizeof word);
}

// Where element i of a record of n lies: which of a unit's, and in which unit.
struct Place {
  std::uint32_t plane;
  std::uint32_t unit;
};

template <class C>
FR_FN Place place_of(std::size_t n, std::size_t i) {
  const auto at = static_cast<std::uint32_t>(i);  // a run is short, and this division then cheap
  if constexpr (C::kPlanes == 1) return {0, at};
  const auto units = static_cast<std::uint32_t>(units_of<C>(n));
  const std::uint32_t plane = at / units;
  return {plane, at - plane * units};
}

// The scale of the run value(0) ... value(n - 1); NaN if one of them is no number or infinite.
template <class C, class Team, class Value>
FR_BLOCK float scale_of(Team& team, typename Team::Index n, const Value& value) {
  using Index = typename Team::Index;
  const std::uint32_t most = team.max(n, [&](Index i) { return magnitude_of(value(i)); });
  if (most >= kInfinity) return bits_float(kNan);
  if constexpr (C::kMean) {
    const float total = team.sum(n, [&](Index i) { return bits_float(magnitude_of(value(i))); });
    const float mean = total / static_cast<float>(static_cast<std::int32_t>(n));
    return bits_float(least(float_bits(mean), kInfinity - 1));
  } else {
    // The largest element of the largest floats must not be decoded as infinite.
    const std::uint32_t scale = float_bits(bits_float(most) / C::kLargest);
    return bits_float(scale - (magnitude_of(bits_float(scale) * C::kLargest) == kInfinity));
  }
}

// Encodes value(0) ... value(n - 1); word(i) is element i's random word. What was said of a team's
// record is to be read after sync() only.
template <class C, class R, class Team, class Value, class Word>
FR_BLOCK void encode(Team& team, char* record, typename Team::Index n, const Value& values,
                     const Word& words) {
  const Value value = values;  // a copy: no store of a byte can change it
  const Word word = words;
  using Unit = typename C::Unit;
  using Index = typename Team::Index;
  Unit* const unit = units_in<C>(record);
  const Index units = static_cast<Index>(units_of<C>(n));
  if constexpr (!C::kScaled) {
    FR_INDEPENDENT
    for (Index j = team.lane(); j < n; j += team.lanes())
      unit[j] = C::template code<R>(value(j), word(j));
  } else {
    const float scale = scale_of<C>(team, n, value);
    if (team.lane() == 0) put_word(record, 0, float_bits(scale));
    if (!(scale > 0)) {  // zeros, too small for a scale, or no numbers
      for (Index j = team.lane(); j < units; j += team.lanes()) unit[j] = 0;
    } else if (Team::kUnrolls && n == units * C::kPlanes) {
      FR_INDEPENDENT
      for (Index j = team.lane(); j < units; j += team.lanes()) {
        std::uint32_t codes = 0;
        FR_UNROLL
        for (int b = 0; b < C::kPlanes; ++b)
          codes |= C::template code<R>(value(b * units + j) / (C::kMean ? 1.0f : scale),
                                       word(b * units + j))
                   << (b * C::kBits);
        unit[j] = static_cast<Unit>(codes);
      }
    } else {
      for (Index j = team.lane(); j < units; j += team.lanes()) {
        std::uint32_t codes = 0;
        FR_ROLLED
        for (int b = 0; b < C::kPlanes && b * units + j < n; ++b)
          codes |= C::template code<R>(value(b * units + j) / (C::kMean ? 1.0f : scale),
                                       word(b * units + j))
                   << (b * C::kBits);
        unit[j] = static_cast<Unit>(codes);
      }
    }
  }
  const Index padded = (units * sizeof(Unit) + 3) / 4 * 4 / sizeof(Unit);
  for (Index j = units + team.lane(); j < padded; j += team.lanes()) unit[j] = 0;
}

// One element of a record.
template <class C>
FR_FN float decoded(const char* record, Place at) {
  const auto* const unit = units_in<C>(record);
  if constexpr (!C::kScaled) {
    return C::value(unit[at.unit]);
  } else {
    const std::uint32_t code = unit[at.unit] >> (at.plane * C::kBits) & ((1u << C::kBits) - 1);
    return C::value(code) * scale_in(record);
  }
}

// store(i, element i) for every element that is this lane's.
template <class C, class Team, class Store>
FR_BLOCK void decode(Team& team, const char* record, typename Team::Index n, const Store& store) {
  using Index = typename Team::Index;
  const auto* const unit = units_in<C>(record);
  if constexpr (!C::kScaled) {
    FR_INDEPENDENT
    for (Index j = team.lane(); j < n; j += team.lanes()) store(j, C::value(unit[j]));
  } else {
    const float scale = scale_in(record);
    const Index units = static_cast<Index>(units_of<C>(n));
    FR_ROLLED
    for (int b = 0; b < C::kPlanes; ++b) {
      const Index begin = b * units;
      const Index here = begin >= n ? 0 : n - begin < units ? n - begin : units;
      FR_INDEPENDENT
      for (Index j = team.lane(); j < here; j += team.lanes()) {
        const std::uint32_t code = unit[j] >> (b * C::kBits) & ((1u << C::kBits) - 1);
        store(begin + j, C::value(code) * scale);
      }
    }
  }
}

// A record that says that there is nothing, see above.
template <class C, class Team>
FR_BLOCK void encode_absent(Team& team, char* record, typename Team::Index n) {
  using Index = typename Team::Index;
  const Index words = record_bytes<C>(n) / 4;
  for (Index k = team.lane(); k < words; k += team.lanes()) {
    std::uint32_t word = 0;
    if (C::kScaled)
      word = k == 0 ? kNegativeZero : 0;
    else
      word = sizeof(typename C::Unit) == 4 ? kNegativeZero : 2 * k + 1 < n ? 0x80008000u : 0x8000u;
    put_word(record, k, word);
  }
}

template <class C, class Team>
FR_BLOCK bool is_absent(Team& team, const char* record, typename Team::Index n) {
  using Index = typename Team::Index;
  if constexpr (C::kScaled) return float_bits(scale_in(record)) == kNegativeZero;
  const auto* const unit = units_in<C>(record);
  bool absent = true;
  for (Index j = team.lane(); j < n && absent; j += team.lanes())
    absent = float_bits(C::value(unit[j])) == kNegativeZero;
  return team.all(absent);
}

}  // namespace FR_ISA
}  // namespace fastreduce
