// Wire formats that send some elements of a buffer and keep the others back: the k largest, k at
// random, or the k largest of those above a threshold. Every rank sends its own choice to all, and
// everybody adds up; nothing is lost on the way back.
//
//   message   count, whether all was finite, then `k` entries of index and value, by ascending
//             index; those past `count` are zero
//
// An index counts the elements of all spans, one after the other. Of equal ones the lower indices
// are chosen.
#pragma once

#include <algorithm>
#include <vector>

#include "host_wire.h"

namespace fastreduce {

struct Selection {
  bool random = false;          // by random numbers, the same on all ranks, not by magnitude
  std::uint64_t k = 0;          // at most
  std::uint32_t threshold = 0;  // the bits of the least magnitude that is sent
};

struct Entry {
  std::uint32_t index;
  float value;
};

struct Header {
  std::uint32_t count;
  std::uint32_t finite;
};

FR_FN std::size_t selection_bytes(std::uint64_t k) { return sizeof(Header) + k * sizeof(Entry); }

inline namespace FR_ISA {

// An element that may be sent. Of two the one with the larger key is chosen first.
struct Candidate {
  std::uint32_t key;
  Entry entry;
};

// Calls visit(span, index of its first element, begin, n, values, keys) for the spans' tiles.
template <class Visit>
void each_tile(const Coding& coding, const Selection& selection, const Visit& visit) {
  HostTeam team;
  alignas(64) std::uint32_t keys[kMostOfRun];
  std::uint32_t index = 0;
  for (std::size_t s = 0; s < coding.plan.spans; ++s) {
    const Span& span = coding.plan.span[s];
    if (coding.absent == nullptr || coding.absent[s] == 0) {
      for (std::size_t begin = 0; begin < span.count; begin += kMostOfRun) {
        const std::size_t n = std::min<std::size_t>(kMostOfRun, span.count - begin);
        const HostTeam::Tile values =
            team.contribution(coding, span, coding.residuals[s].sent, begin, n);
        if (selection.random) {
          const Noise noise{coding.seed, span.key, coding.step, ~0u};
          const auto words = team.words<Stochastic>(noise, begin, n);
          for (std::size_t i = 0; i < n; ++i) keys[i] = words(i) >> 1;
        } else {
          for (std::size_t i = 0; i < n; ++i) keys[i] = magnitude_of(values(i));
        }
        visit(s, index, begin, n, values, static_cast<const std::uint32_t*>(keys));
      }
    }
    index += static_cast<std::uint32_t>(span.count);
  }
}

// A key from which on there are at least k, if there are so many, and not many more.
inline std::uint32_t key_for(const Coding& coding, const Selection& selection) {
  constexpr int kLow = 16;  // of 31 bits
  std::vector<std::uint32_t> count(1u << (31 - kLow));
  each_tile(coding, selection,
            [&](std::size_t, std::uint32_t, std::size_t, std::size_t n, HostTeam::Tile,
                const std::uint32_t* keys) {
              for (std::size_t i = 0; i < n; ++i) ++count[keys[i] >> kLow];
            });
  std::uint64_t above = 0;
  std::size_t bin = count.size();
  while (bin != 0 && above < selection.k) above += count[--bin];
  return static_cast<std::uint32_t>(bin << kLow);
}

// The candidates with keys from `least` on, by index. All values become the new residuals, and
// `most` the largest magnitude.
inline std::vector<Candidate> candidates_from(const Coding& coding, const Selection& selection,
                                              std::uint32_t least, std::uint32_t* most) {
  std::vector<Candidate> found;
  std::size_t count = 0;
  each_tile(coding, selection,
            [&](std::size_t s, std::uint32_t index, std::size_t begin, std::size_t n,
                HostTeam::Tile values, const std::uint32_t* keys) {
              if (found.size() < count + n) found.resize(2 * (count + n));
              Candidate* const to = found.data();
              const auto first = static_cast<std::uint32_t>(index + begin);
              std::size_t next = count;
              for (std::size_t i = 0; i < n; ++i) {  // every one is written, few stay
                to[next] = {keys[i], {static_cast<std::uint32_t>(first + i), values(i)}};
                next += keys[i] >= least;
              }
              count = next;
              *most = std::max(
                  *most, HostTeam::max(n, [&](std::size_t i) { return magnitude_of(values(i)); }));
              auto* const kept = static_cast<float*>(coding.residuals[s].sent_next);
              if (kept != nullptr) std::memcpy(kept + begin, values.at, n * sizeof(float));
            });
  found.resize(count);
  return found;
}

// Writes a message of selection_bytes(k) bytes, and what is not sent into the new residuals.
// `expected` is a key from which on there may be k, or 0; what it is the next time is returned.
inline std::uint32_t select(const Coding& coding, const Selection& selection,
                            std::uint32_t expected, char* message) {
  // Below the one of the last time: magnitudes fall.
  constexpr std::uint32_t kMargin = 1u << 21;
  const std::uint32_t lowest = selection.random ? 0 : selection.threshold;
  std::uint32_t most = 0;
  std::uint32_t from = expected > kMargin ? expected - kMargin : 0;
  std::vector<Candidate> found;
  if (expected != 0) found = candidates_from(coding, selection, std::max(from, lowest), &most);
  if (expected == 0 || (found.size() < selection.k && from > lowest)) {
    from = key_for(coding, selection);
    found = candidates_from(coding, selection, std::max(from, lowest), &most);
  }

  std::uint32_t least = 0;
  std::uint64_t ties = ~0ull;  // so many of those with this very key
  if (found.size() > selection.k) {
    std::vector<std::uint32_t> keys;
    for (const Candidate& each : found) keys.push_back(each.key);
    const auto last = keys.begin() + (selection.k - 1);
    std::nth_element(keys.begin(), last, keys.end(), std::greater<>());
    least = *last;
    ties = selection.k - std::count_if(keys.begin(), last, [=](auto key) { return key > least; });
  }

  auto* entry = reinterpret_cast<Entry*>(message + sizeof(Header));
  Entry* const first = entry;
  std::size_t s = 0;
  std::uint64_t before = 0;
  for (const Candidate& each : found) {
    if (each.key < least || (each.key == least && ties == 0)) continue;
    if (each.key == least) --ties;
    *entry++ = each.entry;
    for (; each.entry.index >= before + coding.plan.span[s].count; ++s)
      before += coding.plan.span[s].count;
    auto* const kept = static_cast<float*>(coding.residuals[s].sent_next);
    if (kept != nullptr) kept[each.entry.index - before] = 0;
  }
  for (std::size_t k = 0; k < coding.plan.spans; ++k) {
    const Residuals& residuals = coding.residuals[k];
    if (coding.absent != nullptr && coding.absent[k] != 0 && residuals.sent != nullptr)
      HostTeam::carry(residuals.sent_next, residuals.sent, 0, coding.plan.span[k].count,
                      DType::float32);
  }
  const Header header{static_cast<std::uint32_t>(entry - first), most < kInfinity ? 1u : 0u};
  std::memcpy(message, &header, sizeof header);
  for (; entry != first + selection.k; ++entry) *entry = {0, 0};
  return found.size() > selection.k ? least : std::max({from, lowest, 1u});
}

// The gradient becomes the mean over the ranks of what they have sent. Missing elements are 0.
inline void combine(const Coding& coding, const char* const* messages) {
  const int world = coding.plan.world;
  std::vector<const Entry*> next(world), end(world);
  bool finite = true;
  for (int p = 0; p < world; ++p) {
    Header header;
    std::memcpy(&header, messages[p], sizeof header);
    finite = finite && header.finite != 0;
    next[p] = reinterpret_cast<const Entry*>(messages[p] + sizeof header);
    end[p] = next[p] + header.count;
  }
  const float share = share_of(world);
  HostTeam team;
  std::vector<float> sums(static_cast<std::size_t>(world) * kMostOfRun);
  std::uint32_t most = 0;
  std::uint64_t index = 0;
  for (std::size_t s = 0; s < coding.plan.spans; ++s) {
    const Span& span = coding.plan.span[s];
    for (std::size_t begin = 0; begin < span.count; begin += kMostOfRun) {
      const std::size_t n = std::min<std::size_t>(kMostOfRun, span.count - begin);
      const std::uint64_t first = index + begin;
      std::fill(sums.begin(), sums.begin() + n, finite ? 0.0f : bits_float(kNan));
      bool some = false;
      for (int p = 0; p < world && finite; ++p)
        some = some || (next[p] != end[p] && next[p]->index < first + n);
      if (some) {
        for (int p = 0; p < world; ++p) {
          float* const own = sums.data() + p * kMostOfRun;
          if (p != 0) std::fill(own, own + n, 0.0f);
          for (; next[p] != end[p] && next[p]->index < first + n; ++next[p])
            own[next[p]->index - first] = next[p]->value;
        }
        // The tree: neighbours pairwise, level by level.
        for (int apart = 1; apart < world; apart *= 2)
          for (int p = 0; p + apart < world; p += 2 * apart) {
            float* const left = sums.data() + p * kMostOfRun;
            const float* const right = left + apart * kMostOfRun;
            for (std::size_t i = 0; i < n; ++i) left[i] = left[i] + right[i];
          }
        for (std::size_t i = 0; i < n; ++i) sums[i] = sums[i] * share;
      }
      most = std::max(most, team.put(coding, span.offset + begin, sums.data(), n));
    }
    index += span.count;
  }
  if (most >= limit_of(coding.dtype)) store_release(coding.finite, 0);
}

}  // namespace FR_ISA
}  // namespace fastreduce
