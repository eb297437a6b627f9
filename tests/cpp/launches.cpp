// The launch side of the CUDA target, over a driver that runs each kernel's body on threads: ranks
// of one process, each with a stream of its own.
//
//   launches list            the cases
//   launches CASE [SABOTAGE]   of encoded calls: no_wait, no_block_barrier
//
// Exit status: 0, 1 after a difference, else the sanitizer's.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda_communicator.h"
#include "device.h"
#include "device_wire.h"
#include "encoding.h"
#include "lanes.h"
#include "ranks.h"
#include "reference.h"

namespace fastreduce {

// host.cpp refers to the kernels, which here are not called through it.
inline namespace baseline {
extern const Kernels instance;
const Kernels instance{"none",  nullptr, nullptr, nullptr, nullptr,
                       nullptr, nullptr, nullptr, nullptr};
}  // namespace baseline

namespace test {
namespace {

int failures = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
}

// A thread of a kernel.
struct HostTarget {
  int index_;
  int count_;
  int thread_;
  int threads_;
  Gate* gate;
  BlockShared* memory;

  int index() const { return index_; }
  int count() const { return count_; }
  int thread() const { return thread_; }
  int threads() const { return threads_; }
  bool all(bool value) const { return gate->all(value); }
  BlockShared& shared() const { return *memory; }
  std::uint64_t nanoseconds() const {
    std::this_thread::yield();
    return static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
  }
  bool first(std::uint32_t& word) const {
    return __atomic_exchange_n(&word, 1u, __ATOMIC_ACQ_REL) == 0;
  }
  std::uint32_t count_up(std::uint32_t& word) const {
    return __atomic_add_fetch(&word, 1u, __ATOMIC_ACQ_REL);
  }
  std::uint32_t look(const std::uint32_t& word) const {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
  }
};

// What is broken in encoded calls, once they are agreed on.
Action sabotage = Action::none;

struct HostDevice : DeviceBlock<HostTarget> {
  bool encodes = false;

  using DeviceBlock::DeviceBlock;
  bool all(bool value) {
    return encodes && sabotage == Action::no_block_barrier ? value : DeviceBlock::all(value);
  }
  bool wait(Flag& flag, std::uint32_t value, int peer, Phase phase) {
    return (encodes && sabotage == Action::skip_wait) ||
           DeviceBlock::wait(flag, value, peer, phase);
  }
};

// As a kernel's: factors are known only after the agreement. With an address that stands for all
// ranks' memory: that of rank 0's.
template <class T, class O>
struct Emulated {
  const HostDevice& own;
  const Launch& launch;

  using Typed = TypedArithmetic<T, O>;
  Typed typed() const {
    const auto* kind = static_cast<const ScaleOf<T>*>(nullptr);
    return Typed(factors_of(own.shared(), kind), launch.view.rank);
  }
  std::size_t item_bytes() const { return Typed::item_bytes(); }
  std::size_t partial_bytes() const { return Typed::partial_bytes(); }
  std::size_t grain() const { return Typed::grain(); }
  template <class... Arguments>
  void reduce(Arguments&&... arguments) const {
    typed().reduce(arguments...);
  }
  template <class... Arguments>
  bool reduce_lines(Arguments&&... arguments) const {
    return typed().reduce_lines(arguments...);
  }
  template <class... Arguments>
  void open_partial(Arguments&&... arguments) const {
    typed().open_partial(arguments...);
  }
  template <class... Arguments>
  void add_partial(Arguments&&... arguments) const {
    typed().add_partial(arguments...);
  }
  template <class... Arguments>
  void close_partial(Arguments&&... arguments) const {
    typed().close_partial(arguments...);
  }
  void reduce_everywhere(HostDevice& block, char* everywhere, std::size_t n) const {
    const Segment& segment = launch.segments[launch.job.call.segment];
    const auto at = [&](int p) { return segment.base[p] + (everywhere - segment.everywhere); };
    const int world = launch.view.world();
    reduce(block, at, world, at, world, n);
  }
};

// A thread stands for a warp, whose lanes take turns in it.
class PlayedCoder {
  struct PlayedLanes : HostLanes {
    std::uint32_t warp_;
    std::uint32_t warps_;
    std::uint32_t warp() const { return warp_; }
    std::uint32_t warps() const { return warps_; }
  };
  using Coder = DeviceCoder<PlayedLanes>;

 public:
  static constexpr bool kGathers = Coder::kGathers;

  PlayedCoder(HostDevice& block, const Coding& coding) : block_(block), coding_(coding) {
    block.encodes = true;
  }

