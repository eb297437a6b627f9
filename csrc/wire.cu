// Wire formats as CUDA kernels: one launch for all messages of a buffer, a warp for every run.
#include <cuda_runtime.h>

#include "cuda_error.h"
#include "device_wire.h"
#include "warp.h"

namespace fastreduce {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;  // of a block
// Of a multiprocessor, at once: what registers allow.
constexpr int kBlocksEach = 4;
constexpr int kBlocksReducing = 3;

__device__ std::size_t warp() { return std::size_t(blockIdx.x) * kWarps + threadIdx.x / 32; }
__device__ std::size_t warps() { return std::size_t(gridDim.x) * kWarps; }

#define FR_KERNEL(blocks) __global__ void __launch_bounds__(kThreads, blocks)

FR_KERNEL(kBlocksEach) wire_encode(const __grid_constant__ WireLaunch launch) {
  DeviceTeam<WarpLanes, true> team;
  encode_messages(team, launch, warp(), warps());
}

template <bool Few>
FR_KERNEL(kBlocksReducing)
wire_reduce(const __grid_constant__ WireLaunch launch) {
  DeviceTeam<WarpLanes, Few> team;
  reduce_messages(team, launch, warp(), warps());
}

FR_KERNEL(kBlocksEach) wire_decode(const __grid_constant__ WireLaunch launch) {
  DeviceTeam<WarpLanes, true> team;
  decode_messages(team, launch, warp(), warps());
}

using Kernel = void (*)(WireLaunch);

Kernel kernel_of(const WireLaunch& launch) {
  switch (launch.step) {
    case WireStep::encode:
      return wire_encode;
    case WireStep::reduce:
      return launch.coding.plan.world <= kInFlight ? wire_reduce<true> : wire_reduce<false>;
    case WireStep::decode:
      break;
  }
  return wire_decode;
}

}  // namespace

void launch_wire(const WireLaunch& launch, cudaStream_t stream) {
  if (launch.runs == 0) return;
  const int each = launch.step == WireStep::reduce ? kBlocksReducing : kBlocksEach;
  const auto most = static_cast<std::size_t>(processors()) * static_cast<std::size_t>(each);
  const std::size_t blocks = (launch.runs + kWarps - 1) / kWarps;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks < most ? blocks : most));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel_of(launch), launch));
}

}  // namespace fastreduce
