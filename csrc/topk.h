// Wire formats that send some elements of a buffer and keep the others back: the k largest, k at
// random, or the k largest of those above a threshold. Every rank sends its own choice to all, and
// everybody adds up; nothing is lost on the way back.
//
//   message   count, whether all was finite, then `k` entries of index and value, by ascending
//             index; those past `count` are zero
//
// An index counts the elements of all spans, one after the other. Of equal ones the lower indices
// are chosen.
#pragma once

#include "wire.h"

namespace fastreduce {

struct Selection {
  bool random = false;  // by random numbers, not by magnitude: alike on ranks with the same spans
  std::uint64_t k = 0;  // at most
  std::uint32_t threshold = 0;  // the bits of the least magnitude that is sent
};

struct Entry {
  std::uint32_t index;
  float value;
};

struct Header {
  std::uint32_t count;
  std::uint32_t finite;
};

// Of an element that may be sent.
FR_FN std::uint32_t lowest_key(const Selection& selection) {
  return selection.random ? 0 : selection.threshold;
}

FR_FN std::size_t selection_bytes(std::uint64_t k) { return sizeof(Header) + k * sizeof(Entry); }

}  // namespace fastreduce
