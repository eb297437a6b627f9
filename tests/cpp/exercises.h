// What ranks are asked to do: every collective in every form, with other inputs in every call
// and on every rank, compared bit for bit with reference.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "encoding.h"
#include "host_wire.h"
#include "ranks.h"
#include "reference.h"
#include "run.h"

namespace fastreduce::test {

enum class Form {
  one_shot,
  two_shot,
  two_shot_staged,
  two_shot_staged_far,
  ring,
  encoded,
  reduce_scatter_one_shot,
  reduce_scatter,
  reduce_scatter_staged,
  reduce_scatter_v_one_shot,
  reduce_scatter_v,
  reduce_scatter_v_staged,
  all_gather_one_shot,
  all_gather,
  all_gather_staged,
  all_gather_v_one_shot,
  all_gather_v,
  all_gather_v_staged,
  broadcast_one_shot,
  broadcast,
  broadcast_staged,
  // As a GPU runs them: every block opens its part of the call.
  low_latency,
  multimem,
  greeted_one_shot,
  greeted_two_shot,
  greeted_reduce_scatter_one_shot,
};

// In the order of Form.
constexpr const char* kForms[] = {
    "one_shot",
    "two_shot",
    "two_shot_staged",
    "two_shot_staged_far",
    "ring",
    "encoded",
    "reduce_scatter_one_shot",
    "reduce_scatter",
    "reduce_scatter_staged",
    "reduce_scatter_v_one_shot",
    "reduce_scatter_v",
    "reduce_scatter_v_staged",
    "all_gather_one_shot",
    "all_gather",
    "all_gather_staged",
    "all_gather_v_one_shot",
    "all_gather_v",
    "all_gather_v_staged",
    "broadcast_one_shot",
    "broadcast",
    "broadcast_staged",
    "low_latency",
    "multimem",
    "greeted_one_shot",
    "greeted_two_shot",
    "greeted_reduce_scatter_one_shot",
};
inline const char* name_of(Form form) { return kForms[static_cast<int>(form)]; }

inline bool is_one_shot(Form form) {
  return form == Form::one_shot || form == Form::reduce_scatter_one_shot ||
         form == Form::all_gather_one_shot || form == Form::broadcast_one_shot ||
         form == Form::reduce_scatter_v_one_shot || form == Form::all_gather_v_one_shot;
}
// Of shares that differ, in place.
inline bool is_reduce_scatter_v(Form form) {
  return form >= Form::reduce_scatter_v_one_shot && form <= Form::reduce_scatter_v_staged;
}
inline bool is_all_gather_v(Form form) {
  return form >= Form::all_gather_v_one_shot && form <= Form::all_gather_v_staged;
}
inline bool greets(Form form) { return form >= Form::low_latency; }
inline bool is_reduce_scatter(Form form) {
  return (form >= Form::reduce_scatter_one_shot && form <= Form::reduce_scatter_staged) ||
         form == Form::greeted_reduce_scatter_one_shot;
}
inline bool is_transfer(Form form) {
  return form >= Form::all_gather_one_shot && form <= Form::broadcast_staged;
}
inline bool is_all_gather(Form form) {
  return form >= Form::all_gather_one_shot && form <= Form::all_gather_staged;
}

// The largest call of a form: all of a slot, or several pieces of every block.
inline std::size_t largest_count(Form form, const Shape& shape, std::size_t item, std::size_t acc) {
  const std::size_t world = shape.world;
  const std::size_t blocks = shape.blocks;
  const std::size_t stage = shape.stage_bytes / 4;
  switch (form) {
    case Form::one_shot:
    case Form::all_gather_one_shot:
    case Form::broadcast_one_shot:
    case Form::greeted_one_shot:
    case Form::reduce_scatter_v_one_shot:
    case Form::all_gather_v_one_shot:
      return shape.slot_bytes / item;
    case Form::low_latency:
      return shape.inbox_bytes / item;
    case Form::reduce_scatter_one_shot:
    case Form::greeted_reduce_scatter_one_shot:
      return shape.slot_bytes / item / world;
    case Form::two_shot_staged:
    case Form::two_shot_staged_far:
      return 6 * blocks * (stage / (world + 1) / 64 * 64 * world / item) + 5;
    case Form::ring:
      return 3 * blocks * world * (stage / acc) + 5;
    case Form::reduce_scatter_staged:
      return 6 * blocks * (stage / world / item) + 5;
    case Form::all_gather_staged:
    case Form::broadcast_staged:
    case Form::reduce_scatter_v_staged:
    case Form::all_gather_v_staged:
      return 6 * blocks * (stage / item) + 5;
    default:
      return 300 * blocks + 5;
  }
}

// Nothing, one element, odd tails, whole cache lines, many pieces.
inline std::size_t count_of(int call, std::size_t largest, Random& random) {
  const auto limit = static_cast<std::uint32_t>(largest);
  switch (call % 8) {
    case 0:
      return 1;
    case 1:
      return largest;
    case 2:
      return largest - largest / 7 - 1;
    case 3:
      return std::min<std::size_t>(64, largest);
    case 4:
      return random.below(limit) + 1;
    case 5:
      return std::min<std::size_t>(random.below(40), largest);
    case 6:
      return largest / 2 + 1;
    default:
      return random.below(limit) + 1;
  }
}

// Ranges of any size for every rank, and some for none.
class Deal {
 public:
  Deal() = default;
  Deal(std::size_t count, int world, Random& random) {
    std::vector<std::vector<Range>> ranks(world);
    for (std::size_t begin = 0; begin < count;) {
      const std::size_t most = random.below(3) == 0 ? count : 50;
      const std::size_t end = std::min(count, begin + 1 + random.below(std::uint32_t(most)));
      const std::size_t owner = random.below(std::uint32_t(world + 1));
      if (owner < ranks.size()) ranks[owner].push_back({begin, end});
      begin = end;
    }
    for (const auto& ranges : ranks) {
      first_.push_back(ranges_.size());
      ranges_.insert(ranges_.end(), ranges.begin(), ranges.end());
    }
    first_.push_back(ranges_.size());
  }
  Shares shares() const { return {ranges_.data(), first_.data()}; }
  // visit(i) for all elements of a rank.
  template <class Visit>
  void each(int rank, const Visit& visit) const {
    for (std::size_t k = first_[rank]; k < first_[rank + 1]; ++k)
      for (std::size_t i = ranges_[k].begin; i < ranges_[k].end; ++i) visit(i);
  }

