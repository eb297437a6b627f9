// Warps whose lanes are coroutines of one thread. A lane runs until it needs the others, the last
// one first, so that what it reads of theirs without having waited is not there yet, in every run.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

namespace fastreduce::test {

// What can be broken, and has to be noticed.
enum class Fault { none, no_sync, other_order };

constexpr int kLanes = 32;

class Warp {
 public:
  // Runs body(lane) for every lane.
  void run(const std::function<void(int)>& body) {
    body_ = &body;
    waits_.assign(kLanes, 0);
    ended_.assign(kLanes, false);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (stacks_[lane] == nullptr) stacks_[lane] = std::unique_ptr<char[]>(new char[kStack]);
      ::getcontext(&contexts_[lane]);
      contexts_[lane].uc_stack.ss_sp = stacks_[lane].get();
      contexts_[lane].uc_stack.ss_size = kStack;
      contexts_[lane].uc_link = lane == 0 ? &whole_ : &contexts_[lane - 1];
      ::makecontext(&contexts_[lane], &Warp::enter, 0);
    }
    current = this;
    running_ = kLanes - 1;
    ::swapcontext(&whole_, &contexts_[running_]);
    for (const auto& waits : waits_) expect(waits == waits_[0]);
  }
  // Returns once every lane has come here.
  void wait() {
    const int lane = running_;
    ++waits_[lane];
    running_ = lane == 0 ? kLanes - 1 : lane - 1;
    expect(!ended_[running_]);
    ::swapcontext(&contexts_[lane], &contexts_[running_]);
    running_ = lane;
  }
  // What each lane gives, of all, for the next wait: two sets, since the first lane to leave one
  // comes to the next before the others have read.
  std::uint32_t exchange(std::uint32_t word, int with) { return told(word)[with]; }
  std::uint32_t ballot(bool value) {
    const std::uint32_t* const words = told(value);
    std::uint32_t bits = 0;
    for (int lane = 0; lane < kLanes; ++lane) bits |= words[lane] << lane;
    return bits;
  }

 private:
  static constexpr std::size_t kStack = 64 << 10;
  static thread_local Warp* current;

  const std::uint32_t* told(std::uint32_t word) {
    std::uint32_t* const words = words_[waits_[running_] % 2];
    words[running_] = word;
    wait();
    return words;
  }

  static void expect(bool holds) {
    if (holds) return;
    std::fprintf(stderr, "some lanes of a warp have waited for others that do not wait\n");
    std::abort();
  }

  static void enter() {
    Warp& warp = *current;
    const int lane = warp.running_;
    (*warp.body_)(lane);
    warp.ended_[lane] = true;
    warp.running_ = lane - 1;  // whom uc_link names
  }

  const std::function<void(int)>* body_ = nullptr;
  std::unique_ptr<char[]> stacks_[kLanes];
  ucontext_t contexts_[kLanes];
  ucontext_t whole_;
  std::vector<std::uint64_t> waits_;
  std::vector<bool> ended_;
  std::uint32_t words_[2][kLanes];
  int running_ = 0;
};

inline thread_local Warp* Warp::current = nullptr;

struct HostLanes {
  Warp* warp;
  int index;
  Fault fault;

  std::uint32_t lane() const { return static_cast<std::uint32_t>(index); }
  std::uint32_t other(std::uint32_t word, int apart) const {
    if (fault == Fault::other_order) apart = kLanes / 2 / apart;
    return warp->exchange(word, index ^ apart);
  }
  void sync() const {
    if (fault != Fault::no_sync) warp->wait();
  }
  bool all(bool value) const { return warp->ballot(value) == ~0u; }
  std::uint32_t ballot(bool value) const { return warp->ballot(value); }
};

}  // namespace fastreduce::test
