// Checks what needs no second thread: schedules, modular counters, conversions of elements, and
// that every way to reduce gives the bits of reference.h. To be compiled once per instruction set.
//
// Exit status: 0, 1 after a difference, 77 where the processor lacks the instruction set.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "bucket.h"
#include "reduce.h"
#include "reference.h"
#include "schedule.h"
#include "signal.h"
#include "target.h"

namespace fastreduce::test {
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

void check_parts() {
  for (const std::size_t grain : {1, 4, 16, 64})
    for (int parts = 1; parts <= 9; ++parts)
      for (std::size_t count = 0; count < 40 * grain; count += grain < 5 ? 1 : 5) {
        std::size_t end = 0;
        std::size_t before = count + grain;
        bool fine = true;
        for (int i = 0; i < parts; ++i) {
          const Range part = part_of(count, parts, i, grain);
          fine = fine && part.begin == end && part.begin <= part.end;
          fine = fine && (part.begin % grain == 0 || part.begin == count);
          fine = fine && part.size() <= before;
          // No longer than the last whole part by more than a grain.
          fine = fine && part.size() <= (count / grain / parts + 1) * grain;
          before = part.size();
          end = part.end;
        }
        expect(fine && end == count, "part_of" + numbers({count, std::uint64_t(parts), grain}));
      }
  for (const std::size_t item : {1, 2, 4, 8})
    for (int world = 1; world <= 8; ++world)
      for (int rank = 0; rank < world; ++rank) {
        const std::size_t begin = chunk_of(5003, world, rank, item).begin;
        expect(begin * item % 64 == 0,
               "chunk_of cuts a cache line" + numbers({item, std::uint64_t(world), begin}));
      }
  for (std::size_t count = 0; count < 50; ++count)
    for (std::size_t piece = 1; piece < 12; ++piece) {
      const Range all{7, 7 + count};
      const std::size_t pieces = pieces_in(count, piece);
      std::size_t end = all.begin;
      bool fine = true;
      for (std::size_t i = 0; i < pieces; ++i) {
        const Range here = piece_of(all, i, piece);
        fine = fine && here.begin == end && here.size() != 0 && here.size() <= piece;
        end = here.end;
      }
      fine = fine && end == all.end && piece_of(all, pieces, piece).size() == 0;
      expect(fine, "piece_of" + numbers({count, piece}));
    }
}

void check_ring() {
  for (int world = 2; world <= kMaxRanks; ++world)
    for (int rank = 0; rank < world; ++rank) {
      const int next = ring_next(rank, world);
      std::vector<int> gathered(world);
      bool fine = ring_previous(next, world) == rank;
      for (int step = 0; step < world - 1; ++step) {
        const int reduced = ring_reduce_send_chunk(rank, step, world);
        fine = fine && ring_reduce_receive_chunk(next, step, world) == reduced;
        // A rank sends on what it has just received, and begins with the chunk behind its own.
        fine = fine && reduced == (step == 0 ? ring_previous(rank, world)
                                             : ring_reduce_receive_chunk(rank, step - 1, world));
        const int passed = ring_gather_send_chunk(rank, step, world);
        fine = fine && ring_gather_receive_chunk(next, step, world) == passed;
        fine =
            fine && passed == (step == 0 ? rank : ring_gather_receive_chunk(rank, step - 1, world));
        ++gathered[ring_gather_receive_chunk(rank, step, world)];
      }
      fine = fine && ring_reduce_receive_chunk(rank, world - 2, world) == rank;
      for (int chunk = 0; chunk < world; ++chunk)
        fine = fine && gathered[chunk] == (chunk == rank ? 0 : 1);
      expect(fine, "ring of" + numbers({std::uint64_t(world)}) + ", rank" +
                       numbers({std::uint64_t(rank)}));
    }
}

void check_reached() {
  constexpr std::uint32_t kHalf = 0x80000000u;
  for (const std::uint32_t at : {0u, 1u, 5u, kHalf - 1, kHalf, kHalf + 1, 0u - 2, 0u - 1})
    for (const std::uint32_t distance : {0u, 1u, 2u, 1000u, kHalf - 1}) {
      expect(reached(at + distance, at), "reached" + numbers({at + distance, at}));
      if (distance != 0)
        expect(!reached(at, at + distance), "not reached" + numbers({at, distance}));
    }
}

std::uint32_t quiet(std::uint32_t bits) {
  return (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : bits;
}

// All patterns one by one, and in runs, which the processor may convert many at once (and then
// quiets a signalling NaN, as any arithmetic would).
// Who gives up in a later call does not spoil an earlier one for who is still in it.
void check_failed_peer() {
  View view;
  view.layout = {3, 1, 0, 0};
  view.rank = 1;
  const std::size_t words = view.layout.bytes() / sizeof(std::uint64_t) + 64;
  std::vector<std::uint64_t> memory[3];
  for (int p = 0; p < 3; ++p) {
    memory[p].resize(words);
    const auto at = reinterpret_cast<std::uintptr_t>(memory[p].data());
    view.area[p] = reinterpret_cast<char*>((at + kLineBytes - 1) / kLineBytes * kLineBytes);
  }
  for (const std::uint32_t call : {6u, 0u, ~0u}) {
    expect(failed_peer(view, call) == -1, "nobody has failed");
    view.given_up(2) = call;
    store_ordered(&view.state(1, 2).value, static_cast<std::uint32_t>(State::failed));
    expect(failed_peer(view, call - 1) == -1, "failed in a later call");
    expect(failed_peer(view, call) == 2, "failed in this call");
    expect(failed_peer(view, call + 1) == 2, "failed in an earlier call");
    store_ordered(&view.state(1, 2).value, static_cast<std::uint32_t>(State::open));
  }
}

template <class T>
void check_load(const char* name) {
  std::vector<T> all;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) all.push_back(static_cast<T>(bits));
  std::vector<float> wide(all.size());
  widen(wide.data() + 3, all.data() + 3, all.size() - 8);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::uint32_t expected = float_bits(widened(all[i]));
    expect(float_bits(Element<T>::load(all[i])) == expected, name + numbers({i}));
    if (i >= 3 && i < all.size() - 5)
      expect(quiet(float_bits(wide[i])) == quiet(expected), name + numbers({i}) + " in a run");
  }
}

