// One rank gives up while another begins to write into its tensor: see claim_peers().
//
//   claims none           as it is
//   claims release        both store their word without ordering it before their look
//   claims look_first     the writer looks whether the peer gave up before it claims
//
// Exit status 1 if ever a rank believed its tensor untouched that the other then wrote.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "signal.h"

using namespace fastreduce;

namespace {

constexpr int kRounds = 400000;

struct Area {
  explicit Area(std::size_t bytes) : words(new char[bytes + kLineBytes]()) {}
  char* data() const {
    const auto at = reinterpret_cast<std::uintptr_t>(words.get());
    return words.get() + (kLineBytes - at % kLineBytes) % kLineBytes;
  }
  std::unique_ptr<char[]> words;
};

void store(std::uint32_t* word, std::uint32_t value, bool ordered) {
  if (ordered)
    store_ordered(word, value);
  else
    store_release(word, value);
}

}  // namespace

int main(int argc, char** argv) {
  const char* sabotage = argc > 1 ? argv[1] : "none";
  const bool ordered = std::strcmp(sabotage, "release") != 0;
  const bool look_first = std::strcmp(sabotage, "look_first") == 0;

  View views[2];
  std::vector<Area> areas;
  for (View& view : views) view.layout = {2, 1, 4096, 4096};
  for (int r = 0; r < 2; ++r) areas.emplace_back(views[0].layout.bytes());
  for (int r = 0; r < 2; ++r) {
    views[r].rank = r;
    for (int p = 0; p < 2; ++p) views[r].area[p] = areas[p].data();
  }

  // A round begins when both have counted it; whoever comes last releases both at once.
  std::atomic<int> arrived{0};
  const auto meet = [&](int round) {
    arrived.fetch_add(1);
    for (int spins = 0; arrived.load() < 2 * round; ++spins)
      if (spins > 1000) std::this_thread::yield();
  };

  int broken = 0;
  bool believed = false;  // rank 0: nobody has claimed my tensor
  bool wrote = false;     // rank 1
  std::thread quitter([&] {
    const View& view = views[0];
    for (int round = 1; round <= kRounds; ++round) {
      const auto epoch = static_cast<std::uint32_t>(round);
      meet(3 * round - 2);
      for (volatile int wait = round % 64; wait > 0; --wait) {
      }
      store(&view.state(1, 0).value, static_cast<std::uint32_t>(State::failed), ordered);
      believed = load_acquire(&view.claim(0, 1).value) != epoch;
      meet(3 * round - 1);
      if (believed && wrote) ++broken;
      view.state(1, 0).value = 0;
      meet(3 * round);
    }
  });
  std::thread writer([&] {
    const View& view = views[1];
    for (int round = 1; round <= kRounds; ++round) {
      const auto epoch = static_cast<std::uint32_t>(round);
      meet(3 * round - 2);
      for (volatile int wait = round / 64 % 64; wait > 0; --wait) {
      }
      if (look_first) {
        const int failed = failed_peer(view);
        store(&view.claim(0, 1).value, epoch, ordered);
        wrote = failed < 0;
      } else if (ordered) {
        wrote = claim_peers(view, epoch) < 0;
      } else {
        store(&view.claim(0, 1).value, epoch, false);
        wrote = failed_peer(view) < 0;
      }
      meet(3 * round - 1);
      meet(3 * round);
    }
  });
  quitter.join();
  writer.join();
  std::printf("%d of %d rounds broken\n", broken, kRounds);
  return broken != 0;
}
