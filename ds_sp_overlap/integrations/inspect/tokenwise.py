"""Checks that a norm or an MLP computes each token independently of the other tokens.

The module's code must be torch's, transformers' or PEFT's. A copy with random weights runs on all
tokens at once, and then on the tokens in several parts. Outputs and gradients must agree. See
Note [Alike tokens].

Note [Alike tokens]
~~~~~~~~~~~~~~~~~~~
An expert of limited capacity, for instance, returns a result for a token that depends on the other
tokens of the expert. A few random tokens rarely get the same expert. So the input also has `CROWD`
tokens that differ so little that all get the same experts.
"""

from __future__ import annotations

import inspect
import math
import types
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.runtime.linear import without_hooks
from ...attention.runtime.sharded import has_plain_parameters
from .accounting import Unknown
from .library import is_library_function, own_class, whole_shape

BATCH, SEQ, DTYPE = 2, 5, torch.float64
# See Note [Alike tokens].
CROWD = 32
# This is a prime, which is unlikely to divide the width of a layer.
TOKENS = SEQ + CROWD
# The limit on the elements of a parameter of the copy.
MOST = 2**26


class _RankOneLinear(nn.Module):
    """Replaces a linear layer; its random weight is the outer product of ``out`` and ``into``."""

    def __init__(self, linear: Any, generator: torch.Generator):
        super().__init__()
        sizes = whole_shape(linear.weight)
        self.out_features, self.in_features = sizes
        self.out, self.into = (
            torch.randn(size, generator=generator, dtype=DTYPE) for size in sizes
        )
        self.into /= self.in_features**0.5
        self.bias = None if linear.bias is None else self.out.flip(0)

    @property
    def weight(self) -> Tensor:
        # Compute the weight only for code that reads it, since the weight may be large.
        with torch._C.DisableTorchFunction():
            return torch.outer(self.out, self.into)

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            y = (x @ self.into)[..., None] * self.out
        return y if self.bias is None else y + self.bias


def _random_copy(module: nn.Module, training: bool, generator: torch.Generator) -> nn.Module:
    """Copy a module without hooks, with random parameters and buffers.

    In the copy, `_RankOneLinear` replaces linear layers, and identities replace dropouts, which
    drop nothing.

    Raises:
        Unknown: if a parameter of the copy would have more than `MOST` elements.
    """
    if own_class(type(module)) is nn.Linear:
        return _RankOneLinear(module, generator)
    # This dropout drops nothing: `_check_parts` has refused others, and each call of the layer
    # checks the probability again (`fixed_state`).
    if own_class(type(module)).__module__ == nn.Dropout.__module__:
        return nn.Identity()
    copy = without_hooks(module)
    copy.training = training
    # Parameters, buffers and children that are None stay None.
    for kind in ("_parameters", "_buffers", "_modules"):
        vars(copy)[kind] = dict(vars(module)[kind])
    for name, parameter in module.named_parameters(recurse=False):
        shape = whole_shape(parameter)
        if math.prod(shape) > MOST:
            raise Unknown(f"a {type(module).__name__} is too large to be tried out")
        numbers = torch.randn(shape, generator=generator, dtype=DTYPE)
        # Scale a matrix so that its products have the magnitude of their input.
        if len(shape) > 1:
            numbers = numbers / shape[-1] ** 0.5
        copy._parameters[name] = numbers.requires_grad_()
    for name, x in module.named_buffers(recurse=False):
        # Integers keep their values, since they may be indices.
        if x.is_floating_point():
            x = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        copy._buffers[name] = x.clone()
    for name, child in module.named_children():
        copy._modules[name] = _random_copy(child, training, generator)
    return copy


def probe_tokenwise(name: str, module: nn.Module, size: int) -> None:
    """Check that ``module`` computes each token [.., size] independently of the others.

    Called in `enable`, and again if the layer has changed. A random copy of the module runs, on the
    CPU. A module without children counts as a norm, and may have parameters but no buffers. Other
    modules may consist of linear layers, of modules without parameters, and of transformers'
    modules.

    Args:
        name: The module's name, for errors.
        module: The module.
        size: The width of a token.

    Raises:
        Unknown: if the module fails the check, or contains third-party code.
    """
    where, norm = f"{name} ({type(module).__name__})", not [*module.children()]
    if norm and [*module.buffers()]:
        raise Unknown(f"{where} has more than parameters")
    _check_parts(name, module, norm)
    for training in (True, False):
        generator, random_state = torch.Generator().manual_seed(0), torch.get_rng_state()
        copy = _random_copy(module, training, generator)
        x = torch.randn(BATCH, TOKENS, size, generator=generator, dtype=DTYPE)
        # See Note [Alike tokens].
        x[:, SEQ:] = x[:1, :1] + 0.01 * x[:, SEQ:]
        whole = _run(where, copy, x)
        # For an MLP, one of the parts has no tokens.
        cuts = (2, TOKENS - 2) if norm else (2, SEQ, 0, CROWD - 2)
        parts = [_run(where, copy, part) for part in x.split(cuts, 1)]
        if not torch.equal(random_state, torch.get_rng_state()):
            raise Unknown(f"{where} draws random numbers")
        for index, expected in enumerate(whole):
            of_parts = [part[index] for part in parts]
            # The first tensor has a row for each token. The other tensors are sums over tokens.
            actual = sum(of_parts) if index else torch.cat(of_parts, 1)
            # Tolerate rounding: the module may compute in fp32, and round by a token's position.
            if not (actual - expected).abs().max() <= 1e-5 * expected.abs().max():
                raise Unknown(f"{where} makes something else of some tokens than of all")