// Around every value and around the middle of every two, both infinities, NaNs, any bits.
template <class T>
void check_store(const char* name) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {kInfinity, -kInfinity, std::numeric_limits<float>::max()};
  const auto add_around = [&](float value) {
    for (const float at :
         {value, std::nextafter(value, kInfinity), std::nextafter(value, -kInfinity)})
      values.push_back(at);
  };
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const std::uint32_t fraction = bits & 0x7fffu;
    const float value = widened(static_cast<T>(bits));
    values.push_back(value);
    if (std::isnan(value) || std::isinf(value)) continue;
    add_around(value);
    // The infinity's pattern stands for the next power of two.
    double above = widened(static_cast<T>(bits + 1));
    if (std::isinf(above)) above = 2 * value - widened(static_cast<T>(bits - 1));
    if (fraction != 0x7fffu) add_around(static_cast<float>((value + above) / 2));
  }
  std::uint32_t state = 1;
  for (int i = 0; i < 400000; ++i)
    values.push_back(bits_float(state = state * 1664525u + 1013904223u));

  std::vector<T> run(values.size());
  narrow(run.data(), values.data(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const T expected = narrowed<T>(values[i]);
    const std::uint64_t bits = float_bits(values[i]);
    expect(Element<T>::store(values[i]) == expected, name + numbers({bits}));
    expect(run[i] == expected, name + numbers({bits}) + " in a run");
  }
}

std::uint32_t state = 12345;
std::uint32_t draw() { return (state = state * 1664525u + 1013904223u) >> 8; }

