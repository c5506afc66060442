"""Modules that are tried out: whether a norm or an MLP is a function of one token at a time, on
random numbers in its weights' place.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .accounting import MOVES, Accounting, Unknown, is_plain

BATCH, SEQ = 2, 5
CROWD = 32  # tokens that are alike
TOKENS = SEQ + CROWD  # a prime, which hardly divides the width of a layer
MOST = 2**26  # numbers of a module that is tried out


@dataclass(frozen=True)
class Form:
    """How the layers of a framework are written.

    size        m of an attention
    is_linear   whether a module computes ``x w^T + b`` and nothing else
    token_dim   of hidden states
    biases      its attentions, MLPs and linear layers return ``(output, bias)``, where the bias is
                yet to be added, or None
    absent      arguments that are None wherever a layer runs in a chain
    accounted   whether what code of their own in norms and MLPs does is accounted for, too
    instead     what stands for the globals of its code while a run looks on; None for all that stay
    """

    size: Callable[[Any], int]
    is_linear: Callable[[nn.Module], bool]
    token_dim: int
    biases: bool
    absent: tuple[str, ...]
    accounted: bool = True
    instead: Callable[[Any], Callable[[str, Any], Any]] | None = None


_OF_ALL = vars(nn.Module()).keys()  # what every module holds
TRANSFORMERS = Form(
    lambda attention: attention.config.hidden_size,
    lambda module: type(module) is nn.Linear,
    1,
    False,
    (),
)


class _TokenByToken(Accounting):
    """Of what computes with each token by itself: number by number, or over the last dim."""

    NUMBERS = frozenset(
        "add sub mul div true_divide neg pow square rsqrt sqrt exp log log1p sigmoid tanh relu silu gelu softplus relu6 hardtanh mish "
        "leaky_relu elu celu selu hardswish hardsigmoid softsign logsigmoid erf abs clamp clamp_min clamp_max maximum minimum reciprocal "
        "to float type type_as expand_as linear __add__ __radd__ __iadd__ __mul__ __rmul__ __imul__ __sub__ __rsub__ __pow__ __rpow__ "
        "__truediv__ __rtruediv__ __rdiv__ rsub where gt lt ge le contiguous clone dim ndim __len__ addcmul_ numel".split()
    )
    OVER_LAST = frozenset("mean sum var std norm amax amin max min softmax log_softmax".split())
    NORMS = frozenset("layer_norm rms_norm".split())
    LAST = frozenset(
        "chunk split split_with_sizes unbind cat concat unsqueeze narrow select".split()
    )

    def __init__(self, sizes: Collection[int]):
        super().__init__(self.NUMBERS | self.OVER_LAST | self.NORMS | self.LAST, sizes)
        self.allowed -= (
            MOVES
            - self.NUMBERS
            - self.LAST
            - {"__getitem__", "view", "reshape", "flatten", "unflatten"}
        )
        self.drops_nothing = False
        self.of_torch = (*self.of_torch, "torch.nn.modules", "torch._VF")

    def done(self, name: str, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        x = args[0][0] if isinstance(args[0], (tuple, list)) else args[0]
        last = -1, x.dim() - 1, (-1,), [-1]
        dim = kwargs.get(
            "dim",
            next(
                (
                    given
                    for given in args[1:]
                    if name not in ("split", "chunk", "norm", "split_with_sizes")
                ),
                None,
            ),
        )
        if name in ("split", "chunk", "split_with_sizes"):
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        if name in self.OVER_LAST | self.LAST and x.dim() > 1 and dim not in last:
            self.fail(f"computes over more than a token: {name}")
        if (
            name in self.NORMS
            and len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) != 1
        ):
            self.fail(f"computes over more than a token: {name}")
        if (
            name == "__getitem__"
            and x.dim() > 1
            and not (isinstance(args[1], tuple) and args[1][0] is ... and len(args[1]) == 2)
        ):
            self.fail("takes some of its tokens")
        y = function(*args, **kwargs)
        if name in ("view", "reshape", "flatten", "unflatten") and y.shape[-1:] != x.shape[-1:]:
            self.fail(f"computes over more than a token: {name}")
        return y


class _Linear(nn.Module):
    """In place of a linear layer: one of rank 1, which needs no memory."""

    def __init__(self, linear: Any, form: Form, generator: torch.Generator, dtype: torch.dtype):
        super().__init__()
        self.out_features, self.in_features = sizes = getattr(
            linear.weight, "ds_shape", linear.weight.shape
        )
        self.out, self.into = (
            torch.randn(size, generator=generator, dtype=dtype) for size in sizes
        )
        self.into /= self.in_features**0.5
        self.bias, self.calls = None if linear.bias is None else self.out.flip(0), 0
        self.biases, self.skip_bias_add = form.biases, getattr(linear, "skip_bias_add", False)

    @property
    def weight(self) -> Tensor:
        with torch._C.DisableTorchFunction():
            return torch.outer(self.out, self.into)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        with torch._C.DisableTorchFunction():
            y = (x @ self.into)[..., None] * self.out
        if self.skip_bias_add:
            return y, self.bias
        y = y if self.bias is None else y + self.bias
        return (y, None) if self.biases else y


def kind(module: nn.Module) -> tuple:
    """What tells whether a module is like another: of all its parts the types, the shapes and what
    else they hold.
    """

    def state(part: nn.Module) -> tuple:
        more = {name: value for name, value in vars(part).items() if name not in _OF_ALL}
        return tuple(
            (name, value if is_plain(value) else id(value)) for name, value in more.items()
        )

    parts = (
        (name, type(part), state(part), tuple(_shapes(part).items()))
        for name, part in module.named_modules()
    )
    return tuple((*part, tuple(module.get_submodule(part[0])._buffers)) for part in parts)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Of its own parameters; whole, where ZeRO-3 took them into parts."""
    return {
        name: torch.Size(getattr(p, "ds_shape", p.shape))
        for name, p in module.named_parameters(recurse=False)
    }


