// The Driver over the CUDA runtime.
#include "cuda.h"
#include "cuda_error.h"

namespace fastreduce {

// kernels.cu, bucket.cu, wire.cu, topk.cu and norm.cu
int resident_blocks_of_kernels();
void launch_kernel(const Launch& launch, int blocks, cudaStream_t stream);
void launch_moves(const Moves& moves, cudaStream_t stream);
void launch_wire(const WireLaunch& launch, cudaStream_t stream);
void launch_select(const SelectLaunch& launch, cudaStream_t stream);
void launch_norm(const NormLaunch& launch, cudaStream_t stream);

namespace {

class CudaDriver final : public Driver {
 public:
  std::string problem() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaSuccess && devices > 0) return "";
    cudaGetLastError();
    return error == cudaSuccess ? "there is no CUDA device" : cudaGetErrorString(error);
  }
  int resident_blocks() override { return resident_blocks_of_kernels(); }
  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes));
    return memory;
  }
  void release(void* memory) override { cudaFree(memory); }
  std::pair<void*, void*> allocate_mapped(std::size_t bytes) override {
    void* here = nullptr;
    void* there = nullptr;
    check(cudaHostAlloc(&here, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
    const cudaError_t error = cudaHostGetDevicePointer(&there, here, 0);
    if (error != cudaSuccess) cudaFreeHost(here);
    check(error);
    return {here, there};
  }
  void release_mapped(void* memory) override { cudaFreeHost(memory); }
  void copy(void* to, const void* from, std::size_t bytes) override {
    // A plain copy out of pageable memory may return before the device has it.
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, nullptr));
    check(cudaStreamSynchronize(nullptr));
  }
  void synchronise() override { check(cudaDeviceSynchronize()); }
  void launch(const Launch& launch, int blocks, Address stream) override {
    launch_kernel(launch, blocks, reinterpret_cast<cudaStream_t>(stream));
  }
  void convert(const Moves& moves, Address stream) override {
    launch_moves(moves, reinterpret_cast<cudaStream_t>(stream));
  }
  void wire(const WireLaunch& launch, Address stream) override {
    launch_wire(launch, reinterpret_cast<cudaStream_t>(stream));
  }
  void select(const SelectLaunch& launch, Address stream) override {
    launch_select(launch, reinterpret_cast<cudaStream_t>(stream));
  }
  void norm(const NormLaunch& launch, Address stream) override {
    launch_norm(launch, reinterpret_cast<cudaStream_t>(stream));
  }
};

}  // namespace

Driver& cuda_driver() {
  static CudaDriver driver;
  return driver;
}

}  // namespace fastreduce