 private:
  std::vector<Range> ranges_;
  std::vector<std::size_t> first_;
};

// A tensor of every rank, in the same memory from call to call: what a peer still reads or
// writes when the next call begins must be noticed. It begins at some element, and the elements
// around it are watched.
template <class T>
class Tensors {
 public:
  static constexpr unsigned char kPoison = 0xa5;

  Tensors(int world, std::size_t largest, bool misaligned)
      : shift_(misaligned ? 1 : 0), memory_(world) {
    for (auto& each : memory_) each.resize((largest + 2 * kAround) * sizeof(T) + 1);
  }
  T* at(int rank, int call) {
    return reinterpret_cast<T*>(memory_[rank].data() + shift_) + first(rank, call);
  }
  void poison(int rank) { std::memset(memory_[rank].data(), kPoison, memory_[rank].size()); }
  bool intact_around(int rank, int call, std::size_t count) const {
    const auto& bytes = memory_[rank];
    const auto begin = bytes.begin() + shift_ + first(rank, call) * sizeof(T);
    const auto poisoned = [](unsigned char byte) { return byte == kPoison; };
    return std::all_of(bytes.begin(), begin, poisoned) &&
           std::all_of(begin + count * sizeof(T), bytes.end(), poisoned);
  }

 private:
  static constexpr std::size_t kAround = 16;
  static std::size_t first(int rank, int call) { return kAround + (7 * call + 3 * rank) % 5; }

  std::size_t shift_;
  std::vector<std::vector<unsigned char>> memory_;
};

template <class T>
T random_value(Random& random) {
  if constexpr (std::is_integral<T>::value) {
    return static_cast<T>(random.next() << 1 ^ random.next());
  } else {
    static const double specials[] = {
        -0.0, 0.0, default_nan(), std::numeric_limits<double>::infinity(), 0x1p-149, -0x1p-24};
    using A = AccOf<T>;
    if (random.below(40) == 0) return narrowed<T>(static_cast<A>(specials[random.below(6)]));
    const double fraction = static_cast<double>(random.next()) / 0x1p30 - 1;
    return narrowed<T>(
        static_cast<A>(std::ldexp(fraction, static_cast<int>(random.below(12)) - 4)));
  }
}

template <class T>
std::string hex(const T& value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(bits));
  return text;
}

template <class T>
std::string difference(const T* seen, const std::vector<T>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (!same_bits(seen[i], expected[i]))
      return "element " + std::to_string(i) + " of " + std::to_string(expected.size()) +
             ": expected " + hex(expected[i]) + ", got " + hex(seen[i]);
  return "";
}

