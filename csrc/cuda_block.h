// A block of a kernel that waits, on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "device.h"

#define FR_WAITING_KERNEL __global__ void __launch_bounds__(kBlockThreads, 1)

namespace fastreduce {

using Kernel = void (*)(Launch);

// Of encoded.cu.
Kernel encoded_kernel();

namespace {

__shared__ BlockShared shared;

struct CudaTarget {
  __device__ int index() const { return static_cast<int>(blockIdx.x); }
  __device__ int count() const { return static_cast<int>(gridDim.x); }
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return static_cast<int>(blockDim.x); }
  __device__ bool all(bool value) const { return __syncthreads_and(value) != 0; }
  __device__ BlockShared& shared() const { return fastreduce::shared; }
  __device__ std::uint64_t nanoseconds() const {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
  }
  __device__ bool first(std::uint32_t& word) const { return atomicExch(&word, 1u) == 0; }
  __device__ std::uint32_t count_up(std::uint32_t& word) const {
    __threadfence();
    return atomicAdd(&word, 1u) + 1;
  }
  __device__ std::uint32_t look(const std::uint32_t& word) const {
    return *static_cast<const volatile std::uint32_t*>(&word);
  }
};

using CudaBlock = DeviceBlock<CudaTarget>;

}  // namespace
}  // namespace fastreduce
