// The kernels of the wire formats, a shared library for Python.
#include <vector>

#include "device_norm.h"
#include "device_topk.h"
#include "lanes.h"
#include "wire_tables.h"

namespace fastreduce::test {
namespace {

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