def _stand_in(
    module: nn.Module, form: Form, training: bool, generator: torch.Generator, dtype: torch.dtype
) -> nn.Module:
    """A copy with parameters, buffers and linear layers of random numbers, and no hooks. Experts
    are narrow inside.
    """
    if form.is_linear(module):
        return _Linear(module, form, generator, dtype)
    if (
        type(module).__module__ == nn.Dropout.__module__
    ):  # of nothing, see `try_out`; looked at again in each call
        return nn.Identity()
    copy = object.__new__(type(module))
    hooks = {name: value for name, value in vars(nn.Module()).items() if "hook" in name}
    parameters: dict[str, Any] = dict.fromkeys(module._parameters)  # some are None
    for name, shape in _narrow(module).items():
        if math.prod(shape) > MOST:
            raise Unknown(f"a {type(module).__name__} is too large to be tried out")
        numbers = torch.randn(shape, generator=generator, dtype=dtype)
        parameters[name] = (
            numbers / shape[-1] ** 0.5 if len(shape) > 1 else numbers
        ).requires_grad_()
    buffers: dict[str, Any] = dict.fromkeys(module._buffers)
    for name, x in module.named_buffers(recurse=False):
        buffers[name] = (
            torch.randn(x.shape, generator=generator, dtype=x.dtype)
            if x.is_floating_point()
            else x.clone()
        )
    children: dict[str, Any] = dict.fromkeys(module._modules)
    for name, child in module.named_children():
        children[name] = _stand_in(child, form, training, generator, dtype)
    new = {
        "_parameters": parameters,
        "_buffers": buffers,
        "_modules": children,
        "training": training,
    }
    vars(copy).update({**vars(module), **hooks, **new})
    return copy


