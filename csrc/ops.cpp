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
void require(bool fine, const char* op, const Args&... message) {
  if (fine) return;
  std::ostringstream text;
  text << "ds_sp_overlap." << op << ": ";
  (text << ... << message);
  throw std::invalid_argument(text.str());
}

std::string show(const Ints& values) {
  std::ostringstream text;
  for (size_t i = 0; i < values.size(); ++i) text << (i ? ", " : "[") << values[i];
  text << (values.empty() ? "[]" : "]");
  return text.str();
}

Ints shape(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

std::string show_parts(const Ints& starts, const Ints& stops, size_t first, size_t count) {
  std::ostringstream text;
  for (size_t i = first; i < first + count; ++i)
    text << (i > first ? ", (" : "[(") << starts[i] << ", " << stops[i] << ")";
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
      require(false, op, "dtype must be float16, bfloat16, float32 or float64, got ", show_type(x));
  }
  return Type::half;
}

bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

void check_like(const char* op, const char* name, const Tensor& other, const char* first, const Tensor& x) {
  require(
      other.scalar_type() == x.scalar_type(), op, name, " has dtype ", show_type(other), ", ", first, " has ",
      show_type(x));
  require(same_device(other, x), op, name, " is on ", show_device(other), ", ", first, " is on ", show_device(x));
}

// Bytes from the first to behind the last element.
std::pair<uintptr_t, uintptr_t> extent(const Tensor& x) {
  const auto begin = reinterpret_cast<uintptr_t>(x.data_ptr());
  int64_t last = 0;
  for (int64_t dim = 0; dim < x.dim(); ++dim) last += (x.size(dim) - 1) * x.stride(dim);
  return {begin, begin + (x.numel() ? (last + 1) * x.element_size() : 0)};
}

void check_apart(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b) {
  const auto x = extent(a), y = extent(b);
  require(
      x.first == x.second || y.first == y.second || x.second <= y.first || y.second <= x.first, op, a_name, " ",
      show(shape(a)), " and ", b_name, " ", show(shape(b)), " share memory; give an output of its own");
}

// tensor and wire of one operator call, or of one of its tensors; number of elements in the wire.
void check_parts(
    const char* op, const Tensor& tensor, int64_t dim, const Ints& starts, const Ints& stops, size_t first,
    size_t count, const Tensor& wire) {
  const int64_t size = tensor.size(dim);
  int64_t slices = 0;
  for (size_t i = first; i < first + count; ++i) {
    require(
        0 <= starts[i] && starts[i] <= stops[i] && stops[i] <= size, op, "part (", starts[i], ", ", stops[i],
        ") does not lie in dim ", dim, " of ", show(shape(tensor)));
    slices += stops[i] - starts[i];
  }
  int64_t row = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) row *= d == dim ? 1 : tensor.size(d);
  require(
      wire.dim() == 1 && wire.numel() == slices * row, op, "parts ", show_parts(starts, stops, first, count),
      " along dim ", dim, " of ", show(shape(tensor)), " hold ", slices * row, " elements, the wire buffer has shape ",
      show(shape(wire)));
  require(wire.is_contiguous(), op, "the wire buffer must be contiguous, got stride ", wire.stride(0));
}

void check_ranges(const char* op, const Ints& starts, const Ints& stops, size_t tensors) {
  require(
      starts.size() == stops.size() && starts.size() % tensors == 0, op, starts.size(), " starts and ", stops.size(),
      " stops; give one of each a part", tensors > 1 ? ", for each tensor the same number" : "");
  require(!starts.empty(), op, "no parts given; there is one a rank, and an sp size of 0 does not exist");
  require(starts.size() / tensors <= UINT16_MAX, op, starts.size() / tensors, " parts; at most ", UINT16_MAX);
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
    require(
        size.size() <= kDims, op, "the tensor has ", size.size(), " dimensions that strides don't let merge (at most ",
        kDims, "); call contiguous() first");
    Strided<Index, Tensors> strided{};
    strided.count = std::max<int32_t>(1, static_cast<int32_t>(size.size()));
    strided.size[0] = divide_by<Index>(1);
    for (size_t i = 0; i < size.size(); ++i) {
      const size_t from = size.size() - 1 - i;
      strided.size[i] = divide_by<Index>(size[from]);
      for (int t = 0; t < Tensors; ++t) strided.stride[t][i] = stride[from][t] / unit;
    }
    return strided;
  }
};

