// The other collectives: reduce-scatter, all-gather, broadcast; and the first two in place, with
// shares of any size and number. Each has the three forms of all_reduce.h: out of the slots of a
// small call, straight out of the peers' tensors between enter() and an exit barrier, and piece by
// piece through staging. Those that do not reduce move bytes, whatever the dtype.
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

// visit(range) for this block's part of every one of a rank's ranges of `count` elements.
template <class Block, class Visit>
FR_BLOCK void each_share(const Block& block, const Shares& shares, int rank, std::size_t count,
                         std::size_t item, const Visit& visit) {
  shares.each(rank, {0, count}, [&](Range range) {
    const Range part = chunk_of(range.size(), block.count(), block.index(), item);
    if (part.size() != 0) visit(Range{range.begin + part.begin, range.begin + part.end});
  });
}

// In place: a rank's ranges of its buffer become the reduction of all ranks'. in(p, i): where rank
// p's elements from i on can be read.
template <class Block, class Arithmetic, class In>
FR_BLOCK void reduce_range(Block& block, const View& view, const Arithmetic& arithmetic,
                           Range range, char* data, const In& in) {
  const std::size_t begin = range.begin * arithmetic.item_bytes();
  arithmetic.reduce(
      block, [=](int) { return data + begin; }, 1, [&](int p) { return in(p, range.begin); },
      view.world(), range.size());
}

template <class Block, class Arithmetic>
FR_BLOCK bool reduce_scatter_v_one_shot(Block& block, const View& view,
                                        const Arithmetic& arithmetic, std::uint32_t epoch,
                                        const Shares& shares, char* data, std::size_t count) {
  const std::size_t item = arithmetic.item_bytes();
  each_share(block, shares, view.rank, count, item, [&](Range range) {
    reduce_range(block, view, arithmetic, range, data, [&](int p, std::size_t i) {
      return static_cast<const char*>(view.slot(p, epoch)) + i * item;
    });
  });
  return true;
}

// Reads S, writes S / N, where shares are equal.
template <class Block, class Arithmetic>
FR_BLOCK bool reduce_scatter_v(Block& block, const View& view, const Arithmetic& arithmetic,
                               const void* const* buffers, const Shares& shares, char* data,
                               std::size_t count) {
  const std::size_t item = arithmetic.item_bytes();
  each_share(block, shares, view.rank, count, item, [&](Range range) {
    reduce_range(block, view, arithmetic, range, data, [=](int p, std::size_t i) {
      return static_cast<const char*>(buffers[p]) + i * item;
    });
  });
  return barrier(block, view, Phase::exit);
}

// Whole pieces of the buffer go through the slots: whose they are is the reader's affair.
template <class Block, class Arithmetic>
FR_BLOCK bool reduce_scatter_v_staged(Block& block, const View& view, const Arithmetic& arithmetic,
                                      const Shares& shares, char* data, std::size_t count) {
  const std::size_t item = arithmetic.item_bytes();
  const std::size_t piece_bytes = view.layout.stage_bytes / Pipeline::kSlots / 64 * 64;
  const std::size_t piece = piece_bytes / item;
  const Range part = chunk_of(count, block.count(), block.index(), item);
  const auto slot = [&](int owner, std::size_t i) {
    return view.stage(owner, block.index()) + (i % Pipeline::kSlots) * piece_bytes;
  };
  const auto fill = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    copy(block, slot(view.rank, i), data + here.begin * item, here.size() * item);
  };
  const auto take = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    shares.each(view.rank, here, [&](Range range) {
      reduce_range(block, view, arithmetic, range, data, [&](int p, std::size_t at) {
        return static_cast<const char*>(slot(p, i)) + (at - here.begin) * item;
      });
    });
  };
  return Pipeline::run(block, view, pieces_in(part.size(), piece), fill, take);
}

// In place: every rank's ranges of its buffer become everybody's. Elements have `item` bytes.
template <class Block>
FR_BLOCK bool all_gather_v_one_shot(Block& block, const View& view, std::uint32_t epoch,
                                    const Shares& shares, char* data, std::size_t count,
                                    std::size_t item) {
  FR_ROLLED
  for (int p = 0; p < view.world(); ++p) {
    if (p == view.rank) continue;
    each_share(block, shares, p, count, item, [&](Range range) {
      copy(block, data + range.begin * item, view.slot(p, epoch) + range.begin * item,
           range.size() * item);
    });
  }
  return true;
}

template <class Block>
FR_BLOCK bool all_gather_v(Block& block, const View& view, const void* const* buffers,
                           const Shares& shares, char* data, std::size_t count, std::size_t item) {
  FR_ROLLED
  for (int p = 0; p < view.world(); ++p) {
    if (p == view.rank) continue;
    const char* const from = static_cast<const char*>(buffers[p]);
    each_share(block, shares, p, count, item, [&](Range range) {
      copy(block, data + range.begin * item, from + range.begin * item, range.size() * item);
    });
  }
  return barrier(block, view, Phase::exit);
}

template <class Block>
FR_BLOCK bool all_gather_v_staged(Block& block, const View& view, const Shares& shares, char* data,
                                  std::size_t count, std::size_t item) {
  const std::size_t piece_bytes = view.layout.stage_bytes / Pipeline::kSlots / 64 * 64;
  const std::size_t piece = piece_bytes / item;
  const Range part = chunk_of(count, block.count(), block.index(), item);
  const auto slot = [&](int owner, std::size_t i) {
    return view.stage(owner, block.index()) + (i % Pipeline::kSlots) * piece_bytes;
  };
  const auto fill = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    shares.each(view.rank, here, [&](Range range) {
      copy(block, slot(view.rank, i) + (range.begin - here.begin) * item, data + range.begin * item,
           range.size() * item);
    });
  };
  const auto take = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    FR_ROLLED
    for (int p = 0; p < view.world(); ++p) {
      if (p == view.rank) continue;
      shares.each(p, here, [&](Range range) {
        copy(block, data + range.begin * item, slot(p, i) + (range.begin - here.begin) * item,
             range.size() * item);
      });
    }
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
