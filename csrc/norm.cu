// The norm of what has been reduced, as a CUDA kernel: a warp for every unit.
#include <cuda_runtime.h>

#include "cuda_error.h"
#include "device_norm.h"
#include "warp.h"

namespace fastreduce {
namespace {

constexpr int kBlocksEach = 4;

FR_WARPS_KERNEL(kBlocksEach) norm_measure(const __grid_constant__ NormLaunch launch) {
  measure_on(WarpLanes{}, DeviceAtomics{}, launch, warp(), warps());
}

}  // namespace

void launch_norm(const NormLaunch& launch, cudaStream_t stream) {
  if (launch.begin >= launch.end) return;
  const std::size_t units = (launch.end - launch.begin + kUnit - 1) / kUnit;
  launch_warps(norm_measure, launch, units, kBlocksEach, stream);
}

}  // namespace fastreduce
