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

// Walks the spans in tiles: visit(span, index of its first element, begin, n, values, keys). Of two
// elements the one with the larger key is chosen first.
template <class Visit>
void each_tile(const Coding& coding, const Selection& selection, const Visit& visit) {
  HostTeam team;
  std::vector<std::uint32_t> keys(kMostOfRun);
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
        visit(s, index, begin, n, values, static_cast<const std::uint32_t*>(keys.data()));
      }
    }
    index += static_cast<std::uint32_t>(span.count);
  }
}

// Writes a message of selection_bytes(k) bytes, and what is not sent into the new residuals.
inline void select(const Coding& coding, const Selection& selection, char* message) {
  // Keys have 31 bits. First how many there are of every upper 11, then those alone among which the
  // last one to be chosen is.
  constexpr int kLow = 20;
  std::vector<std::uint64_t> count(1u << (31 - kLow));
  std::uint32_t most = 0;
  each_tile(coding, selection,
            [&](std::size_t, std::uint32_t, std::size_t, std::size_t n, HostTeam::Tile values,
                const std::uint32_t* keys) {
              for (std::size_t i = 0; i < n; ++i) ++count[keys[i] >> kLow];
              most = std::max(
                  most, HostTeam::max(n, [&](std::size_t i) { return magnitude_of(values(i)); }));
            });
  std::uint64_t above = 0;
  std::size_t bin = count.size();
  while (bin != 0 && above + count[bin - 1] <= selection.k) above += count[--bin];
  std::uint32_t least = 0;     // keys from here on are chosen
  std::uint64_t ties = ~0ull;  // of those that equal it, so many
  if (bin != 0) {
    --bin;
    std::vector<std::uint32_t> here;
    here.reserve(count[bin]);
    each_tile(coding, selection,
              [&](std::size_t, std::uint32_t, std::size_t, std::size_t n, HostTeam::Tile,
                  const std::uint32_t* keys) {
                for (std::size_t i = 0; i < n; ++i)
                  if (keys[i] >> kLow == bin) here.push_back(keys[i]);
              });
    const std::uint64_t left = selection.k - above;
    if (left == 0) {
      least = static_cast<std::uint32_t>((bin + 1) << kLow);
    } else {
      std::nth_element(here.begin(), here.begin() + (left - 1), here.end(), std::greater<>());
      least = here[left - 1];
      ties = left;
      for (std::uint64_t i = 0; i < left; ++i) ties -= here[i] > least;
    }
  }
  const bool finite = most < kInfinity;
  auto* entry = reinterpret_cast<Entry*>(message + sizeof(Header));
  Entry* const first = entry;
  each_tile(coding, selection,
            [&](std::size_t s, std::uint32_t index, std::size_t begin, std::size_t n,
                HostTeam::Tile values, const std::uint32_t* keys) {
              auto* const kept = static_cast<float*>(coding.residuals[s].sent_next);
              for (std::size_t i = 0; i < n; ++i) {
                const float value = values(i);
                bool sent = keys[i] >= least && magnitude_of(value) >= selection.threshold;
                if (sent && keys[i] == least) sent = ties != 0 && ties-- != 0;
                if (sent) *entry++ = {static_cast<std::uint32_t>(index + begin + i), value};
                if (kept != nullptr) kept[begin + i] = sent ? 0.0f : value;
              }
            });
  for (std::size_t s = 0; s < coding.plan.spans; ++s) {
    const Residuals& residuals = coding.residuals[s];
    if (coding.absent != nullptr && coding.absent[s] != 0 && residuals.sent != nullptr)
      HostTeam::carry(residuals.sent_next, residuals.sent, 0, coding.plan.span[s].count,
                      DType::float32);
  }
  const Header header{static_cast<std::uint32_t>(entry - first), finite ? 1u : 0u};
  std::memcpy(message, &header, sizeof header);
  for (; entry != first + selection.k; ++entry) *entry = {0, 0};
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
