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

// A chunk is one rank's share of a buffer, cut on cache lines.
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
