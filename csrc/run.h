// Which protocol a call runs.
#pragma once

#include "all_reduce.h"
#include "collectives.h"
#include "norm.h"
#include "optimizer.h"

namespace fastreduce {

// One call, as the blocks of a rank run it.
struct Job {
  Call call;
  const Call* calls = nullptr;  // every rank's, and the sum of their weights: on the host
  double total = 0;
  const void* in = nullptr;  // of an encoded call: its Coding
  void* out = nullptr;
  bool direct = false;     // `peers` holds every rank's tensor, mapped here
  void* peers[kMaxRanks];  // a broadcast fills in its root's only
  bool far = false;        // the ranks' cores share no cache
  // Of a reduce_scatter_v or an all_gather_v, which are in place: on the host.
  const Shares* shares = nullptr;
  // What is done with what this rank reduces, if anything: on the host.
  const Measure* measure = nullptr;
  const Update* update = nullptr;
};

// Whether a rank measures what it reduces as it stores it. Elements that all ranks reduce, the
// first one counts.
FR_FN bool measures_on_the_way(const Job& job, int rank) {
  const bool whole = job.call.kind == Kind::all_reduce && job.call.algorithm == Algorithm::one_shot;
  return whole ? rank == 0 : job.direct || job.call.algorithm == Algorithm::one_shot;
}

FR_FN bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce_scatter || kind == Kind::reduce_scatter_v;
}

// What a rank's tensor for a call has in bytes before it.
FR_FN std::size_t input_bytes(const Call& call, int world) {
  const std::size_t bytes = call.count * item_bytes(call.dtype);
  return call.kind == Kind::reduce_scatter ? bytes * world : bytes;
}

inline namespace FR_ISA {

// This block's part of the own slot of a one-shot call: all that it reads of its peers' slots.
template <class Block>
FR_BLOCK void fill_slot(Block& block, const View& view, const Job& job, std::uint32_t epoch) {
  const Call& call = job.call;
  if (call.kind == Kind::broadcast && call.root != view.rank) return;
  const std::size_t item = reduces(call.kind) ? item_bytes(call.dtype) : 1;
  const std::size_t each = call.count * item_bytes(call.dtype) / item;
  const Range part = chunk_of(each, block.count(), block.index(), item);
  const int chunks = call.kind == Kind::reduce_scatter ? view.world() : 1;
  for (int c = 0; c < chunks; ++c) {
    const std::size_t begin = (c * each + part.begin) * item;
    copy(block, view.slot(view.rank, epoch) + begin, static_cast<const char*>(job.in) + begin,
         part.size() * item);
  }
}

// Opens a call that no leader announces for all blocks: every rank's block has begun the same one,
// and what it reads of its peers is in place. False: given up.
template <class Block>
FR_BLOCK bool open(Block& block, const View& view, const Job& job, std::uint32_t epoch) {
  if (job.call.algorithm == Algorithm::one_shot) fill_slot(block, view, job, epoch);
  greet(block, view, epoch, job.call);
  return agree(block, view, epoch, job.call);
}

// A rank's factor. A NaN is made the default one, see store_reduced().
FR_FN double factor_of(const Call& call) {
  return call.scale == call.scale ? call.scale : static_cast<double>(bits_float(0x7fc00000u));
}

// What a rank counts in a mean's divisor.
FR_FN double weight_of(const Call* calls, int world, int rank) {
  const double own = calls[rank].weight;
  if (own >= 0) return own;
  if (own == kOrdinary) return 1;
  for (int p = 0; p < world; ++p)
    if (calls[p].weight >= 0) return 0;
  return 1;
}

// The sum of the ranks' weights, in the order of all sums; what is left in `weights` is partial.
FR_FN double total_of(double* weights, int world) {
  for (int apart = 1; apart < world; apart *= 2)
    for (int p = 0; p + apart < world; p += 2 * apart) weights[p] += weights[p + apart];
  return weights[0];
}

// What a reduction is multiplied by. Over no samples a mean is 0 if its ranks drop their inputs.
FR_FN double after_of(const Call& call, double total) {
  return call.op != Op::mean ? 1.0 : total == 0 ? 0.0 : 1.0 / total;
}

// What a rank's gradient is multiplied by before it is encoded: its part of the mean of all ranks'
// gradients, times their number.
FR_FN float encoded_factor(const Call& call, int world, double total) {
  const double share = total == 0 ? 0 : world / total;
  return static_cast<float>(factor_of(call) * share);
}

// An element type and an operation, as a value.
template <class T, class O>
struct Typed {
  using Element = T;
  using Operation = O;
};

// visit(Typed<T, O>{}) for those of a call.
template <class Visit>
FR_BLOCK FR_INLINE auto visit_types(DType dtype, Op op, const Visit& visit) {
  const auto with = [&](auto element) {
    using T = decltype(element);
    switch (op) {
      case Op::min:
        return visit(Typed<T, Min>{});
      case Op::max:
        return visit(Typed<T, Max>{});
      default:
        return visit(Typed<T, Sum>{});
    }
  };
  switch (dtype) {
    case DType::float32:
      return with(float{});
    case DType::float64:
      return with(double{});
    case DType::float16:
      return with(Half{});
    case DType::bfloat16:
      return with(BFloat16{});
    case DType::int32:
      return with(std::int32_t{});
    case DType::int64:
      return with(std::int64_t{});
    default:
      return with(std::uint8_t{});
  }
}

// What a call does after enter(), out of the slots of a one-shot call or by way of `peers`, which
// holds every rank's tensor, mapped here.
template <class Block, class Arithmetic>
FR_BLOCK bool reduce_direct(Block& block, const View& view, const Arithmetic& arithmetic,
                            const Job& job, void* const* peers, std::uint32_t epoch) {
  auto* out = static_cast<char*>(job.out);
  const std::size_t count = job.call.count;
  const bool slots = job.call.algorithm == Algorithm::one_shot;
  if (job.call.kind == Kind::reduce_scatter) {
    if (slots) return reduce_scatter_one_shot(block, view, arithmetic, epoch, out, count);
    return reduce_scatter(block, view, arithmetic, peers, out, count);
  }
  if (slots) return one_shot(block, view, arithmetic, epoch, out, count);
  return two_shot(block, view, arithmetic, peers, count);
}

template <class Block>
FR_BLOCK bool transfer_direct(Block& block, const View& view, const Job& job, void* const* peers,
                              std::uint32_t epoch) {
  auto* out = static_cast<char*>(job.out);
  const std::size_t bytes = job.call.count * item_bytes(job.call.dtype);
  const bool slots = job.call.algorithm == Algorithm::one_shot;
  const int root = job.call.root;
  if (job.call.kind == Kind::all_gather) {
    if (slots) return all_gather_one_shot(block, view, epoch, out, bytes);
    return all_gather(block, view, peers, out, bytes);
  }
  if (job.call.kind != Kind::broadcast) return true;
  if (slots) return broadcast_one_shot(block, view, epoch, root, out, bytes);
  return broadcast(block, view, static_cast<const char*>(peers[root]), out, bytes);
}

}  // namespace FR_ISA
}  // namespace fastreduce
