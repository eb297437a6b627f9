// How warps choose elements, and add up what the ranks have chosen: see topk.h. A warp takes a tile
// of a span at a time, and what it has to know of all of them is found by steps, each a launch:
//
//   count    how often each digit occurs among the keys that may still be the k-th largest
//   settle   one warp: which digit that one has; after three of them it is known
//   tally    of every tile: the keys above it, and the keys equal to it
//   emit     given their sums over the tiles: the message, and the new residuals
//
//   find     where in every rank's message a tile's entries begin
//   combine  the gradient
//
// Beside those of device_wire.h, Lanes have
//   std::uint32_t ballot(bool)                a bit for every lane
#pragma once

#include "device_wire.h"

namespace fastreduce {

constexpr std::size_t kTileElements = 1024;

// A key has 31 bits: the highest digit begins with bit 22, the next one with 11, the last with 0.
constexpr int kDigitBits = 11;
constexpr std::uint32_t kDigitValues = 1u << kDigitBits;
constexpr int kDigits = 3;

// What is known of the k-th largest key; zero at first.
struct Search {
  std::uint64_t most;     // the largest magnitude
  std::uint32_t key;      // its digits, as far as they are known,
  std::uint32_t known;    // and a mask of them
  std::uint32_t ties;     // how many of the keys with these digits belong to the k
  std::uint32_t settled;  // there is nothing more to look for
  std::uint32_t count[kDigitValues];
};

FR_FN std::size_t tiles_of(const Span& span) {
  return (span.count + kTileElements - 1) / kTileElements;
}

// Of all of them.
inline std::size_t tiles_of(const Span* span, std::size_t spans) {
  std::size_t tiles = 0;
  for (std::size_t s = 0; s < spans; ++s) tiles += tiles_of(span[s]);
  return tiles;
}

inline namespace FR_ISA {

// Calls visit(tile, span, index of its first element, begin in the span, n) for a warp's.
template <class Visit>
FR_BLOCK FR_INLINE void each_device_tile(const Plan& plan, std::size_t warp, std::size_t warps,
                                         const Visit& visit) {
  std::size_t before = 0;
  std::uint64_t index = 0;
  for (std::size_t s = 0; s < plan.spans; ++s) {
    const Span& span = plan.span[s];
    const std::size_t tiles = tiles_of(span);
    for (std::size_t t = (warp + warps - before % warps) % warps; t < tiles; t += warps) {
      const std::uint64_t begin = t * kTileElements;
      const std::uint64_t left = span.count - begin;
      const auto n = static_cast<std::uint32_t>(left < kTileElements ? left : kTileElements);
      visit(before + t, s, static_cast<std::uint32_t>(index + begin), begin, n);
    }
    before += tiles;
    index += span.count;
  }
}

// The keys of a tile: magnitudes, or random numbers.
template <class Values, class Words>
struct Keys {
  Values values;
  Words words;
  bool random;
  FR_FN std::uint32_t operator()(std::uint32_t i) const {
    return random ? words(i) >> 1 : magnitude_of(values(i));
  }
};

// visit(values, keys) for one.
template <class Team, class Visit>
FR_BLOCK FR_INLINE void with_keys(const Team& team, const SelectLaunch& launch, std::size_t s,
                                  std::uint64_t begin, std::uint32_t n, const Visit& visit) {
  const Coding& coding = launch.coding;
  const Span& span = coding.plan.span[s];
  const auto values = team.contribution(coding, span, coding.residuals[s].sent, begin, n);
  const Noise noise{coding.seed, span.key, coding.step, ~0u};
  const auto words = team.template words<Stochastic>(noise, begin, n);
  visit(values, Keys<decltype(values), decltype(words)>{values, words, launch.selection.random});
}

// Calls count(digit) for every key that may be the k-th largest.
template <class Team, class Atomics, class Count>
FR_BLOCK void count_digits(const Team& team, const Atomics& atomics, const SelectLaunch& launch,
                           std::size_t warp, std::size_t warps, const Count& count) {
  Search& search = *launch.search;
  if (search.settled != 0) return;
  const std::uint32_t key = search.key;
  const std::uint32_t known = search.known;
  const std::uint32_t lowest = lowest_key(launch.selection);
  const int shift = kDigitBits * (kDigits - 1 - launch.digit);
  each_device_tile(
      launch.coding.plan, warp, warps,
      [&](std::size_t, std::size_t s, std::uint32_t, std::uint64_t begin, std::uint32_t n) {
        if (has_nothing(launch.coding, s)) return;
        with_keys(team, launch, s, begin, n, [&](const auto& values, const auto& keys) {
          for (std::uint32_t i = team.lane(); i < n; i += team.lanes()) {
            const std::uint32_t here = keys(i);
            if (here >= lowest && (here & known) == key) count(here >> shift & (kDigitValues - 1));
          }
          if (launch.digit != 0) return;
          const std::uint32_t most =
              team.max(n, [&](std::uint32_t i) { return magnitude_of(values(i)); });
          if (team.lane() == 0) atomics.raise(&search.most, most);
        });
      });
}

template <class Team>
FR_BLOCK void settle_digit(const Team& team, const SelectLaunch& launch) {
  Search& search = *launch.search;
  const std::uint64_t k = launch.selection.k;
  if (search.settled != 0) return;
  constexpr std::uint32_t kEach = kDigitValues / 32;
  std::uint32_t* const own = search.count + team.lane() * kEach;
  std::uint32_t here = 0;
  for (std::uint32_t i = 0; i < kEach; ++i) here += own[i];
  // In all lanes, and in those above this one.
  std::uint32_t all = here;
  std::uint32_t above = 0;
  FR_UNROLL
  for (std::uint32_t apart = 1; apart != 32; apart *= 2) {
    const std::uint32_t there = team.other(all, static_cast<int>(apart));
    if ((team.lane() & apart) == 0) above += there;
    all += there;
  }
  const bool enough = launch.digit != 0 || (all > k && k != 0);
  const std::uint64_t left = launch.digit == 0 ? k : search.ties;
  team.sync();  // all have read what one of them changes
  if (enough) {
    if (above < left && left <= std::uint64_t{above} + here) {
      std::uint32_t digit = kEach - 1;
      for (; above + own[digit] < left; --digit) above += own[digit];
      const int shift = kDigitBits * (kDigits - 1 - launch.digit);
      search.key |= (team.lane() * kEach + digit) << shift;
      search.known |= (kDigitValues - 1) << shift;
      search.ties = static_cast<std::uint32_t>(left - above);
    }
  } else if (team.lane() == 0) {  // all of them, or none
    search.key = k == 0 ? ~0u : lowest_key(launch.selection);
    search.ties = k == 0 ? 0 : ~0u;
    search.settled = 1;
  }
  for (std::uint32_t i = 0; i < kEach; ++i) own[i] = 0;
}

// launch.table: of every tile the keys above the k-th largest, then of every tile those equal to
// it.
template <class Team>
FR_BLOCK void tally_tiles(const Team& team, const SelectLaunch& launch, std::size_t warp,
                          std::size_t warps) {
  const std::uint32_t key = launch.search->key;
  each_device_tile(
      launch.coding.plan, warp, warps,
      [&](std::size_t tile, std::size_t s, std::uint32_t, std::uint64_t begin, std::uint32_t n) {
        std::uint32_t above = 0;
        std::uint32_t equal = 0;
        if (!has_nothing(launch.coding, s))
          with_keys(team, launch, s, begin, n, [&](const auto&, const auto& keys) {
            for (std::uint32_t i = team.lane(); i < n; i += team.lanes()) {
              const std::uint32_t here = keys(i);
              above += here > key;
              equal += here == key;
            }
          });
        FR_UNROLL
        for (int apart = 16; apart != 0; apart /= 2) {
          above += team.other(above, apart);
          equal += team.other(equal, apart);
        }
        if (team.lane() != 0) return;
        launch.table[tile] = above;
        launch.table[launch.tiles + tile] = equal;
      });
}

FR_FN std::uint32_t ones_of(std::uint32_t word) {
#if defined(__CUDA_ARCH__)
  return static_cast<std::uint32_t>(__popc(word));
#else
  return static_cast<std::uint32_t>(__builtin_popcount(word));
#endif
}

// launch.table: the sums of tally_tiles()'s numbers up to and with every tile.
template <class Team>
FR_BLOCK void emit_tiles(const Team& team, const SelectLaunch& launch, std::size_t warp,
                         std::size_t warps) {
  const Coding& coding = launch.coding;
  const std::uint32_t key = launch.search->key;
  const std::uint32_t most_ties = launch.search->ties;
  const std::uint32_t* const sums = launch.table;
  const std::size_t tiles = launch.tiles;
  auto* const entries = reinterpret_cast<Entry*>(launch.messages + sizeof(Header));
  const std::uint32_t lower = (1u << team.lane()) - 1;
  each_device_tile(
      coding.plan, warp, warps,
      [&](std::size_t tile, std::size_t s, std::uint32_t first, std::uint64_t begin,
          std::uint32_t n) {
        const Residuals& residuals = coding.residuals[s];
        auto* const kept = static_cast<float*>(residuals.sent_next);
        if (has_nothing(coding, s)) {
          if (kept != nullptr) team.carry(kept, residuals.sent, begin, n, DType::float32);
          return;
        }
        std::uint32_t above = tile == 0 ? 0 : sums[tile - 1];
        std::uint32_t equal = tile == 0 ? 0 : sums[tiles + tile - 1];
        with_keys(team, launch, s, begin, n, [&](const auto& values, const auto& keys) {
          for (std::uint32_t row = 0; row < n; row += team.lanes()) {
            const std::uint32_t i = row + team.lane();
            const bool there = i < n;
            const float value = there ? values(i) : 0.0f;
            const std::uint32_t here = there ? keys(i) : 0;
            const std::uint32_t larger = team.ballot(there && here > key);
            const std::uint32_t same = team.ballot(there && here == key);
            const std::uint32_t ties = equal + ones_of(same & lower);
            const bool ties_in = (same >> team.lane() & 1) != 0 && ties < most_ties;
            const bool chosen = (larger >> team.lane() & 1) != 0 || ties_in;
            if (chosen)
              entries[above + ones_of(larger & lower) + least(ties, most_ties)] = {first + i,
                                                                                   value};
            if (there && kept != nullptr) kept[begin + i] = chosen ? 0.0f : value;
            above += ones_of(larger);
            equal += ones_of(same);
          }
        });
      });
  const std::uint32_t count =
      tiles == 0 ? 0 : sums[tiles - 1] + least(sums[2 * tiles - 1], most_ties);
  const std::size_t lane = warp * team.lanes() + team.lane();
  for (std::uint64_t i = count + lane; i < launch.selection.k; i += warps * team.lanes())
    entries[i] = {0, 0};
  if (lane == 0)
    *reinterpret_cast<Header*>(launch.messages) = {count,
                                                   launch.search->most < kInfinity ? 1u : 0u};
}

// One rank's message, of all that lie one after the other.
struct Chosen {
  const Entry* entry;
  std::uint32_t count;
  bool finite;
};

FR_FN Chosen chosen_of(const SelectLaunch& launch, int rank) {
  const char* const at = launch.messages + rank * selection_bytes(launch.selection.k);
  const Header header = *reinterpret_cast<const Header*>(at);
  const auto k = static_cast<std::uint32_t>(launch.selection.k);
  return {reinterpret_cast<const Entry*>(at + sizeof header), least(header.count, k),
          header.finite != 0};
}

// The first of entries begin to end whose index is not less.
FR_FN std::uint32_t entry_from(const Entry* entry, std::uint32_t begin, std::uint32_t end,
                               std::uint64_t index) {
  while (begin < end) {
    const std::uint32_t middle = begin + (end - begin) / 2;
    if (entry[middle].index < index)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

// launch.table: of every tile, and of what would follow the last, every rank's first entry. A lane
// has a rank.
template <class Team>
FR_BLOCK void find_entries(const Team& team, const SelectLaunch& launch, std::size_t warp,
                           std::size_t warps) {
  const auto world = static_cast<std::uint32_t>(launch.coding.plan.world);
  const auto note = [&](std::size_t tile, std::uint64_t index) {
    for (std::uint32_t p = team.lane(); p < world; p += team.lanes()) {
      const Chosen chosen = chosen_of(launch, static_cast<int>(p));
      launch.table[tile * world + p] = entry_from(chosen.entry, 0, chosen.count, index);
    }
  };
  each_device_tile(launch.coding.plan, warp, warps,
                   [&](std::size_t tile, std::size_t, std::uint32_t first, std::uint64_t,
                       std::uint32_t) { note(tile, first); });
  if (warp == 0) note(launch.tiles, ~0ull);
}

template <class Team>
FR_BLOCK void combine_tiles(const Team& team, const SelectLaunch& launch, std::size_t warp,
                            std::size_t warps) {
  const Coding& coding = launch.coding;
  const int world = coding.plan.world;
  bool finite = true;
  for (int p = 0; p < world && finite; ++p) finite = chosen_of(launch, p).finite;
  if (!finite && team.lane() == 0) store_release(coding.finite, 0);
  const float share = share_of(world);
  each_device_tile(coding.plan, warp, warps,
                   [&](std::size_t tile, std::size_t s, std::uint32_t first, std::uint64_t begin,
                       std::uint32_t n) {
                     const std::uint64_t at = coding.plan.span[s].offset + begin;
                     const float rest = finite ? 0.0f : bits_float(kNan);
                     for (std::uint32_t i = team.lane(); i < n; i += team.lanes())
                       store_float(coding.dtype, coding.gradient, at + i, rest);
                     if (!finite) return;
                     team.sync();
                     const std::uint32_t* const from = launch.table + tile * world;
                     const std::uint32_t* const to = from + world;
                     FR_ROLLED
                     for (int p = 0; p < world; ++p) {
                       const Entry* const own = chosen_of(launch, p).entry;
                       for (std::uint32_t e = from[p] + team.lane(); e < to[p]; e += team.lanes()) {
                         const std::uint32_t index = own[e].index;
                         if (index - first >= n) continue;  // of a message that is damaged
                         Counter<Sum, float, kSenderLevels, 1> tree;
                         bool mine = true;  // no rank before this one has sent it
                         FR_ROLLED
                         for (int q = 0; q < world; ++q) {
                           const Entry* const others = chosen_of(launch, q).entry;
                           const std::uint32_t place = entry_from(others, from[q], to[q], index);
                           const bool there = place < to[q] && others[place].index == index;
                           mine = mine && (!there || q >= p);
                           float carry[1] = {there ? others[place].value : 0.0f};
                           tree.add(q, carry);
                         }
                         if (!mine) continue;
                         float total[1] = {};
                         tree.total(world, total);
                         const float mean = total[0] * share;
                         store_float(coding.dtype, coding.gradient, at + (index - first), mean);
                         if (magnitude_of(mean) >= limit_of(coding.dtype))
                           store_release(coding.finite, 0);
                       }
                     }
                   });
}

}  // namespace FR_ISA
}  // namespace fastreduce
