// The norm of what has been reduced, as a CUDA kernel: a warp for every unit.
#include <cuda_runtime.h>

#include "cuda_error.h"
#include "device_norm.h"
#include "warp.h"

namespace fastreduce {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;  // of a block
constexpr int kBlocksEach = 4;         // of a multiprocessor, at once: what registers allow

__global__ void __launch_bounds__(kThreads, kBlocksEach)
    norm_measure(const __grid_constant__ NormLaunch launch) {
  const std::size_t warp = std::size_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  measure_on(WarpLanes{}, DeviceAtomics{}, launch, warp, std::size_t(gridDim.x) * kWarps);
}

}  // namespace

void launch_norm(const NormLaunch& launch, cudaStream_t stream) {
  if (launch.begin >= launch.end) return;
  const std::size_t units = (launch.end - launch.begin + kUnit - 1) / kUnit;
  const auto most = static_cast<std::size_t>(processors()) * kBlocksEach;
  const std::size_t blocks = (units + kWarps - 1) / kWarps;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks < most ? blocks : most));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, norm_measure, launch));
}

}  // namespace fastreduce
