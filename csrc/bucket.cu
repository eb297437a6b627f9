// pack and unpack as CUDA kernels: one launch for a whole list of tensors. A block takes tile after
// tile, of whichever tensor.
#include <cuda_runtime.h>

#include "bucket.h"
#include "cuda_error.h"

namespace fastreduce {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksEach = 8;  // of a multiprocessor; some hold fewer, and the rest waits

struct Threads {
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return kThreads; }
};

template <class Body>
__device__ void each_tile(const Moves& moves, const Body& body) {
  const std::uint64_t tiles = tiles_of(moves);
  for (std::uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) body(tile);
}

__global__ void __launch_bounds__(kThreads, 4) copy_tiles(const __grid_constant__ Moves moves) {
  Threads block;
  each_tile(moves, [&](std::uint64_t tile) { copy_tile(block, moves, tile); });
}

template <class A>
__global__ void __launch_bounds__(kThreads, 3) convert_tiles(const __grid_constant__ Moves moves) {
  Threads block;
  each_tile(moves, [&](std::uint64_t tile) { convert_tile<A>(block, moves, tile); });
}

}  // namespace

void launch_moves(const Moves& moves, cudaStream_t stream) {
  const std::uint64_t tiles = tiles_of(moves);
  if (tiles == 0) return;
  int device = 0;
  int processors = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const auto most = static_cast<std::uint64_t>(processors) * kBlocksEach;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tiles < most ? tiles : most));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const auto kernel = copies(moves)               ? copy_tiles
                      : converts_in_double(moves) ? convert_tiles<double>
                                                  : convert_tiles<float>;
  check(cudaLaunchKernelEx(&config, kernel, moves));
}

}  // namespace fastreduce
