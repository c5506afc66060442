"""transformers: latent attention (DeepSeek's MLA), whose latents travel in place of k and v of all heads.

In whatever family, a forward hands a latent and a rotated key to its ``expand_kv``, and what it returns to the attention function.
While a forward runs here, ``expand_kv`` hands them on as they are, and they are expanded behind their exchange. All else, rotation
too, stays the layer's own.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.latent import LatentAttention, can_expand_rows, latents_pay
from ..attention.layer import Layer
from .layers import Overlap
from .rebinding import Undo, rebind
from .transformers_attention import bind_function
from .transformers_forward import Forwards
from .transformers_modules import digest, off_in_eval, once

EXPAND, PROJECTION = "expand_kv", "kv_b_proj"
KNOWN = {"596e3777c27d516d"}  # source of expand_kv: `LatentAttention` computes the same


def is_latent(module: nn.Module) -> bool:
    """Whether a layer's code expands latents in a way that is known here."""
    return not vars(module).keys() & {"forward", EXPAND} and _hands_on(type(module))


@once
def _hands_on(kind: type[nn.Module]) -> bool:
    """Whether ``forward`` calls ``expand_kv`` once, always, and gives both that it returns to attention, and to nothing else."""
    try:
        expand, forward = digest(kind, EXPAND), inspect.getsource(inspect.unwrap(kind.forward))
    except OSError:  # no source
        return False
    if expand not in KNOWN:  # guard: only code that is known
        return False
    body: Any = ast.parse(textwrap.dedent(forward)).body[0]
    made = [s.targets[0] for s in body.body if isinstance(s, ast.Assign) and ast.unparse(s.value).startswith(f"self.{EXPAND}(")]
    if len(made) != 1 or not isinstance(made[0], ast.Tuple) or not all(isinstance(x, ast.Name) for x in made[0].elts):
        return False
    k, v = (ast.unparse(x) for x in made[0].elts)
    uses = sorted(x.id for x in ast.walk(body) if isinstance(x, ast.Name) and x.id in (k, v))
    calls = [[ast.unparse(x) for x in call.args] for call in ast.walk(body) if isinstance(call, ast.Call)]
    given = [args for args in calls if args[:1] == ["self"] and args[2:4] == [k, v]]
    once_made = ast.unparse(body).count(f".{EXPAND}") == 1
    return once_made and len(given) == 1 and uses == sorted([k, v] * 2)  # guard: no other use


def why_not(layer: Any, size: int) -> str | None:
    """Why the latents of a layer don't travel over ``size`` ranks; empty if they do, None of a layer that isn't known to have any."""
    if not is_latent(layer):
        return None
    per_head = layer.qk_head_dim + layer.v_head_dim
    projection = getattr(layer, PROJECTION)
    if not latents_pay(size, layer.num_heads, layer.kv_lora_rank, layer.qk_rope_head_dim, per_head):
        return (
            f"latents of {layer.kv_lora_rank + layer.qk_rope_head_dim} numbers a token are no smaller than a rank's k and v, "
            f"{layer.num_heads * per_head // size}"
        )
    return "" if can_expand_rows(projection) else f"latents are expanded whole: {PROJECTION} ({type(projection).__name__})"


def bind(name: str, module: Any, forwards: Forwards, overlap: Overlap) -> Undo:
    """Overlap the attention function of a layer whose latents travel."""
    here, nope_dim, original = weakref.ref(module), module.qk_nope_head_dim, module.forward  # the dispatcher keeps no model alive

    def attention(layer: Layer) -> LatentAttention:
        return LatentAttention(layer, lambda: getattr(here(), PROJECTION), nope_dim)

    unbind = bind_function(name, module, forwards, overlap, attention)

    def expand(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        if off_in_eval(module) or not can_expand_rows(getattr(module, PROJECTION)):  # guard: adapters are heard
            return type(module).expand_kv(module, latent, rotated)
        return latent, rotated

    @torch.compiler.disable(recursive=False)
    def forward(*args: Any, **kwargs: Any) -> Any:
        vars(module)[EXPAND] = expand  # gone again before anything else runs
        try:
            return original(*args, **kwargs)
        finally:
            vars(module).pop(EXPAND, None)

    undo = rebind(module, forward, whole=False)

    def both(module: nn.Module) -> None:
        undo(module)
        unbind(module)

    return both
