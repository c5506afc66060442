// CUDA kernels: the loops around the maps of maps.h, and their launches.
//
// Every thread has several independent 16-byte loads in flight, and neighbouring threads touch neighbouring units of the
// wire and of a row of the tensor: memory sees whole lines both ways. No shared memory, no atomics: every output unit is
// written by exactly one thread, which makes sums deterministic.

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels.h"

namespace ds_sp_overlap {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // loads of a thread before its first store

#if defined(__CUDACC__)
template <class Kernel, class... Arguments>
void launch(Kernel* kernel, unsigned grid, cudaStream_t stream, const Arguments&... arguments) {
  kernel<<<grid, kThreads, 0, stream>>>(arguments...);
}
#else  // a compiler of C++, with the cuda_runtime.h of tests/harness/kernels_on_host
template <class Kernel, class... Arguments>
void launch(Kernel* kernel, unsigned grid, cudaStream_t, const Arguments&... arguments) {
  launch_on_host(kernel, grid, kThreads, arguments...);
}
#endif

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) cuda_failed(what, cudaGetErrorString(status));
}

template <class Unit, bool kPack, class Index, class Table>
__global__ void __launch_bounds__(kThreads)
    move(const __grid_constant__ Walk<Index> walk, const __grid_constant__ Table table, const Unit* from, Unit* to) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kInFlight;
  const int64_t total = walk.total;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kThreads * kInFlight + threadIdx.x; base < total;
       base += stride) {
    Unit read[kInFlight];
    int64_t target[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t unit = base + i * kThreads;
      target[i] = -1;
      if (unit < total) {
        const Place<Index> place = locate(walk, table, static_cast<Index>(unit));
        const Segment<Index>& segment = table.segment[place.segment];
        target[i] = kPack ? unit : place.tensor;
        read[i] = Unit{};
        if (segment.sources) {
          read[i] = from[kPack ? place.tensor : wire_unit(table, segment.source, place.outer, place.rest)];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (target[i] >= 0) to[target[i]] = read[i];
    }
  }
}

template <class T, int V, class Index, class Table>
__global__ void __launch_bounds__(kThreads)
    sum(const __grid_constant__ Walk<Index> walk, const __grid_constant__ Table table, const T* wire, T* out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       unit < static_cast<int64_t>(walk.total); unit += stride) {
    sum_unit<T, V>(walk, table, wire, out, static_cast<Index>(unit));
  }
}

template <class T, int V, bool kBackward, class Index, class Table>
__global__ void __launch_bounds__(kThreads)
    rotate(const __grid_constant__ Rotation<Index> rotation, const __grid_constant__ Table table) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       item < static_cast<int64_t>(rotation.total); item += stride) {
    rotate_item<T, V, kBackward>(rotation, table, static_cast<Index>(item));
  }
}

InlineTable<uint32_t> as_arguments(const Descriptors<uint32_t>& descriptors) {
  InlineTable<uint32_t> table{};
  std::copy(descriptors.segments.begin(), descriptors.segments.end(), table.segment);
  std::copy(descriptors.sources.begin(), descriptors.sources.end(), table.source);
  return table;
}

// Copied from pageable memory: the call returns when the host may forget its copy.
PointedTable<uint64_t> upload(const Descriptors<uint64_t>& descriptors, void* memory, cudaStream_t stream) {
  const size_t segments = descriptors.segments.size() * sizeof(Segment<uint64_t>);
  const size_t sources = descriptors.sources.size() * sizeof(Source<uint64_t>);
  char* const at = static_cast<char*>(memory);
  check(
      cudaMemcpyAsync(at, descriptors.segments.data(), segments, cudaMemcpyHostToDevice, stream),
      "copying its descriptors");
  check(
      cudaMemcpyAsync(at + segments, descriptors.sources.data(), sources, cudaMemcpyHostToDevice, stream),
      "copying its descriptors");
  return {reinterpret_cast<const Segment<uint64_t>*>(at), reinterpret_cast<const Source<uint64_t>*>(at + segments)};
}

auto table_for(const Descriptors<uint32_t>& descriptors, void*, cudaStream_t) { return as_arguments(descriptors); }
auto table_for(const Descriptors<uint64_t>& descriptors, void* memory, cudaStream_t stream) {
  return upload(descriptors, memory, stream);
}

