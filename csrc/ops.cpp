// The operators of ds_sp_overlap/relayout/ops.py: schemas, checks, planning, CPU kernels, registration.
//
// torch's stable ABI only (torch/csrc/stable): one binary serves every torch from the one it targets on.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "kernels.h"

// Weak: a torch without CUDA has no such symbol, and the library must load there too.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

// 32-bit indices serve up to so many units; tests lower it to reach the 64-bit ones with small tensors.
static int64_t narrow_limit = INT32_MAX;
extern "C" __attribute__((visibility("default"))) void ds_sp_overlap_narrow_limit(int64_t units) {
  narrow_limit = units;
}

#if defined(DS_SP_OVERLAP_ON_HOST)
// kernels.cu compiled for the host: whether it is launched on CPU tensors, or the loops below do it all.
extern "C" bool ds_sp_overlap_launches;
#endif

// For tests: the kernels' division, by 32-bit or 64-bit indices.
extern "C" __attribute__((visibility("default"))) uint64_t
ds_sp_overlap_divide(uint64_t n, uint64_t divisor, bool wide) {
  using namespace ds_sp_overlap;
  return wide ? divide_by<uint64_t>(divisor)(n) : divide_by<uint32_t>(divisor)(static_cast<uint32_t>(n));
}

namespace ds_sp_overlap {

void cuda_failed(const char* what, const char* why) {
  throw std::runtime_error(std::string("ds_sp_overlap: CUDA error ") + what + ": " + why);
}

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;

// A ValueError in Python.
template <class... Args>
[[noreturn]] void refuse(const char* op, const Args&... message) {
  std::ostringstream text;
  text << "ds_sp_overlap." << op << ": ";
  (text << ... << message);
  throw std::invalid_argument(text.str());
}

// A macro, so that a call that is fine writes no message: messages took two thirds of its instructions.
#define REQUIRE(fine, ...) \
  if (!(fine)) refuse(__VA_ARGS__)

std::string show(const Ints& values) {
  std::ostringstream text;
  for (size_t i = 0; i < values.size(); ++i) text << (i ? ", " : "[") << values[i];
  text << (values.empty() ? "[]" : "]");
  return text.str();
}

Ints shape(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

std::string show_parts(const Ints& starts, const Ints& stops) {
  std::ostringstream text;
  for (size_t i = 0; i < starts.size(); ++i) text << (i ? ", (" : "[(") << starts[i] << ", " << stops[i] << ")";
  text << "]";
  return text.str();
}

std::string show_type(const Tensor& x) {
  std::ostringstream text;
  text << x.scalar_type();
  return text.str();
}

std::string show_device(const Tensor& x) {
  return x.is_cpu() ? "cpu" : x.is_cuda() ? "cuda:" + std::to_string(x.get_device_index()) : "another kind of device";
}

Type type_of(const char* op, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Half:
      return Type::half;
    case ScalarType::BFloat16:
      return Type::bfloat16;
    case ScalarType::Float:
      return Type::float32;
    case ScalarType::Double:
      return Type::float64;
    default:
      refuse(op, "dtype must be float16, bfloat16, float32 or float64, got ", show_type(x));
  }
}

bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

void check_like(const char* op, const char* name, const Tensor& other, const char* first, const Tensor& x) {
  REQUIRE(
      other.scalar_type() == x.scalar_type(), op, name, " has dtype ", show_type(other), ", ", first, " has ",
      show_type(x));
  REQUIRE(same_device(other, x), op, name, " is on ", show_device(other), ", ", first, " is on ", show_device(x));
}

// Bytes from the first to behind the last element.
std::pair<uintptr_t, uintptr_t> extent(const Tensor& x) {
  const auto begin = reinterpret_cast<uintptr_t>(x.data_ptr());
  int64_t last = 0;
  for (int64_t dim = 0; dim < x.dim(); ++dim) last += (x.size(dim) - 1) * x.stride(dim);
  return {begin, begin + (x.numel() ? (last + 1) * x.element_size() : 0)};
}

// Elements from the first to behind the last.
int64_t reach(const Tensor& x) {
  const auto [begin, end] = extent(x);
  return static_cast<int64_t>(end - begin) / x.element_size();
}

void check_apart(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b) {
  const auto x = extent(a), y = extent(b);
  REQUIRE(
      x.first == x.second || y.first == y.second || x.second <= y.first || y.second <= x.first, op, a_name, " ",
      show(shape(a)), " and ", b_name, " ", show(shape(b)), " share memory; give an output of its own");
}

void check_ranges(const char* op, const Ints& starts, const Ints& stops) {
  REQUIRE(
      starts.size() == stops.size(), op, starts.size(), " starts and ", stops.size(),
      " stops; give one of each a part");
  REQUIRE(!starts.empty(), op, "no parts given; there is one a rank, and an sp size of 0 does not exist");
}

void check_parts(
    const char* op, const Tensor& tensor, int64_t dim, const Ints& starts, const Ints& stops, const Tensor& wire) {
  const int64_t size = tensor.size(dim);
  int64_t slices = 0;
  for (size_t i = 0; i < starts.size(); ++i) {
    REQUIRE(
        0 <= starts[i] && starts[i] <= stops[i] && stops[i] <= size, op, "part (", starts[i], ", ", stops[i],
        ") does not lie in dim ", dim, " of ", show(shape(tensor)));
    slices += stops[i] - starts[i];
  }
  int64_t row = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) row *= d == dim ? 1 : tensor.size(d);
  REQUIRE(
      wire.dim() == 1 && wire.numel() == slices * row, op, "parts ", show_parts(starts, stops), " along dim ", dim,
      " of ", show(shape(tensor)), " hold ", slices * row, " elements, the wire buffer has shape ", show(shape(wire)));
  REQUIRE(wire.is_contiguous(), op, "the wire buffer must be contiguous, got stride ", wire.stride(0));
}

