// Paths between ranks that stage data: a Channel to the ring's neighbours, and a pipeline in
// which all ranks move pieces through each other's slots in step.
#pragma once

#include "signal.h"

namespace fastreduce {
inline namespace FR_ISA {

// To the next neighbour and from the previous one. A sender writes into the receiver's slots;
// tail counts slots filled, head counts slots emptied, and their difference never exceeds
// kSlots, so a slot is never written while it is being read.
template <class Block>
class Channel {
 public:
  static constexpr std::uint32_t kSlots = 4;

  FR_BLOCK Channel(Block& block, const View& view)
      : block_(block),
        view_(view),
        next_(ring_next(view.rank, view.world())),
        previous_(ring_previous(view.rank, view.world())) {}

  FR_BLOCK std::size_t slot_bytes() const { return view_.layout.stage_bytes / kSlots / 64 * 64; }

  // The slot to fill next, once the neighbour has emptied it; null: given up.
  FR_BLOCK char* begin_send(Phase phase) {
    const std::uint32_t oldest = block_.progress().sent + 1 - kSlots;
    bool free = true;
    if (block_.thread() == 0)
      free = block_.wait(view_.head(view_.rank, block_.index(), next_), oldest, next_, phase);
    return block_.all(free) ? slot(next_, block_.progress().sent) : nullptr;
  }
  FR_BLOCK void end_send() {
    block_.all(true);
    if (block_.thread() == 0)
      block_.signal(view_.tail(next_, block_.index(), view_.rank), ++block_.progress().sent);
    block_.all(true);
  }

  // The slot that arrives next; null: given up.
  FR_BLOCK const char* begin_receive(Phase phase) {
    const std::uint32_t due = block_.progress().received + 1;
    bool filled = true;
    if (block_.thread() == 0)
      filled =
          block_.wait(view_.tail(view_.rank, block_.index(), previous_), due, previous_, phase);
    return block_.all(filled) ? slot(view_.rank, block_.progress().received) : nullptr;
  }
  FR_BLOCK void end_receive() {
    block_.all(true);
    if (block_.thread() == 0)
      block_.signal(view_.head(previous_, block_.index(), view_.rank),
                    ++block_.progress().received);
    block_.all(true);
  }

 private:
  FR_BLOCK char* slot(int owner, std::uint32_t number) const {
    return view_.stage(owner, block_.index()) + (number % kSlots) * slot_bytes();
  }

  Block& block_;
  const View& view_;
  int next_;
  int previous_;
};

// Moves `pieces` through slots with one flag per piece and peer:
//
//   fill(i)    own data into the own slot i % kSlots
//   take(i)    out of all ranks' slots, kAhead steps later
//   finish(i)  out of what take(i) left in all ranks' result slots, kAhead + 1 steps later
//
// In step i a rank fills piece i and tells its peers; it then waits until every peer has told
// of step i - kAhead, so that filled pieces up to i - kAhead and pieces taken up to
// i - 2 * kAhead - 1 are complete everywhere. Slots are written again after 2 * kAhead + 2
// pieces, by when that same wait, one step earlier, has shown that nobody reads them. The
// first steps are covered by enter(): everybody has left the call before this one.
struct Pipeline {
  static constexpr std::size_t kAhead = 1;
  static constexpr std::size_t kSlots = 2 * kAhead + 2;
  // Steps from filling a piece to finishing it.
  static constexpr std::size_t kFinish = 2 * kAhead + 1;

  template <class Block, class Fill, class Take, class Finish>
  static FR_BLOCK bool run(Block& block, const View& view, std::size_t pieces, bool finishes,
                           Fill fill, Take take, Finish finish) {
    const std::size_t steps = pieces + (finishes ? kFinish : kAhead);
    for (std::size_t i = 0; i < steps && pieces != 0; ++i) {
      if (i < pieces) fill(i);
      advance(block, view);
      if (!await(block, view, kAhead, Phase::gather)) return false;
      if (i >= kAhead && i - kAhead < pieces) take(i - kAhead);
      if (finishes && i >= kFinish) finish(i - kFinish);
    }
    return true;
  }

  template <class Block, class Fill, class Take>
  static FR_BLOCK bool run(Block& block, const View& view, std::size_t pieces, Fill fill,
                           Take take) {
    return run(block, view, pieces, false, fill, take, [](std::size_t) {});
  }
};

}  // namespace FR_ISA
}  // namespace fastreduce
