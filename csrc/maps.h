// Index maps and arithmetic of pack and unpack, the same on host and device.
//
// Both operators connect a tensor that is cut along one dimension with a wire buffer in which the parts lie end to end.
// A kernel counts through *segments*: slices of the cut dimension, each [outer, length, inner]. Every unit of a segment is
// one place in the tensor and, for each *source* of the segment, one place in the wire. pack has one source a segment (the
// part itself); unpack has as many as there are parts that hold the slice, and none where no part does.
//
// A unit is what one access moves: 16 bytes where extents, strides and pointers allow it, fewer otherwise.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>

#if defined(__CUDACC__)
#define BOTH __host__ __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#else
#define BOTH inline
#define UNROLL
#endif

namespace ds_sp_overlap {

using Half = c10::Half;
using BFloat16 = c10::BFloat16;

constexpr int kDims = 5;     // dimensions that can't be merged, on either side of the cut
constexpr int kAtOnce = 4;   // heads that share what was read of the tables, at most
constexpr int kInline = 96;  // descriptors of each kind that travel as kernel arguments (4 KB in all)

// Indices are 32 bits wide where the units can be counted so, and 64 beyond.

BOTH uint32_t high_half(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}
BOTH uint64_t high_half(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// Division by multiplication, exact for n and divisor below 2^31, or 2^63 (Granlund and Montgomery, PLDI 1994): an
// instruction for division there is none, and the routine in its place costs as much as the access that it serves.
template <class Index>
struct Divider {
  Index divisor, magic;
  uint32_t shift;
  BOTH Index operator()(Index n) const { return (high_half(n, magic) + n) >> shift; }
};

template <class Index>
inline Divider<Index> divide_by(uint64_t divisor) {
  using Wide = unsigned __int128;
  uint32_t shift = 0;
  while ((Wide(1) << shift) < divisor) ++shift;
  const Wide magic = divisor == 0 ? 0 : (((Wide(1) << shift) - divisor) << (8 * sizeof(Index))) / divisor + 1;
  return {static_cast<Index>(divisor), static_cast<Index>(magic), shift};
}

// Dimensions, innermost first, that several tensors have in common.
template <class Index, int Tensors>
struct Strided {
  int32_t count;  // at least 1
  Divider<Index> size[kDims];
  int64_t stride[Tensors][kDims];

  BOTH void offsets(Index index, int64_t (&at)[Tensors]) const {
    for (int t = 0; t < Tensors; ++t) at[t] = 0;
    for (int dim = 0; dim < count; ++dim) {
      Index position = index;
      if (dim + 1 < count) {
        const Index above = size[dim](index);
        position = index - above * size[dim].divisor;
        index = above;
      }
      for (int t = 0; t < Tensors; ++t) at[t] += static_cast<int64_t>(position) * stride[t][dim];
    }
  }
};

template <class Index>
struct Segment {
  Index first;         // count of its first unit
  Divider<Index> row;  // units of one outer position
  Index start;         // along the cut dimension
  uint32_t source;     // its sources in their table
  uint32_t sources;
};

// Where a segment lies in the wire: unit (outer, rest) of it is at base + outer * row + rest.
template <class Index>
struct Source {
  Index base, row;
};

// The descriptors, as kernel arguments or behind pointers.
template <class Index>
struct InlineTable {
  Segment<Index> segment[kInline];
  Source<Index> source[kInline];
};

template <class Index>
struct PointedTable {
  const Segment<Index>* segment;
  const Source<Index>* source;
};

template <class Index, class Table>
BOTH uint32_t segment_of(const Table& table, uint32_t segments, Index unit) {
  uint32_t low = 0, high = segments;  // the last segment that begins at or before the unit
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (table.segment[middle].first <= unit) low = middle;
    else high = middle;
  }
  return low;
}

// A tensor cut along one dimension, in units.
template <class Index>
struct Walk {
  Index total;  // units of all segments
  uint32_t segments;
  Divider<Index> equal;  // units of a segment where all have the same, else 0
  Strided<Index, 1> outer, inner;
  Divider<Index> inner_size;
  int64_t cut_stride;
};

template <class Index>
struct Place {
  uint32_t segment;
  Index outer, rest;
  int64_t tensor;
};

template <class Index, class Table>
BOTH Place<Index> locate(const Walk<Index>& walk, const Table& table, Index unit) {
  Place<Index> place;
  place.segment = walk.equal.divisor ? static_cast<uint32_t>(walk.equal(unit)) : segment_of(table, walk.segments, unit);
  const Segment<Index>& segment = table.segment[place.segment];
  const Index within = unit - segment.first;
  place.outer = segment.row(within);
  place.rest = within - place.outer * segment.row.divisor;
  const Index cut = walk.inner_size(place.rest);
  int64_t outer[1], inner[1];
  walk.outer.offsets(place.outer, outer);
  walk.inner.offsets(place.rest - cut * walk.inner_size.divisor, inner);
  place.tensor = outer[0] + (static_cast<int64_t>(segment.start) + cut) * walk.cut_stride + inner[0];
  return place;
}

template <class Index, class Table>
BOTH int64_t wire_unit(const Table& table, uint32_t source, Index outer, Index rest) {
  return static_cast<int64_t>(table.source[source].base) + static_cast<int64_t>(outer) * table.source[source].row +
         rest;
}

// Arithmetic: in fp32 for half precision, rounded once.

template <class T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <class T>
using Acc = typename Accumulator<T>::type;

template <class T, int V>
struct alignas(sizeof(T) * V) Vector {
  T value[V];
};

template <class T, int V, class A>
BOTH void load(const T* from, A (&to)[V]) {
  const Vector<T, V> read = *reinterpret_cast<const Vector<T, V>*>(from);
  UNROLL
  for (int i = 0; i < V; ++i) to[i] = static_cast<A>(read.value[i]);
}

template <class T, int V, class A>
BOTH void store(const A (&from)[V], T* to) {
  Vector<T, V> written;
  UNROLL
  for (int i = 0; i < V; ++i) written.value[i] = static_cast<T>(from[i]);
  *reinterpret_cast<Vector<T, V>*>(to) = written;
}

template <class T, int V>
BOTH void add(const T* from, Acc<T> (&to)[V]) {
  Acc<T> piece[V];
  load<T, V>(from, piece);
  UNROLL
  for (int i = 0; i < V; ++i) to[i] += piece[i];
}

// Sum of what all sources of a segment hold for one unit, in the order of the parts; zero where there is no source.
template <class T, int V, class Index, class Table>
BOTH void sum_unit(const Walk<Index>& walk, const Table& table, const T* wire, T* out, Index unit) {
  const Place<Index> place = locate(walk, table, unit);
  const Segment<Index>& segment = table.segment[place.segment];
  Acc<T> sum[V] = {};
  for (uint32_t s = 0; s < segment.sources; ++s)
    add<T, V>(wire + wire_unit(table, segment.source + s, place.outer, place.rest) * V, sum);
  store<T, V>(sum, out + place.tensor * V);
}

// Rotary embedding on the way. An item is two vectors, the same ones in some neighbouring heads of a token: both elements of
// a rotated pair are in one thread, and the tables are read once for those heads:
//
//     items 0..m-1            | vector i | ... | vector i + m | ...   m = rot / 2V
//     past the rotary dims    | vector i | ... | vector i + n/2 | ... copied; the second may be missing

template <class Index>
struct Rotation {
  void* tensor;  // [tokens..., heads, dim]: x, or the gradient's output
  void* wire;
  const void *cos, *sin;
  Strided<Index, 3> tokens;  // offsets in tensor, cos, sin
  int64_t head_stride, inner_stride;
  int64_t cos_stride, sin_stride;  // of the rotary dimension
  Divider<Index> items;            // of a group of so many heads:
  uint32_t heads;                  // of an item; they divide those of every segment
  uint32_t dim, turned;            // elements of a head; items that are rotated
  Index total;
  uint32_t segments;
  bool accumulator_tables;  // cos and sin are Acc<T>, not T
};

template <class T, int V>
BOTH void load_table(const void* table, int64_t at, bool accumulator, Acc<T> (&to)[V]) {
  if (accumulator) load<Acc<T>, V>(static_cast<const Acc<T>*>(table) + at, to);
  else load<T, V>(static_cast<const T*>(table) + at, to);
}

template <bool kBackward, class A>
BOTH void turn(A& x0, A& x1, A cos0, A sin0, A cos1, A sin1) {
  const A y0 = kBackward ? x0 * cos0 + x1 * sin1 : x0 * cos0 - x1 * sin0;
  const A y1 = kBackward ? x1 * cos1 - x0 * sin0 : x1 * cos1 + x0 * sin1;
  x0 = y0;
  x1 = y1;
}

// One item: forward tensor, rotated -> wire; backward sum of wires, rotated back -> tensor.
template <class T, int V, bool kBackward, class Index, class Table>
BOTH void rotate_item(const Rotation<Index>& rotation, const Table& table, Index item) {
  const Segment<Index>& segment = table.segment[segment_of(table, rotation.segments, item)];
  const Index within = item - segment.first;
  const Index token = segment.row(within);
  const Index rest = within - token * segment.row.divisor;
  const Index group = rotation.items(rest);
  const uint32_t e = static_cast<uint32_t>(rest - group * rotation.items.divisor);

  const bool turned = e < rotation.turned;
  uint32_t first = e, second = e + rotation.turned;
  bool both = true;
  if (!turned) {
    const uint32_t left = rotation.dim / V - 2 * rotation.turned, half = (left + 1) / 2;
    first = rotation.turned + e;  // = 2 turned + (e - turned)
    second = first + half;
    both = e - rotation.turned + half < left;
  }
  first *= V;
  second *= V;

  int64_t at[3];
  rotation.tokens.offsets(token, at);
  Acc<T> cos0[V], sin0[V], cos1[V], sin1[V];
  if (turned) {
    load_table<T, V>(rotation.cos, at[1] + first * rotation.cos_stride, rotation.accumulator_tables, cos0);
    load_table<T, V>(rotation.sin, at[2] + first * rotation.sin_stride, rotation.accumulator_tables, sin0);
    load_table<T, V>(rotation.cos, at[1] + second * rotation.cos_stride, rotation.accumulator_tables, cos1);
    load_table<T, V>(rotation.sin, at[2] + second * rotation.sin_stride, rotation.accumulator_tables, sin1);
  }
  const int64_t inner = V == 1 ? rotation.inner_stride : 1;
  T* const wire = static_cast<T*>(rotation.wire);
  Index which = group * rotation.heads;  // head in the segment
  T* tensor = static_cast<T*>(rotation.tensor) + at[0] +
              (static_cast<int64_t>(segment.start) + which) * rotation.head_stride;
  for (const Index last = which + rotation.heads; which < last; ++which, tensor += rotation.head_stride) {
    Acc<T> a[V] = {}, b[V] = {};
    if (kBackward) {
      for (uint32_t s = 0; s < segment.sources; ++s) {
        // Rows of the wire are counted in heads here, so that a segment means the same to vectors of any width.
        const T* const from = wire + wire_unit(table, segment.source + s, token, which) * rotation.dim;
        add<T, V>(from + first, a);
        if (both) add<T, V>(from + second, b);
      }
    } else {
      load<T, V>(tensor + first * inner, a);
      if (both) load<T, V>(tensor + second * inner, b);
    }
    if (turned) {
      UNROLL
      for (int i = 0; i < V; ++i) turn<kBackward>(a[i], b[i], cos0[i], sin0[i], cos1[i], sin1[i]);
    }
    T* const to = kBackward ? tensor : wire + wire_unit(table, segment.source, token, which) * rotation.dim;
    const int64_t apart = kBackward ? inner : 1;
    store<T, V>(a, to + first * apart);
    if (both) store<T, V>(b, to + second * apart);
  }
}

}  // namespace ds_sp_overlap