// Calls that move one tensor per rank into another one, or within it.
template <class T>
class Collective : public Exercise {
 public:
  int calls() const override { return static_cast<int>(plans_.size()); }
  bool one_block(int call) const override {
    return is_one_shot(plans_[call].form) || call % 5 == 4;
  }
  bool greets(int call) const override { return test::greets(plans_[call].form); }

  void prepare(const View& view, std::uint32_t epoch, int call) override {
    const Plan& plan = plans_[call];
    const auto& input = plan.inputs[view.rank];
    given_.poison(view.rank);
    taken_.poison(view.rank);
    const auto* bytes = reinterpret_cast<const char*>(input.data());
    const std::size_t size = input.size() * sizeof(T);
    std::copy_n(bytes, size, reinterpret_cast<char*>(in(view.rank, call)));
    if (is_one_shot(plan.form)) std::copy_n(bytes, size, view.slot(view.rank, epoch));
  }

  std::string check(int rank, int call) override {
    const Plan& plan = plans_[call];
    const auto& expected = plan.outputs[rank];
    std::string error = difference(taken_.at(rank, call), expected);
    if (error.empty() && !plan.in_place)
      error = difference(given_.at(rank, call), plan.inputs[rank]);
    if (error.empty() && !taken_.intact_around(rank, call, expected.size()))
      error = "wrote outside the output";
    if (error.empty()) return "";
    return std::string(name_of(plan.form)) + ", call " + std::to_string(call) + ", rank " +
           std::to_string(rank) + ": " + error;
  }

 protected:
  struct Plan {
    Form form = Form::one_shot;
    std::size_t count = 0;
    bool in_place = false;
    int root = 0;
    Deal deal;
    Factors factors;
    std::vector<std::vector<T>> inputs;   // of each rank
    std::vector<std::vector<T>> outputs;  // of each rank
  };

  Collective(int world, std::size_t largest, bool misaligned)
      : given_(world, largest, misaligned), taken_(world, largest, misaligned) {}

  // Where a rank's input lies. In place, an all-gather's input is its part of the output.
  T* in(int rank, int call) {
    const Plan& plan = plans_[call];
    if (!plan.in_place) return given_.at(rank, call);
    return taken_.at(rank, call) + (is_all_gather(plan.form) ? rank * plan.count : 0);
  }
  T* out(int rank, int call) { return taken_.at(rank, call); }

  std::vector<Plan> plans_;

 private:
  Tensors<T> given_;
  Tensors<T> taken_;
};

// All-reduce and reduce-scatter.
template <class T, class Op>
class Reduction : public Collective<T> {
  using typename Collective<T>::Plan;
  using Collective<T>::plans_;

 public:
  Reduction(const Shape& shape, const std::vector<Form>& forms, int calls, std::uint64_t seed,
            bool misaligned)
      : Collective<T>(shape.world, largest_of(shape, forms), misaligned) {
    Random random(seed);
    for (int call = 0; call < calls; ++call)
      plans_.push_back(plan(shape, forms[random.below(forms.size())], call, random));
  }

  bool run(TestBlock& block, const View& view, std::uint32_t epoch, int call) override {
    const Plan& plan = plans_[call];
    const std::size_t count = plan.count;
    const Scaled<T> scaled(plan.factors);
    const TypedArithmetic<T, Op> arithmetic(scaled.scale(), view.rank);
    const auto* in = reinterpret_cast<const char*>(this->in(view.rank, call));
    auto* out = reinterpret_cast<char*>(this->out(view.rank, call));
    void* all[kMaxRanks];
    for (int p = 0; p < view.world(); ++p) all[p] = this->in(p, call);
    if (greets(plan.form)) return run_greeted(block, view, epoch, call, arithmetic, all);
    switch (plan.form) {
      case Form::one_shot:
        return one_shot(block, view, arithmetic, epoch, out, count);
      case Form::two_shot:
        return two_shot(block, view, arithmetic, all, count);
      case Form::two_shot_staged:
        return two_shot_staged(block, view, arithmetic, in, out, count, false);
      case Form::two_shot_staged_far:
        return two_shot_staged(block, view, arithmetic, in, out, count, true);
      case Form::ring:
        return ring(block, view, arithmetic, in, out, count);
      case Form::reduce_scatter_one_shot:
        return reduce_scatter_one_shot(block, view, arithmetic, epoch, out, count);
      case Form::reduce_scatter:
        return reduce_scatter(block, view, arithmetic, all, out, count);
      case Form::reduce_scatter_v_one_shot:
        return reduce_scatter_v_one_shot(block, view, arithmetic, epoch, plan.deal.shares(), out,
                                         count);
      case Form::reduce_scatter_v:
        return reduce_scatter_v(block, view, arithmetic, all, plan.deal.shares(), out, count);
      case Form::reduce_scatter_v_staged:
        return reduce_scatter_v_staged(block, view, arithmetic, plan.deal.shares(), out, count);
      default:
        return reduce_scatter_staged(block, view, arithmetic, in, out, count);
    }
  }

