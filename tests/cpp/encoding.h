// What a reduction in wire formats should give, written as directly as can be: one element at a
// time, one record after the other, without a plan of messages' parts. Elements are rounded by
// arithmetic, not by moving bits.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "reference.h"
#include "wire.h"

namespace fastreduce::test {

using Bytes = std::vector<unsigned char>;

// Values of one type, read and written as floats.
struct Values {
  DType dtype = DType::float32;
  Bytes bytes;

  Values() = default;
  Values(DType type, std::size_t count) : dtype(type), bytes(count * item_bytes(type)) {}

  float at(std::size_t i) const {
    switch (dtype) {
      case DType::float16:
        return widened(item<Half>(i));
      case DType::bfloat16:
        return widened(item<BFloat16>(i));
      default:
        return item<float>(i);
    }
  }
  void set(std::size_t i, float value) {
    switch (dtype) {
      case DType::float16:
        return put(i, narrowed<Half>(value));
      case DType::bfloat16:
        return put(i, narrowed<BFloat16>(value));
      default:
        return put(i, value);
    }
  }

 private:
  template <class T>
  T item(std::size_t i) const {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
    return value;
  }
  template <class T>
  void put(std::size_t i, T value) {
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  }
};

// Philox4x32-10, one word of it.
inline std::uint32_t philox_word(std::array<std::uint32_t, 2> key,
                                 std::array<std::uint32_t, 4> counter, int which) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = 0xd2511f53ull * counter[0];
    const std::uint64_t b = 0xcd9e8d57ull * counter[2];
    counter = {
        static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
        static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key = {key[0] + 0x9e3779b9u, key[1] + 0xbb67ae85u};
  }
  return counter[which];
}

// How the elements of a parameter are rounded: to the nearest, ties to even, or by random numbers.
struct Rounding {
  bool random = false;
  std::uint64_t seed = 0;
  std::uint32_t key = 0;
  std::uint32_t step = 0;
  std::uint32_t stream = 0;

  std::uint32_t word(std::uint64_t index) const {
    const auto low = static_cast<std::uint32_t>(seed);
    const std::uint64_t group = index / 4;
    return philox_word(
        {low ^ key, static_cast<std::uint32_t>(seed >> 32)},
        {static_cast<std::uint32_t>(group), static_cast<std::uint32_t>(group >> 32), step, stream},
        static_cast<int>(index % 4));
  }
  // 0 <= U < 1.
  float uniform(std::uint64_t index) const {
    return static_cast<float>(std::ldexp(word(index) >> 8, -24));
  }
};

// A small type of floats: its exponent's and its mantissa's bits, and its largest code.
struct Small {
  int exponent;
  int mantissa;
  int largest;

  int smallest() const { return 2 - (1 << (exponent - 1)); }  // exponent of a normal number

  // Of a finite value. Random numbers decide about the bits that a float has beyond the type's;
  // of what is subnormal in the type, but no float's last place, U is added as a float.
  int code(float value, const Rounding& rounding, std::uint64_t index) const {
    const double magnitude = std::fabs(static_cast<double>(value));
    const int at = magnitude == 0 ? smallest() : std::max(std::ilogb(magnitude), smallest());
    const double units = std::ldexp(magnitude, mantissa - at);
    double whole = std::nearbyint(units);
    if (rounding.random) {
      const bool subnormal = magnitude < std::ldexp(1, smallest());
      const int dropped = 23 - mantissa;
      if (subnormal && smallest() > -126)
        whole = std::floor(static_cast<float>(units) + rounding.uniform(index));
      else
        whole = std::floor(units + std::ldexp(rounding.word(index) >> (32 - dropped), -dropped));
    }
    const int bits = ((at - smallest()) << mantissa) + static_cast<int>(whole);
    return std::min(bits, largest) | (std::signbit(value) ? 1 << (exponent + mantissa) : 0);
  }
  float value(int code) const {
    const int field = code >> mantissa & ((1 << exponent) - 1);
    const int fraction = code & ((1 << mantissa) - 1);
    const int whole = field == 0 ? fraction : fraction + (1 << mantissa);
    return with_sign(code >> (exponent + mantissa) != 0,
                     std::ldexp(whole, std::max(field, 1) - 1 + smallest() - mantissa));
  }
};