// Arguments of pack and unpack; dim is counted from the front afterwards.
Type check_relayout(
    const char* op, const Tensor& tensor, const char* tensor_name, const Tensor& wire, const char* wire_name,
    int64_t& dim, const Ints& starts, const Ints& stops) {
  const Type type = type_of(op, tensor);
  check_like(op, wire_name, wire, tensor_name, tensor);
  check_ranges(op, starts, stops);
  REQUIRE(
      -tensor.dim() <= dim && dim < tensor.dim(), op, "dim ", dim, " does not exist in a tensor of shape ",
      show(shape(tensor)));
  if (dim < 0) dim += tensor.dim();
  check_parts(op, tensor, dim, starts, stops, wire);
  check_apart(op, tensor_name, tensor, wire_name, wire);
  return type;
}

// Dimensions, outermost first, with strides in every tensor that has them; merged where all strides allow it.
struct Dims {
  Ints size;
  std::vector<Ints> stride;  // [dim][tensor]

  void add(int64_t n, Ints strides) {
    if (n == 1) return;
    if (!size.empty()) {
      bool merges = true;
      for (size_t t = 0; t < strides.size(); ++t) merges &= stride.back()[t] == strides[t] * n;
      if (merges) {
        size.back() *= n;
        stride.back() = std::move(strides);
        return;
      }
    }
    size.push_back(n);
    stride.push_back(std::move(strides));
  }

  int64_t numel() const { return std::accumulate(size.begin(), size.end(), int64_t(1), std::multiplies<>()); }

