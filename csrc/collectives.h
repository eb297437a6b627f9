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
template <class Block, class Arithmetic>
FR_BLOCK bool reduce_scatter_one_shot(Block& block, const View& view, const Arithmetic& arithmetic,
                                      std::uint32_t epoch, char* out, std::size_t count) {
  const std::size_t item = arithmetic.item_bytes();
  const Range part = chunk_of(count, block.count(), block.index(), item);
  const std::size_t begin = (view.rank * count + part.begin) * item;
  arithmetic.reduce(
      block, [=](int) { return out + part.begin * item; }, 1,
      [&](int p) { return view.slot(p, epoch) + begin; }, view.world(), part.size());
  return true;
}

// Reads S, writes S / N.
template <class Block, class Arithmetic>
FR_BLOCK bool reduce_scatter(Block& block, const View& view, const Arithmetic& arithmetic,
                             const void* const* inputs, char* out, std::size_t count) {
  const std::size_t item = arithmetic.item_bytes();
  const Range part = chunk_of(count, block.count(), block.index(), item);
  const std::size_t begin = (view.rank * count + part.begin) * item;
  arithmetic.reduce(
      block, [=](int) { return out + part.begin * item; }, 1,
      [=](int p) { return static_cast<const char*>(inputs[p]) + begin; }, view.world(),
      part.size());
  return barrier(block, view, Phase::exit);
}

template <class Block, class Arithmetic>
FR_BLOCK bool reduce_scatter_staged(Block& block, const View& view, const Arithmetic& arithmetic,
                                    const char* in, char* out, std::size_t count) {
  const int world = view.world();
  const int rank = view.rank;
  const std::size_t item = arithmetic.item_bytes();
  const std::size_t share = view.layout.stage_bytes / Pipeline::kSlots;
  const std::size_t piece_bytes = share / world / 64 * 64;  // of each rank's chunk
  const std::size_t piece = piece_bytes / item;
  const Range part = chunk_of(count, block.count(), block.index(), item);

  const auto slot = [&](int owner, std::size_t i, int chunk) {
    return view.stage(owner, block.index()) +
           ((i % Pipeline::kSlots) * world + chunk) * piece_bytes;
  };
  const auto fill = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    FR_ROLLED
    for (int p = 0; p < world; ++p)
      if (p != rank)
        copy(block, slot(rank, i, p), in + (p * count + here.begin) * item, here.size() * item);
  };
  const auto take = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    const char* own = in + (rank * count + here.begin) * item;
    const auto from = [&](int p) { return p == rank ? own : slot(p, i, rank); };
    arithmetic.reduce(
        block, [&](int) { return out + here.begin * item; }, 1, from, world, here.size());
  };
  return Pipeline::run(block, view, pieces_in(part.size(), piece), fill, take);
}

// `count` bytes per rank: rank p's input becomes bytes [p * count, (p + 1) * count) of every
// output.
template <class Block>
FR_BLOCK bool all_gather_one_shot(Block& block, const View& view, std::uint32_t epoch, char* out,
                                  std::size_t count) {
  const Range part = chunk_of(count, block.count(), block.index(), 1);
  FR_ROLLED
  for (int p = 0; p < view.world(); ++p)
    copy(block, out + p * count + part.begin, view.slot(p, epoch) + part.begin, part.size());
  return true;
}

// Reads S, writes S, S being the output.
template <class Block>
FR_BLOCK bool all_gather(Block& block, const View& view, const void* const* inputs, char* out,
                         std::size_t count) {
  const Range part = chunk_of(count, block.count(), block.index(), 1);
  FR_ROLLED
  for (int p = 0; p < view.world(); ++p)
    copy(block, out + p * count + part.begin, static_cast<const char*>(inputs[p]) + part.begin,
         part.size());
  return barrier(block, view, Phase::exit);
}

// A piece of each slot is as long as the smallest share of the staging buffer allows.
template <class Block>
FR_BLOCK bool all_gather_staged(Block& block, const View& view, const char* in, char* out,
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
    FR_ROLLED
    for (int p = 0; p < view.world(); ++p)
      copy(block, out + p * count + here.begin, p == view.rank ? in + here.begin : slot(p, i),
           here.size());
  };
  return Pipeline::run(block, view, pieces_in(part.size(), piece), fill, take);
}

// The root's `count` bytes become everybody's.
template <class Block>
FR_BLOCK bool broadcast_one_shot(Block& block, const View& view, std::uint32_t epoch, int root,
                                 char* out, std::size_t count) {
  const Range part = chunk_of(count, block.count(), block.index(), 1);
  if (view.rank != root)
    copy(block, out + part.begin, view.slot(root, epoch) + part.begin, part.size());
  return true;
}

template <class Block>
FR_BLOCK bool broadcast(Block& block, const View& view, const char* source, char* out,
                        std::size_t count) {
  const Range part = chunk_of(count, block.count(), block.index(), 1);
  copy(block, out + part.begin, source + part.begin, part.size());
  return barrier(block, view, Phase::exit);
}

template <class Block>
FR_BLOCK bool broadcast_staged(Block& block, const View& view, int root, char* data,
                               std::size_t count) {
  const std::size_t piece = view.layout.stage_bytes / Pipeline::kSlots / 64 * 64;
  const Range part = chunk_of(count, block.count(), block.index(), 1);
  const auto slot = [&](std::size_t i) {
    return view.stage(root, block.index()) + (i % Pipeline::kSlots) * piece;
  };
  const auto fill = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    if (view.rank == root) copy(block, slot(i), data + here.begin, here.size());
  };
  const auto take = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    if (view.rank != root) copy(block, data + here.begin, slot(i), here.size());
  };
  return Pipeline::run(block, view, pieces_in(part.size(), piece), fill, take);
}

}  // namespace FR_ISA
}  // namespace fastreduce