inline Small small_of(Format format) {
  switch (format) {
    case Format::bf16:
      return {8, 7, 0x7f7f};
    case Format::fp16:
      return {5, 10, 0x7bff};
    case Format::fp8_e4m3:
      return {4, 3, 0x7e};
    default:
      return {5, 2, 0x7b};
  }
}

inline bool is_scaled(Format format) { return format >= Format::fp8_e4m3; }
inline bool is_fp8(Format format) {
  return format == Format::fp8_e4m3 || format == Format::fp8_e5m2;
}
inline int bits_of_element(Format format) {
  constexpr int kBits[] = {32, 16, 16, 8, 8, 8, 4, 1};
  return kBits[static_cast<int>(format)];
}
// What the largest magnitude of a run becomes.
inline float largest_of(Format format) {
  constexpr float kLargest[] = {0, 0, 0, 448, 57344, 127, 7, 0};
  return kLargest[static_cast<int>(format)];
}

// A record: scale, elements, padding. Element b * units + j is in unit j.
class Record {
 public:
  Record(Format format, std::size_t count) : format_(format) {
    const int bits = bits_of_element(format);
    units_ = bits < 8 ? (count * bits + 7) / 8 : count;
    const std::size_t elements = units_ * (bits < 8 ? 8 : bits) / 8;
    bytes_.resize(first() + (elements + 3) / 4 * 4);
  }
  Record(Format format, std::size_t count, const unsigned char* bytes) : Record(format, count) {
    std::copy_n(bytes, bytes_.size(), bytes_.begin());
  }

  const Bytes& bytes() const { return bytes_; }
  float scale() const {
    float scale;
    std::memcpy(&scale, bytes_.data(), sizeof scale);
    return scale;
  }
  void set_scale(float scale) { std::memcpy(bytes_.data(), &scale, sizeof scale); }
  std::uint32_t code(std::size_t i) const {
    const int bits = bits_of_element(format_);
    if (bits == 32) return read<std::uint32_t>(4 * i);
    if (bits == 16) return read<std::uint16_t>(2 * i);
    return bytes_[first() + i % units_] >> (i / units_ * bits) & ((1 << bits) - 1);
  }
  // Over zeros.
  void set_code(std::size_t i, std::uint32_t code) {
    const int bits = bits_of_element(format_);
    if (bits == 32)
      write(4 * i, code);
    else if (bits == 16)
      write(2 * i, static_cast<std::uint16_t>(code));
    else
      bytes_[first() + i % units_] |= (code & ((1u << bits) - 1)) << (i / units_ * bits);
  }
  float value(std::size_t i) const {
    const auto bits = code(i);
    switch (format_) {
      case Format::fp32:
        return bits_float(bits);
      case Format::bf16:
        return widened(static_cast<BFloat16>(bits));
      case Format::fp16:
        return widened(static_cast<Half>(bits));
      case Format::int8:
        return static_cast<float>(bits < 128 ? int(bits) : int(bits) - 256) * scale();
      case Format::int4:
        return static_cast<float>(bits < 8 ? int(bits) : int(bits) - 16) * scale();
      case Format::onebit:
        return (bits == 0 ? 1.0f : -1.0f) * scale();
      default:
        return small_of(format_).value(static_cast<int>(bits)) * scale();
    }
  }
  bool is_absent(std::size_t count) const {
    if (is_scaled(format_)) return scale() == 0 && std::signbit(scale());
    for (std::size_t i = 0; i < count; ++i)
      if (value(i) != 0 || !std::signbit(value(i))) return false;
    return true;
  }

 private:
  std::size_t first() const { return is_scaled(format_) ? sizeof(float) : 0; }
  template <class T>
  T read(std::size_t at) const {
    T value;
    std::memcpy(&value, bytes_.data() + at, sizeof value);
    return value;
  }
  template <class T>
  void write(std::size_t at, T value) {
    std::memcpy(bytes_.data() + at, &value, sizeof value);
  }

