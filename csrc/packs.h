// How the threads of a block walk a run of elements together: pack by pack, dealt out in turn, so
// that neighbouring threads touch neighbouring memory. A pack is what one 16-byte access moves.
#pragma once

#include "element.h"
#include "lines.h"

namespace fastreduce {
inline namespace FR_ISA {

constexpr int kPackBytes = 16;

// How many elements a thread handles at once. Half a pack of bytes: their accumulators are four
// times as large, and have to fit into the registers of a GPU's thread.
template <class T>
constexpr int kItemsOf = sizeof(T) == 1 ? 8 : kPackBytes / sizeof(T);

// N neighbouring elements, moved at once.
template <class T, int N>
struct alignas(N * sizeof(T)) Items {
  T item[N];
};

// A GPU moves a whole pack with one instruction; told of its elements alone, its compiler may not.
template <int N, class T>
FR_FN Items<T, N> load_items(const T* from) {
  Items<T, N> value;
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof value == kPackBytes) {
    std::uint32_t word[4];
    asm volatile("ld.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from));
    std::memcpy(&value, word, sizeof value);
    return value;
  }
#endif
  value = *reinterpret_cast<const Items<T, N>*>(from);
  return value;
}

template <int N, class T>
FR_FN void store_items(T* to, const Items<T, N>& value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof value == kPackBytes) {
    std::uint32_t word[4];
    std::memcpy(word, &value, sizeof value);
    asm volatile("st.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
    return;
  }
#endif
  *reinterpret_cast<Items<T, N>*>(to) = value;
}

template <int N>
struct Width {
  static constexpr int kItems = N;
};

FR_FN bool on_packs(const void* at) {
  return reinterpret_cast<std::uintptr_t>(at) % kPackBytes == 0;
}

// Calls body(i, Width<N>{}) for every N elements from `begin` on that are this thread's to handle;
// what does not fill a pack, or does not lie on one, comes element by element.
template <int N, class Block, class Body>
FR_BLOCK void deal(Block& block, std::size_t begin, std::size_t end, bool aligned,
                   const Body& body) {
  const std::size_t packs = aligned ? (end - begin) / N : 0;
  for (std::size_t p = block.thread(); p < packs; p += block.threads())
    body(begin + p * N, Width<N>{});
  for (std::size_t i = begin + packs * N + block.thread(); i < end; i += block.threads())
    body(i, Width<1>{});
}

// The tree over any number of inputs, less than 2^Levels, of N elements each: a binary counter.
// Level l holds the sum of 2^l inputs; adding one input carries like adding one. The compiler knows
// all indices, so that the levels stay in registers.
template <class Op, class A, int Levels, int N>
class Counter {
 public:
  // Input number k, which is used up.
  FR_FN void add(int k, A (&carry)[N]) {
    bool going = true;
    FR_UNROLL
    for (int l = 0; l < Levels; ++l) {
      const bool full = (k >> l) & 1;
      FR_UNROLL
      for (int j = 0; j < N; ++j) {
        const A both = Op::apply(level_[l][j], carry[j]);
        if (going && !full) level_[l][j] = carry[j];
        if (going && full) carry[j] = both;
      }
      going = going && full;
    }
  }
  // Of `count` inputs.
  FR_FN void total(int count, A (&total)[N]) const {
    bool some = false;
    FR_UNROLL
    for (int l = 0; l < Levels; ++l) {
      const bool full = (count >> l) & 1;
      FR_UNROLL
      for (int j = 0; j < N; ++j)
        if (full) total[j] = some ? Op::apply(level_[l][j], total[j]) : level_[l][j];
      some = some || full;
    }
  }

 private:
  A level_[Levels][N] = {};
};

template <class T, class Op, int N, class From, class S>
FR_BLOCK Items<T, N> reduced(const From& from, int count, std::size_t i, const S& scale) {
  using A = AccOf<T>;
  constexpr int kLevels = 7;
  static_assert((1 << kLevels) > kMaxRanks, "a level for every power of two of ranks");
  Counter<Op, A, kLevels, N> tree;
  FR_ROLLED
  for (int k = 0; k < count; ++k) {
    const Items<T, N> in = load_items<N>(reinterpret_cast<const T*>(from(k)) + i);
    A carry[N];
    FR_UNROLL
    for (int j = 0; j < N; ++j) carry[j] = scale.of(k)(Element<T>::load(in.item[j]));
    tree.add(k, carry);
  }
  A total[N] = {};
  tree.total(count, total);
  Items<T, N> out;
  FR_UNROLL
  for (int j = 0; j < N; ++j) out.item[j] = store_reduced<T>(scale.result(total[j]));
  return out;
}

// The packs that a thread has in flight at once, of all inputs together: a GPU hides the latency of
// memory by them.
constexpr int kInFlight = 8;

// The tree over the leaves of one pack: `count` of them, at most Width, a power of two. A missing
// right side leaves the left one as it is.
template <class Op, int Width, class A>
FR_FN A tree_up_to(const A (&leaf)[Width], int count) {
  if constexpr (Width == 1) {
    return leaf[0];
  } else {
    A above[Width / 2];
    FR_UNROLL
    for (int i = 0; i < Width / 2; ++i)
      above[i] = 2 * i + 1 < count ? Op::apply(leaf[2 * i], leaf[2 * i + 1]) : leaf[2 * i];
    return tree_up_to<Op, Width / 2>(above, (count + 1) / 2);
  }
}

// Every output's packs out of those of `count` inputs, at most Width, a power of two. A thread
// loads kInFlight packs before it uses the first.
template <class T, class Op, int Width, class Block, class To, class From, class S>
FR_BLOCK void reduce_packs(Block& block, const To& to, int stores, const From& from, int count,
                           std::size_t packs, const S& scale) {
  constexpr int kItems = kItemsOf<T>;
  constexpr int kAhead = kInFlight / Width;
  const std::size_t stride = block.threads();
  const T* source[Width];
  FR_UNROLL
  for (int k = 0; k < Width; ++k) source[k] = reinterpret_cast<const T*>(from(k < count ? k : 0));
  FR_ROLLED
  for (std::size_t first = block.thread(); first < packs; first += kAhead * stride) {
    Items<T, kItems> in[kAhead][Width];
    FR_UNROLL
    for (int a = 0; a < kAhead; ++a) {
      const std::size_t p = first + a * stride;
      FR_UNROLL
      for (int k = 0; k < Width; ++k)
        if (k < count && p < packs) in[a][k] = load_items<kItems>(source[k] + p * kItems);
    }
    FR_UNROLL
    for (int a = 0; a < kAhead; ++a) {
      const std::size_t p = first + a * stride;
      if (p >= packs) break;
      Items<T, kItems> out;
      FR_UNROLL
      for (int j = 0; j < kItems; ++j) {
        AccOf<T> leaf[Width];
        FR_UNROLL
        for (int k = 0; k < Width; ++k) leaf[k] = scale.of(k)(Element<T>::load(in[a][k].item[j]));
        out.item[j] = store_reduced<T>(scale.result(tree_up_to<Op, Width>(leaf, count)));
      }
      FR_ROLLED
      for (int k = 0; k < stores; ++k) store_items(reinterpret_cast<T*>(to(k)) + p * kItems, out);
    }
  }
}

template <class T, class Op, class Block, class To, class From, class S>
FR_BLOCK void reduce_dealt(Block& block, const To& to, int stores, const From& from, int count,
                           std::size_t n, const S& scale) {
  constexpr int kItems = kItemsOf<T>;
  bool aligned = count <= kInFlight;
  FR_ROLLED
  for (int k = 0; k < count; ++k) aligned = aligned && on_packs(from(k));
  FR_ROLLED
  for (int k = 0; k < stores; ++k) aligned = aligned && on_packs(to(k));
  const std::size_t packs = aligned ? n / kItems : 0;
  if (count <= 2)
    reduce_packs<T, Op, 2>(block, to, stores, from, count, packs, scale);
  else if (count <= 4)
    reduce_packs<T, Op, 4>(block, to, stores, from, count, packs, scale);
  else
    reduce_packs<T, Op, 8>(block, to, stores, from, count, packs, scale);
  FR_ROLLED
  for (std::size_t i = packs * kItems + block.thread(); i < n; i += block.threads()) {
    const Items<T, 1> out = reduced<T, Op, 1>(from, count, i, scale);
    FR_ROLLED
    for (int k = 0; k < stores; ++k) store_items(reinterpret_cast<T*>(to(k)) + i, out);
  }
}

// Eight bytes, or what is left of them at the end of a tensor.
FR_FN std::uint64_t load_word(const char* from, std::size_t left) {
  std::uint64_t word = 0;
  if (left >= sizeof word && reinterpret_cast<std::uintptr_t>(from) % sizeof word == 0)
    return *reinterpret_cast<const std::uint64_t*>(__builtin_assume_aligned(from, sizeof word));
  FR_UNROLL
  for (std::size_t b = 0; b < sizeof word; ++b)
    if (b < left) word |= std::uint64_t(static_cast<unsigned char>(from[b])) << 8 * b;
  return word;
}

FR_FN void store_word(char* to, std::uint64_t word, std::size_t left) {
  if (left >= sizeof word && reinterpret_cast<std::uintptr_t>(to) % sizeof word == 0) {
    *reinterpret_cast<std::uint64_t*>(to) = word;
    return;
  }
  FR_UNROLL
  for (std::size_t b = 0; b < sizeof word; ++b)
    if (b < left) to[b] = static_cast<char>(word >> 8 * b);
}

// The lines of `part` of a message of `bytes` bytes: the own data at `rank`, the others' as they
// arrive. At most kInFlight ranks.
template <class T, class Op, class Block, class From, class S>
FR_BLOCK bool reduce_lines(Block& block, char* out, const char* own, const From& from, int rank,
                           int count, Range part, std::size_t bytes, std::uint32_t epoch,
                           const S& scale) {
  constexpr int kItems = kLineData / sizeof(T);
  FR_ROLLED
  for (std::size_t i = part.begin + block.thread(); i < part.end; i += block.threads()) {
    const std::size_t at = i * kLineData;
    std::uint64_t word[kInFlight];
    auto pause = block.pause();
    for (;;) {
      int missing = -1;
      std::uint32_t found = 0;
      FR_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        std::uint32_t seen = 0;
        word[k] = 0;
        if (k >= count || k == rank) continue;
        if (block.template arrived<false>(from(k) + i, epoch, word[k], seen)) continue;
        missing = k;
        found = seen;
      }
      if (missing < 0) break;
      if (!block.more(pause, missing, Phase::reduce, epoch, found)) return false;
    }
    const std::uint64_t mine = load_word(own + at, bytes - at);
    std::uint64_t result = 0;
    FR_UNROLL
    for (int j = 0; j < kItems; ++j) {
      AccOf<T> leaf[kInFlight];
      FR_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        const std::uint64_t bits = (k == rank ? mine : word[k]) >> 8 * sizeof(T) * j;
        T item;
        std::memcpy(&item, &bits, sizeof item);
        leaf[k] = scale.of(k)(Element<T>::load(item));
      }
      const T reduced = store_reduced<T>(scale.result(tree_up_to<Op, kInFlight>(leaf, count)));
      std::uint64_t bits = 0;
      std::memcpy(&bits, &reduced, sizeof reduced);
      result |= bits << 8 * sizeof(T) * j;
    }
    store_word(out + at, result, bytes - at);
  }
  return true;
}

