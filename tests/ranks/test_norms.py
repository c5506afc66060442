"""Tests norms of q and k before the exchange: computed in the autograd node of the projections, and recomputed in its backward."""

import functools

import pytest
import torch

from tests.harness import layers
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape


def known(shape):
    """Return an RMSNorm of PyTorch, which the package knows, with a random weight."""
    norm = torch.nn.RMSNorm(shape.head_dim, dtype=shape.dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    return norm


def layer_norm(shape):
    norm = torch.nn.LayerNorm(shape.head_dim, dtype=shape.dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    torch.nn.init.uniform_(norm.bias)
    return norm


class Rms(torch.nn.Module):
    """A norm of the user, which the package does not know."""

    def __init__(self, shape):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, shape.head_dim, dtype=shape.dtype))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class InPlace(Rms):
    def forward(self, x):
        return x.mul_(self.weight)


class View(Rms):
    """A norm whose weight is a view of another parameter, as with FSDP."""

    def __init__(self, shape):
        super().__init__(shape)
        self.flat = self.weight
        del self.weight
        self.weight = self.flat.view(-1)

    def forward(self, x):
        return x * self.weight


class Counting(Rms):
    """A norm with a buffer that changes in every call."""

    def __init__(self, shape):
        super().__init__(shape)
        self.register_buffer("calls", torch.zeros((), dtype=shape.dtype))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Keeping(Rms):
    """A norm that stores a tensor of each call as an attribute."""

    def forward(self, x):
        self.last = x.pow(2).mean()
        return super().forward(x)


class Nested(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.inner, self.scale = Rms(shape), torch.nn.Parameter(torch.full((shape.head_dim,), 1.5, dtype=shape.dtype))

    def forward(self, x):
        return self.inner(x) * self.scale


def weight_is_hooked(shape):
    """Return a known norm, with a hook that doubles the gradient of its weight."""
    norm = known(shape)
    norm.weight.register_hook(lambda gradient: 2 * gradient)
    return norm


class Both(torch.nn.Module):
    """Holds the projections and norms of a layer; computes the reference, and makes the overlapped block."""

    def __init__(self, shape, kind):
        super().__init__()
        self.shape, self.layer = shape, layers.projections(shape)
        torch.manual_seed(5)
        self.norms = torch.nn.ModuleDict({f"{name}_norm": kind(shape) for name in "qk"})

    def expected(self, x, last=False):
        """Return the output on the whole sequence; norms come before RoPE, or after it if ``last``."""
        reference, layer = layers.reference, self.layer
        q, k, v = (layer[f"{kind}_proj"](x).unflatten(-1, (-1, self.shape.head_dim)) for kind in "qkv")
        tables = reference.rope_tables(torch.arange(x.shape[1]), self.shape.head_dim, self.shape.dtype)
        if last:
            q, k = reference.rope(q, *tables), reference.rope(k, *tables)
        q, k = self.norms["q_norm"](q), self.norms["k_norm"](k)
        if not last:
            q, k = reference.rope(q, *tables), reference.rope(k, *tables)
        return layer["o_proj"](reference.attention(q, k, v).flatten(2))

    def block(self, wrap=lambda norm: norm, last=False):
        made = layers.block(self.shape, self.layer, torch.distributed.group.WORLD)
        made.use(**self.layer, **{name: wrap(norm) for name, norm in self.norms.items()})
        made.inputs.norm_last = last
        return made


def as_it_is(norm):
    return norm


def faults(rank, kind, groups, frozen=None, wrap=as_it_is, twice=False, window=None, last=False):
    """List the faults of the output and of every gradient on this rank.

    frozen   "norms" or "layer": these parameters need no gradient; with "layer", the input needs none, either
    wrap     ``wrap(norm)`` replaces each norm of the block
    twice    whether to run backward twice, and compare the gradients of the second alone
    """
    shape = Shape(heads=max(4, 2 * groups), kv_heads=max(2, groups), config={"head_groups": groups, "window": window})
    mine, whole = Both(shape, kind), Both(shape, kind)
    for model in (mine, whole):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen is None or not name.startswith(frozen))
    x, dy = layers.whole_inputs(shape)
    x.requires_grad_(frozen != "layer")
    y = whole.expected(x, last)
    y.backward(dy)
    local = layers.my_slice(shape, rank, x.detach()).requires_grad_(frozen != "layer")
    attend = mine.block(wrap, last)
    assert (len(attend.split_projections()) == 4) == (kind in KNOWN and wrap is as_it_is)
    got = layers.call_block(shape, attend, rank, local)
    for again in range(1 + twice):  # drop the gradients of a first backward
        for parameter in (*mine.parameters(), local):
            parameter.grad = None
        got.backward(layers.my_slice(shape, rank, dy), retain_graph=not again and twice)
    dx = {"dx": x.grad} if local.requires_grad else {}
    return layers.unlike(shape, rank, mine, whole, {"output": got, "dx": local.grad}, {"output": y, **dx})


KNOWN, OTHERS = [known, layer_norm], [Rms, InPlace, View, Counting, Keeping, Nested, weight_is_hooked]


@pytest.mark.parametrize("kind", KNOWN + OTHERS)
@pytest.mark.parametrize("groups", [1, 2])
def test_norms_are_those_of_the_whole_sequence(kind, groups, rank):
    assert faults(rank, kind, groups) == []


@pytest.mark.parametrize("last", [False, True], ids=["before RoPE", "behind RoPE"])
@pytest.mark.parametrize("window", [1, 2])
def test_norms_are_computed_again_in_a_window(window, last, rank):
    for kind in (known, *[layer_norm] * (not last)):  # after RoPE, the gradient of a bias of k is only rounding
        for frozen in (None, "norms"):
            assert faults(rank, kind, 4, frozen, as_it_is, False, window, last) == []


