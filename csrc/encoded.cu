// All-reduce in wire formats out of the peers' memory, as a kernel: the whole of encoded().
#include "cuda_block.h"
#include "device_wire.h"
#include "warp.h"

namespace fastreduce {
namespace {

struct BlockLanes : WarpLanes {
  __device__ std::uint32_t warp() const { return threadIdx.x / 32; }
  __device__ std::uint32_t warps() const { return blockDim.x / 32; }
};

template <bool Few>
FR_WAITING_KERNEL encoded_reduction(const __grid_constant__ Launch launch) {
  using Coder = DeviceCoder<DeviceTeam<BlockLanes, Few>>;
  run_call(CudaBlock(), launch, [&](CudaBlock& block, std::uint32_t epoch) {
    encoded_call(block, launch, [](const Coding& coding) { return Coder({}, coding); }, epoch);
  });
}

}  // namespace

Kernel encoded_kernel(int world) {
  return world <= kInFlight ? encoded_reduction<true> : encoded_reduction<false>;
}

}  // namespace fastreduce