  const Plan& plan() const { return coding_.plan; }
  static constexpr bool lands() { return false; }
  void encode(int chunk, Range runs, char* to) {
    each_lane([&](const Coder& coder) { coder.encode(chunk, runs, to); });
  }
  template <class From>
  void reduce(Range runs, const From& from, char* to) {
    each_lane([&](const Coder& coder) { coder.reduce(runs, from, to); });
  }
  void decode(int chunk, Range runs, const char* from) {
    each_lane([&](const Coder& coder) { coder.decode(chunk, runs, from); });
  }

 private:
  template <class Body>
  void each_lane(const Body& body) {
    warp_.run([&](int lane) {
      const auto number = static_cast<std::uint32_t>(block_.thread());
      const auto count = static_cast<std::uint32_t>(block_.threads());
      body(Coder({{&warp_, lane, Fault::none}, number, count}, coding_));
    });
  }

  const HostDevice& block_;
  const Coding& coding_;
  Warp warp_;
};

void run_kernel(HostDevice block, const Launch& launch) {
  const Call& call = launch.job.call;
  run_call(block, launch, [&](HostDevice& each, std::uint32_t epoch) {
    if (call.kind != Kind::all_reduce && call.kind != Kind::reduce_scatter)
      return transfer_call(each, launch, epoch);
    if (call.algorithm == Algorithm::encoded)
      return encoded_call(
          each, launch, [&](const Coding& coding) { return PlayedCoder(each, coding); }, epoch);
    // Three types stand for all: each costs seconds to compile.
    const auto with = [&](auto element) {
      using T = decltype(element);
      const Emulated<T, Sum> arithmetic{each, launch};
      if (call.algorithm == Algorithm::low_latency)
        low_latency_call(each, launch, arithmetic, epoch);
      else if (call.algorithm == Algorithm::ring)
        ring_call(each, launch, arithmetic, epoch);
      else
        reduce_call(each, launch, arithmetic, epoch);
    };
    if (call.dtype == DType::bfloat16) return with(BFloat16());
    if (call.dtype == DType::int32) return with(std::int32_t());
    with(float());
  });
}

// One rank's device: what is launched runs in order, on a thread of its own.
class ThreadDriver final : public Driver {
 public:
  static constexpr int kThreads = 3;  // of a block

  ~ThreadDriver() override { join(); }
  std::string problem() override { return ""; }
  int resident_blocks() override { return kGridLimit; }
  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    if (::posix_memalign(&memory, 4096, bytes) != 0) throw std::bad_alloc();
    std::memset(memory, 0xa5, bytes);
    return memory;
  }
  void release(void* memory) override { std::free(memory); }
  std::pair<void*, void*> allocate_mapped(std::size_t bytes) override {
    void* memory = allocate(bytes);
    return {memory, memory};
  }
  void release_mapped(void* memory) override { std::free(memory); }
  void copy(void* to, const void* from, std::size_t bytes) override {
    // A word of a peer's flags may be polled meanwhile.
    if (bytes == sizeof(std::uint32_t))
      store_release(static_cast<std::uint32_t*>(to), *static_cast<const std::uint32_t*>(from));
    else
      std::memcpy(to, from, bytes);
  }
  void synchronise() override {
    join();
    end_ = Clock::now();
  }
  void convert(const Moves&, Address) override {}
  void wire(const WireLaunch&, Address) override {}
  void select(const SelectLaunch&, Address) override {}
  void norm(const NormLaunch&, Address) override {}

  void launch(const Launch& launch, int blocks, Address) override {
    grids.push_back(blocks);
    if (grids.size() == 1) begin_ = Clock::now();
    std::thread before = std::move(last_);
    last_ = std::thread([launch, blocks, before = std::move(before)]() mutable {
      if (before.joinable()) before.join();
      std::vector<std::unique_ptr<Gate>> gates;
      std::vector<BlockShared> memory(blocks);
      std::vector<std::thread> threads;
      for (int b = 0; b < blocks; ++b) gates.push_back(std::make_unique<Gate>(kThreads));
      for (int b = 0; b < blocks; ++b)
        for (int t = 0; t < kThreads; ++t)
          threads.emplace_back([&, b, t] {
            run_kernel(HostDevice({b, blocks, t, kThreads, gates[b].get(), &memory[b]}), launch);
          });
      for (auto& each : threads) each.join();
    });
  }
  void join() {
    if (last_.joinable()) last_.join();
  }
  // From the first launch to the end of the last.
  double seconds() const { return std::chrono::duration<double>(end_ - begin_).count(); }

  std::vector<int> grids;

