// Many tensors <-> one flat buffer, with the cast and a scale in the same pass: for the host one
// tensor after the other, for a GPU as tiles of all of them, which any block can take.
#pragma once

#include <type_traits>

#include "reduce.h"

namespace fastreduce {

// One tensor's way into or out of a flat buffer.
struct Move {
  const void* from;
  void* to;
  std::uint64_t count;  // elements
  std::uint64_t end;    // tiles of this one and of those before it
};

// As many as fit into the arguments of a kernel, which are 32,764 bytes at most.
constexpr int kMoves = 1000;

struct Moves {
  DType from = DType::float32;
  DType to = DType::float32;
  double scale = 1;
  int count = 0;
  Move move[kMoves];
};

// Elements of a Move in one tile.
constexpr std::uint64_t kTileItems = 8192;

// Appends a move; an empty one has no tile. False: there is no room.
inline bool add_move(Moves& moves, const void* from, void* to, std::uint64_t count) {
  if (count == 0) return true;
  if (moves.count == kMoves) return false;
  const std::uint64_t before = moves.count == 0 ? 0 : moves.move[moves.count - 1].end;
  moves.move[moves.count++] = {from, to, count, before + (count + kTileItems - 1) / kTileItems};
  return true;
}

FR_FN std::uint64_t tiles_of(const Moves& moves) {
  return moves.count == 0 ? 0 : moves.move[moves.count - 1].end;
}

// Whether nothing is computed.
inline bool copies(const Moves& moves) { return moves.from == moves.to && moves.scale == 1.0; }

// The product is taken in double if either side is.
inline bool converts_in_double(const Moves& moves) {
  return moves.from == DType::float64 || moves.to == DType::float64;
}

inline namespace FR_ISA {

#if !defined(__CUDACC__)
// to[i] = store(load(from[i]) * scale), in double if either side is double, else in float.
// Equal types and a scale of 1 keep every bit.
template <class From, class To, class Block>
FR_BLOCK void convert(Block& block, To* to, const From* from, std::size_t n, double scale) {
  if (std::is_same<From, To>::value && scale == 1.0) {
    copy(block, reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), n * sizeof(To));
    return;
  }
  constexpr bool kDouble = std::is_same<From, double>::value || std::is_same<To, double>::value;
  using A = typename std::conditional<kDouble, double, float>::type;
  const A factor = static_cast<A>(scale);
  const Range share = share_of(block, n, sizeof(To));
  AccOf<From> wide[kTile];
  AccOf<To> scaled[kTile];
  for (std::size_t i = share.begin; i < share.end; i += kTile) {
    const std::size_t m = share.end - i < kTile ? share.end - i : kTile;
    widen(wide, from + i, m);
    for (std::size_t k = 0; k < m; ++k)
      scaled[k] = static_cast<AccOf<To>>(static_cast<A>(wide[k]) * factor);
    narrow(to + i, scaled, m);
  }
}

// Where one tensor lies in a flat buffer, in elements.
struct Piece {
  void* tensor;
  std::size_t count;
  std::size_t offset;
};

template <class Tensor, class Flat, class Block>
FR_BLOCK void pack(Block& block, Flat* flat, const Piece* pieces, std::size_t n, double scale) {
  for (std::size_t k = 0; k < n; ++k)
    convert(block, flat + pieces[k].offset, static_cast<const Tensor*>(pieces[k].tensor),
            pieces[k].count, scale);
}

template <class Tensor, class Flat, class Block>
FR_BLOCK void unpack(Block& block, const Flat* flat, const Piece* pieces, std::size_t n,
                     double scale) {
  for (std::size_t k = 0; k < n; ++k)
    convert(block, static_cast<Tensor*>(pieces[k].tensor), flat + pieces[k].offset, pieces[k].count,
            scale);
}
#endif

// N neighbouring elements in the type of the product, packs at a time where they lie on packs.
template <class T, class A, int N>
FR_FN void widen_items(A (&wide)[N], const void* from, std::size_t i) {
  constexpr int kPack = kPackBytes / sizeof(T) < N ? kPackBytes / sizeof(T) : N;
  FR_UNROLL
  for (int k = 0; k < N; k += kPack) {
    const Items<T, kPack> in = load_items<kPack>(static_cast<const T*>(from) + i + k);
    FR_UNROLL
    for (int j = 0; j < kPack; ++j) wide[k + j] = static_cast<A>(Element<T>::load(in.item[j]));
  }
}

template <class T, class A, int N>
FR_FN void narrow_items(void* to, std::size_t i, const A (&wide)[N]) {
  constexpr int kPack = kPackBytes / sizeof(T) < N ? kPackBytes / sizeof(T) : N;
  FR_UNROLL
  for (int k = 0; k < N; k += kPack) {
    Items<T, kPack> out;
    FR_UNROLL
    for (int j = 0; j < kPack; ++j)
      out.item[j] = Element<T>::store(static_cast<AccOf<T>>(wide[k + j]));
    store_items(static_cast<T*>(to) + i + k, out);
  }
}

// Types are told at run time, by all threads alike: what differs between them are a few
// instructions around the same product.
template <class A, int N>
FR_FN void widen_any(DType type, A (&wide)[N], const void* from, std::size_t i) {
  if (type == DType::float32) return widen_items<float>(wide, from, i);
  if (type == DType::float16) return widen_items<Half>(wide, from, i);
  if (type == DType::bfloat16) return widen_items<BFloat16>(wide, from, i);
  if constexpr (std::is_same<A, double>::value) widen_items<double>(wide, from, i);
}

template <class A, int N>
FR_FN void narrow_any(DType type, void* to, std::size_t i, const A (&wide)[N]) {
  if (type == DType::float32) return narrow_items<float>(to, i, wide);
  if (type == DType::float16) return narrow_items<Half>(to, i, wide);
  if (type == DType::bfloat16) return narrow_items<BFloat16>(to, i, wide);
  if constexpr (std::is_same<A, double>::value) narrow_items<double>(to, i, wide);
}

// Which of the moves a tile is a part of, and where that part begins.
struct Tile {
  int move;
  std::uint64_t begin;
  std::uint64_t size;
};

FR_FN Tile find_tile(const Moves& moves, std::uint64_t tile) {
  int low = 0;
  int high = moves.count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (moves.move[middle].end > tile)
      high = middle;
    else
      low = middle + 1;
  }
  const std::uint64_t first = low == 0 ? 0 : moves.move[low - 1].end;
  const std::uint64_t begin = (tile - first) * kTileItems;
  const std::uint64_t left = moves.move[low].count - begin;
  return {low, begin, left < kTileItems ? left : kTileItems};
}

