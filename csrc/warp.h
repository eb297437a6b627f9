// A warp of a GPU, as device_wire.h, device_topk.h and device_norm.h see it, and kernels whose
// warps share what there is to do.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_error.h"

namespace fastreduce {

struct WarpLanes {
  __device__ std::uint32_t lane() const { return threadIdx.x % 32; }
  __device__ std::uint32_t other(std::uint32_t word, int apart) const {
    return __shfl_xor_sync(~0u, word, apart);
  }
  __device__ void sync() const { __syncwarp(); }
  __device__ bool all(bool value) const { return __all_sync(~0u, value) != 0; }
  __device__ std::uint32_t ballot(bool value) const { return __ballot_sync(~0u, value); }
};

struct DeviceAtomics {
  static __device__ unsigned long long* word(std::uint64_t* at) {
    return reinterpret_cast<unsigned long long*>(at);
  }
  __device__ void add(std::uint64_t* at, std::uint64_t value) const { atomicAdd(word(at), value); }
  __device__ void raise(std::uint64_t* at, std::uint64_t value) const {
    if (value > *at) atomicMax(word(at), value);
  }
};

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;  // of a block

// Which warp of the grid this is, of how many.
static __device__ std::size_t warp() { return std::size_t(blockIdx.x) * kWarps + threadIdx.x / 32; }
static __device__ std::size_t warps() { return std::size_t(gridDim.x) * kWarps; }

// `blocks` of a multiprocessor at once: what registers allow.
#define FR_WARPS_KERNEL(blocks) __global__ void __launch_bounds__(kThreads, blocks)

// A warp for each of `items`, as far as the current device has room for them at once.
template <class Launch>
void launch_warps(void (*kernel)(Launch), const Launch& launch, std::size_t items, int blocks_each,
                  cudaStream_t stream) {
  int device = 0;
  int processors = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const auto most = static_cast<std::size_t>(processors) * static_cast<std::size_t>(blocks_each);
  const std::size_t blocks = (items + kWarps - 1) / kWarps;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks < most ? blocks : most));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, launch));
}

}  // namespace fastreduce