 private:
  std::thread last_;
  Clock::time_point begin_;
  Clock::time_point end_;
};

constexpr int kBlocks = 3;
constexpr std::size_t kRecord = 512;  // of the runs of encoded calls, at most
constexpr std::size_t kSegmentBytes = 1 << 16;

// Ranks, their control areas, and one segment of memory of each that the others reach.
class Group {
  Layout layout_;
  std::vector<std::vector<char>> areas_;  // outlive those who use them
  std::vector<std::vector<char>> segments_;

 public:
  explicit Group(int world, std::uint32_t first_epoch = 0,
                 std::chrono::nanoseconds timeout = std::chrono::seconds(30),
                 std::size_t stage_bytes = 0)
      : layout_{world, kBlocks, 4096,
                std::max(stage_bytes, 4 * 64 * static_cast<std::size_t>(world + 1)), 2048} {
    std::vector<Address> areas;
    std::vector<Address> bases;
    for (int r = 0; r < world; ++r) {
      drivers.push_back(std::make_unique<ThreadDriver>());
      areas_.emplace_back(layout_.bytes() + kLineBytes);
      segments_.emplace_back(kSegmentBytes + kLineBytes);
      areas.push_back(aligned(areas_.back()));
      bases.push_back(aligned(segments_.back()));
    }
    for (int r = 0; r < world; ++r) {
      ranks.push_back(
          std::make_unique<CudaCommunicator>(*drivers[r], layout_, r, areas, timeout, first_epoch));
      ranks[r]->add_segment(1, bases, bases[0], kSegmentBytes);
    }
  }
  ~Group() {
    for (auto& each : drivers) each->join();
  }
  int world() const { return layout_.world; }
  template <class T>
  T* segment(int rank, std::size_t offset = 0) {
    return reinterpret_cast<T*>(aligned(segments_[rank]) + offset);
  }

  std::vector<std::unique_ptr<ThreadDriver>> drivers;
  std::vector<std::unique_ptr<CudaCommunicator>> ranks;

 private:
  static Address aligned(std::vector<char>& memory) {
    return (reinterpret_cast<Address>(memory.data()) + kLineBytes - 1) / kLineBytes * kLineBytes;
  }
};

Call all_reduce_of(std::size_t count, Algorithm algorithm, Op op = Op::sum) {
  Call call;
  call.kind = Kind::all_reduce;
  call.algorithm = algorithm;
  call.op = op;
  call.count = count;
  return call;
}

constexpr Algorithm kAlgorithms[] = {Algorithm::low_latency, Algorithm::one_shot,
                                     Algorithm::two_shot, Algorithm::ring, Algorithm::multimem};
constexpr const char* kNames[] = {"one_shot", "two_shot", "ring", "low_latency", "multimem"};

template <class T>
T value_of(Random& random) {
  const double number = static_cast<double>(random.below(2000)) / 16 - 60;
  return narrowed<T>(static_cast<AccOf<T>>(number));
}

// All-reduces, mean, of other sizes, grids and places in every call; several are launched before
// the host waits for any. Tensors lie at other places of the segment on every rank.
template <class T>
void check_all_reduce(int world, DType dtype, std::uint32_t first_epoch) {
  Group group(world, first_epoch);
  Random random(world * 977u + first_epoch);
  constexpr int kTogether = 4;
  for (int round = 0; round < 6; ++round) {
    struct Made {
      Call call;
      Factors factors;
      std::vector<double> weights;
      std::vector<T*> at;
      std::vector<T> expected;
    };
    std::vector<Made> calls;
    std::vector<std::vector<T>> own(static_cast<std::size_t>(world) * kTogether);
    for (int c = 0; c < kTogether; ++c) {
      Algorithm algorithm = kAlgorithms[(round * kTogether + c) % 5];
      if (algorithm == Algorithm::multimem && dtype == DType::int32)
        algorithm = Algorithm::two_shot;
      const bool direct = algorithm == Algorithm::two_shot || algorithm == Algorithm::multimem;
      std::size_t count = random.below(2048 / sizeof(T)) + 1;
      if (algorithm == Algorithm::multimem) count = (count + 15) / 16 * 16;
      const bool alike = random.below(2) == 0;
      Made made{all_reduce_of(count, algorithm, Op::mean), {}, {}, {}, {}};
      made.call.dtype = dtype;
      // The switch knows one factor for all.
      const bool scaled = !std::is_integral<T>::value;
      const bool weighted = scaled && algorithm != Algorithm::multimem;
      const Factors factors{scaled ? 0.75 : 1.0, 1, world, !weighted};
      made.factors = factors;
      double total = 0;
      for (int r = 0; r < world; ++r) {
        // Who is absent counts for nothing beside weights, and like the others without them.
        const bool absent = r == world - 1 && round % 2 == 1;
        made.weights.push_back(absent ? kAbsent : weighted ? r + 0.5 : kOrdinary);
        total += absent && weighted ? 0 : weighted ? r + 0.5 : 1;
      }
      for (int r = 0; r < world; ++r) {
        std::vector<T>& mine = own[c * world + r];
        mine.resize(count);
        const std::size_t place = c * 8192 + (alike ? 0 : 64 * static_cast<std::size_t>(r));
        made.at.push_back(direct ? group.segment<T>(r, place) : mine.data());
        for (std::size_t i = 0; i < count; ++i) made.at[r][i] = value_of<T>(random);
      }
      std::vector<AccOf<T>> leaves(world);
      int chunk = 0;
      for (std::size_t i = 0; i < count; ++i) {
        for (int r = 0; r < world; ++r)
          leaves[r] = scaled_input(static_cast<AccOf<T>>(widened(made.at[r][i])), factors, r);
        while (i >= chunk_of(count, world, chunk, sizeof(T)).end) ++chunk;
        const auto sum =
            algorithm == Algorithm::ring ? in_ring<Sum>(leaves, chunk) : in_tree<Sum>(leaves);
        const auto mean = std::is_integral<T>::value
                              ? sum / static_cast<AccOf<T>>(world)
                              : sum * (AccOf<T>(1) / static_cast<AccOf<T>>(total));
        made.expected.push_back(narrowed<T>(mean));
      }
      calls.push_back(std::move(made));
    }
    for (const Made& made : calls)
      for (int r = 0; r < world; ++r) {
        Call call = made.call;
        call.scale = made.factors.of(r);
        call.weight = made.weights[r];
        group.ranks[r]->run(call, made.at[r], made.at[r], 1 + round % kBlocks, 0);
      }
    for (auto& driver : group.drivers) driver->join();
    for (auto& rank : group.ranks) rank->check();
    for (const Made& made : calls)
      for (int r = 0; r < world; ++r)
        expect(std::memcmp(made.at[r], made.expected.data(), made.expected.size() * sizeof(T)) == 0,
               std::string(kNames[static_cast<int>(made.call.algorithm)]) + " of " +
                   std::to_string(made.call.count) + " on " + std::to_string(world) +
                   " ranks, rank " + std::to_string(r) + ", round " + std::to_string(round));
  }
}

void all_reduce() {
  for (const int world : {2, 3, 4, 8}) check_all_reduce<float>(world, DType::float32, 0u - 7);
  check_all_reduce<BFloat16>(4, DType::bfloat16, 0x80000000u - 5);
  check_all_reduce<std::int32_t>(3, DType::int32, 0);
}

// One of a buffer's ranks in one step.
struct Encoded {
  Values gradient;
  std::unique_ptr<Told> told;
};

// Parameters of all formats, and what the ranks keep of them.
struct Parameters {
  std::vector<Span> spans;
  std::unique_ptr<Planned> planned;
  std::uint64_t elements = 1;  // off the alignment of packs
  std::vector<Holding> holdings;

