// Checks the messages of wire formats, and selections of elements, as the kernels make them: that
// every instruction set gives the bytes of encoding.h, and the same numbers out of them.
//
//   wires [ISA]   77 where the kernels are not those of that instruction set
//
// Exit status: 0, 1 after a difference.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "encoding.h"
#include "host.h"
#include "host_topk.h"

namespace fastreduce {

#if defined(FR_BASELINE_ONLY)
// Those compiled here, with what this file is compiled with.
inline namespace baseline {
extern const Kernels instance;
const Kernels instance{"baseline",     nullptr, nullptr, nullptr, encode_message, reduce_messages,
                       decode_message, select,  combine, nullptr, nullptr};
}  // namespace baseline
#endif

namespace test {
namespace {

int failures = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  if (++failures <= 20) std::fprintf(stderr, "failed: %s\n", what.c_str());
}

std::string numbers(std::initializer_list<std::uint64_t> values) {
  std::string text;
  for (const auto value : values) text += " " + std::to_string(value);
  return text;
}

// 31 random bits.
std::uint32_t draw() {
  static std::uint64_t state = 12345;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<std::uint32_t>(state >> 33);
}

// Known answers of the paper's authors' library.
void check_philox() {
  const std::uint32_t none[] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
  const std::uint32_t ones[] = {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu};
  for (int k = 0; k < 4; ++k) {
    expect(philox(0, 0, 0, 0, 0, 0).word[k] == none[k], "philox of zeros");
    expect(philox(~0u, ~0u, ~0u, ~0u, ~0u, ~0u).word[k] == ones[k], "philox of ones");
    expect(philox_word({0, 0}, {0, 0, 0, 0}, k) == none[k], "philox_word of zeros");
    expect(philox_word({~0u, ~0u}, {~0u, ~0u, ~0u, ~0u}, k) == ones[k], "philox_word of ones");
  }
}

// What a gradient cannot hold any more, see wire.h.
void check_limits() {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    Values value(dtype, 1);
    const std::uint32_t limit = limit_of(dtype);
    value.set(0, bits_float(limit));
    expect(std::isinf(value.at(0)), "a limit is too high");
    value.set(0, bits_float(limit - 1));
    expect(std::isfinite(value.at(0)), "a limit is too low");
  }
}

// Every run is reduced by one rank, whatever the key; and a message's runs are found wherever one
// begins to look.
void check_messages() {
  for (const int world : {1, 2, 3, 5, 7, 8, 64}) {
    std::vector<Span> spans;
    std::uint64_t offset = 0;
    for (const std::uint32_t key : {0u, 1u, 6u, 0x80000000u, ~0u - 2, ~0u - 1, ~0u})
      for (const std::uint64_t count : {0, 1, 31, 32, 33, 1000}) {
        spans.push_back({offset, count, key, Format::int4, false, 32});
        offset += count;
      }
    const Planned planned(world, spans);
    const Plan& plan = planned.plan();
    std::vector<int> owners(offset, -1);
    for (int chunk = 0; chunk < world; ++chunk) {
      std::size_t end = 0;
      for (std::size_t index = 0; index < plan.runs(chunk); ++index) {
        const Run run = run_at(plan, chunk, index, 0);
        expect(run.byte == end && run.n != 0, "run_at" + numbers({index, std::uint64_t(world)}));
        for (const std::size_t from : {run.span, spans.size() / 2, spans.size() - 1}) {
          const Run same = run_at(plan, chunk, index, from);
          expect(same.span == run.span && same.begin == run.begin && same.n == run.n &&
                     same.byte == run.byte,
                 "run_at from" + numbers({from, index, std::uint64_t(world)}));
        }
        end = run.byte + record_bytes(Format::int4, run.n);
        const Span& span = spans[run.span];
        const std::size_t runs = (span.count + span.run - 1) / span.run;
        const bool owns = owner_of(run.begin / span.run, runs, world, span.key) == chunk;
        expect(owns, "owner" + numbers({run.span, run.begin, std::uint64_t(world)}));
        for (std::size_t i = 0; i < run.n; ++i) owners[span.offset + run.begin + i] = chunk;
      }
      expect(plan.bytes(chunk) == end, "bytes of a message" + numbers({std::uint64_t(world)}));
    }
    const auto left = std::count(owners.begin(), owners.end(), -1);
    expect(left == 0, "elements that nobody reduces" + numbers({std::uint64_t(left)}));
  }
}

// Messages of all ranks by the kernels, between guards.
class Post {
 public:
  explicit Post(std::size_t bytes) : memory_(bytes / 4 + 2 * kGuard, kUntouched), bytes_(bytes) {}
  char* at() { return reinterpret_cast<char*>(memory_.data() + kGuard); }
  bool holds(const Bytes& expected) {
    return expected.size() == bytes_ && std::memcmp(at(), expected.data(), bytes_) == 0;
  }
  bool intact_around() const {
    const auto untouched = [](std::uint32_t word) { return word == kUntouched; };
    return std::all_of(memory_.begin(), memory_.begin() + kGuard, untouched) &&
           std::all_of(memory_.end() - kGuard, memory_.end(), untouched);
  }

