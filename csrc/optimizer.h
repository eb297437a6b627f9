// One step of an optimizer, fused: what torch.optim's loops do in a pass over memory for each
// operation happens here element by element, with the same roundings: each operation is rounded
// once, and where torch's operators multiply and add in one, so does fma() here.
//
//   sgd    g += decay w;  m = momentum m + (1 - dampening) g;  g = nesterov ? g + momentum m : m
//          w -= rate g
//   adam   g += decay w;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g g
//          w -= rate / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//   adamw  w *= 1 - rate decay, and then as adam without decay
//
// 16-bit parameters are rounded from a copy in float32, which is what is updated.
#pragma once

#include <cmath>

#include "element.h"

namespace fastreduce {

enum class Rule : std::int32_t { sgd, adam, adamw };

// What is the same for all elements in a step. All but the flags as torch's operators get it, in
// double; it is rounded to the accumulator's type once, as they do.
struct Rates {
  Rule rule = Rule::sgd;
  bool maximize = false;
  bool first = false;      // sgd: there is no momentum yet
  bool nesterov = false;   //
  double scale = 1;        // of the gradient, ahead of all
  double rate = 0;         // sgd: the learning rate; else it, over the first moment's correction
  double decay = 0;        // adamw: the factor of the parameter, 1 for none
  double momentum = 0;     // sgd
  double dampening = 0;    //
  double beta1 = 0;        // adam, adamw
  double beta2 = 0;        //
  double correction2 = 1;  // the square root of the second moment's
  double eps = 0;          //
};

// Where elements lie that are updated: those that are stored as the parameter is, and those in its
// accumulator's type.
struct Stretch {
  const void* gradient = nullptr;
  void* parameter = nullptr;
  void* master = nullptr;  // where the parameter's type is narrower
  void* moment = nullptr;  // of sgd with momentum, of adam
  void* square = nullptr;  // of adam
};

// What is to be done with gradients once they have been reduced: runs of elements, each with rates
// of its own, in ascending order of where their gradients lie.
struct Update {
  struct Run {
    Stretch at;
    std::uint64_t count;
    Rates rates;
  };
  const Run* run = nullptr;
  std::size_t runs = 0;
};

inline namespace FR_ISA {

template <class T>
struct Shard {
  using A = AccOf<T>;
  FR_FN explicit Shard(const Stretch& at)
      : gradient(static_cast<const T*>(at.gradient)),
        parameter(static_cast<T*>(at.parameter)),
        master(static_cast<A*>(at.master)),
        moment(static_cast<A*>(at.moment)),
        square(static_cast<A*>(at.square)) {}
  FR_FN Shard from(std::size_t i) const {
    Shard later = *this;
    later.gradient += i;
    later.parameter += i;
    if (master != nullptr) later.master += i;
    if (moment != nullptr) later.moment += i;
    if (square != nullptr) later.square += i;
    return later;
  }
  const T* gradient;
  T* parameter;
  A* master;
  A* moment;
  A* square;
};

FR_FN float fused(float a, float b, float c) { return std::fma(a, b, c); }
FR_FN double fused(double a, double b, double c) { return std::fma(a, b, c); }

// The scalars of a step in the accumulator's type.
template <class A>
struct RatesIn {
  FR_FN explicit RatesIn(const Rates& rates)
      : scale(static_cast<A>(rates.maximize ? -rates.scale : rates.scale)),
        down(static_cast<A>(-rates.rate)),
        decay(static_cast<A>(rates.decay)),
        momentum(static_cast<A>(rates.momentum)),
        fresh(static_cast<A>(1 - rates.dampening)),
        weight(static_cast<A>(1 - rates.beta1)),
        beta2(static_cast<A>(rates.beta2)),
        fresh2(static_cast<A>(1 - rates.beta2)),
        correction2(static_cast<A>(rates.correction2)),
        eps(static_cast<A>(rates.eps)) {}
  A scale, down, decay, momentum, fresh, weight, beta2, fresh2, correction2, eps;
};

template <bool Decays, bool Remembers, bool First, bool Nesterov, class A>
FR_FN A step_sgd(const RatesIn<A>& r, A g, A w, A* m) {
  if constexpr (Decays) g = fused(w, r.decay, g);
  if constexpr (Remembers) {
    const A now = First ? g : fused(g, r.fresh, *m * r.momentum);
    *m = now;
    g = Nesterov ? fused(now, r.momentum, g) : now;
  }
  return fused(g, r.down, w);
}

// torch's lerp comes from the nearer end.
template <bool Decays, bool Decoupled, bool Near, class A>
FR_FN A step_adam(const RatesIn<A>& r, A g, A w, A* m, A* v) {
  if constexpr (Decays) {
    if constexpr (Decoupled)
      w = w * r.decay;
    else
      g = fused(w, r.decay, g);
  }
  *m = Near ? fused(g - *m, r.weight, *m) : fused(g - *m, r.weight - 1, g);
  *v = fused(r.fresh2 * g, g, *v * r.beta2);
  const A scale = std::sqrt(*v) / r.correction2 + r.eps;
  return w + r.down * *m / scale;
}

}  // namespace FR_ISA
}  // namespace fastreduce