  Format format_;
  std::size_t units_;
  Bytes bytes_;
};

inline float scale_of(const std::vector<float>& values, Format format) {
  constexpr float kMost = std::numeric_limits<float>::max();
  float most = 0;
  for (const float value : values) {
    if (!std::isfinite(value)) return bits_float(0x7fc00000u);
    most = std::max(most, std::fabs(value));
  }
  if (format == Format::onebit) {  // 32 sums, and then a tree
    std::vector<float> sums(32);
    for (std::size_t i = 0; i < values.size(); ++i) sums[i % 32] += std::fabs(values[i]);
    for (; sums.size() > 1; sums.resize(sums.size() / 2))
      for (std::size_t i = 0; i < sums.size() / 2; ++i) sums[i] += sums[i + sums.size() / 2];
    return std::min(sums[0] / static_cast<float>(values.size()), kMost);
  }
  const float scale = most / largest_of(format);
  return std::isinf(scale * largest_of(format)) ? std::nextafter(scale, 0.0f) : scale;
}

// `first` is the first element's index in its parameter.
inline Record encoded_run(const std::vector<float>& values, Format format, const Rounding& rounding,
                          std::uint64_t first) {
  Record record(format, values.size());
  float scale = 1;
  if (is_scaled(format)) {
    scale = scale_of(values, format);
    record.set_scale(scale);
    if (!(scale > 0)) return record;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float value = values[i];
    const std::uint64_t index = first + i;
    if (format == Format::fp32) {
      record.set_code(i, float_bits(value));
    } else if (format == Format::onebit) {
      record.set_code(i, std::signbit(value) ? 1 : 0);
    } else if (format == Format::int8 || format == Format::int4) {
      const float whole = rounding.random
                              ? std::floor(value / scale + 128.0f + rounding.uniform(index)) - 128
                              : std::nearbyint(value / scale);
      const float most = largest_of(format);
      record.set_code(
          i, static_cast<std::uint32_t>(static_cast<int>(std::max(-most, std::min(whole, most)))));
    } else if (format == Format::bf16 && !std::isfinite(value)) {
      record.set_code(i, static_cast<std::uint32_t>(narrowed<BFloat16>(value)));
    } else if (format == Format::fp16 && !std::isfinite(value)) {
      const std::uint32_t special = std::isnan(value) ? 0x7e00 : 0x7c00;
      record.set_code(i, special | (std::signbit(value) ? 0x8000 : 0));
    } else {
      record.set_code(
          i, static_cast<std::uint32_t>(small_of(format).code(value / scale, rounding, index)));
    }
  }
  return record;
}

// That a rank has nothing to send.
inline Record absent_run(Format format, std::size_t count) {
  Record record(format, count);
  if (is_scaled(format))
    record.set_scale(-0.0f);
  else
    for (std::size_t i = 0; i < count; ++i) record.set_code(i, 1u << (bits_of_element(format) - 1));
  return record;
}

// What a rank keeps back of a parameter: now, and after the next step; see wire.h's Residuals.
struct Kept {
  Values sent[2];
  Values reduced[2];
};

// A rank's memory.
struct Holding {
  Values gradient;         // of all parameters
  std::vector<Kept> kept;  // of each; empty without feedback
};

// One step of all ranks.
struct Step {
  std::uint64_t seed = 0;
  std::uint32_t number = 0;
  int now = 0;                            // which residuals are the old ones
  std::vector<float> factors;             // of each rank
  std::vector<std::vector<char>> absent;  // of each rank, of each parameter
};

// What travels in a step, and whether its result is finite.
struct Traffic {
  std::vector<std::vector<Bytes>> messages;  // of each rank to each
  std::vector<Bytes> results;                // of each rank to all
  bool finite = true;
};

