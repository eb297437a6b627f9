// Wire formats as CUDA kernels: one launch for all messages of a buffer, a warp for every run.
#include <cuda_runtime.h>

#include "cuda_error.h"
#include "device_wire.h"
#include "warp.h"

namespace fastreduce {
namespace {

constexpr int kBlocksEach = 4;
constexpr int kBlocksReducing = 3;

FR_WARPS_KERNEL(kBlocksEach) wire_encode(const __grid_constant__ WireLaunch launch) {
  DeviceTeam<WarpLanes, true> team;
  encode_messages(team, launch, warp(), warps());
}

template <bool Few>
FR_WARPS_KERNEL(kBlocksReducing)
wire_reduce(const __grid_constant__ WireLaunch launch) {
  DeviceTeam<WarpLanes, Few> team;
  reduce_messages(team, launch, warp(), warps());
}

FR_WARPS_KERNEL(kBlocksEach) wire_decode(const __grid_constant__ WireLaunch launch) {
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
  launch_warps(kernel_of(launch), launch, launch.runs, each, stream);
}

}  // namespace fastreduce
