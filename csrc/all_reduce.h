// All-reduce: every rank ends with the reduction of all ranks' buffers.
//
// Steps and bytes per rank for a buffer of S bytes on N ranks; enter() comes before each and
// is one flag one way.
//
//   one_shot         fill own slot, enter, reduce all slots
//                    writes S + S, reads S + N S; no further flag. Latency.
//   two_shot         enter, reduce own chunk out of all buffers into all buffers, exit barrier
//                    reads S, writes S; one further flag. Every input is read once and every
//                    output written once, which is the least possible. Bandwidth.
//   two_shot_staged  the same through slots, piece by piece, for buffers no peer can map
//                    twice the bytes, half of them from cache; one flag per piece
//   ring             2 (N - 1) hops, each S / N, to the next neighbour only; the first half as
//                    accumulators: twice that of 16-bit types. For links that are no full mesh.
//                    Sums in ring order, not in the tree's.
//   low_latency      send own data in lines to all, reduce what arrives
//                    writes 2 (N - 1) S, reads 2 (N - 1) S of its own; no flag beside the greeting,
//                    which travels with the data. For some KiB, between processors that store
//                    16 bytes at once.
//   multimem         enter, the switch adds the own chunk of all buffers and stores the sum into
//                    all, exit barrier
//                    on a rank's link S + S / N each way. The switch's order of adding.
//   encoded          two_shot_staged, of what a wire format makes of the buffers: see wire.h.
//
// All but ring and multimem reduce with reduce.h's tree, so they give the same bits.
#pragma once

#include "channel.h"
#include "lines.h"
#include "reduce.h"

