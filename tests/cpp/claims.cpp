// One rank gives up while another begins to write into its tensor: see claim_peers().
//
//   claims none           as it is
//   claims release        both store their word without ordering it before their look
//   claims look_first     the writer looks whether the peer gave up before it claims
//
// Exit status 1 as soon as a rank believes its tensor untouched that the other then wrote; 0
// after two seconds without that, or twenty with a sabotage, which may need its moment.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "signal.h"

using namespace fastreduce;

namespace {

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

// This thread onto the n-th core that the process may use: two on one core never meet.
void run_on(int n) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || n-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    return;
  }
}

// Up to some hundreds of nanoseconds: the cores may be far apart.
void dawdle(std::uint32_t hash) {
  for (volatile std::uint32_t wait = hash >> 24; wait > 0; wait = wait - 1) {
  }
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

  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::seconds(std::strcmp(sabotage, "none") == 0 ? 2 : 20);

  // A round begins when both have counted it; whoever comes last releases both at once.
  std::atomic<long> arrived{0};
  const auto meet = [&](long meeting) {
    arrived.fetch_add(1);
    for (int spins = 0; arrived.load() < 2 * meeting; ++spins)
      if (spins > 1000) std::this_thread::yield();
  };

  long rounds = 0;
  bool broken = false;
  bool over = false;
  bool believed = false;  // rank 0: nobody has claimed my tensor
  bool wrote = false;     // rank 1
  std::thread quitter([&] {
    run_on(0);
    const View& view = views[0];
    for (std::uint32_t epoch = 1; !over; ++epoch) {
      meet(3L * epoch - 2);
      dawdle(epoch * 0x9e3779b1u);
      view.given_up(0) = epoch;
      store(&view.state(1, 0).value, static_cast<std::uint32_t>(State::failed), ordered);
      believed = load_acquire(&view.claim(0, 1).value) != epoch;
      meet(3L * epoch - 1);
      broken = believed && wrote;
      over = broken || std::chrono::steady_clock::now() > end;
      rounds = epoch;
      view.state(1, 0).value = 0;
      meet(3L * epoch);
    }
  });
  std::thread writer([&] {
    run_on(1);
    const View& view = views[1];
    for (std::uint32_t epoch = 1; !over; ++epoch) {
      meet(3L * epoch - 2);
      dawdle(epoch * 0x85ebca6bu);
      if (look_first) {
        const int failed = failed_peer(view, epoch);
        dawdle(~0u);
        store(&view.claim(0, 1).value, epoch, ordered);
        wrote = failed < 0;
      } else if (ordered) {
        wrote = claim_peers(view, epoch) < 0;
      } else {
        store(&view.claim(0, 1).value, epoch, false);
        wrote = failed_peer(view, epoch) < 0;
      }
      meet(3L * epoch - 1);
      meet(3L * epoch);
    }
  });
  quitter.join();
  writer.join();
  std::printf("%s in %ld rounds\n", broken ? "deceived" : "never deceived", rounds);
  return broken;
}
