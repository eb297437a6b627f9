// The other collectives: reduce-scatter, all-gather, broadcast. Each has the three forms of
// all_reduce.h: out of the slots of a small call, straight out of the peers' tensors between
// enter() and an exit barrier, and piece by piece through staging. The last two of them move
// bytes, whatever the dtype.
#pragma once

#include "channel.h"
#include "reduce.h"

namespace fastreduce {
inline namespace FR_ISA {

// `count` elements per rank: chunk r of all inputs, reduced, becomes rank r's output.
template <class T, class Op, class Block>
bool reduce_scatter_one_shot(Block& block, const View& view, std::uint32_t epoch, T* out,
                             std::size_t count, const ScaleOf<T>& scale) {
  const T* from[kMaxRanks];
  for (int p = 0; p < view.world(); ++p)
    from[p] = reinterpret_cast<const T*>(view.slot(p, epoch)) + view.rank * count;
  reduce<T, Op>(block, &out, 1, from, view.world(), count, scale);
  return true;
}

// Reads S, writes S / N.
template <class T, class Op, class Block>
bool reduce_scatter(Block& block, const View& view, const T* const* inputs, T* out,
                    std::size_t count, const ScaleOf<T>& scale) {
  const Range part = chunk_of(count, block.count(), block.index(), sizeof(T));
  const T* from[kMaxRanks];
  for (int p = 0; p < view.world(); ++p) from[p] = inputs[p] + view.rank * count + part.begin;
  T* to = out + part.begin;
  reduce<T, Op>(block, &to, 1, from, view.world(), part.size(), scale);
  return barrier(block, view, Phase::exit);
}

template <class T, class Op, class Block>
bool reduce_scatter_staged(Block& block, const View& view, const T* in, T* out, std::size_t count,
                           const ScaleOf<T>& scale) {
  const int world = view.world();
  const int rank = view.rank;
  const std::size_t share = view.layout.stage_bytes / Pipeline::kSlots;
  const std::size_t piece = share / world / 64 * 64 / sizeof(T);  // of each rank's chunk
  const Range part = chunk_of(count, block.count(), block.index(), sizeof(T));

  const auto slot = [&](int owner, std::size_t i, int chunk) {
    return reinterpret_cast<T*>(view.stage(owner, block.index())) +
           ((i % Pipeline::kSlots) * world + chunk) * piece;
  };
  const auto fill = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    for (int p = 0; p < world; ++p)
      if (p != rank) copy<T>(block, slot(rank, i, p), in + p * count + here.begin, here.size());
  };
  const auto take = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    const T* from[kMaxRanks];
    for (int p = 0; p < world; ++p) from[p] = slot(p, i, rank);
    from[rank] = in + rank * count + here.begin;
    T* to = out + here.begin;
    reduce<T, Op>(block, &to, 1, from, world, here.size(), scale);
  };
  return Pipeline::run(block, view, pieces_in(part.size(), piece), fill, take);
}

// `count` bytes per rank: rank p's input becomes bytes [p * count, (p + 1) * count) of every
// output.
template <class Block>
bool all_gather_one_shot(Block& block, const View& view, std::uint32_t epoch, char* out,
                         std::size_t count) {
  for (int p = 0; p < view.world(); ++p)
    copy<char>(block, out + p * count, view.slot(p, epoch), count);
  return true;
}

// Reads S, writes S, S being the output.
template <class Block>
bool all_gather(Block& block, const View& view, const char* const* inputs, char* out,
                std::size_t count) {
  const Range part = chunk_of(count, block.count(), block.index(), 1);
  for (int p = 0; p < view.world(); ++p)
    copy<char>(block, out + p * count + part.begin, inputs[p] + part.begin, part.size());
  return barrier(block, view, Phase::exit);
}

// A piece of each slot is as long as the smallest share of the staging buffer allows.
template <class Block>
bool all_gather_staged(Block& block, const View& view, const char* in, char* out,
                       std::size_t count) {
  const std::size_t piece = view.layout.stage_bytes / Pipeline::kSlots / 64 * 64;
  const Range part = chunk_of(count, block.count(), block.index(), 1);
  const auto slot = [&](int owner, std::size_t i) {
    return view.stage(owner, block.index()) + (i % Pipeline::kSlots) * piece;
  };
  const auto fill = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    copy(block, slot(view.rank, i), in + here.begin, here.size());
  };
  const auto take = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    for (int p = 0; p < view.world(); ++p)
      copy<char>(block, out + p * count + here.begin, p == view.rank ? in + here.begin : slot(p, i),
                 here.size());
  };
  return Pipeline::run(block, view, pieces_in(part.size(), piece), fill, take);
}

// The root's `count` bytes become everybody's.
template <class Block>
bool broadcast_one_shot(Block& block, const View& view, std::uint32_t epoch, int root, char* out,
                        std::size_t count) {
  if (view.rank != root) copy<char>(block, out, view.slot(root, epoch), count);
  return true;
}

template <class Block>
bool broadcast(Block& block, const View& view, const char* source, char* out, std::size_t count) {
  const Range part = chunk_of(count, block.count(), block.index(), 1);
  copy<char>(block, out + part.begin, source + part.begin, part.size());
  return barrier(block, view, Phase::exit);
}

template <class Block>
bool broadcast_staged(Block& block, const View& view, int root, char* data, std::size_t count) {
  const std::size_t piece = view.layout.stage_bytes / Pipeline::kSlots / 64 * 64;
  const Range part = chunk_of(count, block.count(), block.index(), 1);
  const auto slot = [&](std::size_t i) {
    return view.stage(root, block.index()) + (i % Pipeline::kSlots) * piece;
  };
  const auto fill = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    if (view.rank == root) copy<char>(block, slot(i), data + here.begin, here.size());
  };
  const auto take = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    if (view.rank != root) copy<char>(block, data + here.begin, slot(i), here.size());
  };
  return Pipeline::run(block, view, pieces_in(part.size(), piece), fill, take);
}

}  // namespace FR_ISA
}  // namespace fastreduce