template <class T>
T value_at(std::size_t i, int input, int count) {
  if constexpr (std::is_integral<T>::value) {
    return static_cast<T>(static_cast<std::uint64_t>(draw()) << 40 ^ draw() << 12 ^ draw());
  } else {
    using A = AccOf<T>;
    const double small =
        std::ldexp(static_cast<double>(draw()) - 0x1p23, -static_cast<int>(i % 41));
    // At most one NaN among the inputs, which is kept: of two, the compiler chooses either.
    if (i % 16 == 3 && input == static_cast<int>(i / 16) % count) {
      const auto payload = static_cast<float>(default_nan());
      return narrowed<T>(static_cast<A>(bits_float(float_bits(payload) ^ (draw() & 0x3fu) << 16)));
    }
    if (i % 16 == 5) return narrowed<T>(static_cast<A>(i % 32 == 5 ? -0.0 : 0.0));
    if (i % 16 == 7) return narrowed<T>(std::numeric_limits<A>::infinity());
    if (i % 16 == 9) return narrowed<T>(static_cast<A>(small * 0x1p-140));
    if (i % 16 == 11) return narrowed<T>(static_cast<A>(draw() % 2 == 0 ? -0.0 : 0.0));
    return narrowed<T>(static_cast<A>(small * 0x1p-10));
  }
}

// A thread of a block that meets nobody.
struct Loner {
  static constexpr bool kPacks = true;
  int thread() const { return thread_; }
  int threads() const { return threads_; }
  bool packs() const { return packs_; }
  int thread_;
  int threads_;
  bool packs_;
};

template <class T, class Op>
void check_reduce(const char* name) {
  constexpr std::size_t kCount = 2 * kTile + 78;
  for (const int count : {1, 2, 3, 4, 5, 7, 8, 13, 64}) {
    std::vector<std::vector<T>> inputs(count);
    for (std::size_t i = 0; i < kCount; ++i)
      for (int k = 0; k < count; ++k) inputs[k].push_back(value_at<T>(i, k, count));
    const T* from[kMaxRanks];
    for (int k = 0; k < count; ++k) from[k] = inputs[k].data();

    for (const Factors& factors :
         {Factors{1, 1.0 / count, 1}, Factors{1, 1, count}, Factors{0.7, 1.3, 3}}) {
      const Scaled<T> scaled(factors);
      const ScaleOf<T> scale = scaled.scale();
      std::vector<T> expected;
      std::vector<decltype(widened(T()))> leaves(count);
      for (std::size_t i = 0; i < kCount; ++i) {
        for (int k = 0; k < count; ++k) leaves[k] = scaled_input(widened(inputs[k][i]), factors, k);
        expected.push_back(narrowed<T>(scaled_result(in_tree<Op>(leaves), factors)));
      }
      std::vector<std::vector<T>> outputs;
      T* to[kMaxRanks];
      const auto clear = [&](int stores) {
        outputs.assign(stores, std::vector<T>(kCount, static_cast<T>(77)));
        for (int k = 0; k < stores; ++k) to[k] = outputs[k].data();
      };
      const auto compare = [&](const char* how) {
        for (const auto& output : outputs)
          for (std::size_t i = 0; i < kCount; ++i)
            expect(same_bits(output[i], expected[i]), std::string(name) + " " + how + " of" +
                                                          numbers({std::uint64_t(count)}) +
                                                          ", element" + numbers({i}));
      };

      for (const int stores : {1, count}) {
        for (const bool packs : {false, true})
          for (const int threads : {1, 3}) {
            clear(stores);
            // The second part begins off a pack.
            for (const Range part : {Range{0, kCount / 2}, Range{kCount / 2, kCount}})
              for (int t = 0; t < threads; ++t) {
                Loner loner{t, threads, packs};
                TypedArithmetic<T, Op>(scale, 0).reduce(
                    loner, [&](int k) { return reinterpret_cast<char*>(to[k] + part.begin); },
                    stores,
                    [&](int k) { return reinterpret_cast<const char*>(from[k] + part.begin); },
                    count, part.size());
              }
            compare(packs ? "reduce by packs" : "reduce");
          }
        clear(stores);
        reduce_tiled<T, Op>(to, stores, from, count, kCount, scale);
        compare("reduce_tiled");
      }
      clear(1);
      if (count == 2) reduce_unrolled<T, Op, 2, 1>(to, from, kCount, scale);
      if (count == 4) reduce_unrolled<T, Op, 4, 1>(to, from, kCount, scale);
      if (count == 2 || count == 4) compare("reduce_unrolled");
      clear(count);
      if (count == 2) reduce_unrolled<T, Op, 2, 2>(to, from, kCount, scale);
      if (count == 4) reduce_unrolled<T, Op, 4, 4>(to, from, kCount, scale);
      if (count == 2 || count == 4) compare("reduce_unrolled to all");
    }
  }
}

