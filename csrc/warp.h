// A warp of a GPU, as device_wire.h, device_topk.h and device_norm.h see it.
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

// Multiprocessors of the current device.
inline int processors() {
  int device = 0;
  int count = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

}  // namespace fastreduce
