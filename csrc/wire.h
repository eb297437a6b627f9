// A buffer of gradients on its way between ranks in a wire format: which rank reduces which part of
// it, and what each rank does with a run of it.
//
// A buffer consists of spans (parameters). Every span is cut into runs that are encoded on their
// own, and its runs into one part for each rank, so that neither what is encoded together nor who
// reduces it depends on the buffer that a parameter happens to lie in. A message to chunk c is the
// records of part c of all spans, one after the other.
//
// With u = factor * gradient + residual of a rank, e its record, D decoding:
//
//   encode   e = encoding of u;  residual' = u - D(e)
//   reduce   v = mean over the ranks of D(e), plus the reducing rank's own residual;
//            f = encoding of v;  residual' = v - D(f), as it will stand in the gradient
//            (or v is that rank's gradient, and nobody else's: nothing is encoded again)
//   decode   gradient = D(f), on every rank
//
// New residuals are written beside the old ones: whether they count is decided once the whole step
// is known to be finite. Everything is in units of the mean's sum: the mean of all ranks' residuals
// of a parameter, plus the reducing ranks', is what its updates still lack.
#pragma once

#include <algorithm>
#include <vector>

#include "codec.h"
#include "schedule.h"
#include "signal.h"

namespace fastreduce {

struct Span {
  std::uint64_t offset = 0;  // in the buffer, and
  std::uint64_t count = 0;   // elements
  std::uint32_t key = 0;     // of its name: who reduces it, and its random numbers
  Format format = Format::fp32;
  bool stochastic = false;
  std::uint16_t run = 128;  // elements that are encoded together

  FR_FN std::size_t record() const { return record_bytes(format, run); }
};

// What of a message comes before a span's part, and with which of its runs that part begins.
struct Part {
  std::uint64_t runs = 0;
  std::uint64_t bytes = 0;
  std::uint64_t first = 0;
};

// The same on all ranks.
struct Plan {
  int world = 1;
  std::size_t spans = 0;
  std::size_t record = 0;  // bytes of the longest
  const Span* span = nullptr;
  const Part* part = nullptr;  // world x (spans + 1)

  FR_FN const Part* parts(int chunk) const { return part + chunk * (spans + 1); }
  FR_FN std::size_t runs(int chunk) const { return parts(chunk)[spans].runs; }
  FR_FN std::size_t bytes(int chunk) const { return parts(chunk)[spans].bytes; }
};

// Which ranks reduce: of every chunk the place among those that do, or -1. Their parts of a span
// begin with multiples of `grain` elements, a multiple of the runs' or 0 for these.
struct Dealing {
  std::vector<int> place;
  int places = 0;
  std::size_t grain = 0;