  template <class Index, int Tensors>
  Strided<Index, Tensors> in_units(const char* op, int64_t unit) const {
    REQUIRE(
        size.size() <= kDims, op, "the tensor has ", size.size(), " dimensions that strides don't let merge (at most ",
        kDims, "); call contiguous() first");
    Strided<Index, Tensors> strided{};
    strided.count = std::max<int32_t>(1, static_cast<int32_t>(size.size()));
    strided.size[0] = divide_by<Index>(1);
    for (size_t i = 0; i < size.size(); ++i) {
      const size_t from = size.size() - 1 - i;
      strided.size[i] = divide_by<Index>(size[from]);
      for (int t = 0; t < Tensors; ++t) strided.stride[t][i] = static_cast<Index>(stride[from][t] / unit);
    }
    return strided;
  }
};

// A slice of the cut dimension and the parts that hold it.
struct Slice {
  int64_t start, stop;
  std::vector<size_t> parts;
};

// pack: the parts. unpack: the dimension cut at every edge of a part.
std::vector<Slice> cut(bool pack, const Ints& starts, const Ints& stops, int64_t size) {
  std::vector<Slice> slices;
  if (pack) {
    for (size_t i = 0; i < starts.size(); ++i) slices.push_back({starts[i], stops[i], {i}});
    return slices;
  }
  Ints edges{0, size};
  for (size_t i = 0; i < starts.size(); ++i) {
    if (starts[i] == stops[i]) continue;
    edges.push_back(starts[i]);
    edges.push_back(stops[i]);
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  for (size_t e = 0; e + 1 < edges.size(); ++e) {
    Slice slice{edges[e], edges[e + 1], {}};
    for (size_t i = 0; i < starts.size(); ++i) {
      if (starts[i] <= slice.start && slice.stop <= stops[i] && starts[i] < stops[i]) slice.parts.push_back(i);
    }
    slices.push_back(std::move(slice));
  }
  return slices;
}

// An invariant of ours, kept on the CPU too so that its tests see a breach: 32-bit descriptors fit the kernel arguments.
template <class Index>
void check_fits(const char* op, const Descriptors<Index>& descriptors) {
  REQUIRE(
      sizeof(Index) == 8 || (descriptors.segments.size() <= kInline && descriptors.sources.size() <= kInline), op,
      descriptors.segments.size(), " descriptors do not fit ", kInline, " kernel arguments; this is a bug");
}

// CPU: the same maps in a loop.

template <class Body>
void each(uint64_t total, Body body) {
  torch::stable::parallel_for(0, static_cast<int64_t>(total), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) body(unit);
  });
}

template <class Unit, bool kPack, class Index>
void cpu_move_units(const Walk<Index>& walk, const PointedTable<Index>& table, const void* from_, void* to_) {
  const Unit* const from = static_cast<const Unit*>(from_);
  Unit* const to = static_cast<Unit*>(to_);
  each(walk.total, [&](int64_t unit) {
    const Place<Index> place = locate(walk, table, static_cast<Index>(unit));
    const Segment<Index>& segment = table.segment[place.segment];
    if (kPack) to[unit] = from[place.tensor];
    else to[place.tensor] = segment.sources ? from[wire_unit(table, segment.source, place.outer, place.rest)] : Unit{};
  });
}

template <class Unit, class Index>
void cpu_move(const Walk<Index>& walk, const PointedTable<Index>& table, bool pack, const void* from, void* to) {
  pack ? cpu_move_units<Unit, true>(walk, table, from, to) : cpu_move_units<Unit, false>(walk, table, from, to);
}

template <class T, int V, class Index>
void cpu_sum(const Walk<Index>& walk, const PointedTable<Index>& table, const void* wire, void* out) {
  each(walk.total, [&](int64_t unit) {
    sum_unit<T, V>(
        walk, table, static_cast<const Vector<T, V>*>(wire), static_cast<Vector<T, V>*>(out), static_cast<Index>(unit));
  });
}

template <class T, class C, int V, class Index>
void cpu_rotate(const Rotation<Index>& rotation, const PointedTable<Index>& table, bool backward) {
  each(rotation.total, [&](int64_t item) {
    backward ? rotate_item<T, C, V, true, true>(rotation, table, static_cast<Index>(item))
             : rotate_item<T, C, V, false, false>(rotation, table, static_cast<Index>(item));
  });
}