 private:
  static constexpr std::size_t kGuard = 4;
  static constexpr std::uint32_t kUntouched = 0xa5a5a5a5u;
  std::vector<std::uint32_t> memory_;
  std::size_t bytes_;
};

// Of all formats and roundings, in runs of some length, and with every length of a tail up to some:
// all that a step leaves behind, several times over.
void check_encoding(int world, std::uint16_t run, DType dtype, DType residual_dtype) {
  std::vector<Span> spans;
  std::uint64_t offset = 1;  // off the alignment of vectors
  for (int f = 0; f < kFormats; ++f)
    for (const bool stochastic : {false, true}) {
      const std::uint64_t more = draw() % 2 == 0 ? draw() % 70 : draw() % run;
      for (const std::uint64_t count : {1 + more % 9, 2 * run + more, std::uint64_t(run)}) {
        spans.push_back(
            {offset, count, draw() << 1 ^ draw(), static_cast<Format>(f), stochastic, run});
        offset += count + draw() % 3;
      }
    }
  const Planned planned(world, spans);
  const Plan& plan = planned.plan();
  std::vector<Holding> seen(world);
  for (Holding& holding : seen) {
    holding.gradient = Values(dtype, offset);
    for (const Span& span : spans) {
      const Values values(residual_dtype, span.key % 5 == 4 ? 0 : span.count);
      holding.kept.push_back({{values, values}, {values, values}});
    }
  }
  Step step;
  step.absent.resize(world);
  for (int turn = 0; turn < 4; ++turn) {
    step.seed = static_cast<std::uint64_t>(draw()) << 40 ^ draw();
    ++step.number;
    step.factors.assign(world, 1);
    std::vector<Mood> moods;
    for (std::size_t s = 0; s < spans.size(); ++s)
      moods.push_back(static_cast<Mood>(draw() % (turn == 3 ? kMoods : kMoods - 1)));
    for (int p = 0; p < world; ++p) {
      if (turn == 2) step.factors[p] = p == 0 ? 0 : 0.6f + 0.3f * static_cast<float>(p);
      step.absent[p].assign(spans.size(), 0);
      for (std::size_t s = 0; s < spans.size(); ++s) {
        if (turn != 0) step.absent[p][s] = s % 7 == 3 || draw() % 5 == 0;
        const auto ordinary = draw() % 3 == 0;
        for (std::size_t i = 0; i < spans[s].count; ++i)
          seen[p].gradient.set(spans[s].offset + i,
                               mood_value(ordinary ? Mood::ordinary : moods[s], draw));
      }
    }
    std::vector<Holding> expected = seen;
    const Traffic traffic = step_of(spans, step, expected);

    const std::string where =
        "encoding" + numbers({std::uint64_t(world), run, std::uint64_t(dtype),
                              std::uint64_t(residual_dtype), std::uint64_t(turn)});
    std::vector<std::unique_ptr<Told>> told;
    for (int p = 0; p < world; ++p)
      told.push_back(std::make_unique<Told>(plan, step, p, seen[p], residual_dtype, dtype,
                                            seen[p].gradient.bytes.data()));
    std::vector<std::vector<Post>> sent(world);
    std::vector<Post> results;
    for (int p = 0; p < world; ++p)
      for (int c = 0; c < world; ++c) {
        sent[p].emplace_back(plan.bytes(c));
        kernels().encode(told[p]->coding(), c, sent[p][c].at());
        expect(sent[p][c].holds(traffic.messages[p][c]), where + ": a message");
        expect(sent[p][c].intact_around(), where + ": wrote outside a message");
      }
    for (int p = 0; p < world; ++p) {
      std::vector<const char*> from;
      for (int q = 0; q < world; ++q) from.push_back(sent[q][p].at());
      results.emplace_back(plan.bytes(p));
      kernels().reduce(told[p]->coding(), from.data(), results[p].at());
      expect(results[p].holds(traffic.results[p]), where + ": a result");
      expect(results[p].intact_around(), where + ": wrote outside a result");
    }
    for (int p = 0; p < world; ++p) {
      for (int c = 0; c < world; ++c) kernels().decode(told[p]->coding(), c, results[c].at());
      expect(told[p]->finite() == traffic.finite, where + ": finite");
      expect(seen[p].gradient.bytes == expected[p].gradient.bytes, where + ": a gradient");
      for (std::size_t s = 0; s < spans.size(); ++s)
        for (int k = 0; k < 2; ++k) {
          const Kept& kept = seen[p].kept[s];
          const Kept& wanted = expected[p].kept[s];
          const std::string span = " of span" + numbers({s});
          expect(kept.sent[k].bytes == wanted.sent[k].bytes, where + ": what is sent" + span);
          expect(kept.reduced[k].bytes == wanted.reduced[k].bytes,
                 where + ": what is reduced" + span);
        }
    }
    if (traffic.finite) step.now = 1 - step.now;
  }
}

// The k largest (by magnitude, or by random numbers), ties by index, as a sort finds them.
void check_selection(DType dtype, bool random, Mood mood, std::size_t wanted, float threshold,
                     bool absences) {
  const int world = 3;
  std::vector<Span> spans;
  std::uint64_t offset = 2;
  for (const std::uint64_t count : {300, 0, 1, 1024, 1100, 31}) {
    spans.push_back({offset, count, draw(), Format::fp32, false, 128});
    offset += count + 1;
  }
  std::size_t total = 0;
  for (const Span& span : spans) total += span.count;
  const std::size_t k = std::min(wanted, total);
  const Planned planned(world, spans);
  const std::string where =
      "selection" + numbers({std::uint64_t(dtype), std::uint64_t(random), std::uint64_t(mood), k,
                             std::uint64_t(absences)});
  Step step;
  step.seed = static_cast<std::uint64_t>(draw()) << 40 ^ draw();
  step.number = draw();
  step.factors.assign(world, 1);
  step.factors[1] = 0.7f;
  step.absent.resize(world);
  std::vector<Holding> seen(world);
  std::vector<std::unique_ptr<Told>> told;
  std::vector<Post> messages;
  std::vector<std::vector<float>> received(world, std::vector<float>(total));
  std::vector<std::size_t> chosen_first;
  bool finite = true;
  for (int p = 0; p < world; ++p) {
    step.absent[p].assign(spans.size(), 0);
    if (absences && p != 1) step.absent[p][2 + p] = 1;
    seen[p].gradient = Values(dtype, offset);
    for (const Span& span : spans) {
      const Values values(DType::float32, span.key % 5 == 4 ? 0 : span.count);
      seen[p].kept.push_back({{values, values}, {values, values}});
    }
    std::vector<float> all(total);
    std::vector<std::uint32_t> keys(total);
    std::vector<std::size_t> order;
    std::size_t index = 0;
    for (std::size_t s = 0; s < spans.size(); ++s)
      for (std::size_t i = 0; i < spans[s].count; ++i, ++index) {
        Kept& kept = seen[p].kept[s];
        const bool feedback = !kept.sent[0].bytes.empty();
        // Many are alike.
        const float value = draw() % 4 == 0 ? mood_value(mood, draw) : std::ldexp(1.0f, i % 3);
        seen[p].gradient.set(spans[s].offset + i, value);
        if (feedback) kept.sent[0].set(i, draw() % 2 == 0 ? 0 : 0.25f * (draw() % 5));
        all[index] = seen[p].gradient.at(spans[s].offset + i) * step.factors[p];
        if (feedback) all[index] += kept.sent[0].at(i);
        if (step.absent[p][s] != 0) continue;
        finite = finite && std::isfinite(all[index]);
        order.push_back(index);
        const Rounding words{true, step.seed, spans[s].key, step.number, ~0u};
        keys[index] = random ? words.word(i) >> 1 : float_bits(std::fabs(all[index]));
      }
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return keys[a] > keys[b]; });
    order.resize(std::min(k, order.size()));
    const auto below = [&](std::size_t i) { return std::fabs(all[i]) < threshold; };
    order.erase(std::remove_if(order.begin(), order.end(), below), order.end());
    std::sort(order.begin(), order.end());
    if (p == 0) chosen_first = order;
    if (random && !absences && threshold == 0)
      expect(order == chosen_first, where + ": others at random");

