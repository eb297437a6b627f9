// Who handles which elements when: pure integers, no memory, no waiting.
#pragma once

#include "target.h"

namespace fastreduce {

struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;
  FR_FN std::size_t size() const { return end - begin; }
};

// Part `index` of `count` elements cut into `parts`, in units of `grain` elements: parts
// differ by at most one grain, the first ones are the longer ones, only the last can end
// within a grain, and trailing parts can be empty. A grain is a cache line where two ranks
// write neighbouring parts.
FR_FN Range part_of(std::size_t count, int parts, int index, std::size_t grain) {
  if (parts == 1) return {0, count};  // most calls of one block: no division
  const std::size_t grains = (count + grain - 1) / grain;
  const std::size_t each = grains / parts;
  const std::size_t longer = grains % parts;
  const std::size_t at = static_cast<std::size_t>(index);
  const std::size_t first = at * each + (at < longer ? at : longer);
  const std::size_t begin = first * grain;
  const std::size_t end = begin + (each + (at < longer ? 1 : 0)) * grain;
  return {begin < count ? begin : count, end < count ? end : count};
}

// A chunk is one rank's share of a buffer, cut on cache lines. (Where what is stored is measured,
// on units of norm.h: see part_of().)
FR_FN Range chunk_of(std::size_t count, int world, int rank, std::size_t item_bytes) {
  return part_of(count, world, rank, 64 / item_bytes);
}

// Piece `index` of a range that is walked in steps of `piece` elements; empty past the end.
FR_FN Range piece_of(Range range, std::size_t index, std::size_t piece) {
  const std::size_t begin = range.begin + index * piece;
  if (begin >= range.end) return {range.end, range.end};
  return {begin, begin + piece < range.end ? begin + piece : range.end};
}

FR_FN std::size_t pieces_in(std::size_t count, std::size_t piece) {
  return (count + piece - 1) / piece;
}

// Which ranges of a buffer are whose: rank p's are range[first[p]] up to range[first[p + 1]], in
// ascending order, and share no element.
struct Shares {
  const Range* range = nullptr;
  const std::size_t* first = nullptr;

  // visit(range) for those of rank p, as far as they lie in `here`.
  template <class Visit>
  FR_FN void each(int p, Range here, const Visit& visit) const {
    std::size_t low = first[p];
    for (std::size_t high = first[p + 1]; low < high;) {
      const std::size_t middle = (low + high) / 2;
      if (range[middle].end <= here.begin)
        low = middle + 1;
      else
        high = middle;
    }
    for (; low < first[p + 1] && range[low].begin < here.end; ++low) {
      const Range& own = range[low];
      const Range part{own.begin < here.begin ? here.begin : own.begin,
                       own.end < here.end ? own.end : here.end};
      if (part.size() != 0) visit(part);
    }
  }
};

// Ring, step s of world - 1. Reduction: chunk c starts at rank c + 1 and ends, complete, at
// rank c. Gathering: it leaves rank c and goes round once more.
FR_FN int ring_next(int rank, int world) { return (rank + 1) % world; }
FR_FN int ring_previous(int rank, int world) { return (rank + world - 1) % world; }
FR_FN int ring_reduce_send_chunk(int rank, int step, int world) {
  return (rank + 2 * world - 1 - step) % world;
}
FR_FN int ring_reduce_receive_chunk(int rank, int step, int world) {
  return ring_reduce_send_chunk(ring_previous(rank, world), step, world);
}
FR_FN int ring_gather_send_chunk(int rank, int step, int world) {
  return (rank + world - step) % world;
}
FR_FN int ring_gather_receive_chunk(int rank, int step, int world) {
  return ring_gather_send_chunk(ring_previous(rank, world), step, world);
}

}  // namespace fastreduce
