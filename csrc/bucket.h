// Many tensors <-> one flat buffer, with the cast and a scale in the same pass.
#pragma once

#include <type_traits>

#include "reduce.h"

namespace fastreduce {
inline namespace FR_ISA {

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

}  // namespace FR_ISA
}  // namespace fastreduce
