// What the planner (ops.cpp) asks of a device: the CPU loops in ops.cpp and the kernels in kernels.cu offer the same.
#pragma once

#include <algorithm>
#include <vector>

#include "maps.h"

namespace ds_sp_overlap {

enum class Type { half, bfloat16, float32, float64 };

// Calls ``call`` with a zero of the type.
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

// Calls ``call`` with a zero of the type of heads, and one of that of their tables: the same, or float for half precision.
template <class Call>
void with_types(Type type, Type angles, Call call) {
  with_type(type, [&](auto zero) {
    if (type == angles) call(zero, zero);
    else call(zero, Acc<decltype(zero)>{});
  });
}

template <class Index>
struct Descriptors {
  std::vector<Segment<Index>> segments;
  std::vector<Source<Index>> sources;

  bool sums() const {
    return std::any_of(segments.begin(), segments.end(), [](const auto& segment) { return segment.sources > 1; });
  }
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
    const Rotation<Index>&, const Descriptors<Index>&, void* table, Type, Type angles, bool vector, bool backward,
    void* stream);
#endif

}  // namespace ds_sp_overlap