// Bytes, in the largest units in which both sides lie alike.
FR_OUT_OF_LINE void copy_dealt(int thread, int threads, char* to, const char* from,
                               std::size_t bytes) {
  const auto target = reinterpret_cast<std::uintptr_t>(to);
  const auto source = reinterpret_cast<std::uintptr_t>(from);
  const std::size_t stride = threads;
  const auto in_units = [&](auto width) {
    constexpr int kUnit = decltype(width)::kItems;
    constexpr int kAhead = 4;
    const std::size_t head = (kUnit - target % kUnit) % kUnit;
    const std::size_t begin = head < bytes ? head : bytes;
    const std::size_t units = (bytes - begin) / kUnit;
    char* out = to + begin;
    const char* in = from + begin;
    std::size_t p = thread;
    FR_ROLLED
    for (; p + (kAhead - 1) * stride < units; p += kAhead * stride) {
      Items<char, kUnit> held[kAhead];
      FR_UNROLL
      for (int a = 0; a < kAhead; ++a) held[a] = load_items<kUnit>(in + (p + a * stride) * kUnit);
      FR_UNROLL
      for (int a = 0; a < kAhead; ++a) store_items(out + (p + a * stride) * kUnit, held[a]);
    }
    FR_ROLLED
    for (; p < units; p += stride) store_items(out + p * kUnit, load_items<kUnit>(in + p * kUnit));
    FR_ROLLED
    for (std::size_t i = thread; i < begin; i += stride) to[i] = from[i];
    FR_ROLLED
    for (std::size_t i = begin + units * kUnit + thread; i < bytes; i += stride) to[i] = from[i];
  };
  if ((target - source) % kPackBytes == 0)
    in_units(Width<kPackBytes>{});
  else if ((target - source) % 4 == 0)
    in_units(Width<4>{});
  else
    in_units(Width<1>{});
}

}  // namespace FR_ISA
}  // namespace fastreduce
