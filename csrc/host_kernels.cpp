// The protocols, instantiated for HostBlock. Compiled once per instruction set (FR_ISA).
#include <limits>

#include "all_reduce.h"
#include "collectives.h"
#include "host.h"

#define FR_STRING_(x) #x
#define FR_STRING(x) FR_STRING_(x)

namespace fastreduce {
inline namespace FR_ISA {
namespace {

// The factors in the accumulator's type. A NaN is made the default one, see store_reduced().
template <class A>
Scale<A> scale_of(const Scale<A>*, const Call& call, int world) {
  const A before =
      call.scale == call.scale ? static_cast<A>(call.scale) : std::numeric_limits<A>::quiet_NaN();
  return {before, call.op == Op::mean ? A(1) / static_cast<A>(world) : A(1)};
}

template <class A>
Divisor<A> scale_of(const Divisor<A>*, const Call& call, int world) {
  return {call.op == Op::mean ? static_cast<A>(world) : A(1)};
}

template <class T, class O>
bool run_reduction(HostBlock& block, const View& view, const Job& job) {
  const auto scale = scale_of(static_cast<const ScaleOf<T>*>(nullptr), job.call, view.world());
  const auto* in = static_cast<const T*>(job.in);
  auto* out = static_cast<T*>(job.out);
  const std::size_t count = job.call.count;
  auto* const* peers = reinterpret_cast<T* const*>(job.peers);
  if (job.call.kind == Kind::reduce_scatter) {
    if (job.call.algorithm == Algorithm::one_shot)
      return reduce_scatter_one_shot<T, O>(block, view, job.epoch, out, count, scale);
    if (job.direct) return reduce_scatter<T, O>(block, view, peers, out, count, scale);
    return reduce_scatter_staged<T, O>(block, view, in, out, count, scale);
  }
  switch (job.call.algorithm) {
    case Algorithm::one_shot:
      return one_shot<T, O>(block, view, job.epoch, out, count, scale);
    case Algorithm::two_shot:
      if (job.direct) return two_shot<T, O>(block, view, peers, count, scale);
      return two_shot_staged<T, O>(block, view, in, out, count, scale, job.far);
    case Algorithm::ring:
      break;
  }
  return ring<T, O>(block, view, in, out, count, scale);
}

template <class T>
bool run_op(HostBlock& block, const View& view, const Job& job) {
  switch (job.call.op) {
    case Op::min:
      return run_reduction<T, Min>(block, view, job);
    case Op::max:
      return run_reduction<T, Max>(block, view, job);
    case Op::sum:
    case Op::mean:
      break;
  }
  return run_reduction<T, Sum>(block, view, job);
}

bool run_dtype(HostBlock& block, const View& view, const Job& job) {
  switch (job.call.dtype) {
    case DType::float32:
      return run_op<float>(block, view, job);
    case DType::float64:
      return run_op<double>(block, view, job);
    case DType::float16:
      return run_op<Half>(block, view, job);
    case DType::bfloat16:
      return run_op<BFloat16>(block, view, job);
    case DType::int32:
      return run_op<std::int32_t>(block, view, job);
    case DType::int64:
      return run_op<std::int64_t>(block, view, job);
    case DType::uint8:
      break;
  }
  return run_op<std::uint8_t>(block, view, job);
}

bool run(HostBlock& block, const View& view, const Job& job) {
  const std::size_t bytes = job.call.count * item_bytes(job.call.dtype);
  const bool one_shot = job.call.algorithm == Algorithm::one_shot;
  const auto* in = static_cast<const char*>(job.in);
  auto* out = static_cast<char*>(job.out);
  const auto* peers = reinterpret_cast<const char* const*>(job.peers);
  switch (job.call.kind) {
    case Kind::all_reduce:
    case Kind::reduce_scatter:
      return run_dtype(block, view, job);
    case Kind::all_gather:
      if (one_shot) return all_gather_one_shot(block, view, job.epoch, out, bytes);
      if (job.direct) return all_gather(block, view, peers, out, bytes);
      return all_gather_staged(block, view, in, out, bytes);
    case Kind::broadcast:
      if (one_shot) return broadcast_one_shot(block, view, job.epoch, job.call.root, out, bytes);
      if (job.direct) return broadcast(block, view, peers[job.call.root], out, bytes);
      return broadcast_staged(block, view, job.call.root, out, bytes);
    case Kind::barrier:
      break;
  }
  return true;
}

// Calls visit(From{}, To{}) with the element types; only floating types differ from each other.
template <class Visit>
void visit_types(DType from, DType to, Visit visit) {
  const auto with_from = [&](auto f) {
    switch (to) {
      case DType::float32:
        return visit(f, float{});
      case DType::float64:
        return visit(f, double{});
      case DType::float16:
        return visit(f, Half{});
      default:
        return visit(f, BFloat16{});
    }
  };
  switch (from) {
    case DType::float32:
      return with_from(float{});
    case DType::float64:
      return with_from(double{});
    case DType::float16:
      return with_from(Half{});
    case DType::bfloat16:
      return with_from(BFloat16{});
    case DType::int32:
      return visit(std::int32_t{}, std::int32_t{});
    case DType::int64:
      return visit(std::int64_t{}, std::int64_t{});
    case DType::uint8:
      return visit(std::uint8_t{}, std::uint8_t{});
  }
}

void run_pack(HostBlock& block, DType tensor, DType flat, void* to, const Piece* pieces,
              std::size_t n, double scale) {
  visit_types(tensor, flat, [&](auto t, auto f) {
    pack<decltype(t), decltype(f)>(block, static_cast<decltype(f)*>(to), pieces, n, scale);
  });
}

void run_unpack(HostBlock& block, DType tensor, DType flat, void* from, const Piece* pieces,
                std::size_t n, double scale) {
  visit_types(tensor, flat, [&](auto t, auto f) {
    unpack<decltype(t), decltype(f)>(block, static_cast<const decltype(f)*>(from), pieces, n,
                                     scale);
  });
}

}  // namespace

extern const Kernels instance;
const Kernels instance{FR_STRING(FR_ISA), run, run_pack, run_unpack};

}  // namespace FR_ISA
}  // namespace fastreduce