def _check_parts(name: str, module: nn.Module, norm: bool) -> None:
    """Check the classes and parameters of a module and its submodules for `probe_tokenwise`.

    Raises:
        Unknown: if a submodule is not allowed.
    """
    for path, part in module.named_modules(prefix=name):
        where = f"{path} ({type(part).__name__})"
        if has_own_call(part):
            raise Unknown(f"{where} has a __call__ of its own")
        # transformers' `use_experts_implementation` gives this method to experts.
        if hasattr(part, "_apply_gate"):
            raise Unknown(f"{where} is a mixture of experts")
        if not is_library_code(part):  # guard: no code of one's own in tiles
            raise Unknown(f"{where} has code that is neither torch's nor transformers'")
        if norm:
            continue
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        plain = all(type(x) in (nn.Parameter, nn.Buffer, Tensor) for x in own)
        is_linear = own_class(type(part)) is nn.Linear and has_plain_parameters(part)
        # Modules of transformers may have any parameters and buffers.
        is_plain = plain and own_class(type(part)).__module__.startswith("transformers.")
        if own and not is_linear and not is_plain:
            raise Unknown(f"{where} is no plain linear layer, and no activation")
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise Unknown(f"{where} drops out")


def fixed_state(module: nn.Module) -> list[tuple]:
    """Return the state that a module must still have in each call after its probe.

    This is, for each submodule, the class, the forward, and the probability of a dropout. Compare
    states with ``==``.
    """
    parts = []
    for part in module.modules():
        kind: Any = own_class(type(part))
        parts.append((kind, kind.forward, vars(part).get("p")))
    return parts


def has_own_call(module: nn.Module) -> bool:
    """Return whether the class of a module has a ``__call__`` that may do more than its forward."""
    call = type(module).__call__
    # Accept torch's ``__call__``, and transformers', which only checkpoints the forward.
    libraries = "transformers.modeling_layers", "torch.nn."
    return call is not nn.Module.__call__ and not (call.__module__ or "").startswith(libraries)


def is_library_code(part: nn.Module) -> bool:
    """Return whether a module's class and forward are torch's, transformers' or PEFT's.

    The functions that the forward names must be so as well, since a user may have replaced one.
    """
    kind: Any = own_class(type(part))
    libraries = "torch.nn.", "transformers.", "peft."
    if not kind.__module__.startswith(libraries) or not is_library_function(kind.forward):
        return False
    forward = inspect.unwrap(kind.forward)
    for name in forward.__code__.co_names:
        for holder in (vars(part), vars(kind), forward.__globals__):
            function = holder.get(name)
            if isinstance(function, types.FunctionType) and not is_library_function(function):
                return False
    return True


def _run(where: str, copy: nn.Module, x: Tensor) -> list[Tensor]:
    """Run a module forward and backward on some tokens.

    Args:
        where: The module's name, for errors.
        copy: The module, from `_random_copy`.
        x: [b, s, m]. The tokens.

    Returns:
        The output and the gradient of the tokens, concatenated in the last dim, [b, s, 2 * m]; then
        the gradients of the parameters.

    Raises:
        Unknown: if the output is not one tensor with the shape of ``x``.
    """
    parameters = list(copy.parameters())
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        # The forward may change its input in place, which is forbidden for the leaf x: pass x * 1.
        y = type(copy).forward(copy, x * 1)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        raise Unknown(f"{where} doesn't return hidden states alone")
    if not y.numel() and not y.requires_grad:  # without tokens
        return [torch.cat((y, x.detach()), -1), *map(torch.zeros_like, parameters)]
    dx, *gradients = torch.autograd.grad(
        y, [x, *parameters], torch.ones_like(y), allow_unused=True, materialize_grads=True
    )
    return [torch.cat((y.detach(), dx), -1), *gradients]