// A slice of the cut dimension and the parts that hold it.
struct Slice {
  int64_t start, stop;
  std::vector<size_t> parts;
};

// The dimension cut at every edge of a part.
std::vector<Slice> cover(const Ints& starts, const Ints& stops, size_t first, size_t count, int64_t size) {
  Ints edges{0, size};
  for (size_t i = first; i < first + count; ++i) {
    if (starts[i] == stops[i]) continue;
    edges.push_back(starts[i]);
    edges.push_back(stops[i]);
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  std::vector<Slice> slices;
  for (size_t e = 0; e + 1 < edges.size(); ++e) {
    Slice slice{edges[e], edges[e + 1], {}};
    for (size_t i = first; i < first + count; ++i) {
      if (starts[i] <= slice.start && slice.stop <= stops[i] && starts[i] < stops[i]) slice.parts.push_back(i);
    }
    slices.push_back(std::move(slice));
  }
  return slices;
}

// An invariant of ours, kept on the CPU too so that its tests see a breach: 32-bit descriptors fit the kernel arguments.
template <class Index>
void check_fits(const char* op, const Descriptors<Index>& descriptors) {
  require(
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

template <class T, int V, class Index>
void cpu_sum(const Walk<Index>& walk, const PointedTable<Index>& table, const void* wire, void* out) {
  each(walk.total, [&](int64_t unit) {
    sum_unit<T, V>(walk, table, static_cast<const T*>(wire), static_cast<T*>(out), static_cast<Index>(unit));
  });
}

template <class T, int V, class Index>
void cpu_rotate(const Rotation<Index>& rotation, const PointedTable<Index>& table, bool backward) {
  each(rotation.total, [&](int64_t item) {
    backward ? rotate_item<T, V, true>(rotation, table, static_cast<Index>(item))
             : rotate_item<T, V, false>(rotation, table, static_cast<Index>(item));
  });
}

#if defined(DS_SP_OVERLAP_CUDA)
void* current_stream(const Tensor& x) {
  if (aoti_torch_get_current_cuda_stream == nullptr)
    throw std::runtime_error("ds_sp_overlap: a CUDA tensor, but a torch without CUDA");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return stream;
}

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
    if (pack) {
      for (size_t i = 0; i < starts.size(); ++i) slices.push_back({starts[i], stops[i], {i}});
    } else {
      slices = cover(starts, stops, 0, starts.size(), tensor.size(dim));
    }
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
    if (sums && sizeof(Index) == 8) unit = 1;
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
    walk.cut_stride = merged ? cut_stride : cut_stride / unit;
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
      segment.sources = static_cast<uint16_t>(slice.parts.size());
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
    if (tensor.is_cuda()) {
      torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());
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
    const int64_t furthest = std::max(tensor.numel(), wire.numel());
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

int64_t checked_dim(const char* op, int64_t dim, const Tensor& tensor) {
  require(
      -tensor.dim() <= dim && dim < tensor.dim(), op, "dim ", dim, " does not exist in a tensor of shape ",
      show(shape(tensor)));
  return dim < 0 ? dim + tensor.dim() : dim;
}

void relayout(
    const char* op, bool pack, const Tensor& tensor, const char* tensor_name, const Tensor& wire, const char* wire_name,
    int64_t dim, const Ints& starts, const Ints& stops) {
  const Type type = type_of(op, tensor);
  check_like(op, wire_name, wire, tensor_name, tensor);
  check_ranges(op, starts, stops, 1);
  dim = checked_dim(op, dim, tensor);
  check_parts(op, tensor, dim, starts, stops, 0, starts.size(), wire);
  check_apart(op, tensor_name, tensor, wire_name, wire);
  if (pack ? wire.numel() == 0 : tensor.numel() == 0) return;
  Relayout(op, pack, tensor, wire, dim, starts, stops).run(type, starts);
}

void pack(const Tensor& x, int64_t dim, Ints starts, Ints stops, Tensor out) {
  relayout("pack", true, x, "x", out, "out", dim, starts, stops);
}

void unpack(const Tensor& wire, int64_t dim, Ints starts, Ints stops, Tensor out) {
  relayout("unpack", false, out, "out", wire, "wire", dim, starts, stops);
}

// Planning of pack_qkv and unpack_qkv.

struct Fused {
  const char* op;
  bool backward;
  const std::vector<Tensor>&tensors, &wires;
  std::vector<std::optional<Tensor>> bias;
  std::optional<Tensor> cos, sin;
  bool interleaved;
  int64_t rotated;
  const Ints &starts, &stops;

  size_t ranks() const { return starts.size() / tensors.size(); }
  int64_t rot() const { return cos ? cos->size(-1 + cos->dim()) : 0; }

  Type check() const {
    const char* const name = backward ? "out" : "x";
    const char* const wire_name = backward ? "wire" : "out";
    require(
        !tensors.empty() && tensors.size() <= kHeads, op, tensors.size(), " tensors; give 1 to ", kHeads, " (q, k, v)");
    require(
        wires.size() == tensors.size(), op, tensors.size(), " tensors in ", name, " and ", wires.size(), " in ",
        wire_name);
    require(bias.empty() || bias.size() == tensors.size(), op, bias.size(), " biases for ", tensors.size(), " tensors");
    require(
        0 <= rotated && rotated <= int64_t(tensors.size()), op, "rotated must be between 0 and ", tensors.size(),
        ", got ", rotated);
    check_ranges(op, starts, stops, tensors.size());
    const Type type = type_of(op, tensors[0]);
    const Ints first = shape(tensors[0]);
    for (size_t j = 0; j < tensors.size(); ++j) {
      const Tensor& x = tensors[j];
      check_like(op, name, x, name, tensors[0]);
      check_like(op, wire_name, wires[j], name, tensors[0]);
      const Ints own = shape(x);
      require(own.size() >= 2, op, name, "[", j, "] must be [tokens..., heads, d], got ", show(own));
      require(
          own.size() == first.size() && std::equal(own.begin(), own.end() - 2, first.begin()), op, name, "[", j, "] ",
          show(own), " and ", name, "[0] ", show(first), " have other tokens");
      check_parts(op, x, x.dim() - 2, starts, stops, j * ranks(), ranks(), wires[j]);
      for (size_t i = 0; i < tensors.size(); ++i) check_apart(op, name, x, wire_name, wires[i]);
      if (!bias.empty() && bias[j]) {
        const Tensor& b = *bias[j];
        check_like(op, "bias", b, name, tensors[0]);
        require(
            b.numel() == x.size(x.dim() - 2) * x.size(x.dim() - 1), op, "bias[", j, "] ", show(shape(b)),
            " does not have one element a head and dim of ", show(own));
        require(b.is_contiguous(), op, "bias[", j, "] must be contiguous");
        check_apart(op, "bias", b, wire_name, wires[j]);
      }
    }
    require(cos.has_value() == sin.has_value(), op, "cos and sin belong together; give both or neither");
    if (!cos) return type;
    for (const Tensor* table : {&*cos, &*sin}) {
      const char* const which = table == &*cos ? "cos" : "sin";
      require(
          same_device(*table, tensors[0]), op, which, " is on ", show_device(*table), ", ", name, " is on ",
          show_device(tensors[0]));
      require(
          table->scalar_type() == tensors[0].scalar_type() ||
              (tensors[0].element_size() == 2 && table->scalar_type() == ScalarType::Float),
          op, which, " has dtype ", show_type(*table), ", ", name, " has ", show_type(tensors[0]),
          "; give tables of that dtype, or float32 for half precision");
      require(
          table->scalar_type() == cos->scalar_type(), op, "cos has dtype ", show_type(*cos), ", sin has ",
          show_type(*sin));
      const Ints own = shape(*table);
      bool fits = !own.empty() && own.size() <= first.size() - 1 && own.back() == rot();
      for (size_t d = 0; fits && d + 1 < own.size(); ++d) {
        const int64_t tokens = first[first.size() - 2 - (own.size() - 1) + d];
        fits = own[d] == tokens || own[d] == 1;
      }
      require(
          fits, op, which, " ", show(own), " does not broadcast to the tokens of ", show(first),
          " (expected [tokens..., rot])");
      for (size_t j = 0; j < wires.size(); ++j)
        check_apart(op, which, *table, backward ? "out" : "out", backward ? tensors[j] : wires[j]);
    }
    require(rot() % 2 == 0, op, "the rotary dims must be even, got ", rot());
    for (int64_t j = 0; j < rotated; ++j) {
      const int64_t d = tensors[j].size(tensors[j].dim() - 1);
      require(rot() <= d, op, rot(), " rotary dims do not fit head dim ", d, " of ", name, "[", j, "]");
    }
    return type;
  }

  // Stride of a table along a dim of the tokens; 0 where it is broadcast.
  int64_t table_stride(const Tensor& table, int64_t dim, int64_t token_dims) const {
    const int64_t own = dim - (token_dims - (table.dim() - 1));
    return own < 0 || table.size(own) == 1 ? 0 : table.stride(own);
  }

  Dims tokens(const Tensor& x, bool turned) const {
    Dims dims;
    const int64_t token_dims = x.dim() - 2;
    for (int64_t d = 0; d < token_dims; ++d) {
      dims.add(
          x.size(d), {x.stride(d), turned ? table_stride(*cos, d, token_dims) : 0,
                      turned ? table_stride(*sin, d, token_dims) : 0});
    }
    return dims;
  }

  static bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

  bool turns(size_t j) const { return cos && int64_t(j) < rotated && rot() > 0; }

  bool vectors_fit() const {
    const int64_t bytes = tensors[0].element_size(), V = 16 / bytes;
    for (size_t j = 0; j < tensors.size(); ++j) {
      const Tensor& x = tensors[j];
      const int64_t last = x.dim() - 1;
      bool fits = aligned(x.data_ptr(), 16) && aligned(wires[j].data_ptr(), 16) && x.size(last) % V == 0 &&
                  (x.stride(last) == 1 || x.size(last) == 1) && (x.stride(last - 1) % V == 0 || x.size(last - 1) == 1);
      for (int64_t d = 0; d < last - 1; ++d) fits &= x.stride(d) % V == 0 || x.size(d) == 1;
      if (!bias.empty() && bias[j]) fits &= aligned(bias[j]->data_ptr(), 16);
      if (turns(j)) {
        fits &= rot() % (2 * V) == 0;
        for (const Tensor* table : {&*cos, &*sin}) {
          fits &= aligned(table->data_ptr(), V * table->element_size()) && table->stride(table->dim() - 1) == 1;
          for (int64_t d = 0; d + 1 < table->dim(); ++d) fits &= table->stride(d) % V == 0 || table->size(d) == 1;
        }
      }
      if (!fits) return false;
    }
    return true;
  }

  template <class Index>
  void run(Type type, bool vector, const std::vector<std::vector<Slice>>& slices) const {
    const int64_t V = vector ? 16 / tensors[0].element_size() : 1;
    Rotation<Index> rotation{};
    rotation.interleaved = interleaved;
    if (cos) {
      rotation.cos = cos->data_ptr();
      rotation.sin = sin->data_ptr();
      rotation.cos_stride = cos->stride(cos->dim() - 1);
      rotation.sin_stride = sin->stride(sin->dim() - 1);
      rotation.accumulator_tables = cos->scalar_type() != tensors[0].scalar_type();
    }
    Descriptors<Index> descriptors;
    uint64_t total = 0;
    for (size_t j = 0; j < tensors.size(); ++j) {
      const Tensor& x = tensors[j];
      const int64_t last = x.dim() - 1, dim = x.size(last);
      Head<Index>& head = rotation.head[j];
      head.tensor = x.data_ptr();
      head.wire = wires[j].data_ptr();
      head.bias = !bias.empty() && bias[j] ? bias[j]->data_ptr() : nullptr;
      const Dims dims = tokens(x, turns(j));
      head.tokens = dims.in_units<Index, 3>(op, 1);
      head.head_stride = x.stride(last - 1);
      head.inner_stride = x.stride(last);
      head.dim = static_cast<uint32_t>(dim);
      head.turned = turns(j) ? static_cast<uint32_t>(rot() / (2 * V)) : 0;
      const int64_t items = head.turned + (dim / V - 2 * int64_t(head.turned) + 1) / 2;
      head.items = divide_by<Index>(items);
      int64_t at = 0;  // of a part in the wire, in heads
      std::vector<int64_t> part_first;
      for (size_t i = j * ranks(); i < (j + 1) * ranks(); ++i) {
        part_first.push_back(at);
        at += (stops[i] - starts[i]) * dims.numel();
      }
      for (const Slice& slice : slices[j]) {
        const uint64_t units = (slice.stop - slice.start) * items;
        if (units * dims.numel() == 0) continue;
        Segment<Index> segment{};
        segment.first = static_cast<Index>(total);
        segment.row = divide_by<Index>(units);
        segment.start = static_cast<Index>(slice.start);
        segment.source = static_cast<uint32_t>(descriptors.sources.size());
        segment.sources = static_cast<uint16_t>(slice.parts.size());
        segment.head = static_cast<uint16_t>(j);
        for (size_t part : slice.parts) {
          descriptors.sources.push_back(
              {static_cast<Index>(part_first[part - j * ranks()] + slice.start - starts[part]),
               static_cast<Index>(stops[part] - starts[part])});
        }
        descriptors.segments.push_back(segment);
        total += units * dims.numel();
      }
    }
    rotation.total = static_cast<Index>(total);
    rotation.segments = static_cast<uint32_t>(descriptors.segments.size());
    check_fits(op, descriptors);
    if (total == 0) return;
#if defined(DS_SP_OVERLAP_CUDA)
    if (tensors[0].is_cuda()) {
      torch::stable::accelerator::DeviceGuard guard(tensors[0].get_device_index());
      const auto memory = descriptor_memory(descriptors, tensors[0]);
      cuda_rotate<Index>(
          rotation, descriptors, memory ? memory->data_ptr() : nullptr, type, vector, backward,
          current_stream(tensors[0]));
      return;
    }
#endif
    const PointedTable<Index> table{descriptors.segments.data(), descriptors.sources.data()};
    with_type(type, [&](auto zero) {
      using T = decltype(zero);
      vector ? cpu_rotate<T, 16 / sizeof(T)>(rotation, table, backward) : cpu_rotate<T, 1>(rotation, table, backward);
    });
  }

  void run(Type type) const {
    std::vector<std::vector<Slice>> slices(tensors.size());
    size_t segments = 0, sources = 0;
    int64_t furthest = 0;
    for (size_t j = 0; j < tensors.size(); ++j) {
      const int64_t heads = tensors[j].size(tensors[j].dim() - 2);
      if (backward) {
        slices[j] = cover(starts, stops, j * ranks(), ranks(), heads);
      } else {
        for (size_t i = j * ranks(); i < (j + 1) * ranks(); ++i) slices[j].push_back({starts[i], stops[i], {i}});
      }
      segments += slices[j].size();
      for (const Slice& slice : slices[j]) sources += slice.parts.size();
      furthest += std::max(tensors[j].numel(), wires[j].numel()) + heads;
    }
    bool vector = vectors_fit();
    // An item is at least one element; counted as such the limit is safe for vectors too.
    const int64_t items = furthest / (vector ? 16 / int64_t(tensors[0].element_size()) : 1);
    const bool narrow = items <= narrow_limit && segments <= kInline && sources <= kInline;
    narrow ? run<uint32_t>(type, vector, slices) : run<uint64_t>(type, false, slices);
  }
};

void pack_qkv(
    std::vector<Tensor> x, std::vector<std::optional<Tensor>> bias, std::optional<Tensor> cos,
    std::optional<Tensor> sin, bool interleaved, int64_t rotated, Ints starts, Ints stops, std::vector<Tensor> out) {
  const Fused fused{"pack_qkv", false, x, out, bias, cos, sin, interleaved, rotated, starts, stops};
  fused.run(fused.check());
}

void unpack_qkv(
    std::vector<Tensor> wire, std::optional<Tensor> cos, std::optional<Tensor> sin, bool interleaved, int64_t rotated,
    Ints starts, Ints stops, std::vector<Tensor> out) {
  const Fused fused{"unpack_qkv", true, out, wire, {}, cos, sin, interleaved, rotated, starts, stops};
  fused.run(fused.check());
}

}  // namespace
}  // namespace ds_sp_overlap

#define OPERATORS(m)                                       \
  m.impl("pack", TORCH_BOX(&ds_sp_overlap::pack));         \
  m.impl("unpack", TORCH_BOX(&ds_sp_overlap::unpack));     \
  m.impl("pack_qkv", TORCH_BOX(&ds_sp_overlap::pack_qkv)); \
  m.impl("unpack_qkv", TORCH_BOX(&ds_sp_overlap::unpack_qkv));

STABLE_TORCH_LIBRARY(ds_sp_overlap, m) {
  m.def("pack(Tensor x, int dim, int[] starts, int[] stops, Tensor(a!) out) -> ()");
  m.def("unpack(Tensor wire, int dim, int[] starts, int[] stops, Tensor(a!) out) -> ()");
  m.def(
      "pack_qkv(Tensor[] x, Tensor?[] bias, Tensor? cos, Tensor? sin, bool interleaved, int rotated, int[] starts, "
      "int[] stops, Tensor(a!)[] out) -> ()");
  m.def(
      "unpack_qkv(Tensor[] wire, Tensor? cos, Tensor? sin, bool interleaved, int rotated, int[] starts, int[] stops, "
      "Tensor(a!)[] out) -> ()");
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