@pytest.mark.parametrize("frozen", ["norms", "layer", "layer.q_proj"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(frozen, rank):
    assert faults(rank, known, 2, frozen) == []


def test_a_graph_that_is_kept_gives_the_same_again(rank):
    assert faults(rank, known, 2, None, as_it_is, True) == []


def as_a_function(norm):
    return lambda heads: norm(heads)


def test_a_norm_that_is_no_module_is_right_with_projections_called_whole(rank):
    assert faults(rank, known, 2, None, as_a_function) == []


def test_dropout_before_a_norm_is_the_same_in_backward(rank):
    """Compares the gradient of a norm's weight by autograd with finite differences, with the same dropout each time."""
    shape = Shape(config={"head_groups": 1})

    class Drop(Rms):
        def forward(self, x):
            return super().forward(torch.nn.functional.dropout(x, 0.5))

    model = Both(shape, Drop)
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    attend, weight = model.block(), model.norms["q_norm"].weight

    def loss():
        torch.manual_seed(3)
        return (layers.call_block(shape, attend, rank, x) * dy).sum()

    loss().backward()
    here, step, found = weight.grad[0].clone(), 1e-6, []
    torch.distributed.all_reduce(here)
    with torch.no_grad():
        for sign in (1, -1):
            weight[0] += sign * step
            found.append(loss())
            weight[0] -= sign * step
    difference = (found[0] - found[1]) / (2 * step)
    torch.distributed.all_reduce(difference)
    assert abs(here - difference) < 1e-6 * abs(here)


def test_autocast_is_for_a_norm_in_backward_what_it_was_in_forward(rank):
    """Autocast and dtypes must be the same in all calls of a norm."""
    shape, seen = Shape(dtype=torch.float32), []
    model = Both(shape, Rms)

    class Seen(Rms):
        def forward(self, x):
            seen.append((torch.is_autocast_enabled("cpu"), x.dtype, super().forward(x).dtype))
            return super().forward(x)

    model.norms = torch.nn.ModuleDict({f"{name}_norm": Seen(shape) for name in "qk"})
    attend = model.block()
    attend.inputs.pure = frozenset((Seen.forward,))
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    with torch.autocast("cpu", torch.bfloat16):
        y = layers.call_block(shape, attend, rank, x.requires_grad_())
    y.backward(dy.to(y.dtype))
    assert len(seen) == 8 and len(set(seen)) == 1 and seen[0][:2] == (True, torch.bfloat16)


def test_a_hook_on_a_norm_sees_it_once(rank):
    shape, seen = Shape(config={"head_groups": 1}), []
    model = Both(shape, known)
    attend = model.block()
    assert len(attend.split_projections()) == 4
    model.norms["q_norm"].register_forward_hook(lambda module, args, output: seen.append(list(output.shape)))
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy)
    assert len(attend.split_projections()) == 1 and seen == [[2, 6, 4, 8]]


# Guards.

test_the_suite_notices_without_the_guard = notices(
    Watched("only known norms", "if False:", test_dropout_before_a_norm_is_the_same_in_backward),
    Watched("its hooks run once", "return True", functools.partial(faults, kind=weight_is_hooked, groups=2)),
    Watched(
        "as in forward",
        'with torch.enable_grad(), torch.autocast(**{**call.autocast, "enabled": False}):',
        test_autocast_is_for_a_norm_in_backward_what_it_was_in_forward,
    ),
)


# The weights of norms are saved for backward as autograd saves them.


class Alone(torch.nn.Module):
    """A layer with norms, on one rank."""

    def __init__(self, config):
        super().__init__()
        shape = Shape(config=config)
        self.shape, self.layer, self.norm = shape, layers.projections(shape), known(shape)

    def forward(self, x):
        made = layers.block(self.shape, self.layer, None)
        made.use(**self.layer, q_norm=self.norm, k_norm=self.norm)
        return layers.call_block(self.shape, made, 0, x)


@pytest.fixture(params=[{"head_groups": 2}, {"head_groups": 2, "window": 1}], ids=str)
def alone(request):
    """Return two layers with equal weights, hidden states and a cotangent."""
    model = Alone(request.param)
    return model, Alone(request.param), *(layers.my_slice(model.shape, 0, t) for t in layers.whole_inputs(model.shape))


def test_gradients_are_those_at_the_weights_that_a_functional_call_gave(alone):
    torch.manual_seed(0)
    model, like, x, dy = alone
    given = {name: torch.rand_like(p).requires_grad_() for name, p in model.named_parameters()}
    like.load_state_dict(given)
    expected = torch.autograd.grad(like(x), list(like.parameters()), dy)
    for mine, theirs in zip(
        torch.autograd.grad(torch.func.functional_call(model, given, (x,)), list(given.values()), dy), expected
    ):
        assert torch.equal(mine, theirs) and mine.any()


def test_a_weight_that_is_changed_before_backward_is_an_error_as_in_pytorch(alone):
    model, _, x, dy = alone
    y = model(x)
    with torch.no_grad():
        model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_weights_that_are_frozen_before_backward_get_no_gradient(alone):
    model, like, x, dy = alone
    (expected,) = torch.autograd.grad(like(x.requires_grad_()), x, dy)
    y = model(x)
    model.requires_grad_(False)
    y.backward(dy)
    assert torch.equal(x.grad, expected) and x.grad.any()
    assert all(parameter.grad is None for parameter in model.parameters())
