// What csrc/kernels.cu uses of CUDA, for a compiler of C++: a launch is a loop over blocks and their threads.
//
// The kernels share no memory between threads, so that any order of threads is one that a device may take. Device memory is
// host memory. What a device refuses to launch is refused here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>

#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)

struct uint2 {
  alignas(8) unsigned x;
  unsigned y;
};
struct uint4 {
  alignas(16) unsigned x;
  unsigned y, z, w;
};

struct Dim3 {
  unsigned x;
};
inline Dim3 blockIdx, threadIdx;

inline std::set<const void*> launched;

extern "C" {
bool ds_sp_overlap_launches = false;  // ops.cpp reads it, tests write it
size_t ds_sp_overlap_kernels_launched() { return launched.size(); }
}

enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration };
enum cudaMemcpyKind { cudaMemcpyHostToDevice };
using cudaStream_t = void*;

inline cudaError_t last_error = cudaSuccess;
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
inline const char* cudaGetErrorString(cudaError_t) { return "invalid configuration argument"; }

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  if (bytes) std::memcpy(to, from, bytes);
  return cudaSuccess;
}

template <class Kernel, class... Arguments>
void launch_on_host(Kernel* kernel, unsigned grid, unsigned threads, const Arguments&... arguments) {
  if (grid == 0 || grid > INT32_MAX || threads > 1024) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  launched.insert(reinterpret_cast<const void*>(kernel));
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(arguments...);
  }
}
