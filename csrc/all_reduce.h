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
//   ring             2 (N - 1) hops, each S / N, to the next neighbour only. For links that
//                    are no full mesh. Sums in ring order, not in the tree's.
//
// All but ring reduce with reduce.h's tree, so they give the same bits.
#pragma once

#include "channel.h"
#include "reduce.h"

namespace fastreduce {
inline namespace FR_ISA {

// After enter(): every rank's slot of this epoch holds its `count` elements. A slot is filled
// before enter(), by all threads of the block and then block.all(), and not read after the call;
// with two of them, by parity of the epoch, no closing barrier is needed (see enter()).
template <class T, class Op, class Block>
bool one_shot(Block& block, const View& view, std::uint32_t epoch, T* out, std::size_t count,
              const ScaleOf<T>& scale) {
  const T* from[kMaxRanks];
  for (int p = 0; p < view.world(); ++p) from[p] = reinterpret_cast<const T*>(view.slot(p, epoch));
  reduce<T, Op>(block, &out, 1, from, view.world(), count, scale);
  return true;
}

// `buffers` are all ranks' own buffers, mapped here. A chunk is read and written by one rank
// only; the exit barrier tells that all chunks of this rank's buffer are in place.
template <class T, class Op, class Block>
bool two_shot(Block& block, const View& view, T* const* buffers, std::size_t count,
              const ScaleOf<T>& scale) {
  const Range chunk = chunk_of(count, view.world(), view.rank, sizeof(T));
  const Range part = chunk_of(chunk.size(), block.count(), block.index(), sizeof(T));
  T* at[kMaxRanks];
  for (int p = 0; p < view.world(); ++p) at[p] = buffers[p] + chunk.begin + part.begin;
  reduce<T, Op>(block, at, view.world(), at, view.world(), part.size(), scale);
  return barrier(block, view, Phase::exit);
}

// Slots: kSlots of a piece for what a rank contributes, kSlots of a chunk of a piece for what
// it has reduced. The own chunk never goes through a slot. `far`: the ranks' cores share no
// cache, so results are stored past it.
template <class T, class Op, class Block>
bool two_shot_staged(Block& block, const View& view, const T* in, T* out, std::size_t count,
                     const ScaleOf<T>& scale, bool far) {
  const int world = view.world();
  const int rank = view.rank;
  const std::size_t share = view.layout.stage_bytes / Pipeline::kSlots;
  const std::size_t piece = share / (world + 1) / 64 * 64 * world / sizeof(T);
  const std::size_t piece_bytes = piece * sizeof(T);
  const std::size_t result_bytes = piece_bytes / world;
  const Range part = chunk_of(count, block.count(), block.index(), sizeof(T));

  const auto slot = [&](int owner, std::size_t i) {
    return reinterpret_cast<T*>(view.stage(owner, block.index()) +
                                (i % Pipeline::kSlots) * piece_bytes);
  };
  const auto result = [&](int owner, std::size_t i) {
    return reinterpret_cast<T*>(view.stage(owner, block.index()) + Pipeline::kSlots * piece_bytes +
                                (i % Pipeline::kSlots) * result_bytes);
  };
  const auto fill = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    for (int p = 0; p < world; ++p) {
      const Range chunk = chunk_of(here.size(), world, p, sizeof(T));
      if (p != rank)
        copy(block, slot(rank, i) + chunk.begin, in + here.begin + chunk.begin, chunk.size());
    }
  };
  const auto take = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    const Range chunk = chunk_of(here.size(), world, rank, sizeof(T));
    const T* from[kMaxRanks];
    for (int p = 0; p < world; ++p) from[p] = slot(p, i) + chunk.begin;
    from[rank] = in + here.begin + chunk.begin;
    T* const to[2] = {out + here.begin + chunk.begin, result(rank, i)};
    reduce<T, Op>(block, to, far ? 1 : 2, from, world, chunk.size(), scale);
    if (far) copy_streaming(block, to[1], to[0], chunk.size());
  };
  const auto finish = [&](std::size_t i) {
    const Range here = piece_of(part, i, piece);
    for (int p = 0; p < world; ++p) {
      const Range chunk = chunk_of(here.size(), world, p, sizeof(T));
      if (p != rank) copy<T>(block, out + here.begin + chunk.begin, result(p, i), chunk.size());
    }
  };
  // All ranks walk the same number of pieces: `part` depends on count and blocks alone.
  return Pipeline::run(block, view, pieces_in(part.size(), piece), true, fill, take, finish);
}