namespace fastreduce {
inline namespace FR_ISA {

// An `arithmetic` is a TypedArithmetic of reduce.h, or has its methods. Counts are elements.

// After enter(): every rank's slot of this epoch holds its `count` elements. A slot is filled
// before enter(), and not read after the call; with two of them, by parity of the epoch, no
// closing barrier is needed (see enter()).
template <class Block, class Arithmetic>
FR_BLOCK bool one_shot(Block& block, const View& view, const Arithmetic& arithmetic,
                       std::uint32_t epoch, char* out, std::size_t count) {
  const std::size_t item = arithmetic.item_bytes();
  const Range part = chunk_of(count, block.count(), block.index(), item);
  const std::size_t begin = part.begin * item;
  arithmetic.reduce(
      block, [=](int) { return out + begin; }, 1,
      [&](int p) { return view.slot(p, epoch) + begin; }, view.world(), part.size());
  return true;
}

// After greet(), which every rank has made by the time its data can arrive. A message of this call
// overwrites that of the call before the last, which everybody has read (see greet()). `agreed()`
// runs between the agreement and the reduction.
template <class Block, class Arithmetic, class Agreed>
FR_BLOCK bool low_latency(Block& block, const View& view, const Arithmetic& arithmetic,
                          std::uint32_t epoch, const Call& mine, const char* in, char* out,
                          const Agreed& agreed) {
  const std::size_t bytes = mine.count * arithmetic.item_bytes();
  const Range part = part_of((bytes + kLineData - 1) / kLineData, block.count(), block.index(), 1);
  for (std::size_t i = part.begin + block.thread(); i < part.end; i += block.threads()) {
    const std::uint64_t data = load_word(in + i * kLineData, bytes - i * kLineData);
    FR_ROLLED
    for (int p = 0; p < view.world(); ++p)
      if (p != view.rank) store_line(view.inbox(p, view.rank, epoch) + i, data, epoch);
  }
  if (!agree(block, view, epoch, mine)) return false;
  agreed();
  const auto from = [&](int p) -> const DataLine* { return view.inbox(view.rank, p, epoch); };
  return block.all(
      arithmetic.reduce_lines(block, out, in, from, view.rank, view.world(), part, bytes, epoch));
}

// `everywhere` is an address at which a load reads, and a store writes, every rank's buffer.
// Elements come in packs.
template <class Block, class Arithmetic>
FR_BLOCK bool multimem(Block& block, const View& view, const Arithmetic& arithmetic,
                       char* everywhere, std::size_t count) {
  const std::size_t item = arithmetic.item_bytes();
  const Range chunk = chunk_of(count, view.world(), view.rank, item);
  const Range part = chunk_of(chunk.size(), block.count(), block.index(), item);
  arithmetic.reduce_everywhere(block, everywhere + (chunk.begin + part.begin) * item, part.size());
  return barrier(block, view, Phase::exit);
}

// `buffers` are all ranks' own buffers, mapped here. A chunk is read and written by one rank
// only; the exit barrier tells that all chunks of this rank's buffer are in place.
template <class Block, class Arithmetic>
FR_BLOCK bool two_shot(Block& block, const View& view, const Arithmetic& arithmetic,
                       void* const* buffers, std::size_t count) {
  const std::size_t item = arithmetic.item_bytes();
  const std::size_t grain = arithmetic.grain();
  const Range chunk = part_of(count, view.world(), view.rank, grain);
  const Range part = part_of(chunk.size(), block.count(), block.index(), grain);
  const std::size_t begin = (chunk.begin + part.begin) * item;
  const auto at = [=](int p) { return static_cast<char*>(buffers[p]) + begin; };
  arithmetic.reduce(block, at, view.world(), at, view.world(), part.size());
  return barrier(block, view, Phase::exit);
}

// Slots: kSlots of a piece for what a rank contributes, kSlots of a chunk of a piece for what
// it has reduced. The own chunk never goes through a slot. `far`: the ranks' cores share no
// cache, so results are stored past it.
template <class Block, class Arithmetic>
FR_BLOCK bool two_shot_staged(Block& block, const View& view, const Arithmetic& arithmetic,
                              const char* in, char* out, std::size_t count, bool far) {
  const int world = view.world();
  const int rank = view.rank;
  const std::size_t item = arithmetic.item_bytes();
  const std::size_t share = view.layout.stage_bytes / Pipeline::kSlots;
  const std::size_t piece_bytes = share / (world + 1) / 64 * 64 * world;
  const std::size_t result_bytes = piece_bytes / world;
  const std::size_t piece = piece_bytes / item;
  const Range part = chunk_of(count, block.count(), block.index(), item);

  const auto slot = [&](int owner, std::size_t i) {
    return view.stage(owner, block.index()) + (i % Pipeline::kSlots) * piece_bytes;
  };
  const auto result = [&](int owner, std::size_t i) {
    return view.stage(owner, block.index()) + Pipeline::kSlots * piece_bytes +
           (i % Pipeline::kSlots) * result_bytes;
  };
  const auto fill = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    FR_ROLLED
    for (int p = 0; p < world; ++p) {
      const Range chunk = chunk_of(here.size(), world, p, item);
      if (p != rank)
        copy(block, slot(rank, i) + chunk.begin * item, in + (here.begin + chunk.begin) * item,
             chunk.size() * item);
    }
  };
  const auto take = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    const Range chunk = chunk_of(here.size(), world, rank, item);
    const char* own = in + (here.begin + chunk.begin) * item;
    char* kept = out + (here.begin + chunk.begin) * item;
    char* told = result(rank, i);
    const auto from = [&](int p) { return p == rank ? own : slot(p, i) + chunk.begin * item; };
    const auto to = [&](int k) { return k == 0 ? kept : told; };
    arithmetic.reduce(block, to, far ? 1 : 2, from, world, chunk.size());
    if (far) {
      block.all(true);  // threads of a block may share the copy otherwise than the reduction
      copy_streaming(block, told, kept, chunk.size() * item);
    }
  };
  const auto finish = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    FR_ROLLED
    for (int p = 0; p < world; ++p) {
      const Range chunk = chunk_of(here.size(), world, p, item);
      if (p != rank)
        copy(block, out + (here.begin + chunk.begin) * item, result(p, i), chunk.size() * item);
    }
  };
  // All ranks walk the same number of pieces: `part` depends on count and blocks alone.
  return Pipeline::run(block, view, pieces_in(part.size(), piece), true, fill, take, finish);
}