#if defined(DS_SP_OVERLAP_ON_HOST)
bool launches(const Tensor&) { return ds_sp_overlap_launches; }
void* current_stream(const Tensor&) { return nullptr; }
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};
#elif defined(DS_SP_OVERLAP_CUDA)
using torch::stable::accelerator::DeviceGuard;
bool launches(const Tensor& x) { return x.is_cuda(); }
void* current_stream(const Tensor& x) {
  if (aoti_torch_get_current_cuda_stream == nullptr)
    throw std::runtime_error("ds_sp_overlap: a CUDA tensor, but a torch without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return stream;
}
#endif

#if defined(DS_SP_OVERLAP_CUDA)
// Device memory for the descriptors where they don't travel as arguments; from torch's allocator, so in stream order.
template <class Index>
std::optional<Tensor> descriptor_memory(const Descriptors<Index>& descriptors, const Tensor& like) {
  if (sizeof(Index) == 4) return std::nullopt;
  const int64_t bytes =
      descriptors.segments.size() * sizeof(Segment<Index>) + descriptors.sources.size() * sizeof(Source<Index>);
  return torch::stable::new_empty(like, {(bytes + 7) / 8}, ScalarType::Long);
}
#endif

// Planning of pack and unpack.

struct Relayout {
  const char* op;
  bool pack;
  const Tensor &tensor, &wire;
  std::vector<Slice> slices;
  Ints wire_first, length;  // of each part, in elements of the wire and slices of the tensor
  Dims outer, inner;
  int64_t cut_stride,
      scale;     // scale: what a slice of the cut dimension counts once it is merged with what is inside it
  int64_t unit;  // elements

  Relayout(
      const char* op, bool pack, const Tensor& tensor, const Tensor& wire, int64_t dim, const Ints& starts,
      const Ints& stops)
      : op(op), pack(pack), tensor(tensor), wire(wire) {
    for (int64_t d = 0; d < dim; ++d) outer.add(tensor.size(d), {tensor.stride(d)});
    for (int64_t d = dim + 1; d < tensor.dim(); ++d) inner.add(tensor.size(d), {tensor.stride(d)});
    cut_stride = tensor.stride(dim);
    slices = cut(pack, starts, stops, tensor.size(dim));
    int64_t at = 0;
    for (size_t i = 0; i < starts.size(); ++i) {
      wire_first.push_back(at);
      length.push_back(stops[i] - starts[i]);
      at += length.back() * outer.numel() * inner.numel();
    }
    // A slice and what is inside it are one run of memory: count through the run.
    const bool dense = inner.size.empty() || (inner.size.size() == 1 && inner.stride[0][0] == 1);
    scale = 1;
    if (dense && cut_stride == inner.numel()) {
      scale = inner.numel();
      inner = Dims{};
      cut_stride = 1;
    }
    choose_unit(starts, stops, tensor.size(dim));
  }

  void choose_unit(const Ints& starts, const Ints& stops, int64_t size) {
    const int64_t bytes = tensor.element_size();
    int64_t common = reinterpret_cast<uintptr_t>(tensor.data_ptr()) | reinterpret_cast<uintptr_t>(wire.data_ptr()) | 16;
    const auto demand = [&](int64_t elements) {
      common |= elements * bytes;
    };  // its lowest set bit is what divides all
    for (const auto& stride : outer.stride) demand(stride[0]);
    if (cut_stride == 1 && inner.size.empty()) {
      for (size_t i = 0; i < starts.size(); ++i) {
        demand(starts[i] * scale);
        demand(stops[i] * scale);
      }
      if (!pack) demand(size * scale);
    } else if (!inner.size.empty() && inner.stride.back()[0] == 1) {
      demand(inner.size.back());
      demand(cut_stride);
      for (size_t i = 0; i + 1 < inner.size.size(); ++i) demand(inner.stride[i][0]);
    } else {
      demand(1);
    }
    unit = std::max<int64_t>(1, (common & -common) / bytes);
  }

  template <class Index>
  void run(Type type, bool sums) {
    if (sums && unit * int64_t(tensor.element_size()) < 16)
      unit = 1;  // sums know vectors of 16 bytes and single elements
    const bool merged = inner.size.empty();
    const int64_t cut = merged ? unit : 1;  // what a unit divides: the run,
    Dims inside = inner;                    // or the innermost dimension
    int64_t inside_units = inner.numel();
    if (!merged) {
      inside.size.back() /= unit;
      inside.stride.back()[0] *= unit;  // its stride is 1: one unit on
      inside_units /= unit;
    }
    Walk<Index> walk{};
    walk.outer = outer.in_units<Index, 1>(op, unit);
    walk.inner = inside.in_units<Index, 1>(op, unit);
    walk.inner_size = divide_by<Index>(inside_units);
    walk.cut_stride = static_cast<Index>(merged ? cut_stride : cut_stride / unit);
    const int64_t rows = outer.numel();
    Descriptors<Index> descriptors;
    uint64_t total = 0, equal = 0;
    bool all_equal = true;
    for (const Slice& slice : slices) {
      const int64_t units = (slice.stop - slice.start) * scale / cut * inside_units;
      if (units * rows == 0) continue;
      all_equal &= equal == 0 || equal == static_cast<uint64_t>(units * rows);
      equal = units * rows;
      Segment<Index> segment{};
      segment.first = static_cast<Index>(total);
      segment.row = divide_by<Index>(units);
      segment.start = static_cast<Index>(slice.start * scale / cut);
      segment.source = static_cast<uint32_t>(descriptors.sources.size());
      segment.sources = static_cast<uint32_t>(slice.parts.size());
      for (size_t part : slice.parts) {
        const int64_t row = length[part] * scale / cut * inside_units;
        const int64_t begin = pack ? 0 : (slice.start - part_start(part)) * scale / cut * inside_units;
        descriptors.sources.push_back({static_cast<Index>(wire_first[part] / unit + begin), static_cast<Index>(row)});
      }
      descriptors.segments.push_back(segment);
      total += units * rows;
    }
    walk.total = static_cast<Index>(total);
    walk.segments = static_cast<uint32_t>(descriptors.segments.size());
    walk.equal = divide_by<Index>(all_equal ? equal : 0);
    check_fits(op, descriptors);
    if (total == 0) return;

    const void* const from = pack ? tensor.data_ptr() : wire.data_ptr();
    void* const to = pack ? wire.data_ptr() : tensor.data_ptr();
    const bool vector = unit > 1;
#if defined(DS_SP_OVERLAP_CUDA)
    if (launches(tensor)) {
      const DeviceGuard guard(tensor.get_device_index());
      const auto memory = descriptor_memory(descriptors, tensor);
      void* const table = memory ? memory->data_ptr() : nullptr;
      if (sums) cuda_sum<Index>(walk, descriptors, table, type, vector, from, to, current_stream(tensor));
      else
        cuda_move<Index>(
            walk, descriptors, table, static_cast<int>(unit * tensor.element_size()), pack, from, to,
            current_stream(tensor));
      return;
    }
#endif
    const PointedTable<Index> table{descriptors.segments.data(), descriptors.sources.data()};
    if (sums) {
      with_type(type, [&](auto zero) {
        using T = decltype(zero);
        vector ? cpu_sum<T, 16 / sizeof(T)>(walk, table, from, to) : cpu_sum<T, 1>(walk, table, from, to);
      });
      return;
    }
    struct Sixteen {
      uint64_t low, high;
    };
    switch (unit * tensor.element_size()) {
      case 16:
        return cpu_move<Sixteen>(walk, table, pack, from, to);
      case 8:
        return cpu_move<uint64_t>(walk, table, pack, from, to);
      case 4:
        return cpu_move<uint32_t>(walk, table, pack, from, to);
      default:
        return cpu_move<uint16_t>(walk, table, pack, from, to);
    }
  }

  void run(Type type, const Ints& starts) {
    part_starts = &starts;
    size_t sources = 0;
    bool sums = false;
    const int64_t furthest = std::max(reach(tensor), wire.numel());
    for (const Slice& slice : slices) {
      sources += slice.parts.size();
      sums |= slice.parts.size() > 1;
    }
    const bool narrow = furthest / unit <= narrow_limit && slices.size() <= kInline && sources <= kInline;
    narrow ? run<uint32_t>(type, sums) : run<uint64_t>(type, sums);
  }

  const Ints* part_starts = nullptr;
  int64_t part_start(size_t part) const { return (*part_starts)[part]; }
};

void relayout(
    const char* op, bool pack, const Tensor& tensor, const char* tensor_name, const Tensor& wire, const char* wire_name,
    int64_t dim, const Ints& starts, const Ints& stops) {
  const Type type = check_relayout(op, tensor, tensor_name, wire, wire_name, dim, starts, stops);
  if (pack ? wire.numel() == 0 : tensor.numel() == 0) return;
  Relayout(op, pack, tensor, wire, dim, starts, stops).run(type, starts);
}

void pack(const Tensor& x, int64_t dim, Ints starts, Ints stops, Tensor out) {
  relayout("pack", true, x, "x", out, "out", dim, starts, stops);
}

void unpack(const Tensor& wire, int64_t dim, Ints starts, Ints stops, Tensor out) {
  relayout("unpack", false, out, "out", wire, "wire", dim, starts, stops);
}

// Planning of rotate_pack and unpack_rotate_back.

struct Rotated {
  const char* op;
  bool backward;
  const Tensor &tensor, &wire, &cos, &sin;
  const Ints &starts, &stops;

  int64_t rot() const { return cos.dim() ? cos.size(cos.dim() - 1) : 0; }

  Type check() const {
    const char* const name = backward ? "out" : "x";
    const char* const wire_name = backward ? "wire" : "out";
    const Ints whole = shape(tensor);
    REQUIRE(whole.size() >= 2, op, name, " must be [tokens..., heads, d], got ", show(whole));
    int64_t dim = -2;
    const Type type = check_relayout(op, tensor, name, wire, wire_name, dim, starts, stops);
    for (const Tensor* table : {&cos, &sin}) {
      const char* const which = table == &cos ? "cos" : "sin";
      REQUIRE(
          same_device(*table, tensor), op, which, " is on ", show_device(*table), ", ", name, " is on ",
          show_device(tensor));
      REQUIRE(
          table->scalar_type() == tensor.scalar_type() ||
              (tensor.element_size() == 2 && table->scalar_type() == ScalarType::Float),
          op, which, " has dtype ", show_type(*table), ", ", name, " has ", show_type(tensor),
          "; give tables of that dtype, or float32 for half precision");
      REQUIRE(
          table->scalar_type() == cos.scalar_type(), op, "cos has dtype ", show_type(cos), ", sin has ",
          show_type(sin));
      const Ints own = shape(*table);
      bool fits = !own.empty() && own.size() <= whole.size() - 1 && own.back() == rot();
      for (size_t d = 0; fits && d + 1 < own.size(); ++d) {
        const int64_t tokens = whole[whole.size() - 2 - (own.size() - 1) + d];
        fits = own[d] == tokens || own[d] == 1;
      }
      REQUIRE(
          fits, op, which, " ", show(own), " does not broadcast to the tokens of ", show(whole),
          " (expected [tokens..., rot])");
      check_apart(op, which, *table, "out", backward ? tensor : wire);
    }
    REQUIRE(rot() % 2 == 0, op, "the rotary dims must be even, got ", rot());
    REQUIRE(rot() <= whole.back(), op, rot(), " rotary dims do not fit head dim ", whole.back(), " of ", name);
    return type;
  }

  // Stride of a table along a dim of the tokens; 0 where it is broadcast.
  int64_t table_stride(const Tensor& table, int64_t dim) const {
    const int64_t own = dim - (tensor.dim() - 2 - (table.dim() - 1));
    return own < 0 || table.size(own) == 1 ? 0 : table.stride(own);
  }

  static bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

  bool vectors_fit() const {
    const int64_t V = 16 / tensor.element_size(), last = tensor.dim() - 1;
    bool fits = aligned(tensor.data_ptr(), 16) && aligned(wire.data_ptr(), 16) && tensor.size(last) % V == 0 &&
                (tensor.stride(last) == 1 || tensor.size(last) == 1) && rot() % (2 * V) == 0;
    for (int64_t d = 0; d < last; ++d) fits &= tensor.stride(d) % V == 0 || tensor.size(d) == 1;
    for (const Tensor* table : {&cos, &sin}) {
      fits &= aligned(table->data_ptr(), V * table->element_size()) && table->stride(table->dim() - 1) == 1;
      for (int64_t d = 0; d + 1 < table->dim(); ++d) fits &= table->stride(d) % V == 0 || table->size(d) == 1;
    }
    return fits;
  }

  template <class Index>
  void run(Type type, bool vector, const std::vector<Slice>& slices) const {
    const Type angles = type_of(op, cos);
    const int64_t V = vector ? 16 / tensor.element_size() : 1;
    const int64_t last = tensor.dim() - 1, dim = tensor.size(last), turned = rot() / (2 * V);
    const int64_t items = turned + (dim / V - 2 * turned + 1) / 2;
    Dims tokens;
    for (int64_t d = 0; d < last - 1; ++d)
      tokens.add(tensor.size(d), {tensor.stride(d), table_stride(cos, d), table_stride(sin, d)});
    Rotation<Index> rotation{};
    rotation.tensor = tensor.data_ptr();
    rotation.wire = wire.data_ptr();
    rotation.cos = cos.data_ptr();
    rotation.sin = sin.data_ptr();
    rotation.tokens = tokens.in_units<Index, 3>(op, V);
    rotation.head_stride = static_cast<Index>(tensor.stride(last - 1) / V);
    rotation.inner_stride = static_cast<Index>(tensor.stride(last));
    rotation.cos_stride = static_cast<Index>(cos.stride(cos.dim() - 1));
    rotation.sin_stride = static_cast<Index>(sin.stride(sin.dim() - 1));
    rotation.items = divide_by<Index>(items);
    rotation.dim = static_cast<uint32_t>(dim / V);
    rotation.turned = static_cast<uint32_t>(turned);
    Ints wire_first;  // of each part, in heads
    int64_t at = 0;
    for (size_t i = 0; i < starts.size(); ++i) {
      wire_first.push_back(at);
      at += (stops[i] - starts[i]) * tokens.numel();
    }
    Descriptors<Index> descriptors;
    int64_t heads = 0, equal = 0;
    bool all_equal = true;
    for (const Slice& slice : slices) {
      const int64_t of_slice = slice.stop - slice.start;
      if (of_slice == 0) continue;
      all_equal &= equal == 0 || equal == of_slice;
      equal = of_slice;
      Segment<Index> segment{};
      segment.first = static_cast<Index>(heads);
      segment.start = static_cast<Index>(slice.start);
      segment.source = static_cast<uint32_t>(descriptors.sources.size());
      segment.sources = static_cast<uint32_t>(slice.parts.size());
      for (size_t part : slice.parts) {
        descriptors.sources.push_back(
            {static_cast<Index>(wire_first[part] + slice.start - starts[part]),
             static_cast<Index>(stops[part] - starts[part])});
      }
      descriptors.segments.push_back(segment);
      heads += of_slice;
    }
    const int64_t total = tokens.numel() * heads * items;
    rotation.heads = divide_by<Index>(heads);
    rotation.equal = divide_by<Index>(all_equal ? equal : 0);
    rotation.total = static_cast<Index>(total);
    rotation.segments = static_cast<uint32_t>(descriptors.segments.size());
    check_fits(op, descriptors);
    if (total == 0) return;
#if defined(DS_SP_OVERLAP_CUDA)
    if (launches(tensor)) {
      const DeviceGuard guard(tensor.get_device_index());
      const auto memory = descriptor_memory(descriptors, tensor);
      cuda_rotate<Index>(
          rotation, descriptors, memory ? memory->data_ptr() : nullptr, type, angles, vector, backward,
          current_stream(tensor));
      return;
    }
#endif
    const PointedTable<Index> table{descriptors.segments.data(), descriptors.sources.data()};
    with_types(type, angles, [&](auto zero, auto angle) {
      using T = decltype(zero);
      using C = decltype(angle);
      vector ? cpu_rotate<T, C, 16 / sizeof(T)>(rotation, table, backward)
             : cpu_rotate<T, C, 1>(rotation, table, backward);
    });
  }

  void run() const {
    const Type type = check();
    const std::vector<Slice> slices = cut(!backward, starts, stops, tensor.size(tensor.dim() - 2));
    size_t sources = 0;
    for (const Slice& slice : slices) sources += slice.parts.size();
    const bool vector = vectors_fit();
    const int64_t furthest = std::max({reach(tensor), wire.numel(), reach(cos), reach(sin)});
    const int64_t units = furthest / (vector ? 16 / int64_t(tensor.element_size()) : 1);
    const bool narrow = units <= narrow_limit && slices.size() <= kInline && sources <= kInline;
    narrow ? run<uint32_t>(type, vector, slices) : run<uint64_t>(type, vector, slices);
  }
};

void rotate_pack(const Tensor& x, const Tensor& cos, const Tensor& sin, Ints starts, Ints stops, Tensor out) {
  Rotated{"rotate_pack", false, x, out, cos, sin, starts, stops}.run();
}

void unpack_rotate_back(const Tensor& wire, const Tensor& cos, const Tensor& sin, Ints starts, Ints stops, Tensor out) {
  Rotated{"unpack_rotate_back", true, out, wire, cos, sin, starts, stops}.run();
}

}  // namespace
}  // namespace ds_sp_overlap