// Tiles of many tensors, taken by threads of a block, give what the host's loop gives; and nothing
// around them is touched.
template <class From, class To>
void check_moves(const char* name, DType from_type, DType to_type) {
  const Loner serial{0, 1, false};
  for (const double scale : {1.0, 0.3})
    for (const std::size_t shift : {0, 1}) {
      const std::size_t counts[] = {5, 0, 3 * kTileItems + 17, 1, 4096, 8, kTileItems};
      Moves moves;
      moves.from = from_type;
      moves.to = to_type;
      moves.scale = scale;
      std::vector<std::vector<From>> sources;
      std::vector<std::vector<To>> targets;
      for (const std::size_t count : counts) {
        sources.emplace_back();
        for (std::size_t i = 0; i < count + shift; ++i)
          sources.back().push_back(value_at<From>(i % 16 == 3 ? 0 : i, 0, 1));
        targets.emplace_back(count + shift + 1, static_cast<To>(77));
        add_move(moves, sources.back().data() + shift, targets.back().data() + shift, count);
      }
      expect(moves.count == 6, std::string(name) + ": a move for all but the empty one");
      for (std::uint64_t tile = 0; tile < tiles_of(moves); ++tile)
        for (int t = 0; t < 3; ++t) {
          Loner loner{t, 3, true};
          if (copies(moves))
            copy_tile(loner, moves, tile);
          else if (converts_in_double(moves))
            convert_tile<double>(loner, moves, tile);
          else
            convert_tile<float>(loner, moves, tile);
        }
      for (std::size_t k = 0; k < std::size(counts); ++k) {
        std::vector<To> expected(counts[k] + shift + 1, static_cast<To>(77));
        convert(serial, expected.data() + shift, sources[k].data() + shift, counts[k], scale);
        expect(std::memcmp(expected.data(), targets[k].data(), expected.size() * sizeof(To)) == 0,
               std::string(name) + numbers({k, shift}) + (scale == 1.0 ? "" : " scaled"));
      }
    }
}

bool processor_fits() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
#if defined(__x86_64__) && defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512cd");
#elif defined(__x86_64__) && defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
#else
  return true;
#endif
}

int main() {
  if (!processor_fits()) return 77;
  check_parts();
  check_ring();
  check_reached();
  check_failed_peer();
  check_load<Half>("load half");
  check_load<BFloat16>("load bfloat16");
  check_store<Half>("store half");
  check_store<BFloat16>("store bfloat16");
  check_reduce<float, Sum>("float sum");
  check_reduce<float, Min>("float min");
  check_reduce<double, Sum>("double sum");
  check_reduce<Half, Sum>("half sum");
  check_reduce<Half, Max>("half max");
  check_reduce<BFloat16, Sum>("bfloat16 sum");
  check_reduce<BFloat16, Max>("bfloat16 max");
  check_reduce<std::int32_t, Sum>("int32 sum");
  check_reduce<std::int32_t, Min>("int32 min");
  check_reduce<std::uint8_t, Sum>("uint8 sum");
  check_moves<float, float>("float to float", DType::float32, DType::float32);
  check_moves<float, BFloat16>("float to bfloat16", DType::float32, DType::bfloat16);
  check_moves<BFloat16, float>("bfloat16 to float", DType::bfloat16, DType::float32);
  check_moves<Half, BFloat16>("half to bfloat16", DType::float16, DType::bfloat16);
  check_moves<double, Half>("double to half", DType::float64, DType::float16);
  check_moves<float, double>("float to double", DType::float32, DType::float64);
  Moves full;
  float one = 1;
  for (int k = 0; k < kMoves; ++k) add_move(full, &one, &one, 1);
  expect(!add_move(full, &one, &one, 1) && add_move(full, &one, &one, 0), "moves are limited");
  static_assert(sizeof(Moves) <= 32764, "moves are arguments of a kernel");
  if (failures != 0) std::fprintf(stderr, "%d differences\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fastreduce::test

int main() { return fastreduce::test::main(); }
