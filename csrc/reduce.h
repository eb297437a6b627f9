// What the threads of a block do to memory together: reduce, copy, and the ring's partial sums.
// Nothing here waits or knows a rank.
//
// A Block with `kPacks` can walk memory pack by pack (packs.h), and packs() says whether it does;
// any other one gives each thread a stretch of its own (host_loops.h).
#pragma once

#include "packs.h"
#include "schedule.h"

#if !defined(__CUDACC__)
#include "host_loops.h"
#endif

namespace fastreduce {
inline namespace FR_ISA {

// The stretch of n items that is this thread's.
template <class Block>
FR_FN Range share_of(Block& block, std::size_t n, std::size_t item_bytes) {
  return chunk_of(n, block.threads(), block.thread(), item_bytes);
}

template <class Block>
FR_BLOCK void copy(Block& block, char* to, const char* from, std::size_t bytes) {
  if (to == from) return;
  if constexpr (Block::kPacks)
    if (block.packs()) return copy_dealt(block.thread(), block.threads(), to, from, bytes);
#if !defined(__CUDACC__)
  const Range share = share_of(block, bytes, 1);
  if (share.size() != 0) std::memcpy(to + share.begin, from + share.begin, share.size());
#endif
}

// copy() past the caches, where the target has stores of that kind: a reader in a far cache then
// fetches from memory and not out of this core's cache.
template <class Block>
FR_BLOCK void copy_streaming(Block& block, char* to, const char* from, std::size_t bytes) {
#if !defined(__CUDACC__)
  const Range share = share_of(block, bytes, 1);
  stream(to + share.begin, from + share.begin, share.size());
#else
  copy(block, to, from, bytes);
#endif
}

// An element type, an operation and its factors, as a protocol uses them. A partial is what a
// ring passes on: an accumulator, not yet rounded.
template <class T, class Op>
class TypedArithmetic {
 public:
  using A = AccOf<T>;

  FR_FN TypedArithmetic(const ScaleOf<T>& scale, int rank) : scale_(scale), rank_(rank) {}

  static FR_FN constexpr std::size_t item_bytes() { return sizeof(T); }
  static FR_FN constexpr std::size_t partial_bytes() { return sizeof(A); }
  // Of a rank's chunk, in elements: at least a cache line.
  static FR_FN constexpr std::size_t grain() { return 64 / sizeof(T); }

  FR_FN const ScaleOf<T>& scale() const { return scale_; }

  // to(k)[i] = store(after * tree over ranks j of before[j] * from(j)[i]) for every k. An output
  // may be one of the inputs; otherwise none overlap.
  template <class Block, class To, class From>
  FR_BLOCK void reduce(Block& block, const To& to, int stores, const From& from, int count,
                       std::size_t n) const {
    if constexpr (Block::kPacks)
      if (block.packs()) return reduce_dealt<T, Op>(block, to, stores, from, count, n, scale_);
#if !defined(__CUDACC__)
    const Range share = share_of(block, n, sizeof(T));
    const T* in[kMaxRanks];
    T* out[kMaxRanks];
    for (int k = 0; k < count; ++k) in[k] = reinterpret_cast<const T*>(from(k)) + share.begin;
    for (int k = 0; k < stores; ++k) out[k] = reinterpret_cast<T*>(to(k)) + share.begin;
    reduce_serial<T, Op>(out, stores, in, count, share.size(), scale_);
#endif
  }

  // The same for low_latency(), out of lines; see packs.h. False: given up.
  template <class Block, class From>
  FR_BLOCK bool reduce_lines(Block& block, char* out, const char* own, const From& from, int rank,
                             int count, Range part, std::size_t bytes, std::uint32_t epoch) const {
    return fastreduce::reduce_lines<T, Op>(block, out, own, from, rank, count, part, bytes, epoch,
                                           scale_);
  }

  // A partial out of this rank's own elements.
  template <class Block>
  FR_BLOCK void open_partial(Block& block, char* partial, const char* own, std::size_t n) const {
    auto* to = reinterpret_cast<A*>(partial);
    const auto* in = reinterpret_cast<const T*>(own);
    for_each(block, n, on_packs(to) && on_packs(in), [=, *this](std::size_t i, auto width) {
      constexpr int kNow = decltype(width)::kItems;
      const Items<T, kNow> mine = load_items<kNow>(in + i);
      Items<A, kNow> out;
      FR_UNROLL
      for (int j = 0; j < kNow; ++j) out.item[j] = scale_.of(rank_)(Element<T>::load(mine.item[j]));
      store_items(to + i, out);
    });
  }

  // The partial that arrived, and the own elements.
  template <class Block>
  FR_BLOCK void add_partial(Block& block, char* partial, const char* arrived, const char* own,
                            std::size_t n) const {
    auto* to = reinterpret_cast<A*>(partial);
    each_sum(block, arrived, own, n, on_packs(to),
             [=](std::size_t i, const auto& sum) { store_items(to + i, sum); });
  }

  // The last of them: rounded, into both outputs.
  template <class Block>
  FR_BLOCK void close_partial(Block& block, char* kept, char* sent, const char* arrived,
                              const char* own, std::size_t n) const {
    auto* first = reinterpret_cast<T*>(kept);
    auto* second = reinterpret_cast<T*>(sent);
    const bool aligned = on_packs(first) && on_packs(second);
    each_sum(block, arrived, own, n, aligned, [=, *this](std::size_t i, const auto& sum) {
      constexpr int kNow = sizeof(sum) / sizeof(A);
      Items<T, kNow> out;
      FR_UNROLL
      for (int j = 0; j < kNow; ++j) out.item[j] = Element<T>::store(scale_.result(sum.item[j]));
      store_items(first + i, out);
      store_items(second + i, out);
    });
  }

 private:
  template <class Block, class Body>
  static FR_BLOCK void for_each(Block& block, std::size_t n, bool aligned, const Body& body) {
    if constexpr (Block::kPacks)
      if (block.packs()) return deal<kPackBytes / sizeof(A)>(block, 0, n, aligned, body);
#if !defined(__CUDACC__)
    const Range share = share_of(block, n, sizeof(T));
    FR_INDEPENDENT
    for (std::size_t i = share.begin; i < share.end; ++i) body(i, Width<1>{});
#endif
  }

  template <class Block, class Take>
  FR_BLOCK void each_sum(Block& block, const char* arrived, const char* own, std::size_t n,
                         bool aligned, const Take& take) const {
    const auto* partial = reinterpret_cast<const A*>(arrived);
    const auto* in = reinterpret_cast<const T*>(own);
    aligned = aligned && on_packs(partial) && on_packs(in);
    for_each(block, n, aligned, [=, *this](std::size_t i, auto width) {
      constexpr int kNow = decltype(width)::kItems;
      const Items<A, kNow> before = load_items<kNow>(partial + i);
      const Items<T, kNow> mine = load_items<kNow>(in + i);
      Items<A, kNow> sum;
      FR_UNROLL
      for (int j = 0; j < kNow; ++j)
        sum.item[j] = Op::apply(before.item[j], scale_.of(rank_)(Element<T>::load(mine.item[j])));
      take(i, sum);
    });
  }

  ScaleOf<T> scale_;
  int rank_;
};

}  // namespace FR_ISA
}  // namespace fastreduce
