// The choice of elements, and their sums, as CUDA kernels: a warp for every tile.
#include <cuda_runtime.h>

#include "cuda_error.h"
#include "device_topk.h"
#include "warp.h"

namespace fastreduce {
namespace {

constexpr int kBlocksEach = 4;
constexpr int kBlocksCombining = 3;

using Team = DeviceTeam<WarpLanes, true>;

// Keys crowd in few digits: a block counts for itself first.
FR_WARPS_KERNEL(kBlocksEach) select_count(const __grid_constant__ SelectLaunch launch) {
  __shared__ std::uint32_t count[kDigitValues];
  for (std::uint32_t i = threadIdx.x; i < kDigitValues; i += kThreads) count[i] = 0;
  __syncthreads();
  count_digits(Team(), DeviceAtomics{}, launch, warp(), warps(),
               [](std::uint32_t digit) { atomicAdd(count + digit, 1u); });
  __syncthreads();
  for (std::uint32_t i = threadIdx.x; i < kDigitValues; i += kThreads)
    if (count[i] != 0) atomicAdd(launch.search->count + i, count[i]);
}

FR_WARPS_KERNEL(kBlocksEach) select_settle(const __grid_constant__ SelectLaunch launch) {
  if (warp() == 0) settle_digit(Team(), launch);
}

FR_WARPS_KERNEL(kBlocksEach) select_tally(const __grid_constant__ SelectLaunch launch) {
  tally_tiles(Team(), launch, warp(), warps());
}

FR_WARPS_KERNEL(kBlocksEach) select_emit(const __grid_constant__ SelectLaunch launch) {
  emit_tiles(Team(), launch, warp(), warps());
}

FR_WARPS_KERNEL(kBlocksEach) select_find(const __grid_constant__ SelectLaunch launch) {
  find_entries(Team(), launch, warp(), warps());
}

FR_WARPS_KERNEL(kBlocksCombining) select_combine(const __grid_constant__ SelectLaunch launch) {
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
  const int each = launch.step == SelectStep::combine ? kBlocksCombining : kBlocksEach;
  const std::size_t items = launch.step == SelectStep::settle ? 1 : launch.tiles + 1;
  launch_warps(kernel_of(launch.step), launch, items, each, stream);
}

}  // namespace fastreduce
