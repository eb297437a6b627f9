// Which protocol a call runs.
#pragma once

#include <limits>

#include "all_reduce.h"
#include "collectives.h"

namespace fastreduce {

// One call, as the blocks of a rank run it.
struct Job {
  Call call;
  std::uint32_t epoch = 0;
  const void* in = nullptr;
  void* out = nullptr;
  bool direct = false;     // `peers` holds every rank's tensor, mapped here
  void* peers[kMaxRanks];  // a broadcast fills in its root's only
  bool far = false;        // the ranks' cores share no cache
};

FR_FN std::size_t item_bytes(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::uint8:
      break;
  }
  return 1;
}

inline namespace FR_ISA {

// The factors of a call in the accumulator's type. A NaN is made the default one, see
// store_reduced().
template <class A>
FR_FN Scale<A> scale_of(const Scale<A>*, const Call& call, int world) {
  const A before =
      call.scale == call.scale ? static_cast<A>(call.scale) : std::numeric_limits<A>::quiet_NaN();
  return {before, call.op == Op::mean ? A(1) / static_cast<A>(world) : A(1)};
}

template <class A>
FR_FN Divisor<A> scale_of(const Divisor<A>*, const Call& call, int world) {
  return {call.op == Op::mean ? static_cast<A>(world) : A(1)};
}

template <class T, class O>
FR_FN TypedArithmetic<T, O> arithmetic_of(const Call& call, int world) {
  return TypedArithmetic<T, O>(scale_of(static_cast<const ScaleOf<T>*>(nullptr), call, world));
}

// An all-reduce or a reduce-scatter, after enter().
template <class Block, class Arithmetic>
FR_BLOCK bool run_reduction(Block& block, const View& view, const Job& job,
                            const Arithmetic& arithmetic) {
  const auto* in = static_cast<const char*>(job.in);
  auto* out = static_cast<char*>(job.out);
  const std::size_t count = job.call.count;
  if (job.call.kind == Kind::reduce_scatter) {
    if (job.call.algorithm == Algorithm::one_shot)
      return reduce_scatter_one_shot(block, view, arithmetic, job.epoch, out, count);
    if (job.direct) return reduce_scatter(block, view, arithmetic, job.peers, out, count);
    return reduce_scatter_staged(block, view, arithmetic, in, out, count);
  }
  switch (job.call.algorithm) {
    case Algorithm::one_shot:
      return one_shot(block, view, arithmetic, job.epoch, out, count);
    case Algorithm::two_shot:
      if (job.direct) return two_shot(block, view, arithmetic, job.peers, count);
      return two_shot_staged(block, view, arithmetic, in, out, count, job.far);
    case Algorithm::ring:
      break;
  }
  return ring(block, view, arithmetic, in, out, count);
}

// Any other call, after enter().
template <class Block>
FR_BLOCK bool run_transfer(Block& block, const View& view, const Job& job) {
  const std::size_t bytes = job.call.count * item_bytes(job.call.dtype);
  const bool one_shot = job.call.algorithm == Algorithm::one_shot;
  const auto* in = static_cast<const char*>(job.in);
  auto* out = static_cast<char*>(job.out);
  const int root = job.call.root;
  switch (job.call.kind) {
    case Kind::all_gather:
      if (one_shot) return all_gather_one_shot(block, view, job.epoch, out, bytes);
      if (job.direct) return all_gather(block, view, job.peers, out, bytes);
      return all_gather_staged(block, view, in, out, bytes);
    case Kind::broadcast:
      if (one_shot) return broadcast_one_shot(block, view, job.epoch, root, out, bytes);
      if (job.direct)
        return broadcast(block, view, static_cast<const char*>(job.peers[root]), out, bytes);
      return broadcast_staged(block, view, root, out, bytes);
    default:
      return true;
  }
}

}  // namespace FR_ISA
}  // namespace fastreduce
