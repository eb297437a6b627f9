// Runs the protocols of csrc/ with ranks as threads, to be compiled with a sanitizer.
//
//   protocols list              the cases and the sabotages
//   protocols CASE              in many shapes
//   protocols CASE SABOTAGE     in one shape, with one thing wrong
//   protocols CASE none         in the same shapes, with nothing wrong
//
// Exit status: 0, 2 after a wrong result, 3 after a wait that was given up, else the sanitizer's.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "exercises.h"

namespace fastreduce {

// host.cpp refers to the kernels, which here are not called through it.
inline namespace baseline {
extern const Kernels instance;
const Kernels instance{"none",  nullptr, nullptr, nullptr, nullptr,
                       nullptr, nullptr, nullptr, nullptr};
}  // namespace baseline

namespace test {
namespace {

constexpr int kCalls = 24;

struct Case {
  const char* name;
  std::vector<Form> forms;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = [] {
    std::vector<Case> made;
    std::vector<Form> every;
    for (int f = 0; f <= static_cast<int>(Form::greeted_reduce_scatter_one_shot); ++f) {
      every.push_back(static_cast<Form>(f));
      made.push_back({name_of(every.back()), {every.back()}});
    }
    made.push_back({"barrier", {}});
    made.push_back({"medley", every});
    return made;
  }();
  return all;
}

bool is(const Case& chosen, const char* name) { return std::strcmp(chosen.name, name) == 0; }

// Bytes that are only moved have no type.
bool has_types(const Case& chosen) {
  return std::any_of(chosen.forms.begin(), chosen.forms.end(),
                     [](Form form) { return !is_transfer(form); });
}

// Epochs and counters wrap at 2^32, and change sign at 2^31, within a run.
constexpr std::uint32_t kFirstEpochs[] = {0u - 9, 0u - 20, 0, 0x80000000u - 12};

constexpr struct {
  int world;
  int blocks;
  int threads;
  bool sleeps;
} kShapes[] = {
    {1, 1, 1, false}, {2, 1, 1, true},  {2, 2, 1, false}, {2, 1, 4, false}, {3, 1, 1, false},
    {3, 2, 2, true},  {4, 1, 1, false}, {4, 2, 1, true},  {4, 1, 3, false}, {8, 1, 1, false},
    {8, 2, 1, true},  {8, 1, 2, false}, {2, 6, 2, false}, {5, 3, 2, false},
};

// They stand for all in what a protocol knows of a type: sizes of elements and of partial sums.
// (Arithmetic itself: see units.cpp.)
std::unique_ptr<Exercise> reduction(int turn, const Shape& shape, const std::vector<Form>& forms,
                                    int calls, std::uint64_t seed, bool misaligned) {
  const auto make = [&](auto element, auto op) -> std::unique_ptr<Exercise> {
    return std::make_unique<Reduction<decltype(element), decltype(op)>>(shape, forms, calls, seed,
                                                                        misaligned);
  };
  switch (turn) {
    case 0:
      return make(BFloat16(), Sum());
    case 1:
      return make(std::int32_t(), Sum());
    case 2:
      return make(std::uint8_t(), Max());
    default:
      return make(float(), Sum());
  }
}
constexpr int kFloatSum = 3;
constexpr int kTypes = 4;
// Shapes take them in turns, so that each type meets several blocks, several threads and counters
// that wrap. Addresses depend on types, the order of threads does not.
#if defined(__SANITIZE_THREAD__)
constexpr int kTypesOfAShape = 1;
#else
constexpr int kTypesOfAShape = 2;
#endif

std::unique_ptr<Exercise> encoding(int turn, const Shape& shape, int calls, std::uint64_t seed) {
  switch (turn) {
    case 0:
      return std::make_unique<Encoding<BFloat16>>(shape, calls, seed, DType::bfloat16);
    case 1:
      return std::make_unique<Encoding<Half>>(shape, calls, seed, DType::float32);
    case 2:
      return std::make_unique<Encoding<float>>(shape, calls, seed, DType::bfloat16);
    default:
      return std::make_unique<Encoding<float>>(shape, calls, seed, DType::float32);
  }
}

std::unique_ptr<Exercise> exercise(const Case& chosen, const Shape& shape, int turn,
                                   std::uint64_t seed, bool misaligned) {
  std::vector<Form> reductions;
  std::vector<Form> transfers;
  bool encodes = false;
  for (const Form form : chosen.forms) {
    if (form == Form::ring && shape.world == 1) continue;  // a rank alone has no neighbour
    if (form == Form::encoded)
      encodes = true;
    else
      (is_transfer(form) ? transfers : reductions).push_back(form);
  }
  std::vector<std::unique_ptr<Exercise>> parts;
  if (!reductions.empty())
    parts.push_back(reduction(turn, shape, reductions, kCalls, seed, misaligned));
  if (!transfers.empty())
    parts.push_back(std::make_unique<Transfer>(shape, transfers, kCalls, seed));
  if (encodes) parts.push_back(encoding(turn, shape, kCalls, seed));
  if (is(chosen, "barrier") || is(chosen, "medley"))
    parts.push_back(std::make_unique<Meeting>(shape, kCalls));
  return std::make_unique<Medley>(std::move(parts));
}

// The smallest slots and staging that hold every element type.
Shape shape_of(int world, int blocks, int threads, bool sleeps, std::uint32_t first_epoch) {
  Shape shape;
  shape.world = world;
  shape.blocks = blocks;
  shape.threads = threads;
  shape.sleeps = sleeps;
  shape.first_epoch = first_epoch;
  shape.slot_bytes = 2048;
  shape.inbox_bytes = 2048;
  shape.stage_bytes = 5 * 64 * static_cast<std::size_t>(world + 1);
  return shape;
}

int run(const Case& chosen, const Shape& shape, int turn, const Sabotage& sabotage) {
  const std::uint64_t seed = 7919u * static_cast<unsigned>(turn) + shape.world;
  const auto work = exercise(chosen, shape, turn, seed, sabotage.action == Action::misaligned);
  Outcome outcome;
  Ranks ranks(shape, sabotage, seed);
  ranks.run(*work, outcome);
  if (outcome.code() != Outcome::fine)
    std::fprintf(stderr, "%s, %d ranks of %d blocks of %d threads, first epoch %u: %s\n",
                 chosen.name, shape.world, shape.blocks, shape.threads, shape.first_epoch,
                 outcome.text().c_str());
  return outcome.code();
}

int run_all(const Case& chosen) {
  const int types = has_types(chosen) ? kTypesOfAShape : 1;
  for (int turn = 0; turn < static_cast<int>(std::size(kShapes)); ++turn) {
    const auto& each = kShapes[turn];
    if (each.world == 1 && is(chosen, "ring")) continue;
    const Shape shape =
        shape_of(each.world, each.blocks, each.threads, each.sleeps, kFirstEpochs[turn % 4]);
    for (int k = 0; k < types; ++k) {
      const int code = run(chosen, shape, (turn + turn / 6 + k) % kTypes, kSabotages[0]);
      if (code != Outcome::fine) return code;
    }
  }
  return 0;
}

// Only with more ranks than slots does the ring's credit decide anything, and only with several
// threads the block's barrier.
int run_one(const Case& chosen, const Sabotage& sabotage) {
  const int world = is(chosen, "ring") ? 8 : 4;
  for (const int threads : {1, 3}) {
    const bool wanted = (threads == 3) == (sabotage.action == Action::no_block_barrier);
    if (!wanted && sabotage.action != Action::none) continue;
    const Shape shape = shape_of(world, 1, threads, false, kFirstEpochs[0]);
    const int code = run(chosen, shape, kFloatSum, sabotage);
    if (code != Outcome::fine) return code;
  }
  return 0;
}

int list() {
  for (const auto& each : cases()) std::printf("case %s\n", each.name);
  for (const auto& each : kSabotages) std::printf("sabotage %s\n", each.name);
  return 0;
}

int main(int count, char** arguments) {
  ::alarm(200);  // a run that hangs ends
  if (count == 2 && std::strcmp(arguments[1], "list") == 0) return list();
  for (const auto& each : cases()) {
    if (count < 2 || !is(each, arguments[1])) continue;
    if (count == 2) return run_all(each);
    for (const auto& sabotage : kSabotages)
      if (std::strcmp(arguments[2], sabotage.name) == 0) return run_one(each, sabotage);
  }
  std::fprintf(stderr, "usage: %s list | CASE [SABOTAGE]\n", arguments[0]);
  return 64;
}

}  // namespace
}  // namespace test
}  // namespace fastreduce

int main(int count, char** arguments) { return fastreduce::test::main(count, arguments); }
