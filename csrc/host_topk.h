// How one host thread chooses elements, and adds up what the ranks have chosen.
#pragma once

#include <cstdlib>
#include <new>

#include "host_wire.h"
#include "topk.h"

namespace fastreduce {
inline namespace FR_ISA {

// Memory for n items. A std::vector's functions would bear one name in the objects of all
// instruction sets, and a linker takes whichever it likes.
template <class T>
class Room {
 public:
  explicit Room(std::size_t n = 0) { grow(n); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  ~Room() { std::free(items_); }

  // What is there stays.
  void grow(std::size_t n) {
    if (n <= size_) return;
    void* const more = std::realloc(items_, n * sizeof(T));
    if (more == nullptr) throw std::bad_alloc();
    items_ = static_cast<T*>(more);
    size_ = n;
  }
  T* data() { return items_; }
  T& operator[](std::size_t i) { return items_[i]; }
  std::size_t size() const { return size_; }

 private:
  T* items_ = nullptr;
  std::size_t size_ = 0;
};

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
    if (!has_nothing(coding, s)) {
      for (std::size_t begin = 0; begin < span.count; begin += kMostOfRun) {
        const std::size_t left = span.count - begin;
        const std::size_t n = left < kMostOfRun ? left : kMostOfRun;
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
  constexpr std::size_t kBins = 1u << (31 - kLow);
  Room<std::uint32_t> count(kBins);
  for (std::size_t bin = 0; bin < kBins; ++bin) count[bin] = 0;
  each_tile(coding, selection,
            [&](std::size_t, std::uint32_t, std::size_t, std::size_t n, HostTeam::Tile,
                const std::uint32_t* keys) {
              for (std::size_t i = 0; i < n; ++i) ++count[keys[i] >> kLow];
            });
  std::uint64_t above = 0;
  std::size_t bin = kBins;
  while (bin != 0 && above < selection.k) above += count[--bin];
  return static_cast<std::uint32_t>(bin << kLow);
}

// The candidates with keys from `least` on, by index, and how many. All values become the new
// residuals, and `most` the largest magnitude.
inline std::size_t find_candidates(const Coding& coding, const Selection& selection,
                                   std::uint32_t least, Room<Candidate>& found,
                                   std::uint32_t* most) {
  std::size_t count = 0;
  each_tile(coding, selection,
            [&](std::size_t s, std::uint32_t index, std::size_t begin, std::size_t n,
                HostTeam::Tile values, const std::uint32_t* keys) {
              if (found.size() < count + n) found.grow(2 * (count + n));
              Candidate* const to = found.data();
              const auto first = static_cast<std::uint32_t>(index + begin);
              std::size_t next = count;
              for (std::size_t i = 0; i < n; ++i) {  // every one is written, few stay
                to[next] = {keys[i], {static_cast<std::uint32_t>(first + i), values(i)}};
                next += keys[i] >= least;
              }
              count = next;
              const std::uint32_t here =
                  HostTeam::max(n, [&](std::size_t i) { return magnitude_of(values(i)); });
              *most = *most < here ? here : *most;
              auto* const kept = static_cast<float*>(coding.residuals[s].sent_next);
              if (kept != nullptr) std::memcpy(kept + begin, values.at, n * sizeof(float));
            });
  return count;
}

// The k-th largest key of more than k candidates, digit by digit; `ties` becomes how many of those
// with this very key belong to the k.
inline std::uint32_t last_key(Room<Candidate>& found, std::size_t n, std::uint64_t k,
                              std::uint64_t* ties) {
  constexpr int kDigit = 11;
  constexpr std::uint32_t kDigits = 1u << kDigit;
  std::uint32_t prefix = 0;
  std::uint32_t known = 0;
  for (const int shift : {22, 11, 0}) {
    std::uint32_t count[kDigits] = {};
    for (std::size_t i = 0; i < n; ++i)
      if ((found[i].key & known) == prefix) ++count[found[i].key >> shift & (kDigits - 1)];
    std::uint32_t digit = kDigits - 1;
    for (; k > count[digit]; --digit) k -= count[digit];
    prefix |= digit << shift;
    known |= (kDigits - 1) << shift;
  }
  *ties = k;
  return prefix;
}

// Writes a message of selection_bytes(k) bytes, and what is not sent into the new residuals.
// `expected` is a key from which on there may be k, or 0; what it is the next time is returned.
inline std::uint32_t select(const Coding& coding, const Selection& selection,
                            std::uint32_t expected, char* message) {
  // Below the one of the last time: magnitudes fall.
  constexpr std::uint32_t kMargin = 1u << 21;
  const std::uint32_t lowest = lowest_key(selection);
  std::uint32_t most = 0;
  std::uint32_t from = expected > kMargin ? expected - kMargin : 0;
  from = from < lowest ? lowest : from;
  Room<Candidate> found;
  std::size_t count = 0;
  if (expected != 0) count = find_candidates(coding, selection, from, found, &most);
  if (expected == 0 || (count < selection.k && from > lowest)) {
    from = key_for(coding, selection);
    from = from < lowest ? lowest : from;
    count = find_candidates(coding, selection, from, found, &most);
  }

  std::uint32_t least = 0;
  std::uint64_t ties = ~0ull;  // so many of those with this very key
  if (selection.k != 0 && count > selection.k) least = last_key(found, count, selection.k, &ties);
  if (selection.k == 0) count = 0;

  auto* entry = reinterpret_cast<Entry*>(message + sizeof(Header));
  Entry* const first = entry;
  std::size_t s = 0;
  std::uint64_t before = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Candidate& each = found[i];
    if (each.key < least || (each.key == least && ties == 0)) continue;
    if (each.key == least) --ties;
    if (magnitude_of(each.entry.value) < selection.threshold) continue;  // chosen by chance
    *entry++ = each.entry;
    for (; each.entry.index >= before + coding.plan.span[s].count; ++s)
      before += coding.plan.span[s].count;
    auto* const kept = static_cast<float*>(coding.residuals[s].sent_next);
    if (kept != nullptr) kept[each.entry.index - before] = 0;
  }
  for (std::size_t k = 0; k < coding.plan.spans; ++k) {
    const Residuals& residuals = coding.residuals[k];
    if (has_nothing(coding, k) && residuals.sent != nullptr)
      HostTeam::carry(residuals.sent_next, residuals.sent, 0, coding.plan.span[k].count,
                      DType::float32);
  }
  const Header header{static_cast<std::uint32_t>(entry - first), most < kInfinity ? 1u : 0u};
  std::memcpy(message, &header, sizeof header);
  for (; entry != first + selection.k; ++entry) *entry = {0, 0};
  return count > selection.k ? least : from != 0 ? from : 1;
}

// The gradient becomes the mean over the ranks of what they have sent, at most k elements each.
// Missing elements are 0.
inline void combine(const Coding& coding, std::uint64_t k, const char* const* messages) {
  const int world = coding.plan.world;
  Room<const Entry*> next(world), end(world);
  bool finite = true;
  for (int p = 0; p < world; ++p) {
    Header header;
    std::memcpy(&header, messages[p], sizeof header);
    finite = finite && header.finite != 0;
    next[p] = reinterpret_cast<const Entry*>(messages[p] + sizeof header);
    end[p] = next[p] + (header.count < k ? header.count : k);
  }
  const float share = share_of(world);
  HostTeam team;
  Room<float> sums(static_cast<std::size_t>(world) * kMostOfRun);
  std::uint32_t most = 0;
  std::uint64_t index = 0;
  for (std::size_t s = 0; s < coding.plan.spans; ++s) {
    const Span& span = coding.plan.span[s];
    for (std::size_t begin = 0; begin < span.count; begin += kMostOfRun) {
      const std::size_t left = span.count - begin;
      const std::size_t n = left < kMostOfRun ? left : kMostOfRun;
      const std::uint64_t first = index + begin;
      for (std::size_t i = 0; i < n; ++i) sums[i] = finite ? 0.0f : bits_float(kNan);
      bool some = false;
      for (int p = 0; p < world && finite; ++p)
        some = some || (next[p] != end[p] && next[p]->index < first + n);
      if (some) {
        for (int p = 0; p < world; ++p) {
          float* const own = sums.data() + p * kMostOfRun;
          for (std::size_t i = 0; i < n && p != 0; ++i) own[i] = 0;
          // None that is not where its order says.
          for (; next[p] != end[p] && next[p]->index - first < n; ++next[p])
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
      const std::uint32_t here =
          team.put(coding, span.offset + begin, HostTeam::Tile{sums.data()}, n);
      most = most < here ? here : most;
    }
    index += span.count;
  }
  if (most >= limit_of(coding.dtype)) store_release(coding.finite, 0);
}

}  // namespace FR_ISA
}  // namespace fastreduce
