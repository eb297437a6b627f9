// A plan of the rows that Python gives, and a coding of its numbers: the same for every target.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "wire.h"

namespace fastreduce {

// A Plan and what it points to.
class PlanTables {
 public:
  // Of every span: offset, count, key, format, whether it is rounded stochastically, elements of a
  // run.
  using Row = std::tuple<std::uint64_t, std::uint64_t, std::uint32_t, int, bool, std::size_t>;

  // `servers`: the ranks that reduce, none for all. Their parts begin with multiples of `grain`
  // elements, or with any run.
  PlanTables(int world, const std::vector<Row>& spans, const std::vector<int>& servers = {},
             std::size_t grain = 0) {
    if (world < 1 || world > kMostSenders)
      throw std::invalid_argument("ranks: expected 1 to " + std::to_string(kMostSenders) +
                                  ", got " + std::to_string(world));
    for (const auto& [offset, count, key, format, stochastic, run] : spans) {
      if (run < 4 || run > kMostOfRun || run % 4 != 0)
        throw std::invalid_argument("run: expected 4 to " + std::to_string(kMostOfRun) +
                                    " elements, a multiple of 4, got " + std::to_string(run));
      if (format < 0 || format >= kFormats) throw std::invalid_argument("format: unknown");
      spans_.push_back({offset, count, key, static_cast<Format>(format), stochastic,
                        static_cast<std::uint16_t>(run)});
      plan_.record = std::max(plan_.record, spans_.back().record());
    }
    plan_.world = world;
    plan_.spans = spans_.size();
    plan_.span = spans_.data();
    Dealing dealing(world, servers);
    dealing.grain = grain;
    if (dealing.places == 0) throw std::invalid_argument("servers: expected at least one rank");
    for (const Span& span : spans_)
      if (grain % span.run != 0)
        throw std::invalid_argument("grain: expected a multiple of every run's elements");
    parts_ = parts_of(plan_, dealing);
    plan_.part = parts_.data();
    messages_ = messages_of(plan_);
  }
  PlanTables(const PlanTables&) = delete;
  PlanTables& operator=(const PlanTables&) = delete;

  const Plan& plan() const { return plan_; }
  const std::vector<Part>& messages() const { return messages_; }

  // All tables, one after the other, for memory elsewhere; and the plan, and the messages, of those
  // that lie at `base`.
  std::string image() const {
    std::string bytes;
    const auto add = [&](const auto& table) {
      bytes.append(reinterpret_cast<const char*>(table.data()), table.size() * sizeof(table[0]));
    };
    static_assert(sizeof(Span) % alignof(Part) == 0, "tables stay aligned");
    add(spans_);
    add(parts_);
    add(messages_);
    return bytes;
  }
  Plan plan_at(const char* base) const {
    Plan plan = plan_;
    plan.span = reinterpret_cast<const Span*>(base);
    plan.part = reinterpret_cast<const Part*>(plan.span + spans_.size());
    return plan;
  }
  const Part* messages_at(const char* base) const { return plan_at(base).part + parts_.size(); }

 private:
  std::vector<Span> spans_;
  std::vector<Part> parts_;
  std::vector<Part> messages_;
  Plan plan_;
};

// All but what lies in memory.
inline Coding coding_of(const Plan& plan, Address gradient, int dtype, int rank, double factor,
                        int residual_dtype, std::uint64_t seed, std::uint32_t step) {
  if (rank < 0 || rank >= plan.world)
    throw std::invalid_argument("rank: expected 0 to " + std::to_string(plan.world - 1) + ", got " +
                                std::to_string(rank));
  Coding coding;
  coding.plan = plan;
  coding.residual_dtype = static_cast<DType>(residual_dtype);
  coding.dtype = static_cast<DType>(dtype);
  coding.gradient = reinterpret_cast<void*>(gradient);
  coding.rank = rank;
  coding.factor = static_cast<float>(factor);
  coding.seed = seed;
  coding.step = step;
  return coding;
}

}  // namespace fastreduce