 private:
  static std::size_t largest_of(const Shape& shape, const std::vector<Form>& forms) {
    std::size_t most = 0;
    for (const Form form : forms) {
      const std::size_t count = largest_count(form, shape, sizeof(T), sizeof(AccOf<T>));
      most = std::max(most, is_reduce_scatter(form) ? count * shape.world : count);
    }
    return most;
  }

  // A tensor's place is what tells the ranks' calls apart.
  static Call called(const Plan& plan, int rank, int call) {
    Call made;
    made.kind = is_reduce_scatter(plan.form) ? Kind::reduce_scatter : Kind::all_reduce;
    made.dtype = sizeof(T) == 8   ? DType::float64
                 : sizeof(T) == 4 ? DType::float32
                 : sizeof(T) == 2 ? DType::float16
                                  : DType::uint8;
    made.algorithm = Algorithm::one_shot;
    made.count = plan.count;
    made.scale = plan.factors.of(rank);
    made.weight = rank + 0.5;
    made.shape = static_cast<std::uint32_t>(call) * 0x9e3779b9u;
    made.segment = rank - 1;
    made.offset = 16u * static_cast<std::uint64_t>(call * 64 + rank);
    return made;
  }

  bool run_greeted(TestBlock& block, const View& view, std::uint32_t epoch, int call,
                   const TypedArithmetic<T, Op>& arithmetic, void* const* all) {
    const Plan& plan = plans_[call];
    Job job;
    job.call = called(plan, view.rank, call);
    job.in = this->in(view.rank, call);
    const auto* in = static_cast<const char*>(job.in);
    auto* out = reinterpret_cast<char*>(this->out(view.rank, call));
    bool complete = true;
    if (plan.form == Form::low_latency) {
      greet(block, view, epoch, job.call);
      complete = low_latency(block, view, arithmetic, epoch, job.call, in, out, [] {});
    } else {
      const bool slots = plan.form != Form::greeted_two_shot && plan.form != Form::multimem;
      if (!slots) job.call.algorithm = Algorithm::two_shot;
      if (!open(block, view, job, epoch)) return false;
      if (plan.form == Form::greeted_one_shot)
        complete = one_shot(block, view, arithmetic, epoch, out, plan.count);
      else if (plan.form == Form::greeted_two_shot)
        complete = two_shot(block, view, arithmetic, all, plan.count);
      else if (plan.form == Form::multimem)
        complete = multimem(block, view, Everywhere{arithmetic, all, view.world()},
                            static_cast<char*>(all[0]), plan.count);
      else
        complete = reduce_scatter_one_shot(block, view, arithmetic, epoch, out, plan.count);
    }
    for (int p = 0; complete && p < view.world(); ++p) {
      const Call expected = called(plan, p, call);
      const Call& said = block.calls()[p];
      if (said.segment != expected.segment || said.offset != expected.offset) return false;
      if (said.scale != expected.scale || said.weight != expected.weight) return false;
    }
    return complete;
  }

  // An address at which all ranks' tensors lie: rank 0's stands for it.
  struct Everywhere {
    const TypedArithmetic<T, Op>& typed;
    void* const* all;
    int world;
    std::size_t item_bytes() const { return typed.item_bytes(); }
    void reduce_everywhere(TestBlock& block, char* everywhere, std::size_t n) const {
      const std::size_t begin = everywhere - static_cast<char*>(all[0]);
      const auto at = [&](int p) { return static_cast<char*>(all[p]) + begin; };
      typed.reduce(block, at, world, at, world, n);
    }
  };