// Who reduces a run: a parameter's runs are dealt out in equal parts, the first ones the longer
// ones, the first of them to a rank that its key says.
inline int owner_of(std::size_t run, std::size_t runs, int world, std::uint32_t key) {
  const std::size_t each = runs / world;
  const std::size_t longer = runs % world;
  const std::size_t before = longer * (each + 1);
  const std::size_t part = run < before ? run / (each + 1) : longer + (run - before) / each;
  return static_cast<int>((part + world - key % world) % world);
}

// Holdings become what they should be after a step.
inline Traffic step_of(const std::vector<Span>& spans, const Step& step,
                       std::vector<Holding>& ranks) {
  const int world = static_cast<int>(ranks.size());
  const int next = 1 - step.now;
  Traffic traffic;
  traffic.messages.assign(world, std::vector<Bytes>(world));
  traffic.results.resize(world);
  const auto append = [](Bytes& to, const Record& record) {
    to.insert(to.end(), record.bytes().begin(), record.bytes().end());
  };
  for (std::size_t s = 0; s < spans.size(); ++s) {
    const Span& span = spans[s];
    const bool feedback = !ranks[0].kept[s].sent[0].bytes.empty();
    const std::size_t runs = (span.count + span.run - 1) / span.run;
    for (std::size_t r = 0; r < runs; ++r) {
      const std::size_t begin = r * span.run;
      const std::size_t n = std::min<std::size_t>(span.run, span.count - begin);
      const int owner = owner_of(r, runs, world, span.key);
      const auto rounding = [&](int rank, bool result) {
        const auto stream = static_cast<std::uint32_t>(2 * rank + (result ? 1 : 0));
        return Rounding{span.stochastic, step.seed, span.key, step.number, stream};
      };

      std::vector<Record> records;
      bool some = false;
      for (int p = 0; p < world; ++p) {
        Kept& kept = ranks[p].kept[s];
        if (step.absent[p][s] != 0) {
          records.push_back(absent_run(span.format, n));
          for (std::size_t i = begin; feedback && i < begin + n; ++i)
            kept.sent[next].set(i, kept.sent[step.now].at(i));
        } else {
          std::vector<float> values(n);
          for (std::size_t i = 0; i < n; ++i) {
            const float gradient = ranks[p].gradient.at(span.offset + begin + i);
            values[i] = step.factors[p] == 0 ? 0 : gradient * step.factors[p];
            if (feedback) values[i] += kept.sent[step.now].at(begin + i);
          }
          records.push_back(encoded_run(values, span.format, rounding(p, false), begin));
          for (std::size_t i = 0; feedback && i < n; ++i)
            kept.sent[next].set(begin + i, values[i] - records[p].value(i));
        }
        some = some || !records[p].is_absent(n);
        append(traffic.messages[p][owner], records[p]);
      }

      Kept& kept = ranks[owner].kept[s];
      Record result = absent_run(span.format, n);
      std::vector<float> values(n);
      if (some) {
        for (std::size_t i = 0; i < n; ++i) {
          std::vector<float> leaves;
          for (const Record& record : records) leaves.push_back(record.value(i));
          values[i] = in_tree<Sum>(leaves) * static_cast<float>(1.0 / world);
          if (feedback) values[i] += kept.reduced[step.now].at(begin + i);
        }
        result = encoded_run(values, span.format, rounding(owner, true), begin);
      }
      append(traffic.results[owner], result);
      for (int p = 0; p < world; ++p)
        for (std::size_t i = 0; i < n; ++i)
          ranks[p].gradient.set(span.offset + begin + i, result.value(i));
      for (std::size_t i = 0; i < n; ++i) {
        const float given = ranks[owner].gradient.at(span.offset + begin + i);
        traffic.finite = traffic.finite && std::isfinite(given);
        if (feedback)
          kept.reduced[next].set(begin + i,
                                 some ? values[i] - given : kept.reduced[step.now].at(begin + i));
      }
    }
  }
  return traffic;
}

