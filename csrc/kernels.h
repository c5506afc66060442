// What the planner (ops.cpp) asks of a device: the CPU loops in ops.cpp and the kernels in kernels.cu offer the same.
#pragma once

#include <vector>

#include "maps.h"

namespace ds_sp_overlap {

enum class Type { half, bfloat16, float32, float64 };

template <class Index>
struct Descriptors {
  std::vector<Segment<Index>> segments;
  std::vector<Source<Index>> sources;
};

// Raised for a CUDA error; the operator's name is put before it.
[[noreturn]] void cuda_failed(const char* what, const char* why);

#if defined(DS_SP_OVERLAP_CUDA)
// table: device memory for the descriptors, segments first; null where they travel as kernel arguments (32-bit indices).
template <class Index>
void cuda_move(
    const Walk<Index>&, const Descriptors<Index>&, void* table, int unit_bytes, bool pack, const void* from, void* to,
    void* stream);
template <class Index>
void cuda_sum(
    const Walk<Index>&, const Descriptors<Index>&, void* table, Type, bool vector, const void* wire, void* out,
    void* stream);
template <class Index>
void cuda_rotate(
    const Rotation<Index>&, const Descriptors<Index>&, void* table, Type, bool vector, bool backward, void* stream);
#endif

}  // namespace ds_sp_overlap
