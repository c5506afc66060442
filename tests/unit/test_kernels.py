"""Compares the compiled operators with PyTorch: copies bit for bit, arithmetic within a single rounding.

The CPU kernels use the index maps of the CUDA kernels, so every case here also tests the index maps on CUDA. Each case runs
twice: with 32-bit indices and, by lowering the limit for them, with 64-bit indices.
"""

import contextlib
import ctypes
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sp_overlap.relayout import kernels
from ds_sp_overlap.rotary import Rotary
from tests.harness import relayout
from tests.harness.cases import examples

LIBRARY = kernels.library()
compiled = torch.ops.ds_sp_overlap
REFUSAL = ValueError, RuntimeError  # torch 2.15 keeps the text of a compiled operator's error, but not its type
needs_library = pytest.mark.skipif(LIBRARY.path is None, reason=f"no compiled kernels: {LIBRARY.reason}")
_on_device = pytest.mark.skipif(
    not (torch.cuda.is_available() and LIBRARY.cuda), reason="needs a CUDA device and a library with CUDA kernels"
)


def needs_cuda(test):
    return pytest.mark.gpu(_on_device(test))


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _on_device])]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
NARROW = 2**31 - 1


@contextlib.contextmanager
def indices_of_32_bits_up_to(units):
    set_limit = ctypes.CDLL(str(LIBRARY.path)).ds_sp_overlap_narrow_limit
    set_limit.argtypes = [ctypes.c_int64]
    set_limit(units)
    try:
        yield
    finally:
        set_limit(NARROW)


LIMITS = NARROW, 0  # limits for 32-bit indices; every tensor exceeds the second limit


@pytest.fixture
def two_threads():
    """Run the test with two threads, among which kernels divide their work; other tests run with one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def poisoned(*shape, dtype, device="cpu"):
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def same_bits(a, b):
    bits = BITS[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def strided(values, order, gap, offset):
    """Return ``values`` in another memory order of dims, with ``gap`` elements after each innermost row, from ``offset`` on."""
    shape = [values.shape[d] for d in order]
    room = shape[:-1] + [shape[-1] + gap] if shape else shape
    memory = torch.full((math.prod(room) + offset,), math.nan, dtype=values.dtype, device=values.device)
    view = memory[offset:].view(room).narrow(-1, 0, shape[-1]) if shape else memory[offset:].view(room)
    view = view.permute([order.index(d) for d in range(len(order))])
    view.copy_(values)
    return view


@st.composite
def geometries(draw):
    """Draw shape, dim, parts, dtype, and the tensor's memory order, gap and offset."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    shape[-1] = draw(st.sampled_from([0, 1, 2, 3, 4, 8, 16, 24, 33]))
    dim = draw(st.integers(0, len(shape) - 1))
    if draw(st.booleans()):
        shape[dim] = draw(st.integers(0, 12))
    size = shape[dim]
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=5)))
        parts = list(zip([0, *cuts], [*cuts, size]))
    else:
        edges = st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted).map(tuple)
        parts = draw(st.lists(edges, min_size=1, max_size=6))
    order = draw(st.one_of(st.just(list(range(len(shape)))), st.permutations(range(len(shape)))))
    dtype, gap = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0, 0, 1, 8]))
    return shape, dim, parts, dtype, order, gap, draw(st.integers(0, 8))


def wire_size(shape, dim, parts):
    return sum(stop - start for start, stop in parts) * math.prod(n for d, n in enumerate(shape) if d != dim)


def check_pack(case, device="cpu"):
    shape, dim, parts, dtype, order, gap, offset = case
    starts, stops = map(list, zip(*parts))
    x = strided(torch.randn(shape, dtype=torch.float64).to(device, dtype), order, gap, offset)
    size = wire_size(shape, dim, parts)
    expected = poisoned(size, dtype=dtype, device=device)
    relayout.pack(x, dim, starts, stops, expected)
    assert not expected.isnan().any()
    for limit in LIMITS:
        got = poisoned(size + offset, dtype=dtype, device=device)[offset:]
        with indices_of_32_bits_up_to(limit):
            compiled.pack(x, dim, starts, stops, got)
        assert same_bits(got, expected), limit


