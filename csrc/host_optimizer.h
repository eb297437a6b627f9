// How one host thread steps an optimizer; see optimizer.h.
#pragma once

#include <algorithm>

#include "host_loops.h"
#include "optimizer.h"

namespace fastreduce {
inline namespace FR_ISA {

// Calls visit(flag) with a flag that the compiler knows.
template <class Visit>
void with(bool flag, const Visit& visit) {
  flag ? visit(std::true_type{}) : visit(std::false_type{});
}

// step(g, w, i) gives the new parameter for every element i, in loops that are vectorised.
template <class T, class Step>
void step_each(const Shard<T>& shard, std::size_t n, AccOf<T> scale, const Step& step) {
  using A = AccOf<T>;
  if constexpr (std::is_same<T, A>::value) {
    const T* const gradient = shard.gradient;
    T* const parameter = shard.parameter;
    FR_INDEPENDENT
    for (std::size_t i = 0; i < n; ++i) parameter[i] = step(scale * gradient[i], parameter[i], i);
  } else {
    alignas(64) A wide[kTile];
    for (std::size_t base = 0; base < n; base += kTile) {
      const std::size_t m = n - base < kTile ? n - base : kTile;
      widen(wide, shard.gradient + base, m);
      A* const master = shard.master + base;
      FR_INDEPENDENT
      for (std::size_t i = 0; i < m; ++i) master[i] = step(scale * wide[i], master[i], base + i);
      narrow(shard.parameter + base, master, m);
    }
  }
}

template <class T>
void step_serial(const Rates& rates, const Shard<T>& shard, std::size_t n) {
  using A = AccOf<T>;
  const RatesIn<A> in(rates);
  A* const moment = shard.moment;
  A* const square = shard.square;
  if (rates.rule == Rule::sgd) {
    with(rates.decay != 0, [&](auto decays) {
      const auto run = [&](auto remembers, auto first, auto nesterov) {
        step_each(shard, n, in.scale, [=](A g, A w, std::size_t i) {
          A* const m = decltype(remembers)::value ? moment + i : nullptr;
          return step_sgd<decays, remembers, first, nesterov>(in, g, w, m);
        });
      };
      if (rates.momentum == 0) return run(std::false_type{}, std::false_type{}, std::false_type{});
      with(rates.first, [&](auto first) {
        with(rates.nesterov, [&](auto nesterov) { run(std::true_type{}, first, nesterov); });
      });
    });
    return;
  }
  const bool decoupled = rates.rule == Rule::adamw;
  const bool decays = decoupled ? rates.decay != 1 : rates.decay != 0;
  with(1 - rates.beta1 < 0.5, [&](auto near) {
    const auto run = [&](auto decays, auto decoupled) {
      step_each(shard, n, in.scale, [=](A g, A w, std::size_t i) {
        return step_adam<decays, decoupled, near>(in, g, w, moment + i, square + i);
      });
    };
    if (!decays) return run(std::false_type{}, std::false_type{});
    with(decoupled, [&](auto decoupled) { run(std::true_type{}, decoupled); });
  });
}

// Those elements whose gradients lie in n from `gradient` on.
template <class T>
void update_serial(const Update& update, const T* gradient, std::size_t n) {
  const auto first = [](const Update::Run& run) { return static_cast<const T*>(run.at.gradient); };
  const Update::Run* const end = update.run + update.runs;
  const Update::Run* run = std::partition_point(
      update.run, end, [&](const auto& each) { return first(each) + each.count <= gradient; });
  for (; run != end && first(*run) < gradient + n; ++run) {
    const Shard<T> shard(run->at);
    const std::size_t skipped = shard.gradient < gradient ? gradient - shard.gradient : 0;
    const std::size_t left = gradient + n - shard.gradient;
    step_serial(run->rates, shard.from(skipped), (left < run->count ? left : run->count) - skipped);
  }
}

}  // namespace FR_ISA
}  // namespace fastreduce