    Bytes expected(selection_bytes(k));
    const Header header{static_cast<std::uint32_t>(order.size()), 1};
    std::memcpy(expected.data(), &header, sizeof header);
    for (std::size_t n = 0; n < order.size(); ++n) {
      const Entry entry{static_cast<std::uint32_t>(order[n]), all[order[n]]};
      std::memcpy(expected.data() + sizeof header + n * sizeof entry, &entry, sizeof entry);
      received[p][order[n]] = all[order[n]];
    }
    bool own_finite = true;
    index = 0;
    for (std::size_t s = 0; s < spans.size(); ++s)
      for (std::size_t i = 0; i < spans[s].count; ++i, ++index)
        own_finite = own_finite && (step.absent[p][s] != 0 || std::isfinite(all[index]));
    if (!own_finite) std::memset(expected.data() + 4, 0, 4);

    told.push_back(std::make_unique<Told>(planned.plan(), step, p, seen[p], DType::float32, dtype,
                                          seen[p].gradient.bytes.data()));
    messages.emplace_back(expected.size());
    const Selection selection{random, k, float_bits(threshold)};
    // Where it begins to look decides nothing.
    const std::uint32_t begin[] = {0, 1u << 30, 0x7fffffffu, 1};
    kernels().select(told[p]->coding(), selection, begin[p % 4], messages[p].at());
    expect(messages[p].holds(expected), where + ": a message");
    expect(messages[p].intact_around(), where + ": wrote outside a message");
    index = 0;
    for (std::size_t s = 0; s < spans.size(); ++s)
      for (std::size_t i = 0; i < spans[s].count; ++i, ++index) {
        const Kept& kept = seen[p].kept[s];
        if (kept.sent[0].bytes.empty()) continue;
        const bool sent = std::binary_search(order.begin(), order.end(), index);
        const float rest = step.absent[p][s] != 0 ? kept.sent[0].at(i) : sent ? 0 : all[index];
        expect(same_bits(kept.sent[1].at(i), rest), where + ": kept" + numbers({s, i}));
      }
  }

  std::vector<const char*> from;
  for (Post& message : messages) from.push_back(message.at());
  for (int p = 0; p < world; ++p) {
    Values expected = seen[p].gradient;
    bool sums_finite = finite;
    std::size_t index = 0;
    for (const Span& span : spans)
      for (std::size_t i = 0; i < span.count; ++i, ++index) {
        std::vector<float> leaves;
        for (int q = 0; q < world; ++q) leaves.push_back(received[q][index]);
        const float mean = in_tree<Sum>(leaves) * static_cast<float>(1.0 / world);
        expected.set(span.offset + i, finite ? mean : bits_float(0x7fc00000u));
        sums_finite = sums_finite && std::isfinite(expected.at(span.offset + i));
      }
    kernels().combine(told[p]->coding(), k, from.data());
    expect(seen[p].gradient.bytes == expected.bytes, where + ": a gradient");
    expect(told[p]->finite() == sums_finite, where + ": finite");
  }

  // Damaged messages, which count too many elements, beyond the end and out of order, are not
  // followed there: sanitizers look on.
  for (const unsigned char byte : {0xff, 0x01}) {
    std::vector<char> damaged(selection_bytes(k), static_cast<char>(byte));
    const std::vector<const char*> all(world, damaged.data());
    kernels().combine(told[0]->coding(), k, all.data());
    if (k > 1) std::reverse(damaged.begin() + sizeof(Header), damaged.end());
    kernels().combine(told[0]->coding(), k, all.data());
  }
}

int main(int count, char** arguments) {
  if (count == 2 && std::strcmp(kernels().name, arguments[1]) != 0) return 77;
  check_philox();
  check_limits();
  check_messages();
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16})
    for (const DType residual_dtype : {DType::float32, DType::bfloat16})
      for (const int run : {4, 32, 96, 128})
        check_encoding(1 + static_cast<int>(draw() % 5), static_cast<std::uint16_t>(run), dtype,
                       residual_dtype);
  check_encoding(2, 1024, DType::float32, DType::float32);
  check_encoding(3, 1024, DType::float16, DType::bfloat16);
  check_encoding(2, 480, DType::bfloat16, DType::float32);
  check_encoding(8, 64, DType::float32, DType::bfloat16);
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16})
    for (const bool random : {false, true})
      for (int mood = 0; mood < kMoods; ++mood)
        for (const std::size_t k : {0, 1, 37, 1500, 100000})
          check_selection(dtype, random, static_cast<Mood>(mood), k, k == 1500 ? 1.5f : 0.0f,
                          (mood + k) % 2 == 1);
  if (failures != 0) std::fprintf(stderr, "%d differences\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace test
}  // namespace fastreduce

int main(int count, char** arguments) { return fastreduce::test::main(count, arguments); }