#define OPERATORS(m)                                             \
  m.impl("pack", TORCH_BOX(&ds_sp_overlap::pack));               \
  m.impl("unpack", TORCH_BOX(&ds_sp_overlap::unpack));           \
  m.impl("rotate_pack", TORCH_BOX(&ds_sp_overlap::rotate_pack)); \
  m.impl("unpack_rotate_back", TORCH_BOX(&ds_sp_overlap::unpack_rotate_back));

STABLE_TORCH_LIBRARY(ds_sp_overlap, m) {
  m.def("pack(Tensor x, int dim, int[] starts, int[] stops, Tensor(a!) out) -> ()");
  m.def("unpack(Tensor wire, int dim, int[] starts, int[] stops, Tensor(a!) out) -> ()");
  m.def("rotate_pack(Tensor x, Tensor cos, Tensor sin, int[] starts, int[] stops, Tensor(a!) out) -> ()");
  m.def("unpack_rotate_back(Tensor wire, Tensor cos, Tensor sin, int[] starts, int[] stops, Tensor(a!) out) -> ()");
}

// The CPU kernels show that the maps are right; PyTorch's own copies are faster on a CPU and stay in charge there.
STABLE_TORCH_LIBRARY_IMPL(ds_sp_overlap, CPU, m) {
  OPERATORS(m)
}
#if defined(DS_SP_OVERLAP_CUDA)
STABLE_TORCH_LIBRARY_IMPL(ds_sp_overlap, CUDA, m) {
  OPERATORS(m)
}
#endif