// Blocks for so many units; beyond 2^20 the loops in the kernels stride.
unsigned blocks(uint64_t units, int each) {
  const uint64_t a_block = static_cast<uint64_t>(kThreads) * each;
  return static_cast<unsigned>(std::min<uint64_t>((units + a_block - 1) / a_block, 1u << 20));
}

template <class Unit, bool kPack, class Index, class Table>
void launch_move(const Walk<Index>& walk, const Table& table, const void* from, void* to, cudaStream_t stream) {
  launch(
      move<Unit, kPack, Index, Table>, blocks(walk.total, kInFlight), stream, walk, table,
      static_cast<const Unit*>(from), static_cast<Unit*>(to));
}

template <class T, class Index, class Table>
void launch_sum(
    const Walk<Index>& walk, const Table& table, bool vector, const void* wire, void* out, cudaStream_t stream) {
  const unsigned grid = blocks(walk.total, 1);
  const T* const from = static_cast<const T*>(wire);
  T* const to = static_cast<T*>(out);
  if (vector) launch(sum<T, 16 / sizeof(T), Index, Table>, grid, stream, walk, table, from, to);
  else launch(sum<T, 1, Index, Table>, grid, stream, walk, table, from, to);
}

template <class T, bool kBackward, class Index, class Table>
void launch_rotate(const Rotation<Index>& rotation, const Table& table, bool vector, cudaStream_t stream) {
  const unsigned grid = blocks(rotation.total, 1);
  if (vector) launch(rotate<T, 16 / sizeof(T), kBackward, Index, Table>, grid, stream, rotation, table);
  else launch(rotate<T, 1, kBackward, Index, Table>, grid, stream, rotation, table);
}

template <class Call>
void with_type(Type type, Call call) {
  switch (type) {
    case Type::half:
      return call(Half{});
    case Type::bfloat16:
      return call(BFloat16{});
    case Type::float32:
      return call(float{});
    case Type::float64:
      return call(double{});
  }
}

}  // namespace

template <class Index>
void cuda_move(
    const Walk<Index>& walk, const Descriptors<Index>& descriptors, void* memory, int unit_bytes, bool pack,
    const void* from, void* to, void* stream_) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  const auto table = table_for(descriptors, memory, stream);
  const auto with_unit = [&](auto unit) {
    using Unit = decltype(unit);
    pack ? launch_move<Unit, true>(walk, table, from, to, stream)
         : launch_move<Unit, false>(walk, table, from, to, stream);
  };
  switch (unit_bytes) {
    case 16:
      with_unit(uint4{});
      break;
    case 8:
      with_unit(uint2{});
      break;
    case 4:
      with_unit(uint32_t{});
      break;
    default:
      with_unit(uint16_t{});
  }
  check(cudaGetLastError(), "launching its kernel");
}

template <class Index>
void cuda_sum(
    const Walk<Index>& walk, const Descriptors<Index>& descriptors, void* memory, Type type, bool vector,
    const void* wire, void* out, void* stream_) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  const auto table = table_for(descriptors, memory, stream);
  with_type(type, [&](auto zero) { launch_sum<decltype(zero)>(walk, table, vector, wire, out, stream); });
  check(cudaGetLastError(), "launching its kernel");
}

template <class Index>
void cuda_rotate(
    const Rotation<Index>& rotation, const Descriptors<Index>& descriptors, void* memory, Type type, bool vector,
    bool backward, void* stream_) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  const auto table = table_for(descriptors, memory, stream);
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    backward ? launch_rotate<T, true>(rotation, table, vector, stream)
             : launch_rotate<T, false>(rotation, table, vector, stream);
  });
  check(cudaGetLastError(), "launching its kernel");
}

#define FOR_INDEX(Index)                                                                                               \
  template void cuda_move(const Walk<Index>&, const Descriptors<Index>&, void*, int, bool, const void*, void*, void*); \
  template void cuda_sum(const Walk<Index>&, const Descriptors<Index>&, void*, Type, bool, const void*, void*, void*); \
  template void cuda_rotate(const Rotation<Index>&, const Descriptors<Index>&, void*, Type, bool, bool, void*);
FOR_INDEX(uint32_t)
FOR_INDEX(uint64_t)

}  // namespace ds_sp_overlap