def check_unpack(case, device="cpu"):
    shape, dim, parts, dtype, order, gap, offset = case
    starts, stops = map(list, zip(*parts))
    wire = torch.randn(wire_size(shape, dim, parts), dtype=torch.float64).to(device, dtype)
    blank = poisoned(*shape, dtype=dtype, device=device)
    expected = blank.clone()
    relayout.unpack(wire, dim, starts, stops, expected)
    assert not expected.isnan().any()
    for limit in LIMITS:
        got = strided(blank, order, gap, offset)
        with indices_of_32_bits_up_to(limit):
            compiled.unpack(wire, dim, starts, stops, got)
        assert same_bits(got + 0.0, expected + 0.0), limit  # +0.0: a copied -0.0 stays -0.0, but a sum that begins with 0 gives 0.0
        room = got.untyped_storage().nbytes() // got.element_size()
        memory = got.new_empty(0).set_(got.untyped_storage(), 0, (room,))
        assert int(memory.isnan().sum()) == room - got.numel(), limit  # elements outside of the tensor are not written


def check(case, device="cpu"):
    torch.manual_seed(0)
    check_pack(case, device)
    check_unpack(case, device)


@needs_library
@pytest.mark.parametrize("device", DEVICES)
@given(case=geometries())
@settings(deadline=None, max_examples=examples(300), derandomize=True)
def test_they_move_and_sum_the_same_bits_as_pytorch_and_write_all_of_their_output_and_nothing_else(device, case):
    check(case, device)


