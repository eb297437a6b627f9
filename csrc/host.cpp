#include "host.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <string>

namespace fastreduce {

// One instance per compiled instruction set, see host_kernels.cpp.
#if defined(__x86_64__) && !defined(FR_BASELINE_ONLY)
namespace avx2 {
extern const Kernels instance;
}
namespace avx512 {
extern const Kernels instance;
}
#endif
inline namespace baseline {
extern const Kernels instance;
}

const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
#if defined(__x86_64__) && !defined(FR_BASELINE_ONLY)
    const char* wanted = std::getenv("FASTREDUCE_ISA");
    const std::string limit = wanted == nullptr ? "" : wanted;
    __builtin_cpu_init();
    unsigned a = 0, b = 0, c = 0, d = 0;  // clang's builtin does not know f16c
    const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
    const bool has_avx2 = has_f16c && __builtin_cpu_supports("avx2") &&
                          __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                          __builtin_cpu_supports("bmi2");
    const bool has_avx512 =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512cd");
    if (has_avx2 && has_avx512 && limit != "avx2" && limit != "baseline") return avx512::instance;
    if (has_avx2 && limit != "baseline") return avx2::instance;
#endif
    return baseline::instance;
  }();
  return chosen;
}

namespace {

FR_FN void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

void sleep_on(std::uint32_t* word, std::uint32_t value, std::chrono::nanoseconds limit) {
  const timespec time{static_cast<time_t>(limit.count() / 1000000000),
                      static_cast<long>(limit.count() % 1000000000)};
  ::syscall(SYS_futex, word, FUTEX_WAIT, value, &time, nullptr, 0);
}

}  // namespace

void HostBlock::wake(Flag& flag) {
  ::syscall(SYS_futex, &flag.value, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

bool HostBlock::wait_slowly(Flag& flag, std::uint32_t value, int peer, Phase phase) {
  const auto begin = Clock::now();
  const bool seen = wait_since(begin, flag, value, peer, phase);
  Account* const account = watch_.account;
  if (account == nullptr) return seen;
  const auto waited = Clock::now() - begin;
  account->waited += waited;
  if (phase == Phase::enter && waited > account->latest_wait) {
    account->latest = peer;
    account->latest_wait = waited;
  }
  return seen;
}

bool HostBlock::wait_since(Clock::time_point begin, Flag& flag, std::uint32_t value, int peer,
                           Phase phase) {
  const auto arrived = [&] { return reached(load_acquire(&flag.value), value); };

  for (auto now = begin; now - begin < watch_.patience.spin; now = Clock::now()) {
    for (int i = 0; i < 32; ++i) {
      if (arrived()) return true;
      relax();
    }
  }
  const auto yield_end = watch_.patience.spin + watch_.patience.yield;
  while (Clock::now() - begin < yield_end) {
    ::sched_yield();
    if (arrived()) return true;
  }
  for (;;) {
    // Either the writer sees `sleeping`, or this thread sees the writer's value.
    store_ordered(&flag.sleeping, 1);
    const std::uint32_t seen = load_ordered(&flag.value);
    if (!reached(seen, value)) sleep_on(&flag.value, seen, kLook);
    store_release(&flag.sleeping, 0);
    if (arrived()) return true;

    Reason reason = hopeless(peer, phase);
    if (reason.failure == Failure::none && Clock::now() - begin >= watch_.timeout)
      reason = {Failure::timeout, peer};
    // What a peer did before it left still counts.
    if (arrived()) return true;
    if (reason.failure == Failure::none) continue;

    peer = reason.peer;
    failure_.failure = reason.failure;
    failure_.kind = watch_.kind;
    failure_.phase = phase;
    failure_.rank = watch_.view->rank;
    failure_.peer = peer;
    failure_.epoch = watch_.epoch;
    failure_.expected = value;
    failure_.seen = load_acquire(&flag.value);
    if (phase == Phase::enter) {
      // The last call that the peer has announced, in whichever parity.
      const View& view = *watch_.view;
      std::uint32_t last[2];
      for (std::uint32_t parity = 0; parity < 2; ++parity)
        last[parity] = load_acquire(&view.announcement(view.rank, peer, parity).flag.value);
      failure_.seen = reached(last[0], last[1]) ? last[0] : last[1];
    }
    // The first rank to give up knows best why.
    const int first = failed_peer(*watch_.view, watch_.epoch);
    if (first >= 0 && reason.failure != Failure::sibling) failure_ = watch_.view->failure(first);
    return false;
  }
}

HostBlock::Reason HostBlock::hopeless(int peer, Phase phase) const {
  const View& view = *watch_.view;
  const Failure stop = watch_.stop == nullptr ? Failure::none : watch_.stop->load();
  if (stop != Failure::none) return {stop, view.rank};
  if (watch_.siblings != nullptr && watch_.siblings->load()) return {Failure::sibling, view.rank};
  if (watch_.interrupted != nullptr && *watch_.interrupted && (*watch_.interrupted)())
    return {Failure::interrupted, peer};
  for (int p = 0; p < view.world(); ++p) {
    if (p == view.rank) continue;
    const auto state = static_cast<State>(load_acquire(&view.state(view.rank, p).value));
    if (state == State::failed && reached(watch_.epoch, view.given_up(p)))
      return {Failure::closed, p};
    // A peer that has left is missed by whoever waits for it. Before a call has begun, it is
    // missed by all.
    const bool missed =
        p == peer ||
        (phase == Phase::enter &&
         !reached(load_acquire(&view.announcement(view.rank, p, watch_.epoch).flag.value),
                  watch_.epoch));
    if (!missed) continue;
    if (state == State::closed) return {Failure::closed, p};
    if (watch_.peers == nullptr || !watch_.peers->lost(p)) continue;
    // Whoever closes says so before it hangs up.
    const auto last = static_cast<State>(load_acquire(&view.state(view.rank, p).value));
    return {last == State::open ? Failure::lost : Failure::closed, p};
  }
  return {Failure::none, peer};
}

}  // namespace fastreduce
