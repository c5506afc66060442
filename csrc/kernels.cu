// CUDA kernels: what a thread does with the maps of maps.h, and their launches.
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
constexpr int kRotating = 128;  // threads of a block that rotates: more registers a thread, so smaller blocks fit better
constexpr int kInFlight = 4;    // loads of a thread before its first store

unsigned blocks(uint64_t units, int of_a_block) {
  return static_cast<unsigned>((units + of_a_block - 1) / of_a_block);
}

#if defined(__CUDACC__)
template <class Kernel, class... Arguments>
void launch(Kernel* kernel, uint64_t units, int threads, int each, cudaStream_t stream, const Arguments&... arguments) {
  kernel<<<blocks(units, threads * each), threads, 0, stream>>>(arguments...);
}
#else  // a compiler of C++, with the cuda_runtime.h of tests/harness/kernels_on_host
template <class Kernel, class... Arguments>
void launch(Kernel* kernel, uint64_t units, int threads, int each, cudaStream_t, const Arguments&... arguments) {
  launch_on_host(kernel, blocks(units, threads * each), threads, arguments...);
}
#endif

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) cuda_failed(what, cudaGetErrorString(status));
}

template <class Unit, bool kPack, class Index, class Table>
__global__ void __launch_bounds__(kThreads)
    move(const __grid_constant__ Walk<Index> walk, const __grid_constant__ Table table, const Unit* from, Unit* to) {
  const Index base = static_cast<Index>(blockIdx.x) * kThreads * kInFlight + threadIdx.x;
  Unit read[kInFlight];
  Index target[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    const Index unit = base + i * kThreads;
    if (unit < walk.total) {
      const Place<Index> place = locate(walk, table, unit);
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
    if (base + i * kThreads < walk.total) to[target[i]] = read[i];
  }
}

template <class T, int V, class Index, class Table>
__global__ void __launch_bounds__(kThreads)
    sum(const __grid_constant__ Walk<Index> walk, const __grid_constant__ Table table, const Vector<T, V>* wire,
        Vector<T, V>* out) {
  const Index unit = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (unit < walk.total) sum_unit<T, V>(walk, table, wire, out, unit);
}

template <class T, class C, int V, bool kBackward, bool kSums, class Index, class Table>
__global__ void __launch_bounds__(kRotating)
    rotate(const __grid_constant__ Rotation<Index> rotation, const __grid_constant__ Table table) {
  const Index item = static_cast<Index>(blockIdx.x) * kRotating + threadIdx.x;
  if (item < rotation.total) rotate_item<T, C, V, kBackward, kSums>(rotation, table, item);
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

template <class Unit, bool kPack, class Index, class Table>
void launch_move(const Walk<Index>& walk, const Table& table, const void* from, void* to, cudaStream_t stream) {
  launch(
      move<Unit, kPack, Index, Table>, walk.total, kThreads, kInFlight, stream, walk, table,
      static_cast<const Unit*>(from), static_cast<Unit*>(to));
}

template <class T, class Index, class Table>
void launch_sum(
    const Walk<Index>& walk, const Table& table, bool vector, const void* wire, void* out, cudaStream_t stream) {
  const auto by = [&](auto width) {
    constexpr int V = decltype(width)::value;
    launch(
        sum<T, V, Index, Table>, walk.total, kThreads, 1, stream, walk, table,
        static_cast<const Vector<T, V>*>(wire), static_cast<Vector<T, V>*>(out));
  };
  if (vector) by(std::integral_constant<int, 16 / sizeof(T)>{});
  else by(std::integral_constant<int, 1>{});
}

template <class T, class C, bool kBackward, bool kSums, class Index, class Table>
void launch_rotate(const Rotation<Index>& rotation, const Table& table, bool vector, cudaStream_t stream) {
  constexpr int V = 16 / sizeof(T);
  const auto kernel =
      vector ? rotate<T, C, V, kBackward, kSums, Index, Table> : rotate<T, C, 1, kBackward, kSums, Index, Table>;
  launch(kernel, rotation.total, kRotating, 1, stream, rotation, table);
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
    const Rotation<Index>& rotation, const Descriptors<Index>& descriptors, void* memory, Type type, Type angles,
    bool vector, bool backward, void* stream_) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  const auto table = table_for(descriptors, memory, stream);
  with_types(type, angles, [&](auto zero, auto angle) {
    using T = decltype(zero);
    using C = decltype(angle);
    if (!backward) launch_rotate<T, C, false, false>(rotation, table, vector, stream);
    else if (descriptors.sums()) launch_rotate<T, C, true, true>(rotation, table, vector, stream);
    else launch_rotate<T, C, true, false>(rotation, table, vector, stream);
  });
  check(cudaGetLastError(), "launching its kernel");
}

#define FOR_INDEX(Index)                                                                                               \
  template void cuda_move(const Walk<Index>&, const Descriptors<Index>&, void*, int, bool, const void*, void*, void*); \
  template void cuda_sum(const Walk<Index>&, const Descriptors<Index>&, void*, Type, bool, const void*, void*, void*); \
  template void cuda_rotate(const Rotation<Index>&, const Descriptors<Index>&, void*, Type, Type, bool, bool, void*);
FOR_INDEX(uint32_t)
FOR_INDEX(uint64_t)

}  // namespace ds_sp_overlap