  static Plan plan(const Shape& shape, Form form, int call, Random& random) {
    const int world = shape.world;
    Plan made;
    made.form = form;
    made.count = count_of(call, largest_count(form, shape, sizeof(T), sizeof(AccOf<T>)), random);
    made.in_place = form == Form::two_shot || form == Form::greeted_two_shot ||
                    form == Form::multimem || is_reduce_scatter_v(form) ||
                    (!is_reduce_scatter(form) && call % 3 == 0);
    if (is_reduce_scatter_v(form)) made.deal = Deal(made.count, world, random);
    if (call % 3 == 1) made.factors = {1, 1.0 / world, world};
    if (call % 3 == 2) made.factors = {0.7, 1.3, 3};

    const std::size_t items = made.count * (is_reduce_scatter(form) ? world : 1);
    made.inputs.resize(world);
    for (auto& input : made.inputs)
      for (std::size_t i = 0; i < items; ++i) input.push_back(random_value<T>(random));

    std::vector<T> sums;
    std::vector<decltype(widened(T()))> leaves(world);
    int chunk = 0;
    for (std::size_t i = 0; i < items; ++i) {
      for (int p = 0; p < world; ++p)
        leaves[p] = scaled_input(widened(made.inputs[p][i]), made.factors, p);
      if (form == Form::ring)
        while (i >= chunk_of(items, world, chunk, sizeof(T)).end) ++chunk;
      const auto sum = form == Form::ring ? in_ring<Op>(leaves, chunk) : in_tree<Op>(leaves);
      sums.push_back(narrowed<T>(scaled_result(sum, made.factors)));
    }
    for (int p = 0; p < world; ++p) {
      if (is_reduce_scatter_v(form)) {
        made.outputs.push_back(made.inputs[p]);
        made.deal.each(p, [&](std::size_t i) { made.outputs[p][i] = sums[i]; });
      } else if (is_reduce_scatter(form)) {
        made.outputs.emplace_back(sums.begin() + p * made.count,
                                  sums.begin() + (p + 1) * made.count);
      } else {
        made.outputs.push_back(sums);
      }
    }
    return made;
  }
};

// All-gather and broadcast.
class Transfer : public Collective<char> {
 public:
  Transfer(const Shape& shape, const std::vector<Form>& forms, int calls, std::uint64_t seed)
      : Collective<char>(shape.world, largest_of(shape, forms), false) {
    Random random(seed);
    for (int call = 0; call < calls; ++call)
      plans_.push_back(plan(shape, forms[random.below(forms.size())], call, random));
  }

  bool run(TestBlock& block, const View& view, std::uint32_t epoch, int call) override {
    const Plan& plan = plans_[call];
    const std::size_t count = plan.count;
    char* out = this->out(view.rank, call);
    void* all[kMaxRanks];
    for (int p = 0; p < view.world(); ++p) all[p] = in(p, call);
    const char* own = in(view.rank, call);
    switch (plan.form) {
      case Form::all_gather_one_shot:
        return all_gather_one_shot(block, view, epoch, out, count);
      case Form::all_gather:
        return all_gather(block, view, all, out, count);
      case Form::all_gather_staged:
        return all_gather_staged(block, view, own, out, count);
      case Form::all_gather_v_one_shot:
        return all_gather_v_one_shot(block, view, epoch, plan.deal.shares(), out, count, 1);
      case Form::all_gather_v:
        return all_gather_v(block, view, all, plan.deal.shares(), out, count, 1);
      case Form::all_gather_v_staged:
        return all_gather_v_staged(block, view, plan.deal.shares(), out, count, 1);
      case Form::broadcast_one_shot:
        return broadcast_one_shot(block, view, epoch, plan.root, out, count);
      case Form::broadcast:
        return broadcast(block, view, in(plan.root, call), out, count);
      default:
        return broadcast_staged(block, view, plan.root, out, count);
    }
  }

 private:
  static std::size_t largest_of(const Shape& shape, const std::vector<Form>& forms) {
    std::size_t most = 0;
    for (const Form form : forms) {
      const std::size_t count = largest_count(form, shape, 1, 1);
      most = std::max(most, is_all_gather(form) ? count * shape.world : count);
    }
    return most;
  }

  static Plan plan(const Shape& shape, Form form, int call, Random& random) {
    Plan made;
    made.form = form;
    made.count = count_of(call, largest_count(form, shape, 1, 1), random);
    made.in_place = !is_all_gather(form) || call % 3 == 0;
    made.root = call % shape.world;
    made.inputs.resize(shape.world);
    for (auto& input : made.inputs)
      for (std::size_t i = 0; i < made.count; ++i)
        input.push_back(static_cast<char>(random.next()));
    std::vector<char> gathered;
    for (const auto& input : made.inputs)
      gathered.insert(gathered.end(), input.begin(), input.end());
    if (is_all_gather_v(form)) {
      made.deal = Deal(made.count, shape.world, random);
      made.outputs = made.inputs;
      for (auto& output : made.outputs)
        for (int p = 0; p < shape.world; ++p)
          made.deal.each(p, [&](std::size_t i) { output[i] = made.inputs[p][i]; });
      return made;
    }
    made.outputs.assign(shape.world, is_all_gather(form) ? gathered : made.inputs[made.root]);
    return made;
  }
};