// The staging of encoded(): for each of a few pieces, room for what a rank sends to every chunk,
// and for what it has reduced (chunk `world`). One that `gathers` has room for copies of peers'
// slots, too.
struct EncodedSlots {
  std::size_t room;  // bytes of each, a multiple of 64

  static FR_FN EncodedSlots of(const Layout& layout, bool gathers) {
    const std::size_t pieces = Pipeline::kSlots + (gathers ? 1 : 0);
    return {layout.stage_bytes / (pieces * (layout.world + 1)) / 64 * 64};
  }
  FR_FN char* at(const View& view, int owner, int block, int chunk, std::size_t piece) const {
    return view.stage(owner, block) +
           (piece % Pipeline::kSlots * (view.world() + 1) + chunk) * room;
  }
  FR_FN char* copy_of(const View& view, int owner, int block) const {
    return view.stage(view.rank, block) + (Pipeline::kSlots * (view.world() + 1) + owner) * room;
  }
};

// Copies so many bytes of every rank's slot, in whole packs, of all ranks together: a piece of one
// would not keep the threads busy.
FR_OUT_OF_LINE void gather_slots(int thread, int threads, const View& view, EncodedSlots slots,
                                 int block, int chunk, std::size_t piece, std::size_t bytes) {
  constexpr int kAhead = 4;
  const auto packs = static_cast<std::uint32_t>((bytes + kPackBytes - 1) / kPackBytes);
  const std::uint32_t all = packs * static_cast<std::uint32_t>(view.world());
  const auto stride = static_cast<std::uint32_t>(threads);
  FR_ROLLED
  for (auto first = static_cast<std::uint32_t>(thread); first < all; first += kAhead * stride) {
    Items<char, kPackBytes> held[kAhead];
    FR_UNROLL
    for (int a = 0; a < kAhead; ++a) {
      const std::uint32_t k = first + a * stride;
      if (k >= all) break;
      const char* const slot = slots.at(view, static_cast<int>(k / packs), block, chunk, piece);
      held[a] = load_items<kPackBytes>(slot + k % packs * kPackBytes);
    }
    FR_UNROLL
    for (int a = 0; a < kAhead; ++a) {
      const std::uint32_t k = first + a * stride;
      if (k >= all) break;
      char* const copy = slots.copy_of(view, static_cast<int>(k / packs), block);
      store_items(copy + k % packs * kPackBytes, held[a]);
    }
  }
}

// A `coder` is a HostCoder of host_wire.h, or has its methods. What a rank sends to itself is
// encoded, too: a gradient's sum does not depend on who reduces it. A coder that kGathers is given
// copies in place of what lies in its peers' memory.
template <class Block, class Coder>
FR_BLOCK bool encoded(Block& block, const View& view, Coder& coder) {
  if (coder.plan().spans == 0) return true;
  const int world = view.world();
  const int rank = view.rank;
  const auto slots = EncodedSlots::of(view.layout, Coder::kGathers);

  const auto part = [&](int chunk) {
    return part_of(coder.plan().runs(chunk), block.count(), block.index(), 1);
  };
  std::size_t longest = 0;
  FR_ROLLED
  for (int c = 0; c < world; ++c) {
    const std::size_t here = part(c).size();
    longest = here < longest ? longest : here;
  }
  if (longest == 0) return true;
  // Pieces of equal length, in runs.
  const std::size_t pieces = pieces_in(longest, slots.room / coder.plan().record);
  const std::size_t piece = pieces_in(longest, pieces);

  const auto own = [&](int chunk, std::size_t i) {
    return slots.at(view, rank, block.index(), chunk, i);
  };
  // Of every rank: where its slot, or the copy of it, is.
  const auto of_all = [&](int chunk, std::size_t i) {
    if constexpr (Coder::kGathers) {
      block.all(true);
      gather_slots(block.thread(), block.threads(), view, slots, block.index(), chunk, i,
                   piece * coder.plan().record);
      block.all(true);
      const char* const first = slots.copy_of(view, 0, block.index());
      return [=](int p) { return first + p * slots.room; };
    } else {
      return [=, &view, &block](int p) { return slots.at(view, p, block.index(), chunk, i); };
    }
  };
  const auto fill = [&](std::size_t i) {
    FR_ROLLED
    for (int c = 0; c < world; ++c) coder.encode(c, piece_of(part(c), i, piece), own(c, i));
  };
  const auto take = [&](std::size_t i) {
    coder.reduce(piece_of(part(rank), i, piece), of_all(rank, i), own(world, i));
  };
  const auto finish = [&](std::size_t i) {
    const auto from = of_all(world, i);
    FR_ROLLED
    for (int c = 0; c < world; ++c) coder.decode(c, piece_of(part(c), i, piece), from(c));
  };
  return Pipeline::run(block, view, pieces, !coder.lands(), fill, take, finish);
}