// One piece of every chunk goes all the way round before the next. A rank that waits for a free
// slot has sent at most one slot more than it has received. Were all to wait, each would have
// sent kSlots more than its neighbour has received; so somebody always goes on. The partial sums
// travel as accumulators: they are rounded once, at the end of the reduction.
template <class T, class Op, class Block>
bool ring(Block& block, const View& view, const T* in, T* out, std::size_t count,
          const ScaleOf<T>& scale) {
  using A = AccOf<T>;
  const int world = view.world();
  const int rank = view.rank;
  const auto part_of_chunk = [&](int c) {
    const Range chunk = chunk_of(count, world, c, sizeof(T));
    const Range part = chunk_of(chunk.size(), block.count(), block.index(), sizeof(T));
    return Range{chunk.begin + part.begin, chunk.begin + part.end};
  };
  Channel<Block> channel(block, view);
  const std::size_t piece = channel.slot_bytes() / sizeof(A);
  const std::size_t rounds = pieces_in(part_of_chunk(0).size(), piece);  // the longest chunk

  for (std::size_t round = 0; round < rounds; ++round) {
    for (int step = 0; step < world - 1; ++step) {
      const A* arrived = nullptr;
      if (step > 0) {
        arrived = reinterpret_cast<const A*>(channel.begin_receive(Phase::reduce));
        if (arrived == nullptr) return false;
      }
      const Range here =
          piece_of(part_of_chunk(ring_reduce_send_chunk(rank, step, world)), round, piece);
      A* to = reinterpret_cast<A*>(channel.begin_send(Phase::reduce));
      if (to == nullptr) return false;
      const Range share = share_of<A>(block, here.size());
      const T* own = in + here.begin;
      if (step == 0) {
        FR_INDEPENDENT
        for (std::size_t i = share.begin; i < share.end; ++i)
          to[i] = scale.input(Element<T>::load(own[i]));
      } else {
        FR_INDEPENDENT
        for (std::size_t i = share.begin; i < share.end; ++i)
          to[i] = Op::apply(arrived[i], scale.input(Element<T>::load(own[i])));
      }
      channel.end_send();
      if (step > 0) channel.end_receive();
    }

    // The own chunk is complete with this last arrival: round it, keep it, pass it on.
    {
      const Range here = piece_of(part_of_chunk(rank), round, piece);
      const A* arrived = reinterpret_cast<const A*>(channel.begin_receive(Phase::reduce));
      if (arrived == nullptr) return false;
      T* to = reinterpret_cast<T*>(channel.begin_send(Phase::gather));
      if (to == nullptr) return false;
      const Range share = share_of<T>(block, here.size());
      const T* own = in + here.begin;
      T* kept = out + here.begin;
      FR_INDEPENDENT
      for (std::size_t i = share.begin; i < share.end; ++i) {
        const A sum = Op::apply(arrived[i], scale.input(Element<T>::load(own[i])));
        kept[i] = to[i] = Element<T>::store(scale.result(sum));
      }
      channel.end_send();
      channel.end_receive();
    }

    for (int step = 0; step < world - 1; ++step) {
      const Range here =
          piece_of(part_of_chunk(ring_gather_receive_chunk(rank, step, world)), round, piece);
      const T* arrived = reinterpret_cast<const T*>(channel.begin_receive(Phase::gather));
      if (arrived == nullptr) return false;
      if (step < world - 2) {
        T* to = reinterpret_cast<T*>(channel.begin_send(Phase::gather));
        if (to == nullptr) return false;
        copy(block, to, arrived, here.size());
        channel.end_send();
      }
      copy(block, out + here.begin, arrived, here.size());
      channel.end_receive();
    }
  }
  return true;
}

}  // namespace FR_ISA
}  // namespace fastreduce