// A tile whose elements change in type or value, in A.
template <class A, class Block>
FR_BLOCK void convert_tile(Block& block, const Moves& moves, std::uint64_t number) {
  constexpr int kItems = 8;
  constexpr int kAhead = 2;
  const Tile tile = find_tile(moves, number);
  const void* from = moves.move[tile.move].from;
  void* to = moves.move[tile.move].to;
  const A scale = static_cast<A>(moves.scale);
  const std::size_t stride = block.threads();
  const bool aligned = on_packs(from) && on_packs(to);
  const std::size_t groups = aligned ? tile.size / kItems : 0;
  FR_ROLLED
  for (std::size_t first = block.thread(); first < groups; first += kAhead * stride) {
    A wide[kAhead][kItems];
    FR_UNROLL
    for (int a = 0; a < kAhead; ++a) {
      const std::size_t g = first + a * stride;
      if (g < groups) widen_any(moves.from, wide[a], from, tile.begin + g * kItems);
    }
    FR_UNROLL
    for (int a = 0; a < kAhead; ++a) {
      const std::size_t g = first + a * stride;
      if (g >= groups) break;
      FR_UNROLL
      for (int j = 0; j < kItems; ++j) wide[a][j] *= scale;
      narrow_any(moves.to, to, tile.begin + g * kItems, wide[a]);
    }
  }
  FR_ROLLED
  for (std::size_t i = groups * kItems + block.thread(); i < tile.size; i += kAhead * 2 * stride) {
    A wide[kAhead * 2][1];
    FR_UNROLL
    for (int a = 0; a < kAhead * 2; ++a)
      if (i + a * stride < tile.size)
        widen_any(moves.from, wide[a], from, tile.begin + i + a * stride);
    FR_UNROLL
    for (int a = 0; a < kAhead * 2; ++a) {
      if (i + a * stride >= tile.size) break;
      wide[a][0] *= scale;
      narrow_any(moves.to, to, tile.begin + i + a * stride, wide[a]);
    }
  }
}

template <class Block>
FR_BLOCK void copy_tile(Block& block, const Moves& moves, std::uint64_t number) {
  const Tile tile = find_tile(moves, number);
  const Move& move = moves.move[tile.move];
  const std::size_t item = item_bytes(moves.from);
  copy_dealt(block.thread(), block.threads(), static_cast<char*>(move.to) + tile.begin * item,
             static_cast<const char*>(move.from) + tile.begin * item, tile.size * item);
}

}  // namespace FR_ISA
}  // namespace fastreduce
