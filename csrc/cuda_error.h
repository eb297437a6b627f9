// Errors of the CUDA runtime as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace fastreduce {

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next call reports it again
  throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

}  // namespace fastreduce
