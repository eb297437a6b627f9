// How the threads of a block walk a run of elements together: pack by pack, dealt out in turn, so
// that neighbouring threads touch neighbouring memory. A pack is what one 16-byte access moves.
#pragma once

#include "element.h"

namespace fastreduce {
inline namespace FR_ISA {

constexpr int kPackBytes = 16;

// N neighbouring elements, moved at once.
template <class T, int N>
struct alignas(N * sizeof(T)) Items {
  T item[N];
};

template <int N, class T>
FR_FN Items<T, N> load_items(const T* from) {
  return *reinterpret_cast<const Items<T, N>*>(from);
}

template <int N, class T>
FR_FN void store_items(T* to, const Items<T, N>& value) {
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

// The tree over any number of inputs: a binary counter. Level l holds the sum of 2^l inputs;
// adding one input carries like adding one. The compiler knows all indices, so that the levels
// stay in registers.
template <class T, class Op, int N, class From, class S>
FR_BLOCK Items<T, N> reduced(const From& from, int count, std::size_t i, const S& scale) {
  using A = AccOf<T>;
  constexpr int kLevels = 7;
  static_assert((1 << kLevels) > kMaxRanks, "a level for every power of two of ranks");
  A level[kLevels][N] = {};
  for (int k = 0; k < count; ++k) {
    const Items<T, N> in = load_items<N>(reinterpret_cast<const T*>(from(k)) + i);
    A carry[N];
    FR_UNROLL
    for (int j = 0; j < N; ++j) carry[j] = scale.input(Element<T>::load(in.item[j]));
    bool going = true;
    FR_UNROLL
    for (int l = 0; l < kLevels; ++l) {
      const bool full = (k >> l) & 1;
      FR_UNROLL
      for (int j = 0; j < N; ++j) {
        const A both = Op::apply(level[l][j], carry[j]);
        if (going && !full) level[l][j] = carry[j];
        if (going && full) carry[j] = both;
      }
      going = going && full;
    }
  }
  A total[N] = {};
  bool some = false;
  FR_UNROLL
  for (int l = 0; l < kLevels; ++l) {
    const bool full = (count >> l) & 1;
    FR_UNROLL
    for (int j = 0; j < N; ++j)
      if (full) total[j] = some ? Op::apply(level[l][j], total[j]) : level[l][j];
    some = some || full;
  }
  Items<T, N> out;
  FR_UNROLL
  for (int j = 0; j < N; ++j) out.item[j] = store_reduced<T>(scale.result(total[j]));
  return out;
}

// The tree over `Count` inputs, known to the compiler. A thread loads several packs of every
// input before it uses the first: a GPU hides the latency of memory by what is in flight.
template <class T, class Op, int Count, class Block, class To, class From, class S>
FR_BLOCK void reduce_packs(Block& block, const To& to, int stores, const From& from,
                           std::size_t packs, const S& scale) {
  constexpr int kItems = kPackBytes / sizeof(T);
  constexpr int kAhead = Count >= 8 ? 1 : 8 / Count;
  const std::size_t stride = block.threads();
  const T* source[Count];
  FR_UNROLL
  for (int k = 0; k < Count; ++k) source[k] = reinterpret_cast<const T*>(from(k));
  const auto step = [&](std::size_t first, auto ahead) {
    constexpr int kNow = decltype(ahead)::kItems;
    Items<T, kItems> in[kNow][Count];
    FR_UNROLL
    for (int a = 0; a < kNow; ++a) {
      FR_UNROLL
      for (int k = 0; k < Count; ++k)
        in[a][k] = load_items<kItems>(source[k] + (first + a * stride) * kItems);
    }
    FR_UNROLL
    for (int a = 0; a < kNow; ++a) {
      Items<T, kItems> out;
      FR_UNROLL
      for (int j = 0; j < kItems; ++j) {
        const auto leaf = [&](int k) { return scale.input(Element<T>::load(in[a][k].item[j])); };
        out.item[j] = store_reduced<T>(scale.result(tree<Op, 0, Count>(leaf)));
      }
      for (int k = 0; k < stores; ++k)
        store_items(reinterpret_cast<T*>(to(k)) + (first + a * stride) * kItems, out);
    }
  };
  std::size_t p = block.thread();
  for (; p + (kAhead - 1) * stride < packs; p += kAhead * stride) step(p, Width<kAhead>{});
  for (; p < packs; p += stride) step(p, Width<1>{});
}

template <class T, class Op, class Block, class To, class From, class S>
FR_BLOCK void reduce_dealt(Block& block, const To& to, int stores, const From& from, int count,
                           std::size_t n, const S& scale) {
  bool aligned = true;
  for (int k = 0; k < count; ++k) aligned = aligned && on_packs(from(k));
  for (int k = 0; k < stores; ++k) aligned = aligned && on_packs(to(k));
  const std::size_t packs = aligned ? n * sizeof(T) / kPackBytes : 0;
  std::size_t done = packs * (kPackBytes / sizeof(T));
  if (count == 2)
    reduce_packs<T, Op, 2>(block, to, stores, from, packs, scale);
  else if (count == 4)
    reduce_packs<T, Op, 4>(block, to, stores, from, packs, scale);
  else if (count == 8)
    reduce_packs<T, Op, 8>(block, to, stores, from, packs, scale);
  else
    done = 0;
  constexpr int kItems = kPackBytes / sizeof(AccOf<T>);
  deal<kItems>(block, done, n, aligned, [&](std::size_t i, auto width) {
    constexpr int kNow = decltype(width)::kItems;
    const Items<T, kNow> out = reduced<T, Op, kNow>(from, count, i, scale);
    for (int k = 0; k < stores; ++k) store_items(reinterpret_cast<T*>(to(k)) + i, out);
  });
}

// Bytes, in the largest units in which both sides lie alike.
template <class Block>
FR_BLOCK void copy_dealt(Block& block, char* to, const char* from, std::size_t bytes) {
  const auto target = reinterpret_cast<std::uintptr_t>(to);
  const auto source = reinterpret_cast<std::uintptr_t>(from);
  const auto in_units = [&](auto unit) {
    using Unit = decltype(unit);
    constexpr std::size_t kUnit = sizeof(Unit);
    constexpr int kAhead = 4;
    const std::size_t head = (kUnit - target % kUnit) % kUnit;
    const std::size_t begin = head < bytes ? head : bytes;
    const std::size_t units = (bytes - begin) / kUnit;
    auto* out = reinterpret_cast<Unit*>(to + begin);
    const auto* in = reinterpret_cast<const Unit*>(from + begin);
    const std::size_t stride = block.threads();
    std::size_t p = block.thread();
    for (; p + (kAhead - 1) * stride < units; p += kAhead * stride) {
      Unit held[kAhead];
      FR_UNROLL
      for (int a = 0; a < kAhead; ++a) held[a] = in[p + a * stride];
      FR_UNROLL
      for (int a = 0; a < kAhead; ++a) out[p + a * stride] = held[a];
    }
    for (; p < units; p += stride) out[p] = in[p];
    for (std::size_t i = block.thread(); i < begin; i += stride) to[i] = from[i];
    for (std::size_t i = begin + units * kUnit + block.thread(); i < bytes; i += stride)
      to[i] = from[i];
  };
  if ((target - source) % kPackBytes == 0)
    in_units(Items<char, kPackBytes>{});
  else if ((target - source) % 4 == 0)
    in_units(Items<char, 4>{});
  else
    in_units(Items<char, 1>{});
}

}  // namespace FR_ISA
}  // namespace fastreduce