// What a thread does of a block's pieces: every so-manieth run. Gathers: as on a GPU.
template <bool Gathers>
class SharedCoder {
 public:
  static constexpr bool kGathers = Gathers;

  SharedCoder(const Coding& coding, const TestBlock& block)
      : coder_(coding), coding_(coding), block_(block) {}

  const fastreduce::Plan& plan() const { return coding_.plan; }
  bool lands() const { return coding_.lands; }
  void encode(int chunk, Range runs, char* to) {
    each(chunk, runs, [&](Range run, std::size_t at) { coder_.encode(chunk, run, to + at); });
  }
  template <class From>
  void reduce(Range runs, const From& from, char* to) {
    each(coding_.rank, runs, [&](Range run, std::size_t at) {
      coder_.reduce(run, [&](int p) { return from(p) + at; }, to + at);
    });
  }
  void decode(int chunk, Range runs, const char* from) {
    each(chunk, runs, [&](Range run, std::size_t at) { coder_.decode(chunk, run, from + at); });
  }

 private:
  template <class Visit>
  void each(int chunk, Range runs, const Visit& visit) const {
    if (block_.threads() == 1) {
      visit(runs, 0);
      return;
    }
    for (std::size_t i = runs.begin + block_.thread(); i < runs.end; i += block_.threads())
      visit({i, i + 1},
            run_at(plan(), chunk, i, 0).byte - run_at(plan(), chunk, runs.begin, 0).byte);
  }

  HostCoder coder_;
  const Coding& coding_;
  const TestBlock& block_;
};

// All-reduce in wire formats: several buffers of several parameters each in turns, with residuals
// that turn from step to step.
template <class T>
class Encoding : public Exercise {
 public:
  Encoding(const Shape& shape, int calls, std::uint64_t seed, DType residual_dtype)
      : world_(shape.world), residual_dtype_(residual_dtype) {
    Random random(seed);
    for (int b = 0; b < kBuffers; ++b) {
      buffers_.push_back(std::make_unique<Buffer>(shape, spans_of(b, shape, random)));
      Buffer& buffer = *buffers_.back();
      buffer.holdings.resize(world_);
      for (Holding& holding : buffer.holdings) {
        holding.gradient = Values(dtype(), buffer.elements);
        for (const Span& span : buffer.spans) holding.kept.push_back(kept_of(span));
      }
    }
    std::vector<std::vector<Holding>> expected;
    for (const auto& buffer : buffers_) expected.push_back(buffer->holdings);
    std::vector<int> now(kBuffers);
    for (int call = 0; call < calls; ++call) {
      const int b = call % kBuffers;
      calls_.push_back(call_of(*buffers_[b], call, now[b], expected[b], random));
      if (calls_.back().finite) now[b] = 1 - now[b];
    }
  }

  int calls() const override { return static_cast<int>(calls_.size()); }
  bool one_block(int call) const override { return call % 5 == 4; }
  bool greets(int) const override { return false; }

  void prepare(const View& view, std::uint32_t, int call) override {
    Buffer& buffer = buffer_of(call);
    const Values& input = calls_[call].inputs[view.rank];
    buffer.tensors.poison(view.rank);
    T* const at = buffer.tensors.at(view.rank, call);
    std::copy_n(input.bytes.data(), input.bytes.size(), reinterpret_cast<unsigned char*>(at));
    buffer.told[view.rank] =
        std::make_unique<Told>(buffer.planned.plan(), calls_[call].step, view.rank,
                               buffer.holdings[view.rank], residual_dtype_, dtype(), at);
  }

  bool run(TestBlock& block, const View& view, std::uint32_t, int call) override {
    const Coding& coding = buffer_of(call).told[view.rank]->coding();
    if (block.threads() == 1) {
      SharedCoder<false> coder(coding, block);
      return encoded(block, view, coder);
    }
    SharedCoder<true> coder(coding, block);
    return encoded(block, view, coder);
  }

  std::string check(int rank, int call) override {
    const std::string error = differs(rank, call);
    if (error.empty()) return "";
    return "encoded, call " + std::to_string(call) + ", rank " + std::to_string(rank) + ": " +
           error;
  }

 private:
  static constexpr int kBuffers = 6;