def _narrow(module: Any) -> dict[str, torch.Size]:
    """Shapes of its own parameters; of experts', [experts, out, in] and [experts, out], with few
    numbers inside an expert.
    """
    shapes = _shapes(module)
    if not hasattr(module, "_apply_gate") or not hasattr(
        module, "is_transposed"
    ):  # of transformers' `use_experts_implementation`
        return shapes
    inside: dict[str, int] = {}
    for name, shape in shapes.items():
        if len(shape) == 3:
            inside[name] = -1 if ("down" in name) != module.is_transposed else -2
        elif "down" not in name:
            inside[name] = -1
    unit = math.gcd(*(shapes[name][at] for name, at in inside.items()))
    made = {name: list(shape) for name, shape in shapes.items()}
    for name, at in inside.items():
        made[name][at] = 4 * made[name][at] // unit  # grouped products want rows of 16 bytes
    return {name: torch.Size(shape) for name, shape in made.items()}


def try_out(
    name: str, module: nn.Module, size: int, form: Form, norm: bool
) -> list[tuple[dict[str, Any], str, Any]]:
    """Raise Unknown unless ``module`` is a function of one token [.., size] at a time; returns the
    globals that its code looked at.

    norm   is made of parameters of its own; else of linear layers, of modules that have no
           parameters, and of transformers' own
    """
    what = f"{name} ({type(module).__name__})"
    if norm and (any(module.children()) or any(True for _ in module.buffers())):
        raise Unknown(f"{what} has more than parameters")
    known_code, names = True, []
    for at, part in module.named_modules(prefix=name):
        if own_call(part):
            raise Unknown(f"{at} ({type(part).__name__}) has a __call__ of its own")
        known_code = known_code and (
            _is_theirs(part) or type(part).__module__.startswith("torch.nn.")
        )
        if norm:
            continue
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        known = (
            form.is_linear(part)
            or _is_theirs(part)
            and all(type(x) in (nn.Parameter, nn.Buffer, Tensor) for x in own)
        )
        if own and not known:
            raise Unknown(
                f"{at} ({type(part).__name__}) is no plain linear layer, and no activation"
            )
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise Unknown(f"{at} ({type(part).__name__}) drops out")
    # fp32 for experts, whose grouped products know no fp64.
    dtype = (
        torch.float32
        if any(hasattr(part, "_apply_gate") for part in module.modules())
        else torch.float64
    )
    for training in (True, False):
        generator, drawn = torch.Generator().manual_seed(0), torch.get_rng_state()
        stand_in, dim = _stand_in(module, form, training, generator, dtype), form.token_dim
        x = torch.randn(BATCH, TOKENS if norm else SEQ, size, generator=generator, dtype=dtype)
        if not norm:  # a crowd, which goes to the same experts
            x = torch.cat(
                (
                    x,
                    x[:1, :1]
                    + 0.01 * torch.randn(BATCH, CROWD, size, generator=generator, dtype=dtype),
                ),
                1,
            )
        x = x.movedim(1, dim)
        cuts = (2, TOKENS - 2) if norm else (2, SEQ, 0, CROWD - 2)
        biases = form.biases and not norm
        accounts = not known_code and form.accounted  # guard: code of one's own is accounted for
        accounting = _TokenByToken(x.shape[:-1]) if accounts else None
        before, (whole, of_whole) = _state(stand_in), _ran(what, stand_in, x, biases, accounting)
        names += accounting.names if accounting else []  # guard: globals of a module too
        ys, of_parts = zip(*(_ran(what, stand_in, part, biases) for part in x.split(cuts, dim)))
        if not torch.equal(drawn, torch.get_rng_state()):
            raise Unknown(f"{what} draws random numbers")
        if not _is_same_state(before, _state(stand_in)):
            raise Unknown(f"{what} remembers something of its tokens")
        pairs = [
            (torch.cat(ys, dim), whole),
            *((sum(parts), of_all) for *parts, of_all in zip(*of_parts, of_whole)),
        ]
        if not all(
            (mine - expected).abs().max() <= 1e-5 * expected.abs().max() for mine, expected in pairs
        ):
            # fp32 in it, which vector units round by position
            raise Unknown(f"{what} makes something else of some tokens than of all")
    return names


