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
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define BOTH __host__ __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define LOADED asm volatile("" ::: "memory");  // a compiler moves no load behind it
#else
#define BOTH inline
#define UNROLL
#define ROLLED
#define LOADED
#endif

namespace ds_sp_overlap {

using Half = c10::Half;
using BFloat16 = c10::BFloat16;

constexpr int kDims = 5;     // dimensions that can't be merged, on either side of the cut
constexpr int kInline = 96;  // descriptors of each kind that travel as kernel arguments (4 KB in all)

// Indices and offsets are 32 bits wide where the units of all tensors can be counted so, and 64 beyond.

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
  Index stride[Tensors][kDims];

  BOTH void offsets(Index index, Index (&at)[Tensors]) const {
    for (int t = 0; t < Tensors; ++t) at[t] = 0;
    for (int dim = 0; dim < count; ++dim) {
      Index position = index;
      if (dim + 1 < count) {
        const Index above = size[dim](index);
        position = index - above * size[dim].divisor;
        index = above;
      }
      for (int t = 0; t < Tensors; ++t) at[t] += position * stride[t][dim];
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
  Index cut_stride;
};

template <class Index>
struct Place {
  uint32_t segment;
  Index outer, rest, tensor;
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
  Index outer[1], inner[1];
  walk.outer.offsets(place.outer, outer);
  walk.inner.offsets(place.rest - cut * walk.inner_size.divisor, inner);
  place.tensor = outer[0] + (segment.start + cut) * walk.cut_stride + inner[0];
  return place;
}

template <class Index, class Table>
BOTH Index wire_unit(const Table& table, uint32_t source, Index outer, Index rest) {
  return table.source[source].base + outer * table.source[source].row + rest;
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

// Conversions of two neighbours by one instruction; torch's take one by one.
BOTH float widened(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.x) << 16;
  float to;
  memcpy(&to, &bits, sizeof(to));
  return to;
}
template <class T>
BOTH Acc<T> widened(T x) {
  return static_cast<Acc<T>>(x);
}

template <class T, int V>
BOTH Vector<T, V> rounded(const Acc<T> (&from)[V]) {
  Vector<T, V> to;
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2 && V % 2 == 0) {
    UNROLL
    for (int i = 0; i < V; i += 2) {
      if constexpr (std::is_same_v<T, Half>) {
        const __half2 pair = __floats2half2_rn(from[i], from[i + 1]);
        memcpy(&to.value[i], &pair, sizeof(pair));
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(from[i], from[i + 1]);
        memcpy(&to.value[i], &pair, sizeof(pair));
      }
    }
    return to;
  }
#endif
  UNROLL
  for (int i = 0; i < V; ++i) to.value[i] = static_cast<T>(from[i]);
  return to;
}

template <class T, int V>
BOTH void add(const Vector<T, V>& piece, Acc<T> (&to)[V]) {
  UNROLL
  for (int i = 0; i < V; ++i) to[i] += widened(piece.value[i]);
}

// Sum of what all sources of a segment hold for one unit, in the order of the parts; zero where there is no source.
template <class T, int V, class Index, class Table>
BOTH void sum_unit(
    const Walk<Index>& walk, const Table& table, const Vector<T, V>* wire, Vector<T, V>* out, Index unit) {
  const Place<Index> place = locate(walk, table, unit);
  const Segment<Index>& segment = table.segment[place.segment];
  Acc<T> sum[V] = {};
  for (uint32_t s = 0; s < segment.sources; ++s)
    add(wire[wire_unit(table, segment.source + s, place.outer, place.rest)], sum);
  out[place.tensor] = rounded<T, V>(sum);
}

// Rotary embedding on the way. An item is two vectors of one head, so that both elements of a rotated pair are in one thread:
//
//     items 0..m-1            | vector i | ... | vector i + m | ...   m = rot / 2V
//     past the rotary dims    | vector i | ... | vector i + n/2 | ... copied; the second may be missing
//
// Items are counted token by token, through the heads of all segments: threads that read the same row of the tables run side
// by side, and memory reads it once. Segments count heads here.

template <class Index>
struct Rotation {
  void* tensor;  // [tokens..., heads, dim]: x, or the gradient's output
  void* wire;
  const void *cos, *sin;
  Strided<Index, 3> tokens;  // offsets in tensor, cos, sin; vectors, as all that follows
  Index head_stride, inner_stride;
  Index cos_stride, sin_stride;  // of the rotary dimension
  Divider<Index> items, heads;   // items of a head; heads of all segments
  Divider<Index> equal;          // heads of a segment where all have the same, else 0
  Index total;                   // items
  uint32_t dim, turned;          // vectors of a head; its items that are rotated
  uint32_t segments;
};

template <bool kBackward, class A>
BOTH void turn(A& x0, A& x1, A cos0, A sin0, A cos1, A sin1) {
  const A y0 = kBackward ? x0 * cos0 + x1 * sin1 : x0 * cos0 - x1 * sin0;
  const A y1 = kBackward ? x1 * cos1 - x0 * sin0 : x1 * cos1 + x0 * sin1;
  x0 = y0;
  x1 = y1;
}

// One item: forward tensor, rotated -> wire; backward sum of wires, rotated back -> tensor.
//
// C: type of the tables, T or Acc<T>. kSums: whether there may be several sources; their loop takes registers of its own.
// All is loaded before anything is converted: else a thread waits for one load after another.
template <class T, class C, int V, bool kBackward, bool kSums, class Index, class Table>
BOTH void rotate_item(const Rotation<Index>& rotation, const Table& table, Index item) {
  const Index row = rotation.items(item);
  const uint32_t e = static_cast<uint32_t>(item - row * rotation.items.divisor);
  const Index token = rotation.heads(row);
  const Index head = row - token * rotation.heads.divisor;

  const bool turned = e < rotation.turned;
  uint32_t first = e, second = e + rotation.turned;
  if (!turned) {
    const uint32_t left = rotation.dim - 2 * rotation.turned;
    first = rotation.turned + e;  // = 2 turned + (e - turned)
    second = first + (left + 1) / 2;
  }
  const bool both = second < rotation.dim;

  Index at[3];
  rotation.tokens.offsets(token, at);
  Vector<C, V> cos0{}, sin0{}, cos1{}, sin1{};
  if (turned) {
    const auto* const cos = static_cast<const Vector<C, V>*>(rotation.cos) + at[1];
    const auto* const sin = static_cast<const Vector<C, V>*>(rotation.sin) + at[2];
    const Index cos_stride = V == 1 ? rotation.cos_stride : 1, sin_stride = V == 1 ? rotation.sin_stride : 1;
    cos0 = cos[first * cos_stride];
    sin0 = sin[first * sin_stride];
    cos1 = cos[second * cos_stride];
    sin1 = sin[second * sin_stride];
  }

  const Segment<Index>& segment = table.segment
      [rotation.equal.divisor ? static_cast<uint32_t>(rotation.equal(head))
                              : segment_of(table, rotation.segments, head)];
  const Index within = head - segment.first;
  const uint32_t source = segment.source, sources = segment.sources;
  Vector<T, V>* const wire = static_cast<Vector<T, V>*>(rotation.wire);
  Vector<T, V>* const tensor =
      static_cast<Vector<T, V>*>(rotation.tensor) + at[0] + (segment.start + within) * rotation.head_stride;
  const auto sent = [&](uint32_t s) { return wire + wire_unit(table, source + s, token, within) * rotation.dim; };
  const Index inner = V == 1 ? rotation.inner_stride : 1, apart = kBackward ? 1 : inner;
  Vector<T, V> read0{}, read1{};
  if (!kBackward || sources > 0) {
    const Vector<T, V>* const from = kBackward ? sent(0) : tensor;
    read0 = from[first * apart];
    if (both) read1 = from[second * apart];
  }
  LOADED

  Acc<T> a[V], b[V];
  UNROLL
  for (int i = 0; i < V; ++i) {
    a[i] = widened(read0.value[i]);
    b[i] = widened(read1.value[i]);
  }
  if (kSums) {
    ROLLED
    for (uint32_t s = 1; s < sources; ++s) {
      add(sent(s)[first], a);
      if (both) add(sent(s)[second], b);
    }
  }
  if (turned) {
    UNROLL
    for (int i = 0; i < V; ++i) {
      turn<kBackward>(
          a[i], b[i], widened(cos0.value[i]), widened(sin0.value[i]), widened(cos1.value[i]), widened(sin1.value[i]));
    }
  }
  Vector<T, V>* const to = kBackward ? tensor : sent(0);
  to[first * (kBackward ? inner : 1)] = rounded<T, V>(a);
  if (both) to[second * (kBackward ? inner : 1)] = rounded<T, V>(b);
}

}  // namespace ds_sp_overlap