  struct Buffer {
    Buffer(const Shape& shape, const std::vector<Span>& made)
        : spans(made),
          planned(shape.world, made),
          elements(elements_of(made)),
          tensors(shape.world, elements, false),
          told(shape.world) {}
    static std::size_t elements_of(const std::vector<Span>& spans) {
      return spans.empty() ? 0 : spans.back().offset + spans.back().count;
    }
    std::vector<Span> spans;
    Planned planned;
    std::size_t elements;
    Tensors<T> tensors;
    std::vector<Holding> holdings;            // of each rank: its residuals
    std::vector<std::unique_ptr<Told>> told;  // what each rank is told of this call
  };

  // A call, and what should come of it.
  struct Called {
    Step step;
    bool finite = true;
    std::vector<Values> inputs;  // of each rank
    Values output;
    std::vector<std::vector<Values>> sent;  // of each rank, of each span: as they will be
    std::vector<std::vector<Values>> reduced;
  };

  static constexpr DType dtype() {
    return std::is_same<T, Half>::value       ? DType::float16
           : std::is_same<T, BFloat16>::value ? DType::bfloat16
                                              : DType::float32;
  }
  Buffer& buffer_of(int call) const { return *buffers_[call % kBuffers]; }

  // No residuals of every fifth.
  Kept kept_of(const Span& span) const {
    Kept kept;
    for (Values* each : {kept.sent, kept.reduced})
      for (int k = 0; k < 2; ++k)
        each[k] = Values(residual_dtype_, span.key % 5 == 4 ? 0 : span.count);
    return kept;
  }

  std::string differs(int rank, int call) {
    Buffer& buffer = buffer_of(call);
    const Called& called = calls_[call];
    T* const at = buffer.tensors.at(rank, call);
    std::vector<T> expected(buffer.elements);
    std::copy_n(called.output.bytes.data(), called.output.bytes.size(),
                reinterpret_cast<unsigned char*>(expected.data()));
    std::string error = difference(at, expected);
    if (error.empty() && !buffer.tensors.intact_around(rank, call, expected.size()))
      error = "wrote outside the gradient";
    if (error.empty() && buffer.told[rank]->finite() != called.finite)
      error = "told otherwise whether all is finite";
    const int next = 1 - called.step.now;
    for (std::size_t s = 0; s < buffer.spans.size() && error.empty(); ++s) {
      const Kept& kept = buffer.holdings[rank].kept[s];
      if (kept.sent[next].bytes != called.sent[rank][s].bytes)
        error = "what it has sent, span " + std::to_string(s);
      else if (kept.reduced[next].bytes != called.reduced[rank][s].bytes)
        error = "what it has reduced, span " + std::to_string(s);
    }
    return error;
  }

  // Nothing; one element; a parameter of many pieces, of fewer runs than ranks; and mixtures.
  static std::vector<Span> spans_of(int which, const Shape& shape, Random& random) {
    const std::size_t room =
        EncodedSlots::of(Layout{shape.world, 1, 0, shape.stage_bytes}, true).room;
    std::vector<Span> spans;
    std::uint64_t offset = 0;
    const auto add = [&](std::size_t most, bool exactly) {
      Span span;
      span.format = static_cast<Format>(random.below(kFormats));
      span.stochastic = random.below(2) != 0;
      span.key = random.next() << 1 ^ random.next();
      if (random.below(8) == 0) span.key = ~0u - random.below(3);
      constexpr std::uint16_t kRuns[] = {4, 8, 16, 32, 60, 64, 96, 128, 256, 480};
      do span.run = kRuns[random.below(std::size(kRuns))];
      while (span.record() > room || (span.run < 32 && record_bytes(span.format, 32) <= room));
      span.offset = offset;
      span.count = exactly ? most : random.below(static_cast<std::uint32_t>(most));
      offset += span.count + random.below(3);
      spans.push_back(span);
    };
    const std::size_t runs = static_cast<std::size_t>(shape.world) * shape.blocks;
    switch (which) {
      case 0:
        add(1, true);
        break;
      case 1:
        add(1, true);
        spans[0].count = 5 * runs * spans[0].run + 3;
        break;
      case 2:
        for (std::size_t s = 0; s < 1 + 2 * runs; ++s) add(90, false);
        break;
      case 3:
        if (random.below(2) == 0)
          for (int s = 0; s < 3; ++s) add(0, true);
        break;
      case 4:
        add(1, true);
        spans[0].count = spans[0].run + 1;
        break;
      default:
        for (int s = 0; s < 4; ++s) add(150 * runs + 1, false);
    }
    return spans;
  }

