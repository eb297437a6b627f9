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

FR_WAITING_KERNEL encoded_reduction(const __grid_constant__ Launch launch) {
  const auto coder_of = [](const Coding& coding) {
    return DeviceCoder<BlockLanes>(BlockLanes(), coding);
  };
  run_call(CudaBlock(), launch, [&](CudaBlock& block, std::uint32_t epoch) {
    encoded_call(block, launch, coder_of, epoch);
  });
}

}  // namespace

Kernel encoded_kernel() { return encoded_reduction; }

}  // namespace fastreduce