@needs_library
@pytest.mark.parametrize("bits", [31, 63])
def test_division_by_multiplication_is_exact(bits):
    """Guards the reciprocals of `Divider`. If the last bit of one is wrong, numbers next to a multiple of the divisor fail."""
    divide = ctypes.CDLL(str(LIBRARY.path)).ds_sp_overlap_divide
    divide.restype, divide.argtypes = ctypes.c_uint64, [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_bool]
    last, draw = 2**bits - 1, random.Random(0)
    divisors = [
        divisor for power in range(bits) for divisor in (2**power, 2 ** (power + 1) - 1, draw.randrange(2**power, 2 ** (power + 1)))
    ]
    for divisor in divisors:
        for times in (0, 1, last // divisor, *(draw.randint(0, last // divisor) for _ in range(40))):
            for n in (times * divisor - 1, times * divisor, times * divisor + 1):
                if 0 <= n <= last:
                    assert divide(n, divisor, bits == 63) == n // divisor, (n, divisor)


@needs_library
@pytest.mark.parametrize("parts", [95, 96, 97, 200])
@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_more_parts_than_travel_as_kernel_arguments(device, parts, overlapping):
    size = parts if not overlapping else 7
    ranges = [(i, i + 1) for i in range(parts)] if not overlapping else [(i % 5, i % 5 + 3) for i in range(parts)]
    case = (2, size, 16), 1, ranges, torch.bfloat16, [0, 1, 2], 0, 0
    check(case, device)


@needs_library
@pytest.mark.parametrize("offset", [0, 1], ids=["16-byte units", "single elements"])
@pytest.mark.parametrize("parts", [[(0, 5), (5, 5), (5, 12)], [(0, 7), (3, 12), (3, 7)]], ids=["apart", "overlapping"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_units_than_one_block_of_threads_moves(dtype, parts, offset):
    case = (37, 12, 80), 1, parts, dtype, [0, 1, 2], 0, offset
    check(case)


@needs_library
@pytest.mark.parametrize("shift", [0, 1], ids=["16-byte units", "single elements"])
def test_offsets_beyond_32_bits_reach_the_right_elements(shift):
    """Allocates 4 GB of address space, but uses only a few pages of it."""
    x = torch.empty(2**31 + 4096, dtype=torch.bfloat16)
    first = x.numel() - 104 + shift
    x[first : first + 96] = torch.arange(96, dtype=torch.bfloat16)
    out = poisoned(64, dtype=torch.bfloat16)
    compiled.pack(x, 0, [first, first + 48], [first + 16, first + 96], out)
    assert torch.equal(out, torch.cat((x[first : first + 16], x[first + 48 : first + 96])))
    x[2**31 + 3992 :] = torch.arange(104, dtype=torch.bfloat16)
    rows = x.as_strided((2, 4, 8), (2**31 + 4000 + shift, 8, 1))
    compiled.pack(rows[1:], 1, [1, 3], [3, 4], out[:24])
    assert torch.equal(out[:24], x[2**31 + 4008 + shift : 2**31 + 4032 + shift])


# Operators that rotate, against the definition of rotary embedding, written out below in fp64.


def rotary(x, cos, sin):
    """Rotate x [..., h, d] by cos and sin [..., rot] in fp64, as https://arxiv.org/abs/2104.09864 defines for each element."""
    rot = cos.shape[-1]
    partner = torch.arange(x.shape[-1])
    sign = torch.zeros(x.shape[-1], dtype=x.dtype)
    for i in range(rot):
        partner[i], sign[i] = (i + rot // 2, -1.0) if i < rot // 2 else (i - rot // 2, 1.0)
    pad = (0, x.shape[-1] - rot)
    cos = torch.nn.functional.pad(cos, pad, value=1.0).unsqueeze(-2)
    sin = torch.nn.functional.pad(sin, pad, value=0.0).unsqueeze(-2)
    return x * cos + x[..., partner] * sign * sin


def allowed(exact, magnitude, dtype, terms):
    """Return the error that one rounding to ``dtype`` allows, after a sum of ``terms`` products in fp32 (for fp64 in fp64)."""
    arithmetic = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    info = torch.finfo(dtype)
    return exact.abs() * info.eps / 2 * 1.001 + info.tiny * info.eps + magnitude * arithmetic * (terms + 2)


@st.composite
def rotations(draw):
    head_dim = draw(st.sampled_from([16, 64, 80, 96, 128, 192, 256, 5, 18, 65]))
    rot = 2 * draw(st.integers(0, head_dim // 2)) if draw(st.booleans()) else head_dim // 16 * 16
    cuts, each = draw(st.integers(1, 6)), draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    edge = st.integers(0, cuts).map(lambda cut: cut * each)
    return dict(
        head_dim=head_dim, rot=rot, heads=cuts * each,
        parts=draw(st.lists(st.tuples(edge, edge).map(sorted).map(tuple), min_size=1, max_size=4)),
        tokens=draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)), dtype=draw(st.sampled_from(DTYPES)),
        broadcast=draw(st.booleans()), float_tables=draw(st.booleans()), fused=draw(st.booleans()), aligned=draw(st.booleans()),
    )  # fmt: skip


class Rotation:
    """Makes the inputs for rotate_pack and unpack_rotate_back, and checks the results against exact arithmetic.

    broadcast      the tables have one batch element, for all of x
    float_tables   the tables are float32 if x has half precision
    fused          x is a view of the output of a wider projection
    aligned        x begins at a multiple of 16 bytes
    """

    def __init__(
        self, head_dim, rot, heads, parts, tokens, dtype, broadcast, float_tables, fused, aligned, device="cpu"
    ):  # fmt: skip
        self.shape, self.parts, self.dtype, self.device = (*tokens, heads, head_dim), parts, dtype, device
        self.fused, self.aligned = fused, aligned
        self.starts, self.stops = map(list, zip(*parts))
        self.x = self.blank()
        self.x.copy_(torch.randn(self.shape))
        kind = torch.float32 if float_tables and dtype.itemsize == 2 else dtype
        of_tokens = [tokens[0], 1] if broadcast and len(tokens) == 2 else tokens
        self.cos, self.sin = (torch.randn(*of_tokens, rot).to(device, kind) for _ in range(2))

    def blank(self):
        *tokens, heads, head_dim = self.shape
        width, skip = (heads + 2 * self.fused) * head_dim, int(not self.aligned)
        memory = poisoned(math.prod(tokens) * width + skip, dtype=self.dtype, device=self.device)[skip:]
        return memory.view(*tokens, -1, head_dim)[..., :heads, :]

    def exact(self, x, cos, sin):
        return rotary(x, cos.double().cpu(), sin.double().cpu())

    def wire(self, x):
        return torch.cat([x[..., start:stop, :].flatten() for start, stop in self.parts])

    def check_pack(self):
        x = self.x.double().cpu()
        exact = self.wire(self.exact(x, self.cos, self.sin))
        products = self.exact(x.abs(), self.cos.abs(), self.sin * 0) + self.exact(x.abs(), self.cos * 0, self.sin.abs()).abs()
        bound = allowed(exact, self.wire(products), self.dtype, 3)
        for limit in LIMITS:
            out = torch.full_like(self.wire(self.x), math.nan)
            with indices_of_32_bits_up_to(limit):
                compiled.rotate_pack(self.x, self.cos, self.sin, self.starts, self.stops, out)
            assert ((out.double().cpu() - exact).abs() <= bound).all(), limit  # a NaN fails

    def check_unpack(self):
        wire = torch.randn_like(self.wire(self.x))
        total, magnitude = torch.zeros(2, *self.shape, dtype=torch.float64)
        at = 0
        for start, stop in self.parts:
            piece = total[..., start:stop, :]
            received = wire[at : at + piece.numel()].view(piece.shape).double().cpu()
            at += piece.numel()
            piece += received
            magnitude[..., start:stop, :] += received.abs()
        # The backward of the exact rotation by autograd, so that no inverse is written by hand.
        x = torch.zeros_like(total, requires_grad=True)
        exact = torch.autograd.grad(self.exact(x, self.cos, self.sin), x, total)[0]
        largest = float(self.cos.abs().max() + self.sin.abs().max()) if self.cos.numel() else 1.0
        bound = magnitude.amax(-1, keepdim=True) * max(1.0, largest)
        bound = allowed(exact, bound, self.dtype, len(self.parts) + 2)
        for limit in LIMITS:
            out = self.blank()
            with indices_of_32_bits_up_to(limit):
                compiled.unpack_rotate_back(wire, self.cos, self.sin, self.starts, self.stops, out)
            assert ((out.double().cpu() - exact).abs() <= bound).all(), limit


@needs_library
@pytest.mark.parametrize("device", DEVICES)
@given(inputs=rotations())
@settings(deadline=None, max_examples=examples(150), derandomize=True)
def test_heads_are_rotated_cut_and_put_back_within_one_rounding(device, inputs):
    torch.manual_seed(0)
    case = Rotation(**inputs, device=device)
    case.check_pack()
    case.check_unpack()


USUAL = dict(
    rot=64, heads=8, tokens=[5, 2], dtype=torch.bfloat16, broadcast=True, float_tables=True, fused=True, aligned=True,
)  # fmt: skip


MANY = [(i, i + 1) for i in range(100)], [(i // 50, i // 50 + 1) for i in range(100)]  # more than fit into a kernel's arguments
LIKE_LLAMA = [
    dict(head_dim=head_dim, dtype=dtype, parts=parts)
    for parts in ([(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 4), (0, 4), (4, 8), (4, 8)])  # of q; of k with heads for several ranks
    for head_dim in (64, 80, 96, 128, 192, 256)
    for dtype in DTYPES
]


@pytest.mark.usefixtures("two_threads")
@needs_library
@pytest.mark.parametrize("case", [
    *LIKE_LLAMA,
    *(dict(head_dim=64, heads=parts[-1][1], parts=parts) for parts in MANY),
    # Enough tokens for more than one block of threads.
    *(dict(head_dim=96, tokens=[67, 3], parts=[(0, 3), (2, 8)], aligned=aligned) for aligned in (True, False)),
])  # fmt: skip
def test_heads_of_usual_sizes_are_rotated_and_rounded_as_pytorch_does(case):
    torch.manual_seed(0)
    case = Rotation(**{**USUAL, **case})
    case.check_pack()
    case.check_unpack()
    outs = [torch.full_like(case.wire(case.x), math.nan) for _ in range(2)]
    for op, out in zip((compiled.rotate_pack, relayout.rotate_pack), outs):
        op(case.x, case.cos, case.sin, case.starts, case.stops, out)
    assert same_bits(*outs), "products are rounded before they are added, as PyTorch rounds them"


# What is refused.

x4, t4, flat = torch.zeros(4, 6, 8), torch.zeros(4, 8), torch.zeros(292)
GOOD = {  # valid arguments of each operator, in order; each case changes some of them
    "pack": dict(x=x4, dim=1, starts=[0], stops=[6], out=flat[:192]),
    "unpack": dict(wire=flat[:192], dim=1, starts=[0], stops=[6], out=x4),
    "rotate_pack": dict(x=x4, cos=t4, sin=t4, starts=[0], stops=[6], out=flat[:192]),
    "unpack_rotate_back": dict(wire=flat[:192], cos=t4, sin=t4, starts=[0], stops=[6], out=x4),
}
REFUSED = {
    "another dtype": ("pack", dict(out=flat.double()), r"pack: out has dtype \w+, x has"),
    "integers": ("pack", dict(x=x4.int(), out=flat.int()), r"pack: dtype must be float16"),
    "no ranks": ("pack", dict(starts=[], stops=[], out=torch.zeros(0)), "pack: no parts given; .* sp size of 0"),
    "more starts than stops": ("pack", dict(starts=[0, 1]), "pack: 2 starts and 1 stops"),
    "no such dim": ("pack", dict(dim=3), r"pack: dim 3 does not exist in .* \[4, 6, 8\]"),
    "a part outside": ("pack", dict(starts=[4], stops=[7]), r"pack: part \(4, 7\) does not lie in dim 1 of \[4, 6, 8\]"),
    "a part backwards": ("unpack", dict(starts=[4], stops=[3]), r"unpack: part \(4, 3\) does not lie"),
    "a wire too short": (
        "unpack",
        dict(wire=flat[:191]),
        r"unpack: parts \[\(0, 6\)\] along dim 1 of \[4, 6, 8\] hold 192 elements, the wire buffer has shape \[191\]",
    ),
    "a wire of two dims": ("pack", dict(out=flat[:192].view(12, 16)), r"the wire buffer has shape \[12, 16\]"),
    "a wire with gaps": ("pack", dict(out=torch.zeros(384)[::2]), "wire buffer must be contiguous, got stride 2"),
    "overlapping memory": (
        "unpack",
        dict(wire=flat[100:], out=flat[:192].view(4, 6, 8)),
        r"unpack: out \[4, 6, 8\] and wire \[192\] share memory",
    ),
    "heads without tokens": ("rotate_pack", dict(x=x4[0, 0]), r"rotate_pack: x must be \[tokens..., heads, d\], got \[8\]"),
    "too many rotary dims": ("rotate_pack", dict(cos=torch.zeros(4, 10), sin=torch.zeros(4, 10)), "10 rotary dims do not fit head dim 8 of x"),
    "odd rotary dims": ("unpack_rotate_back", dict(cos=t4[:, 1:], sin=t4[:, 1:]), "rotate_back: the rotary dims must be even, got 7"),
    "tables of other tokens": ("rotate_pack", dict(cos=t4[1:], sin=t4[1:]), r"cos \[3, 8\] does not broadcast to the tokens of \[4, 6, 8\]"),
    "tables of two widths": ("rotate_pack", dict(sin=t4[:, 2:]), r"sin \[4, 6\] does not broadcast to the tokens of \[4, 6, 8\]"),
    "tables of another dtype": ("rotate_pack", dict(cos=t4.double(), sin=t4.double()), "cos has dtype .*, x has .*; give tables of that dtype"),
    "tables of two dtypes": ("rotate_pack", dict(x=x4.half(), cos=t4.half(), out=flat[:192].half()), "cos has dtype .*, sin has"),
    "tables in the output": ("rotate_pack", dict(cos=flat[:32].view(4, 8)), r"rotate_pack: cos \[4, 8\] and out \[192\] share memory"),
    "tables in the gradient": ("unpack_rotate_back", dict(sin=x4[:, 0]), r"sin \[4, 8\] and out \[4, 6, 8\] share memory"),
}  # fmt: skip


@pytest.mark.parametrize("name, changed, message", REFUSED.values(), ids=REFUSED)
@needs_library
def test_bad_input_is_refused_with_the_operator_and_the_values(name, changed, message):
    with pytest.raises(REFUSAL, match=message) as refused:
        getattr(compiled, name)(*{**GOOD[name], **changed}.values())
    assert str(refused.value).startswith("ds_sp_overlap.")


@needs_library
def test_more_dimensions_than_a_kernel_counts_are_refused_not_misread():
    x = torch.zeros(2, 2, 2, 2, 2, 2, 2, 2).permute(1, 0, 3, 2, 5, 4, 7, 6)
    with pytest.raises(REFUSAL, match="6 dimensions that strides don't let merge"):
        compiled.pack(x, 6, [0], [2], torch.zeros(256))


@needs_library
def test_the_operators_say_what_they_do_to_their_arguments():
    """Checks the schemas. The operators need no fake implementation: in a compiled model, layers run uncompiled."""
    x, wire, parts, tables = torch.randn(3, 4, 8), torch.zeros(120), ([0, 1], [2, 4]), (torch.randn(3, 4), torch.randn(3, 4))
    calls = {
        "pack": (x, 1, *parts, wire),
        "unpack": (wire, 1, *parts, x),
        "rotate_pack": (x, *tables, *parts, wire),
        "unpack_rotate_back": (wire, *tables, *parts, x),
    }
    for name, call in calls.items():
        torch.library.opcheck(getattr(compiled, name).default, call, test_utils="test_schema")


# On a GPU: faults that can occur only there.


@needs_cuda
def test_the_kernels_run_on_the_current_stream():
    """A busy side stream writes the input last: a kernel on another stream would read the old input."""
    stream = torch.cuda.Stream()
    x, out = torch.zeros(2, 64, 1024, 128, device="cuda"), torch.empty(2 * 64 * 1024 * 128, device="cuda")
    back = torch.empty_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(1.0)
        compiled.pack(x, 2, [0, 512], [512, 1024], out)
        compiled.unpack(out, 2, [0, 512], [512, 1024], back)
    stream.synchronize()
    assert torch.equal(out, torch.ones_like(out)) and torch.equal(back, x)


@needs_cuda
def test_more_elements_than_32_bits_count_on_the_device():
    """Rows have an odd length, so the kernel copies single elements, more than 2^31 of them; takes 17 GB of device memory."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GB of free device memory")
    x = torch.empty(2, 2**30 + 7, dtype=torch.bfloat16, device="cuda").random_(-128, 128)
    cut, end = 2**29 + 1, x.shape[1]
    out = torch.full((x.numel(),), math.nan, dtype=x.dtype, device="cuda")
    compiled.pack(x, 1, [0, cut], [cut, end], out)
    assert torch.equal(out[: 2 * cut].view(2, -1), x[:, :cut]) and torch.equal(out[2 * cut :].view(2, -1), x[:, cut:])
    back = torch.full_like(x, math.nan)
    compiled.unpack(out, 1, [0, cut], [cut, end], back)
    assert torch.equal(back, x)


@needs_cuda
def test_another_device_is_refused_by_the_cuda_kernels():
    with pytest.raises(ValueError, match="pack: out is on cpu, x is on cuda:0"):
        compiled.pack(x4.cuda(), 1, [0], [6], torch.zeros(192))


@pytest.mark.skipif(torch.cuda.device_count() < 2 or not LIBRARY.cuda, reason="needs two CUDA devices and CUDA kernels")
def test_the_device_is_the_tensor_s_and_not_the_current_one():
    torch.cuda.set_device(0)
    check_pack(((3, 8, 64), 1, [(0, 4), (4, 8)], torch.bfloat16, [0, 1, 2], 0, 0), "cuda:1")
    assert torch.cuda.current_device() == 0


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_tables", DTYPES)
def test_a_layer_has_its_rotation_done_by_the_operator_just_where_that_takes_the_tables(dtype, of_tables):
    """On a GPU, the operators rotate by default; they once raised for OLMo 2 in fp64, whose tables are fp32."""
    tables = torch.randn(2, 3, 1, 1, 4).to(of_tables)
    of_tokens = Rotary(lambda given: given).of_tokens(tuple(tables), 4, dtype)
    x, wire = torch.randn(3, 1, 2, 4).to(dtype), torch.empty(24, dtype=dtype)
    try:
        compiled.rotate_pack(x, *tables.squeeze(-2), [0, 1], [1, 2], wire)
    except REFUSAL:
        assert of_tokens is None
    else:
        assert of_tokens is not None