// One piece of every chunk goes all the way round before the next. A rank that waits for a free
// slot has sent at most one slot more than it has received. Were all to wait, each would have
// sent kSlots more than its neighbour has received; so somebody always goes on. The partial sums
// travel as accumulators: they are rounded once, at the end of the reduction.
template <class Block, class Arithmetic>
FR_BLOCK bool ring(Block& block, const View& view, const Arithmetic& arithmetic, const char* in,
                   char* out, std::size_t count) {
  const int world = view.world();
  const int rank = view.rank;
  const std::size_t item = arithmetic.item_bytes();
  const auto part_of_chunk = [&](int c) {
    const Range chunk = chunk_of(count, world, c, item);
    const Range part = chunk_of(chunk.size(), block.count(), block.index(), item);
    return Range{chunk.begin + part.begin, chunk.begin + part.end};
  };
  Channel<Block> channel(block, view);
  const std::size_t piece = channel.slot_bytes() / arithmetic.partial_bytes();
  const std::size_t rounds = pieces_in(part_of_chunk(0).size(), piece);  // the longest chunk

  for (std::size_t round = 0; round < rounds; ++round) {
    for (int step = 0; step < world - 1; ++step) {
      const char* arrived = nullptr;
      if (step > 0) {
        arrived = channel.begin_receive(Phase::reduce);
        if (arrived == nullptr) return false;
      }
      const Range here =
          piece_of(part_of_chunk(ring_reduce_send_chunk(rank, step, world)), round, piece);
      char* to = channel.begin_send(Phase::reduce);
      if (to == nullptr) return false;
      const char* own = in + here.begin * item;
      if (step == 0)
        arithmetic.open_partial(block, to, own, here.size());
      else
        arithmetic.add_partial(block, to, arrived, own, here.size());
      channel.end_send();
      if (step > 0) channel.end_receive();
    }

    // The own chunk is complete with this last arrival: round it, keep it, pass it on.
    {
      const Range here = piece_of(part_of_chunk(rank), round, piece);
      const char* arrived = channel.begin_receive(Phase::reduce);
      if (arrived == nullptr) return false;
      char* to = channel.begin_send(Phase::gather);
      if (to == nullptr) return false;
      arithmetic.close_partial(block, out + here.begin * item, to, arrived, in + here.begin * item,
                               here.size());
      channel.end_send();
      channel.end_receive();
    }

    for (int step = 0; step < world - 1; ++step) {
      const Range here =
          piece_of(part_of_chunk(ring_gather_receive_chunk(rank, step, world)), round, piece);
      const char* arrived = channel.begin_receive(Phase::gather);
      if (arrived == nullptr) return false;
      const std::size_t bytes = here.size() * item;
      if (step < world - 2) {
        char* to = channel.begin_send(Phase::gather);
        if (to == nullptr) return false;
        copy(block, to, arrived, bytes);
        channel.end_send();
      }
      copy(block, out + here.begin * item, arrived, bytes);
      channel.end_receive();
    }
  }
  return true;
}

}  // namespace FR_ISA
}  // namespace fastreduce
