// The yardsticks of benchmarks/ranks.py: plain loops over shared memory.
#include <cstddef>
#include <cstdint>
#include <ctime>

// What an all-reduce cannot avoid: every buffer read once and written once, a rank's share of
// the elements by each rank. No flags, no waiting.
extern "C" void move_bytes(float* const* buffers, int ranks, std::size_t begin, std::size_t end) {
  if (ranks == 2) {
    float *a = buffers[0], *b = buffers[1];
#pragma GCC ivdep
    for (std::size_t i = begin; i < end; ++i) a[i] = b[i] = a[i] + b[i];
    return;
  }
  if (ranks == 4) {
    float *a = buffers[0], *b = buffers[1], *c = buffers[2], *d = buffers[3];
#pragma GCC ivdep
    for (std::size_t i = begin; i < end; ++i)
      a[i] = b[i] = c[i] = d[i] = (a[i] + b[i]) + (c[i] + d[i]);
    return;
  }
  for (std::size_t i = begin; i < end; ++i) {
    float sum = 0;
    for (int r = 0; r < ranks; ++r) sum += buffers[r][i];
    for (int r = 0; r < ranks; ++r) buffers[r][i] = sum;
  }
}

// Nanoseconds of one flag round trip between ranks 0 and 1, each spinning. Two flags, 128 bytes
// apart, count rounds from `first` on; the others return at once. Gives up after a second.
extern "C" double round_trip(std::uint32_t* flags, int rank, std::uint32_t first,
                             std::uint32_t rounds) {
  if (rank > 1) return 0;
  std::uint32_t* mine = flags + 32 * rank;
  std::uint32_t* theirs = flags + 32 * (1 - rank);
  timespec begin, now;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  const auto elapsed = [&] {
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (now.tv_sec - begin.tv_sec) * 1e9 + (now.tv_nsec - begin.tv_nsec);
  };
  for (std::uint32_t k = first + 1; k <= first + rounds; ++k) {
    if (rank == 0) __atomic_store_n(mine, k, __ATOMIC_RELEASE);
    for (long spins = 0; __atomic_load_n(theirs, __ATOMIC_ACQUIRE) != k; ++spins) {
      if (spins % 1024 == 1023 && elapsed() > 1e9) return elapsed() / (k - first);
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    if (rank == 1) __atomic_store_n(mine, k, __ATOMIC_RELEASE);
  }
  return elapsed() / rounds;
}