  Parameters(int world, DType residual_dtype, Random& random) {
    for (int f = 0; f < kFormats; ++f)
      for (const bool stochastic : {false, true}) {
        Span span{elements,
                  random.below(900),
                  random.next() << 1 ^ random.next(),
                  static_cast<Format>(f),
                  stochastic,
                  32};
        for (const std::uint16_t run : {60, 96, 128, 480})
          if (random.below(2) == 0 && record_bytes(span.format, run) <= kRecord) span.run = run;
        spans.push_back(span);
        elements += span.count + random.below(3);
      }
    planned = std::make_unique<Planned>(world, spans);
    holdings.resize(world);
    for (Holding& holding : holdings)
      for (const Span& span : spans) {
        const Values values(residual_dtype, span.key % 5 == 4 ? 0 : span.count);
        holding.kept.push_back({{values, values}, {values, values}});
      }
  }
};

// Steps in wire formats, one launched behind the other, with residuals from step to step: weights,
// none, and such of no samples; parameters that some or all have not used; one that is not finite.
// A piece has `runs` of each chunk, at least.
void check_encoded(int world, int blocks, int runs, DType dtype, DType residual_dtype) {
  Group group(world, 0u - 3, std::chrono::seconds(30), 5 * runs * kRecord * (world + 1));
  Random random(world * 31u + static_cast<unsigned>(dtype));
  const auto draw = [&] { return random.next(); };
  Parameters parameters(world, residual_dtype, random);
  const std::vector<Span>& spans = parameters.spans;
  std::vector<Holding> expected = parameters.holdings;
  for (Holding& each : expected) each.gradient = Values(dtype, parameters.elements);
  constexpr int kSteps = 4;
  std::vector<std::vector<Encoded>> steps(kSteps);
  std::vector<Values> outputs;
  std::vector<bool> finite;
  Step step;
  for (int turn = 0; turn < kSteps; ++turn) {
    step.seed = static_cast<std::uint64_t>(draw()) << 40 ^ draw();
    ++step.number;
    const bool weighted = turn % 2 == 1;
    std::vector<double> scales, weights;
    double total = 0;
    for (int r = 0; r < world; ++r) {
      const bool absent = r == world - 1 && turn == 1;  // counts for nothing beside weights
      const double samples = turn == 3 ? 0 : 0.7 * r;
      weights.push_back(absent ? kAbsent : weighted ? samples : kOrdinary);
      scales.push_back(weighted ? samples : 1.25);
      total += absent ? 0 : weighted ? weights[r] : 1;
    }
    step.factors.clear();
    step.absent.assign(world, std::vector<char>(spans.size()));
    for (int r = 0; r < world; ++r) {
      step.factors.push_back(static_cast<float>(scales[r] * (total == 0 ? 0 : world / total)));
      for (std::size_t s = 0; s < spans.size(); ++s) {
        step.absent[r][s] = turn != 0 && (s == 3 || random.below(4) == 0);
        const auto mood =
            static_cast<Mood>(random.below(turn == 2 && s == 5 ? kMoods : kMoods - 1));
        for (std::size_t i = 0; i < spans[s].count; ++i)
          expected[r].gradient.set(spans[s].offset + i, mood_value(mood, draw));
      }
    }
    for (int r = 0; r < world; ++r) steps[turn].push_back({expected[r].gradient, nullptr});
    finite.push_back(step_of(spans, step, expected).finite);
    outputs.push_back(expected[0].gradient);
    for (int r = 0; r < world; ++r) {
      Encoded& each = steps[turn][r];
      each.told =
          std::make_unique<Told>(parameters.planned->plan(), step, r, parameters.holdings[r],
                                 residual_dtype, dtype, each.gradient.bytes.data());
      Coding coding = each.told->coding();
      coding.factor = bits_float(kNan);  // which all find together
      Call call = all_reduce_of(parameters.elements, Algorithm::encoded, Op::mean);
      call.dtype = dtype;
      call.scale = scales[r];
      call.weight = weights[r];
      group.ranks[r]->run(call, &coding, nullptr, blocks, 0);
    }
    if (finite.back()) step.now = 1 - step.now;
  }
  for (auto& driver : group.drivers) driver->join();
  for (auto& rank : group.ranks) rank->check();
  for (int r = 0; r < world; ++r) {
    const std::string where = "encoded on " + std::to_string(world) + " ranks of " +
                              std::to_string(blocks) + " blocks, rank " + std::to_string(r);
    for (int turn = 0; turn < kSteps; ++turn) {
      const std::string which = where + ", step " + std::to_string(turn);
      expect(steps[turn][r].gradient.bytes == outputs[turn].bytes, which + ": a gradient");
      expect(steps[turn][r].told->finite() == finite[turn], which + ": finite");
    }
    for (std::size_t s = 0; s < spans.size(); ++s)
      for (int k = 0; k < 2; ++k) {
        const Kept& kept = parameters.holdings[r].kept[s];
        const Kept& wanted = expected[r].kept[s];
        expect(kept.sent[k].bytes == wanted.sent[k].bytes &&
                   kept.reduced[k].bytes == wanted.reduced[k].bytes,
               where + ": residuals of span " + std::to_string(s));
      }
  }
}

void encoded_steps() {
  check_encoded(2, 3, 1, DType::float32, DType::float32);
  check_encoded(3, 2, 4, DType::bfloat16, DType::float32);
  check_encoded(4, 1, 7, DType::float16, DType::bfloat16);
  check_encoded(5, 3, 2, DType::float32, DType::bfloat16);
  check_encoded(9, 1, 3, DType::float32, DType::float32);
}

void others() {
  constexpr int kWorld = 4;
  Group group(kWorld);
  for (const Algorithm algorithm : {Algorithm::one_shot, Algorithm::two_shot}) {
    constexpr std::size_t kCount = 133;
    std::vector<std::vector<float>> out(kWorld, std::vector<float>(kCount * kWorld));
    const auto run = [&](Kind kind, int root, std::size_t count, bool in_place) {
      for (int r = 0; r < kWorld; ++r) {
        Call call = all_reduce_of(count, algorithm);
        call.kind = kind;
        call.root = root;
        auto* in = group.segment<float>(r);
        group.ranks[r]->run(call, in, in_place ? in : out[r].data(), kBlocks, 0);
      }
      for (auto& driver : group.drivers) driver->join();
      for (auto& rank : group.ranks) rank->check();
    };
    const auto fill = [&] {
      for (int r = 0; r < kWorld; ++r)
        for (std::size_t i = 0; i < kCount * kWorld; ++i)
          group.segment<float>(r)[i] = static_cast<float>(100 * r + i % 37);
    };
    fill();
    run(Kind::reduce_scatter, 0, kCount, false);
    for (int r = 0; r < kWorld; ++r)
      for (std::size_t i = 0; i < kCount; ++i)
        expect(out[r][i] == 600 + 4 * static_cast<float>((r * kCount + i) % 37), "reduce_scatter");
    run(Kind::all_gather, 0, kCount, false);
    for (int r = 0; r < kWorld; ++r)
      for (std::size_t i = 0; i < kCount * kWorld; ++i)
        expect(out[r][i] == static_cast<float>(100 * (i / kCount) + i % kCount % 37), "all_gather");
    for (int root = 0; root < kWorld; ++root) {
      fill();
      run(Kind::broadcast, root, kCount, true);
      for (int r = 0; r < kWorld; ++r)
        for (std::size_t i = 0; i < kCount; ++i)
          expect(group.segment<float>(r)[i] == static_cast<float>(100 * root + i % 37),
                 "broadcast");
    }
    run(Kind::barrier, 0, 0, true);
  }
}

// What check() throws, or Failure::none.
FailureRecord failure_of(const CudaCommunicator& rank) {
  try {
    rank.check();
  } catch (const CallFailed& failed) {
    return failed.record;
  }
  return {};
}

bool refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

// Rank 2 makes another call, in another grid: all ranks say the same, and nothing is written.
void mismatch() {
  constexpr int kWorld = 3;
  for (const Field field : {Field::count, Field::dtype, Field::weight, Field::scale}) {
    Group fresh(kWorld);
    for (int r = 0; r < kWorld; ++r) {
      std::fill_n(fresh.segment<float>(r), 300, 1.0f + static_cast<float>(r));
      // Only where a switch adds must factors be alike.
      const bool by_switch = field == Field::scale;
      const std::size_t count = r == 2 && field == Field::count ? 20 : 300;
      Call call = all_reduce_of(count, by_switch ? Algorithm::multimem : Algorithm::two_shot);
      if (r == 2 && field == Field::dtype) call.dtype = DType::int32;
      if (r == 2 && field == Field::weight) call.weight = 0;
      if (r == 0 && field == Field::weight) call.weight = kAbsent;
      if (r == 2 && field == Field::scale) call.scale = 0.5;
      fresh.ranks[r]->run(call, fresh.segment<float>(r), fresh.segment<float>(r),
                          r == 2 ? 1 : kBlocks, 0);
    }
    for (auto& driver : fresh.drivers) driver->join();
    for (int r = 0; r < kWorld; ++r) {
      const FailureRecord record = failure_of(*fresh.ranks[r]);
      expect(record.failure == Failure::mismatch && record.peer == 2 && record.epoch == 1 &&
                 record.field == field && !record.written,
             "a mismatch is the same on rank " + std::to_string(r));
      bool same = true;
      for (int i = 0; i < 300; ++i)
        same = same && fresh.segment<float>(r)[i] == 1.0f + static_cast<float>(r);
      expect(same, "a mismatch writes nothing on rank " + std::to_string(r));
      bool again = false;
      try {
        fresh.ranks[r]->run(all_reduce_of(1, Algorithm::one_shot), fresh.segment<float>(r),
                            fresh.segment<float>(r), 1, 0);
      } catch (const CallFailed& failed) {
        again = failed.record.failure == Failure::mismatch;
      }
      expect(again, "a communicator that has failed refuses further calls");
    }
  }
}

// Rank 1 never makes the call.
void never_launched() {
  Group group(3, 0, std::chrono::milliseconds(300));
  for (const int r : {0, 2})
    group.ranks[r]->run(all_reduce_of(8, Algorithm::low_latency), group.segment<float>(r),
                        group.segment<float>(r), 1, 0);
  for (auto& driver : group.drivers) driver->join();
  int timeouts = 0;
  for (const int r : {0, 2}) {
    const FailureRecord record = failure_of(*group.ranks[r]);
    // Who gives up second may have seen that the first did.
    timeouts += record.failure == Failure::timeout;
    expect(record.failure == Failure::timeout && record.peer == 1 && record.epoch == 1 &&
               record.phase == Phase::enter && record.expected == 1 && record.seen == 0 &&
               !record.written,
           "a rank that does not come is named on rank " + std::to_string(r));
  }
  expect(timeouts == 2, "both have waited");
}

// Rank 1's process ends while the others wait for it: rank 0 is told, rank 2 hears it from rank 0.
void lost() {
  Group group(3, 0, std::chrono::seconds(60));
  for (const int r : {0, 2})
    group.ranks[r]->run(all_reduce_of(64, Algorithm::two_shot), group.segment<float>(r),
                        group.segment<float>(r), 2, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  group.ranks[0]->lose(1);
  for (auto& driver : group.drivers) driver->join();
  for (const int r : {0, 2}) {
    const FailureRecord record = failure_of(*group.ranks[r]);
    expect(record.failure == Failure::lost && record.peer == 1 && record.rank == 0,
           "a lost peer is named on rank " + std::to_string(r));
  }
}

// The same, of a process that is watched: it is killed while a call waits for its rank.
void killed() {
  const pid_t process = ::fork();
  if (process == 0) {
    for (;;) ::pause();
  }
  {
    Group group(2, 0, std::chrono::seconds(60));
    group.ranks[0]->watch({{1, process}});
    expect(refused([&] { group.ranks[0]->watch({{1, process}}); }), "peers are watched once");
    group.ranks[0]->run(all_reduce_of(64, Algorithm::low_latency), group.segment<float>(0),
                        group.segment<float>(0), 1, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    expect(failure_of(*group.ranks[0]).failure == Failure::none, "nobody is lost yet");
    // Closing waits for the call, and hears of the end meanwhile.
    std::thread closing([&] { group.ranks[0]->close(true); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ::kill(process, SIGKILL);
    closing.join();
    ::waitpid(process, nullptr, 0);
    expect(group.drivers[0]->seconds() < 10, "a killed peer ends the wait");
  }
  Group late(2, 0, std::chrono::seconds(60));
  late.ranks[0]->watch({{1, process}});  // which has ended
  late.ranks[0]->run(all_reduce_of(64, Algorithm::one_shot), late.segment<float>(0),
                     late.segment<float>(0), 1, 0);
  late.drivers[0]->join();
  const FailureRecord record = failure_of(*late.ranks[0]);
  expect(record.failure == Failure::lost && record.peer == 1, "one that was gone before is lost");
}

// A peer that left after its part was done is not missed: a look that finds it gone is followed by
// one more poll.
void not_missed() {
  for (int round = 0; round < 40; ++round) {
    Group group(2);
    for (const int r : {0, 1}) {
      *group.segment<float>(r) = 1;
      group.ranks[r]->run(all_reduce_of(1, Algorithm::two_shot), group.segment<float>(r),
                          group.segment<float>(r), 1, 0);
    }
    group.drivers[1]->join();
    const bool complete = failure_of(*group.ranks[1]).failure == Failure::none;
    group.ranks[1]->close(true);
    group.drivers[0]->join();
    expect(complete && failure_of(*group.ranks[0]).failure == Failure::none,
           "a peer that has done its part may go");
    expect(*group.segment<float>(0) == 2, "the sum is there");
  }
}

void closing() {
  Group group(2, 0, std::chrono::seconds(60));
  group.ranks[0]->run(all_reduce_of(4, Algorithm::one_shot), group.segment<float>(0),
                      group.segment<float>(0), 1, 0);
  group.ranks[1]->close(true);
  group.drivers[0]->join();
  const FailureRecord record = failure_of(*group.ranks[0]);
  expect(record.failure == Failure::closed && record.peer == 1, "a peer that closes is named");
  expect(refused([&] { group.ranks[1]->check(); }), "what is closed refuses");

  Group other(2, 0, std::chrono::seconds(60));
  other.ranks[0]->run(all_reduce_of(4, Algorithm::one_shot), other.segment<float>(0),
                      other.segment<float>(0), 1, 0);
  other.ranks[0]->close(false);  // its own call ends
  other.ranks[0]->close(true);   // and once more is nothing
}

void arguments() {
  Group group(2);
  CudaCommunicator& rank = *group.ranks[0];
  float* inside = group.segment<float>(0);
  std::vector<float> outside(4096);
  const auto refuses = [&](const char* what, const Call& call, const void* in, void* out,
                           int blocks = 1) {
    expect(refused([&] { rank.run(call, in, out, blocks, 0); }), what);
  };
  refuses("no block", all_reduce_of(1, Algorithm::one_shot), inside, inside, 0);
  refuses("too many blocks", all_reduce_of(1, Algorithm::one_shot), inside, inside, kBlocks + 1);
  refuses("more than a slot", all_reduce_of(1025, Algorithm::one_shot), inside, inside);
  refuses("more than an inbox", all_reduce_of(513, Algorithm::low_latency), inside, inside);
  refuses("memory that no peer reaches", all_reduce_of(4, Algorithm::two_shot), outside.data(),
          outside.data());
  refuses("past the segment's end", all_reduce_of(kSegmentBytes / 4, Algorithm::two_shot),
          inside + 4, inside + 4);
  refuses("off the packs", all_reduce_of(4, Algorithm::two_shot), inside + 1, inside + 1);
  refuses("not in place", all_reduce_of(4, Algorithm::two_shot), inside, outside.data());
  refuses("a part of a pack", all_reduce_of(3, Algorithm::multimem), inside, inside);
  refuses("what no switch adds", all_reduce_of(4, Algorithm::multimem, Op::max), inside, inside);
  Call whole = all_reduce_of(4, Algorithm::multimem);
  whole.dtype = DType::float64;
  refuses("what no switch adds", whole, inside, inside);
  const Planned others(3, {{0, 4, 0, Format::fp32, false, 4}});
  const Planned longer(2, {{0, 1024, 0, Format::fp32, false, 1024}});
  for (const Planned* each : {&others, &longer}) {
    Coding coding;
    coding.plan = each->plan();
    refuses("a plan of other ranks, runs that are too long", all_reduce_of(4, Algorithm::encoded),
            &coding, nullptr);
  }
  expect(group.drivers[0]->grids.empty(), "what is refused is not launched");
  expect(rank.find(inside + 4, 16, true) == 1 && rank.find(outside.data(), 16, false) == -1,
         "segments are found by address");
  rank.remove_segment(1);
  expect(rank.find(inside + 4, 16, false) == -1, "a segment that is gone is not found");
  expect(refused([&] { rank.add_segment(kSegments, {0, 0}, 0, 16); }), "too many segments");
}

// Rank 2 encodes otherwise, or gives a weight alone, or never comes: nothing is written, and no
// residual counts.
void encoded_failures() {
  constexpr int kWorld = 3;
  for (const Field field : {Field::shape, Field::weight, Field::none}) {
    const bool comes = field != Field::none;
    Group group(kWorld, 0,
                comes ? std::chrono::milliseconds(30000) : std::chrono::milliseconds(300),
                5 * kRecord * (kWorld + 1));
    Random random(1);
    Parameters parameters(kWorld, DType::float32, random);
    Step step;
    step.factors.assign(kWorld, 1);
    step.absent.assign(kWorld, std::vector<char>(parameters.spans.size()));
    std::vector<Encoded> ranks(kWorld);
    for (int r = 0; r < (comes ? kWorld : kWorld - 1); ++r) {
      Encoded& each = ranks[r];
      each.gradient = Values(DType::float32, parameters.elements);
      each.told =
          std::make_unique<Told>(parameters.planned->plan(), step, r, parameters.holdings[r],
                                 DType::float32, DType::float32, each.gradient.bytes.data());
      Call call = all_reduce_of(parameters.elements, Algorithm::encoded, Op::mean);
      if (r == 2 && field == Field::shape) call.shape = 1;
      if (r == 2 && field == Field::weight) call.weight = 1;
      group.ranks[r]->run(call, &each.told->coding(), nullptr, r == 2 ? 1 : kBlocks, 0);
    }
    for (auto& driver : group.drivers) driver->join();
    for (int r = 0; r < (comes ? kWorld : kWorld - 1); ++r) {
      const FailureRecord record = failure_of(*group.ranks[r]);
      expect(record.failure == (comes ? Failure::mismatch : Failure::timeout) &&
                 record.field == field && record.peer == 2 && !(comes && record.written),
             "a failure of an encoded call is the same on rank " + std::to_string(r));
      const Values untouched(DType::float32, parameters.elements);
      expect(ranks[r].gradient.bytes == untouched.bytes && !ranks[r].told->finite(),
             "an encoded call that fails writes nothing on rank " + std::to_string(r));
    }
  }
}

constexpr struct {
  const char* name;
  void (*run)();
} kCases[] = {
    {"all_reduce", all_reduce},
    {"others", others},
    {"mismatch", mismatch},
    {"never_launched", never_launched},
    {"lost", lost},
    {"killed", killed},
    {"not_missed", not_missed},
    {"closing", closing},
    {"arguments", arguments},
    {"encoded", encoded_steps},
    {"encoded_failures", encoded_failures},
};

int main(int count, char** arguments) {
  ::alarm(200);  // a run that hangs ends
  if (count == 3) {
    sabotage =
        std::strcmp(arguments[2], "no_wait") == 0 ? Action::skip_wait : Action::no_block_barrier;
  }
  for (const auto& each : kCases) {
    if (count == 2 && std::strcmp(arguments[1], "list") == 0) std::printf("%s\n", each.name);
    if (count >= 2 && std::strcmp(arguments[1], each.name) == 0) each.run();
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace test
}  // namespace fastreduce

int main(int count, char** arguments) { return fastreduce::test::main(count, arguments); }