// A plan of the kernels, and what it points to.
class Planned {
 public:
  Planned(int world, const std::vector<Span>& spans) : spans_(spans) {
    plan_.world = world;
    plan_.spans = spans_.size();
    plan_.span = spans_.data();
    for (const Span& span : spans_) plan_.record = std::max(plan_.record, span.record());
    parts_ = parts_of(plan_, Dealing(plan_.world));
    plan_.part = parts_.data();
  }
  Planned(const Planned&) = delete;
  Planned& operator=(const Planned&) = delete;
  const Plan& plan() const { return plan_; }

 private:
  std::vector<Span> spans_;
  std::vector<Part> parts_;
  Plan plan_;
};

// The same step as the kernels are told it, for one rank; `gradient` may lie elsewhere than in its
// holding.
class Told {
 public:
  Told(const Plan& plan, const Step& step, int rank, Holding& holding, DType residual_dtype,
       DType dtype, void* gradient)
      : absent_(step.absent[rank].begin(), step.absent[rank].end()) {
    const int next = 1 - step.now;
    for (Kept& kept : holding.kept) {
      if (kept.sent[0].bytes.empty())
        residuals_.emplace_back();
      else
        residuals_.push_back({kept.sent[step.now].bytes.data(), kept.sent[next].bytes.data(),
                              kept.reduced[step.now].bytes.data(),
                              kept.reduced[next].bytes.data()});
    }
    coding_.plan = plan;
    coding_.residuals = residuals_.data();
    coding_.absent = absent_.data();
    coding_.residual_dtype = residual_dtype;
    coding_.dtype = dtype;
    coding_.gradient = gradient;
    coding_.rank = rank;
    coding_.factor = step.factors[rank];
    coding_.seed = step.seed;
    coding_.step = step.number;
    coding_.finite = &finite_;
  }
  Told(const Told&) = delete;
  Told& operator=(const Told&) = delete;
  const Coding& coding() const { return coding_; }
  bool finite() const { return load_acquire(&finite_) != 0; }

 private:
  std::vector<Residuals> residuals_;
  std::vector<std::uint8_t> absent_;
  std::uint32_t finite_ = 1;
  Coding coding_;
};

// What gradients are made of.
enum class Mood {
  ordinary,  // some small, some large, zeros of both signs
  extreme,   // subnormals, what is rounded half way, what is too large for a format
  tiny,      // a few of the smallest floats
  zero,
  broken  // somewhere no number, or an infinity
};
constexpr int kMoods = 5;

// Not a number is the one that every order of operands keeps, see reference.h. `draw()` gives 31
// random bits.
template <class Draw>
float mood_value(Mood mood, const Draw& draw) {
  const double fraction = static_cast<double>(draw()) / 0x1p30 - 1;
  constexpr float kMost = std::numeric_limits<float>::max();
  constexpr float kPool[] = {0.0f,       0x1p-149f,  0x1.8p-148f, 1e-40f,    0x1p-126f, 65504.0f,
                             65519.0f,   65520.0f,   1e30f,       kMost,     kMost / 8, 0.5f,
                             1.5f,       2.5f,       448.0f,      57344.0f,  0x1p-24f,  0x1p-17f,
                             0x1.8p-24f, 0x1.004p0f, 0x1.008p0f,  0x1.01p0f, 0x1p-14f,  0x1p-6f};
  switch (mood) {
    case Mood::extreme:
      return kPool[draw() % std::size(kPool)] * (draw() % 2 == 0 ? 1 : -1);
    case Mood::tiny:
      return static_cast<float>(std::ldexp(static_cast<int>(draw() % 401) - 200, -149));
    case Mood::zero:
      return draw() % 2 == 0 ? 0.0f : -0.0f;
    case Mood::broken:
      if (draw() % 16 == 0) return static_cast<float>(default_nan());
      if (draw() % 16 == 0)
        return std::numeric_limits<float>::infinity() * (draw() % 2 == 0 ? 1 : -1);
      [[fallthrough]];
    default:
      if (draw() % 12 == 0) return draw() % 2 == 0 ? 0.0f : -0.0f;
      return static_cast<float>(std::ldexp(fraction, static_cast<int>(draw() % 12) - 6));
  }
}

}  // namespace fastreduce::test