  // All of `world` ranks, or those named.
  explicit Dealing(int world, const std::vector<int>& ranks = {}) : place(world, -1) {
    for (int p = 0; p < world; ++p)
      if (ranks.empty() || std::find(ranks.begin(), ranks.end(), p) != ranks.end())
        place[p] = places++;
  }
};

// The runs of a span that a chunk consists of.
inline Range runs_of(const Span& span, const Dealing& dealing, int chunk) {
  const int place = dealing.place[chunk];
  if (place < 0) return {};
  const int places = dealing.places;
  const std::size_t runs = (span.count + span.run - 1) / span.run;
  const int first = static_cast<int>(span.key % static_cast<std::uint32_t>(places));
  const std::size_t grain = dealing.grain == 0 ? 1 : dealing.grain / span.run;
  const Range part = part_of(runs, places, (place + first) % places, grain);
  return part.size() == 0 ? Range{} : part;
}

// Of every chunk: of every span, and of what would follow the last.
inline std::vector<Part> parts_of(const Plan& plan, const Dealing& dealing) {
  std::vector<Part> parts;
  for (int chunk = 0; chunk < plan.world; ++chunk) {
    Part part;
    for (std::size_t s = 0; s <= plan.spans; ++s) {
      if (s == plan.spans) {
        parts.push_back(part);
        break;
      }
      const Span& span = plan.span[s];
      const Range runs = runs_of(span, dealing, chunk);
      part.first = runs.begin;
      parts.push_back(part);
      part.runs += runs.size();
      const std::size_t shorter = runs.size() == 0 || runs.end * span.run <= span.count ? 0 : 1;
      part.bytes += (runs.size() - shorter) * span.record();
      if (shorter != 0)
        part.bytes += record_bytes(span.format, span.count - (runs.end - 1) * span.run);
    }
  }
  return parts;
}

// Of all messages, one after the other: what comes before each of them, and after the last.
inline std::vector<Part> messages_of(const Plan& plan) {
  std::vector<Part> messages(1);
  for (int chunk = 0; chunk < plan.world; ++chunk) {
    const Part& before = messages.back();
    messages.push_back({before.runs + plan.runs(chunk), before.bytes + plan.bytes(chunk), 0});
  }
  return messages;
}

// A span's residuals on this rank, as they are and as they will be; null without feedback. `sent`
// of what it has sent, `reduced` of what it has reduced (its own chunk only counts).
struct Residuals {
  void* sent = nullptr;
  void* sent_next = nullptr;
  void* reduced = nullptr;
  void* reduced_next = nullptr;
};

// One buffer in one step on one rank.
struct Coding {
  Plan plan;
  const Residuals* residuals = nullptr;   // of every span
  const std::uint8_t* absent = nullptr;   // of every span: this rank has nothing to send; or null
  DType residual_dtype = DType::float32;  // or bfloat16
  DType dtype = DType::float32;           // of the gradient: float32, float16, bfloat16
  void* gradient = nullptr;
  int rank = 0;
  float factor = 1;  // 0 drops this rank's gradient
  std::uint64_t seed = 0;
  std::uint32_t step = 0;
  std::uint32_t* finite = nullptr;  // set to 0 where the result is not
  bool lands = false;               // the mean stays in the gradient of the rank that reduces it
};

// Between hosts there can be more ranks than on one.
constexpr int kMostSenders = 4096;
constexpr int kSenderLevels = 13;
static_assert((1 << kSenderLevels) > kMostSenders, "a level for every power of two of ranks");

inline namespace FR_ISA {

// A run of a message: n elements from `begin` of a span, whose record is at `byte` of the message.
struct Run {
  std::size_t span = 0;
  std::size_t begin = 0;
  std::size_t n = 0;
  std::size_t byte = 0;
};

// Of `count` parts the one that holds run `index`; before each, and at the end, stands what comes
// before. `near` is a guess.
FR_FN std::size_t part_with(const Part* parts, std::size_t count, std::size_t index,
                            std::size_t near) {
  if (parts[near].runs <= index && index < parts[near + 1].runs) return near;
  std::size_t low = 0, high = count - 1;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (index < parts[middle + 1].runs)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Run `index` of a message. `span` is the one of the run asked for before, 0 at first.
FR_FN Run run_at(const Plan& plan, int chunk, std::size_t index, std::size_t span) {
  const Part* const parts = plan.parts(chunk);
  span = part_with(parts, plan.spans, index, span);
  const std::size_t before = index - parts[span].runs;
  Run run;
  run.span = span;
  const Span& of = plan.span[span];
  run.begin = (parts[span].first + before) * of.run;
  const std::size_t left = of.count - run.begin;
  run.n = left < of.run ? left : of.run;
  run.byte = parts[span].bytes + before * of.record();
  return run;
}

// Whether this rank has nothing to send of a span.
FR_FN bool has_nothing(const Coding& coding, std::size_t span) {
  return coding.absent != nullptr && coding.absent[span] != 0;
}

// A magnitude from which on a gradient is not finite once it is stored.
FR_FN std::uint32_t limit_of(DType dtype) {
  return dtype == DType::float16 ? 0x477ff000u : dtype == DType::bfloat16 ? 0x7f7f8000u : kInfinity;
}

// A gradient's value, once it is stored.
FR_FN float stored(DType dtype, float value) {
  if (dtype == DType::float16) return Element<Half>::load(Element<Half>::store(value));
  if (dtype == DType::bfloat16) return Element<BFloat16>::load(Element<BFloat16>::store(value));
  return value;
}

FR_FN Noise noise_of(const Coding& coding, const Span& span, bool result) {
  const auto stream = static_cast<std::uint32_t>(2 * coding.rank + (result ? 1 : 0));
  return {coding.seed, span.key, coding.step, stream};
}

// The mean's factor. (Of so few ranks, the quotient in double, rounded, is the same.)
FR_FN float share_of(int world) { return 1.0f / static_cast<float>(world); }

// What a rank does with a run. Beside what a codec needs, a Team has
//   contribution()  the values factor * gradient + residual
//   mean<C>()       the values mean over the ranks' records + residual
//   words<R>()      the random words of a run
//   keep<C>()       a new residual: values less what their record holds
//   carry()         a new residual: the old one
//   give<C>()       the gradient becomes what a record holds; returns the largest magnitude
template <class C, class R, class Team>
FR_BLOCK void encode_run(Team& team, const Coding& coding, const Run& run, char* record) {
  const Span& span = coding.plan.span[run.span];
  const Residuals& residuals = coding.residuals[run.span];
  if (has_nothing(coding, run.span)) {
    encode_absent<C>(team, record, run.n);
    if (residuals.sent != nullptr)
      team.carry(residuals.sent_next, residuals.sent, run.begin, run.n, coding.residual_dtype);
    return;
  }
  const auto values = team.contribution(coding, span, residuals.sent, run.begin, run.n);
  const auto words = team.template words<R>(noise_of(coding, span, false), run.begin, run.n);
  encode<C, R>(team, record, run.n, values, words);
  if (residuals.sent == nullptr) return;
  team.sync();
  team.template keep<C>(residuals.sent_next, run.begin, run.n, coding.residual_dtype, record,
                        values, DType::float32);
}

// from(p): rank p's record of the run.
template <class C, class R, class Team, class From>
FR_BLOCK void reduce_run(Team& team, const Coding& coding, const Run& run, const From& from,
                         char* record) {
  const Span& span = coding.plan.span[run.span];
  const Residuals& residuals = coding.residuals[run.span];
  const int world = coding.plan.world;
  if constexpr (Team::kLands) {
    if (coding.lands) {
      const auto mean = team.template mean<C>(coding, from, nullptr, run.begin, run.n);
      if (team.put(coding, span.offset + run.begin, mean, run.n) >= limit_of(coding.dtype))
        store_release(coding.finite, 0);
      return;
    }
  }
  bool absent = true;
  for (int p = 0; p < world && absent; ++p) absent = is_absent<C>(team, from(p), run.n);
  if (absent) {
    encode_absent<C>(team, record, run.n);
    if (residuals.reduced != nullptr)
      team.carry(residuals.reduced_next, residuals.reduced, run.begin, run.n,
                 coding.residual_dtype);
    return;
  }
  const auto values = team.template mean<C>(coding, from, residuals.reduced, run.begin, run.n);
  const auto words = team.template words<R>(noise_of(coding, span, true), run.begin, run.n);
  encode<C, R>(team, record, run.n, values, words);
  if (residuals.reduced == nullptr) return;
  team.sync();
  team.template keep<C>(residuals.reduced_next, run.begin, run.n, coding.residual_dtype, record,
                        values, coding.dtype);
}

template <class C, class Team>
FR_BLOCK void decode_run(Team& team, const Coding& coding, const Run& run, const char* record) {
  const Span& span = coding.plan.span[run.span];
  const std::uint32_t most = team.template give<C>(coding, span.offset + run.begin, record, run.n);
  if (most >= limit_of(coding.dtype) && team.lane() == 0) store_release(coding.finite, 0);
}

}  // namespace FR_ISA
}  // namespace fastreduce
