// The protocols, instantiated for HostBlock. Compiled once per instruction set (FR_ISA).
#include "host.h"
#include "host_norm.h"
#include "host_optimizer.h"
#include "host_topk.h"
#include "host_wire.h"

#define FR_STRING_(x) #x
#define FR_STRING(x) FR_STRING_(x)

namespace fastreduce {
inline namespace FR_ISA {
namespace {

// A TypedArithmetic whose type the protocols do not see: they are compiled once, not once per
// element type and operation. A virtual call moves a whole piece.
class HostArithmetic {
 public:
  virtual std::size_t item_bytes() const = 0;
  virtual std::size_t partial_bytes() const = 0;
  // So that what is measured begins with a unit, whoever measures.
  static constexpr std::size_t grain() { return kUnit; }

  template <class To, class From>
  void reduce(HostBlock&, const To& to, int stores, const From& from, int count,
              std::size_t n) const {
    char* out[kMaxRanks];
    const char* in[kMaxRanks];
    for (int k = 0; k < stores; ++k) out[k] = to(k);
    for (int k = 0; k < count; ++k) in[k] = from(k);
    reduce_all(out, stores, in, count, n);
  }

  virtual void open_partial(HostBlock&, char* partial, const char* own, std::size_t n) const = 0;
  virtual void add_partial(HostBlock&, char* partial, const char* arrived, const char* own,
                           std::size_t n) const = 0;
  virtual void close_partial(HostBlock&, char* kept, char* sent, const char* arrived,
                             const char* own, std::size_t n) const = 0;

 protected:
  ~HostArithmetic() = default;
  virtual void reduce_all(char* const* to, int stores, const char* const* from, int count,
                          std::size_t n) const = 0;
};

template <class T, class O>
class HostArithmeticOf final : public HostArithmetic {
 public:
  // `gauge`, if any, measures what is stored into the tensor of the rank; `update`, if any, uses
  // it.
  HostArithmeticOf(const TypedArithmetic<T, O>& typed, const Job& job, Gauge* gauge,
                   const Update* update)
      : typed_(typed),
        tensor_(static_cast<const char*>(job.out)),
        bytes_(job.call.count * sizeof(T)),
        gauge_(gauge),
        update_(update) {}

  std::size_t item_bytes() const override { return typed_.item_bytes(); }
  std::size_t partial_bytes() const override { return typed_.partial_bytes(); }
  void open_partial(HostBlock& block, char* partial, const char* own,
                    std::size_t n) const override {
    typed_.open_partial(block, partial, own, n);
  }
  void add_partial(HostBlock& block, char* partial, const char* arrived, const char* own,
                   std::size_t n) const override {
    typed_.add_partial(block, partial, arrived, own, n);
  }
  void close_partial(HostBlock& block, char* kept, char* sent, const char* arrived, const char* own,
                     std::size_t n) const override {
    typed_.close_partial(block, kept, sent, arrived, own, n);
  }

 private:
  void reduce_all(char* const* to, int stores, const char* const* from, int count,
                  std::size_t n) const override {
    auto* const out = reinterpret_cast<T* const*>(to);
    const auto* const in = reinterpret_cast<const T* const*>(from);
    if constexpr (std::is_floating_point<AccOf<T>>::value && std::is_same<O, Sum>::value) {
      if (gauge_ != nullptr || update_ != nullptr) {
        int own = 0;
        while (own + 1 < stores && !(tensor_ <= to[own] && to[own] < tensor_ + bytes_)) ++own;
        const std::size_t index = static_cast<std::size_t>(to[own] - tensor_) / sizeof(T);
        if (gauge_ != nullptr)
          return reduce_measured<T, O>(out, stores, in, count, n, typed_.scale(), index, own,
                                       *gauge_);
        return reduce_units<T, O>(out, stores, in, count, n, typed_.scale(), index, own,
                                  [&](const T* values, std::size_t, std::size_t m) {
                                    update_serial(*update_, values, m);
                                  });
      }
    }
    reduce_serial<T, O>(out, stores, in, count, n, typed_.scale());
  }

  TypedArithmetic<T, O> typed_;
  const char* tensor_;
  std::size_t bytes_;
  Gauge* gauge_;
  const Update* update_;
};

void measure(const Measure& measure, int rank, int world, DType dtype, const void* tensor,
             std::size_t count) {
  const Range part = part_of(count, world, rank, kUnit);
  Gauge gauge(measure, 0);
  const auto range = [&](const auto* values) {
    gauge.range(values + part.begin, part.begin, part.size());
  };
  switch (dtype) {
    case DType::float32:
      return range(static_cast<const float*>(tensor));
    case DType::float64:
      return range(static_cast<const double*>(tensor));
    case DType::float16:
      return range(static_cast<const Half*>(tensor));
    case DType::bfloat16:
      return range(static_cast<const BFloat16*>(tensor));
    default:
      return;
  }
}

void update(const Update& update, DType dtype) {
  const auto all = [&](auto element) {
    using T = decltype(element);
    for (std::size_t k = 0; k < update.runs; ++k)
      step_serial(update.run[k].rates, Shard<T>(update.run[k].at), update.run[k].count);
  };
  switch (dtype) {
    case DType::float32:
      return all(float{});
    case DType::float64:
      return all(double{});
    case DType::float16:
      return all(Half{});
    default:
      return all(BFloat16{});
  }
}

// Which protocol a call runs.
bool reduce(HostBlock& block, const View& view, const HostArithmetic& arithmetic, const Job& job,
            std::uint32_t epoch) {
  const auto* in = static_cast<const char*>(job.in);
  auto* out = static_cast<char*>(job.out);
  const std::size_t count = job.call.count;
  if (job.call.algorithm == Algorithm::ring) return ring(block, view, arithmetic, in, out, count);
  if (job.call.kind == Kind::reduce_scatter_v) {
    const Shares& shares = *job.shares;
    if (job.call.algorithm == Algorithm::one_shot)
      return reduce_scatter_v_one_shot(block, view, arithmetic, epoch, shares, out, count);
    if (job.direct) return reduce_scatter_v(block, view, arithmetic, job.peers, shares, out, count);
    return reduce_scatter_v_staged(block, view, arithmetic, shares, out, count);
  }
  if (job.call.algorithm == Algorithm::one_shot || job.direct)
    return reduce_direct(block, view, arithmetic, job, job.peers, epoch);
  if (job.call.kind == Kind::reduce_scatter)
    return reduce_scatter_staged(block, view, arithmetic, in, out, count);
  return two_shot_staged(block, view, arithmetic, in, out, count, job.far);
}

bool transfer(HostBlock& block, const View& view, const Job& job, std::uint32_t epoch) {
  const std::size_t item = item_bytes(job.call.dtype);
  const std::size_t bytes = job.call.count * item;
  const auto* in = static_cast<const char*>(job.in);
  auto* out = static_cast<char*>(job.out);
  if (job.call.kind == Kind::all_gather_v) {
    const Shares& shares = *job.shares;
    const std::size_t count = job.call.count;
    if (job.call.algorithm == Algorithm::one_shot)
      return all_gather_v_one_shot(block, view, epoch, shares, out, count, item);
    if (job.direct) return all_gather_v(block, view, job.peers, shares, out, count, item);
    return all_gather_v_staged(block, view, shares, out, count, item);
  }
  if (job.call.algorithm == Algorithm::one_shot || job.direct)
    return transfer_direct(block, view, job, job.peers, epoch);
  if (job.call.kind == Kind::all_gather) return all_gather_staged(block, view, in, out, bytes);
  return broadcast_staged(block, view, job.call.root, out, bytes);
}

// The factors of a call in the accumulator's type; `factors` is room for every rank's.
template <class A>
Scale<A> scale_of(A* factors, const Job& job, int world, const Scale<A>*) {
  bool some = false;
  for (int p = 0; p < world; ++p) {
    factors[p] = static_cast<A>(factor_of(job.calls[p]));
    some = some || factors[p] != 1;
  }
  return {some ? factors : nullptr, static_cast<A>(after_of(job.call, job.total))};
}

template <class A>
Divisor<A> scale_of(A*, const Job& job, int, const Divisor<A>*) {
  return {job.call.op == Op::mean ? static_cast<A>(job.total) : A(1)};
}

bool run_encoded(HostBlock& block, const View& view, const Job& job) {
  Coding coding = *static_cast<const Coding*>(job.in);
  coding.factor = encoded_factor(job.calls[view.rank], view.world(), job.total);
  HostCoder coder(coding);
  return encoded(block, view, coder);
}

bool run(HostBlock& block, const View& view, const Job& job, std::uint32_t epoch) {
  const Call& call = job.call;
  if (call.algorithm == Algorithm::encoded) return run_encoded(block, view, job);
  if (!reduces(call.kind)) return transfer(block, view, job, epoch);
  return visit_types(call.dtype, call.op, [&](auto type) {
    using T = typename decltype(type)::Element;
    using O = typename decltype(type)::Operation;
    AccOf<T> factors[kMaxRanks];
    const ScaleOf<T> scale =
        scale_of(factors, job, view.world(), static_cast<ScaleOf<T>*>(nullptr));
    const TypedArithmetic<T, O> typed(scale, view.rank);
    const auto with = [&](Gauge* gauge, const Update* update) {
      return reduce(block, view, HostArithmeticOf<T, O>(typed, job, gauge, update), job, epoch);
    };
    if (!measures_on_the_way(job, view.rank)) return with(nullptr, nullptr);
    if (job.measure == nullptr) return with(nullptr, job.update);
    Gauge gauge(*job.measure, block.index());
    return with(&gauge, nullptr);
  });
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
const Kernels instance{
    FR_STRING(FR_ISA), run,    run_pack, run_unpack, encode_message, reduce_messages,
    decode_message,    select, combine,  measure,    update};

}  // namespace FR_ISA
}  // namespace fastreduce
