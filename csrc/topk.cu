// The choice of elements, and their sums, as CUDA kernels: a warp for every tile.
#include <cuda_runtime.h>

#include "cuda_error.h"
#include "device_topk.h"
#include "warp.h"

namespace fastreduce {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;  // of a block
// Of a multiprocessor, at once: what registers allow.
constexpr int kBlocksEach = 4;
constexpr int kBlocksCombining = 3;

using Team = DeviceTeam<WarpLanes, true>;

__device__ std::size_t warp() { return std::size_t(blockIdx.x) * kWarps + threadIdx.x / 32; }
__device__ std::size_t warps() { return std::size_t(gridDim.x) * kWarps; }

#define FR_KERNEL(blocks) __global__ void __launch_bounds__(kThreads, blocks)

// Keys crowd in few digits: a block counts for itself first.
FR_KERNEL(kBlocksEach) select_count(const __grid_constant__ SelectLaunch launch) {
  __shared__ std::uint32_t count[kDigitValues];
  for (std::uint32_t i = threadIdx.x; i < kDigitValues; i += kThreads) count[i] = 0;
  __syncthreads();
  count_digits(Team(), DeviceAtomics{}, launch, warp(), warps(),
               [](std::uint32_t digit) { atomicAdd(count + digit, 1u); });
  __syncthreads();
  for (std::uint32_t i = threadIdx.x; i < kDigitValues; i += kThreads)
    if (count[i] != 0) atomicAdd(launch.search->count + i, count[i]);
}

FR_KERNEL(kBlocksEach) select_settle(const __grid_constant__ SelectLaunch launch) {
  settle_digit(Team(), launch);
}

FR_KERNEL(kBlocksEach) select_tally(const __grid_constant__ SelectLaunch launch) {
  tally_tiles(Team(), launch, warp(), warps());
}

FR_KERNEL(kBlocksEach) select_emit(const __grid_constant__ SelectLaunch launch) {
  emit_tiles(Team(), launch, warp(), warps());
}

FR_KERNEL(kBlocksEach) select_find(const __grid_constant__ SelectLaunch launch) {
  find_entries(Team(), launch, warp(), warps());
}

FR_KERNEL(kBlocksCombining) select_combine(const __grid_constant__ SelectLaunch launch) {
  combine_tiles(Team(), launch, warp(), warps());
}

using Kernel = void (*)(SelectLaunch);

Kernel kernel_of(SelectStep step) {
  switch (step) {
    case SelectStep::count:
      return select_count;
    case SelectStep::settle:
      return select_settle;
    case SelectStep::tally:
      return select_tally;
    case SelectStep::emit:
      return select_emit;
    case SelectStep::find:
      return select_find;
    case SelectStep::combine:
      break;
  }
  return select_combine;
}

}  // namespace

void launch_select(const SelectLaunch& launch, cudaStream_t stream) {
  const bool combines = launch.step == SelectStep::combine;
  const int each = combines ? kBlocksCombining : kBlocksEach;
  const auto most = static_cast<std::size_t>(processors()) * static_cast<std::size_t>(each);
  const std::size_t blocks = launch.tiles / kWarps + 1;
  const bool alone = launch.step == SelectStep::settle;  // one warp
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(alone ? 1 : static_cast<unsigned>(blocks < most ? blocks : most));
  config.blockDim = dim3(alone ? 32 : kThreads);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel_of(launch.step), launch));
}

}  // namespace fastreduce