  Called call_of(const Buffer& buffer, int call, int now, std::vector<Holding>& holdings,
                 Random& random) const {
    const auto draw = [&] { return random.next(); };
    Called made;
    made.step.seed = 0x123456789abcdefull * static_cast<unsigned>(call);
    made.step.number = static_cast<std::uint32_t>(call);
    made.step.now = now;
    made.step.factors.assign(world_, 1);
    if (call % 4 == 3)
      for (int p = 0; p < world_; ++p)
        made.step.factors[p] = p % 5 == 0 && world_ > 1 ? 0 : 0.7f + 0.1f * static_cast<float>(p);
    // Of some parameters no rank has anything to send.
    std::vector<bool> unused;
    for (std::size_t s = 0; s < buffer.spans.size(); ++s)
      unused.push_back(random.below(6) == 0 && call >= kBuffers);
    for (int p = 0; p < world_; ++p) {
      made.step.absent.emplace_back();
      for (std::size_t s = 0; s < buffer.spans.size(); ++s)
        made.step.absent[p].push_back(unused[s] || (call % 3 == 2 && random.below(3) == 0));
      Values& gradient = holdings[p].gradient;
      std::fill(gradient.bytes.begin(), gradient.bytes.end(), Tensors<T>::kPoison);
      for (const Span& span : buffer.spans) {
        const auto mood = static_cast<Mood>(random.below(call % 4 == 2 ? kMoods : kMoods - 1));
        for (std::size_t i = 0; i < span.count; ++i)
          gradient.set(span.offset + i,
                       mood_value(random.below(2) == 0 ? Mood::ordinary : mood, draw));
      }
      made.inputs.push_back(gradient);
    }
    made.finite = step_of(buffer.spans, made.step, holdings).finite;
    made.output = holdings[0].gradient;
    made.sent.resize(world_);
    made.reduced.resize(world_);
    for (int p = 0; p < world_; ++p)
      for (const Kept& kept : holdings[p].kept) {
        made.sent[p].push_back(kept.sent[1 - now]);
        made.reduced[p].push_back(kept.reduced[1 - now]);
      }
    return made;
  }

  int world_;
  DType residual_dtype_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<Called> calls_;
};

// Plain memory that nothing but barrier() orders: every block writes its word, and reads those
// of the same block of all ranks.
class Meeting : public Exercise {
 public:
  Meeting(const Shape& shape, int calls)
      : calls_(calls),
        words_(shape.world, std::vector<std::uint32_t>(shape.blocks)),
        missed_(shape.world) {}

  int calls() const override { return calls_; }
  bool one_block(int) const override { return false; }
  bool greets(int) const override { return false; }
  void prepare(const View&, std::uint32_t, int) override {}

  bool run(TestBlock& block, const View& view, std::uint32_t, int call) override {
    for (int round = 0; round < kRounds; ++round) {
      const auto number = static_cast<std::uint32_t>(call * kRounds + round);
      if (block.thread() == 0) words_[view.rank][block.index()] = number * 31 + view.rank;
      if (!barrier(block, view, Phase::reduce)) return false;
      for (int p = 0; p < view.world(); ++p)
        if (words_[p][block.index()] != number * 31 + p) missed_[view.rank] = true;
      if (!barrier(block, view, Phase::exit)) return false;
    }
    return true;
  }

  std::string check(int rank, int call) override {
    if (!missed_[rank]) return "";
    return "barrier, call " + std::to_string(call) + ", rank " + std::to_string(rank) +
           ": left it before a peer came";
  }

 private:
  static constexpr int kRounds = 3;
  int calls_;
  std::vector<std::vector<std::uint32_t>> words_;
  std::vector<std::atomic<bool>> missed_;
};

// One after the other out of several exercises: they share slots, staging and counters.
class Medley : public Exercise {
 public:
  explicit Medley(std::vector<std::unique_ptr<Exercise>> parts) : parts_(std::move(parts)) {}

  int calls() const override { return parts_[0]->calls() * static_cast<int>(parts_.size()); }
  bool one_block(int call) const override { return part(call).one_block(within(call)); }
  bool greets(int call) const override { return part(call).greets(within(call)); }
  void prepare(const View& view, std::uint32_t epoch, int call) override {
    part(call).prepare(view, epoch, within(call));
  }
  bool run(TestBlock& block, const View& view, std::uint32_t epoch, int call) override {
    return part(call).run(block, view, epoch, within(call));
  }
  std::string check(int rank, int call) override { return part(call).check(rank, within(call)); }

 private:
  Exercise& part(int call) const { return *parts_[call % parts_.size()]; }
  int within(int call) const { return call / static_cast<int>(parts_.size()); }

  std::vector<std::unique_ptr<Exercise>> parts_;
};

}  // namespace fastreduce::test
