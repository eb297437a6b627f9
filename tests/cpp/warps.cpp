// The kernels of the wire formats, a shared library for Python: warps whose lanes are coroutines of
// one thread. A lane runs until it needs the others, the last one first, so that what it reads of
// theirs without having waited is not there yet, in every run.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "device_norm.h"
#include "device_topk.h"
#include "wire_tables.h"

namespace fastreduce::test {
namespace {

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
      if (stacks_[lane] == nullptr) stacks_[lane] = std::make_unique<char[]>(kStack);
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

thread_local Warp* Warp::current = nullptr;

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

template <bool Few>
void run(const WireLaunch& launch, int warps, Fault fault) {
  Warp warp;
  for (int w = 0; w < warps; ++w)
    warp.run([&](int lane) {
      DeviceTeam<HostLanes, Few> team({&warp, lane, fault});
      if (launch.step == WireStep::encode)
        encode_messages(team, launch, w, warps);
      else if (launch.step == WireStep::reduce)
        reduce_messages(team, launch, w, warps);
      else
        decode_messages(team, launch, w, warps);
    });
}

// Warps take turns.
struct PlainAtomics {
  void add(std::uint64_t* at, std::uint64_t value) const { *at += value; }
  void raise(std::uint64_t* at, std::uint64_t value) const { *at = *at < value ? value : *at; }
};

}  // namespace
}  // namespace fastreduce::test

using namespace fastreduce;

extern "C" {

// Numbers of a span as PlanTables::Row has them.
struct RowNumbers {
  std::uint64_t offset, count, key, format, stochastic, run;
};

void* make_plan(int world, const RowNumbers* rows, int spans) {
  std::vector<PlanTables::Row> table;
  for (const RowNumbers* row = rows; row != rows + spans; ++row)
    table.emplace_back(row->offset, row->count, static_cast<std::uint32_t>(row->key),
                       static_cast<int>(row->format), row->stochastic != 0, row->run);
  return new PlanTables(world, table);
}

void free_plan(void* plan) { delete static_cast<PlanTables*>(plan); }

std::uint64_t message_bytes(const void* plan, int chunk) {
  return static_cast<const PlanTables*>(plan)->plan().bytes(chunk);
}

// One kernel over so many warps; `few` is which of two kernels reduces.
void launch(const void* plan, Address gradient, int dtype, int rank, double factor,
            const float* factor_at, const void* residuals, int residual_dtype,
            const std::uint8_t* absent, std::uint64_t seed, std::uint32_t step,
            std::uint32_t* finite, int what, const char* from, std::uint64_t stride, char* to,
            int warps, bool few, int fault) {
  const auto& tables = *static_cast<const PlanTables*>(plan);
  const std::string image = tables.image();
  std::vector<std::uint64_t> memory((image.size() + 7) / 8);  // as on a device: copied, aligned
  std::memcpy(memory.data(), image.data(), image.size());
  const char* const base = reinterpret_cast<const char*>(memory.data());
  WireLaunch launch;
  launch.step = static_cast<WireStep>(what);
  launch.coding =
      coding_of(tables.plan_at(base), gradient, dtype, rank, factor, residual_dtype, seed, step);
  launch.coding.residuals = static_cast<const Residuals*>(residuals);
  launch.coding.absent = absent;
  launch.coding.finite = finite;
  launch.messages = tables.messages_at(base);
  launch.factor = factor_at;
  launch.from = from;
  launch.stride = stride;
  launch.to = to;
  const auto broken = static_cast<fastreduce::test::Fault>(fault);
  if (few)
    fastreduce::test::run<true>(launch, warps, broken);
  else
    fastreduce::test::run<false>(launch, warps, broken);
}

std::uint64_t tiles(const void* plan) {
  const Plan& own = static_cast<const PlanTables*>(plan)->plan();
  return tiles_of(own.span, own.spans);
}

std::uint64_t search_bytes() { return sizeof(Search); }

// One step of device_topk.h.
void choose(const void* plan, Address gradient, int dtype, int rank, double factor,
            const void* residuals, const std::uint8_t* absent, std::uint64_t seed,
            std::uint32_t step, std::uint32_t* finite, int what, int digit, bool random,
            std::uint64_t k, float threshold, void* search, std::uint32_t* table, char* messages,
            int warps, int fault) {
  const auto& tables = *static_cast<const PlanTables*>(plan);
  SelectLaunch launch;
  launch.step = static_cast<SelectStep>(what);
  launch.coding = coding_of(tables.plan(), gradient, dtype, rank, factor,
                            static_cast<int>(DType::float32), seed, step);
  launch.coding.residuals = static_cast<const Residuals*>(residuals);
  launch.coding.absent = absent;
  launch.coding.finite = finite;
  launch.selection = {random, k, magnitude_of(threshold)};
  launch.digit = digit;
  launch.search = static_cast<Search*>(search);
  launch.tiles = tiles(plan);
  launch.table = table;
  launch.messages = messages;
  fastreduce::test::Warp warp;
  const auto broken = static_cast<fastreduce::test::Fault>(fault);
  // Blocks count for themselves first.
  std::vector<std::uint32_t> count(kDigitValues);
  if (launch.step == SelectStep::settle) warps = 1;
  for (int w = 0; w < warps; ++w)
    warp.run([&](int lane) {
      const DeviceTeam<fastreduce::test::HostLanes, true> team({&warp, lane, broken});
      switch (launch.step) {
        case SelectStep::count:
          return count_digits(team, fastreduce::test::PlainAtomics{}, launch, w, warps,
                              [&](std::uint32_t value) { ++count[value]; });
        case SelectStep::settle:
          return settle_digit(team, launch);
        case SelectStep::tally:
          return tally_tiles(team, launch, w, warps);
        case SelectStep::emit:
          return emit_tiles(team, launch, w, warps);
        case SelectStep::find:
          return find_entries(team, launch, w, warps);
        case SelectStep::combine:
          return combine_tiles(team, launch, w, warps);
      }
    });
  if (launch.step == SelectStep::count)
    for (std::uint32_t i = 0; i < kDigitValues; ++i) launch.search->count[i] += count[i];
}

// Norms of every section, added to `norms`.
void measure(int dtype, const void* tensor, std::uint64_t begin, std::uint64_t end,
             const std::uint64_t* ends, std::uint64_t sections, Norm* norms, int warps, int fault) {
  std::vector<NormBins> bins(sections, NormBins{});
  NormLaunch launch;
  launch.dtype = static_cast<DType>(dtype);
  launch.tensor = tensor;
  launch.begin = begin;
  launch.end = end;
  launch.ends = ends;
  launch.sections = sections;
  launch.bins = bins.data();
  fastreduce::test::Warp warp;
  const auto broken = static_cast<fastreduce::test::Fault>(fault);
  for (int w = 0; w < warps; ++w)
    warp.run([&](int lane) {
      const fastreduce::test::HostLanes lanes{&warp, lane, broken};
      measure_on(lanes, fastreduce::test::PlainAtomics{}, launch, static_cast<std::size_t>(w),
                 static_cast<std::size_t>(warps));
    });
  for (std::size_t s = 0; s < sections; ++s) merge(norms[s], norm_of(bins[s]));
}
}