def held(module: nn.Module) -> list[tuple]:
    """Return what may not change in a module that was tried out.

    Its code, what a dropout drops, and what code of one's own may look at.
    """
    kinds = []
    for part in module.modules():
        of: Any = type(part)
        more = {}
        if not _is_theirs(part) and not of.__module__.startswith(
            "torch.nn."
        ):  # guard: whatever it may look at
            bases = of.__mro__[: of.__mro__.index(nn.Module)]
            of_class = {
                name: value for base in reversed(bases) for name, value in vars(base).items()
            }
            more = _values(
                {
                    **of_class,
                    **{name: value for name, value in vars(part).items() if name not in _OF_ALL},
                }
            )
        kinds.append((of, of.forward, vars(part).get("p"), more))
    return kinds


def _values(x: Any, depth: int = 3) -> Any:
    """Constants, those in dicts, lists and objects, such as a config, too; all else by its
    identity.
    """
    if is_plain(x):
        return x
    if not depth or isinstance(x, (type, nn.Module, Tensor, types.FunctionType)):
        return id(x)
    if isinstance(x, (list, tuple)):
        return [_values(value, depth - 1) for value in x]
    inside = x if isinstance(x, dict) else getattr(x, "__dict__", None)
    if not isinstance(inside, dict):  # made anew at every look, of a generic alias
        return id(x)
    return {name: _values(value, depth - 1) for name, value in inside.items()}


def own_call(module: nn.Module) -> bool:
    """Whether the class of a module does something around its forward, beside gradient
    checkpointing of transformers'.
    """
    call = type(module).__call__
    return call is not nn.Module.__call__ and not (call.__module__ or "").startswith(
        ("transformers.modeling_layers", "torch.nn.")
    )


def _is_theirs(part: nn.Module) -> bool:
    """Whether a module is one of transformers', which are tried out with whatever parameters and
    buffers they have.
    """
    return type(part).__module__.startswith("transformers.")


def _state(stand_in: nn.Module) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """What its parts remember."""
    parts = [part for part in stand_in.modules() if not isinstance(part, _Linear)]
    return [(dict(vars(part)), [x.clone() for x in part.buffers(recurse=False)]) for part in parts]


def _is_same_state(before: list, now: list) -> bool:
    return all(
        mine.keys() == others.keys()
        and all(mine[name] is others[name] for name in mine)
        and all(map(torch.equal, buffers, other_buffers))
        for (mine, buffers), (others, other_buffers) in zip(before, now)
    )


def _ran(
    what: str, stand_in: nn.Module, x: Tensor, biases: bool, accounting: Accounting | None = None
) -> tuple[Tensor, list[Tensor]]:
    """What tokens become, with their gradients; and the gradients of its parameters. Raises
    Unknown.
    """
    linear = [part for part in stand_in.modules() if isinstance(part, _Linear)]
    parameters = [
        p
        for part in stand_in.modules()
        if part not in linear
        for p in part._parameters.values()
        if p is not None
    ]
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        given = x * 1  # which may be changed in place
        try:
            with accounting or contextlib.nullcontext():
                y = type(stand_in).forward(stand_in, given)
        except Unknown as error:
            raise Unknown(f"{what}: {error}") from None
        if biases and isinstance(y, tuple) and len(y) == 2:
            y = y[0] if y[1] is None else y[0] + y[1]
    if not isinstance(y, Tensor) or y.shape != x.shape:
        raise Unknown(f"{what} doesn't return hidden states alone")
    if not y.numel() and not y.requires_grad:  # of no tokens
        return torch.cat((y, x.detach()), -1), [torch.zeros_like(p) for p in parameters]
    calls = [part.calls for part in linear]
    dx, *of_parameters = torch.autograd.grad(
        y, [x, *parameters], torch.ones_like(y), allow_unused=True, materialize_grads=True
    )
    if calls != [part.calls for part in linear]:
        raise Unknown(f"{what} is computed again in backward")
    return torch.cat((y.detach(), dx), -1), of_parameters
