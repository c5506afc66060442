"""Runs the exchanges of one layer's o and of the next layer's q, k, v under the MLP between them.

Between two attentions nothing mixes tokens. So that part, a *segment*, runs in chunks of every
rank's tokens: chunk c of o is projected and goes through the MLP, and the chunk's q, k and v of the
next layer are sent, while exchanges of other chunks are under way. Backward is the mirror image but
for the weight gradients; `schedule.block` draws both. `attention` runs what is around an attention,
and `chain` puts layers together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.runtime import sharded
from ..attention.runtime.deferred import Shadows, Wgrads
from ..attention.runtime.execution import Call
from ..attention.runtime.linear import call_through, goes_by_token
from ..attention.runtime.parts import cut, join
from ..attention.runtime.recorded import join_heads
from ..attention.runtime.runner import Runner
from ..attention.runtime.slices import Ranges
from ..attention.self_attention import SelfAttention
from ..schedule import O, Op, Recompute, Step, by_chunks, head, tail
from .attention import walk_attention
from .block_layer import BlockLayer, Options
from .layer_call import LayerCall
from .recompute_region import RecomputeRegion
from .saved_attention import SavedAttention

Watch = Callable[[Any, Tensor], None]


def run_segment(
    done: LayerCall | None,
    following: LayerCall | None,
    hidden: Tensor,
    recompute: Recompute,
    watch: Watch | None = None,
) -> Tensor:
    """Run a segment: what lies between two attentions.

    Args:
        done: The attention that was run; None in front of the first.
        following: The next attention, whose q, k and v are started; None behind the last.
        hidden: Hidden states in front of ``done``, for its residual; in front of ``following`` if
            there is no ``done``.
        recompute: Unless "none", autograd saves nothing, and the segment is recomputed in backward.
        watch: Called in forward with the node of autograd through which the residual gives its part
            of the gradient of ``hidden``, and with ``hidden``; see `Started.watch`.

    Returns:
        Hidden states behind ``done``; ``hidden`` if that is None.
    """
    if recompute == "none":
        return _segment(done, following, hidden, watch)
    region = _Region(done, following, hidden)
    with region.watched():
        out = _segment(done, following, hidden, watch)
    if following is not None:
        following.region = region
    if done is not None:
        region.precede(out)
    return out


def attend(here: LayerCall, hidden: Tensor, recompute: Recompute) -> None:
    """Run the attention whose q, k and v are under way, and start its o.

    Args:
        here: The call of the attention.
        hidden: Hidden states that the layer is given.
        recompute: What of the layer is recomputed in backward.
    """
    if here.region is None:
        walk_attention(here, hidden)
    else:
        assert isinstance(here.region, _Region)
        here.region.attend(here, hidden, keep=recompute == "but attention")


def run_alone(
    attention: SelfAttention,
    call: Call,
    hidden: Tensor,
    position_embeddings: Any,
    args: tuple,
    kwargs: dict[str, Any],
) -> Tensor:
    """Run an attention layer by itself in the order of a `Block`, whose MLP it does not have.

    For a layer whose own ``schedule=`` makes a `Block`.

    Args:
        attention: The layer.
        call: The call, whose schedule is a `Block`.
        hidden: [b, s/P, m], or [s/P, b, m] where the attention is not ``batch_first``.
        position_embeddings: As for `SelfAttention`.
        args: For the local attention, as is ``kwargs``.
        kwargs: Keywords.

    Returns:
        The output of the layer, as ``hidden``.

    Raises:
        ValueError: if the layer can't run in chunks of tokens.
    """
    # In the place of norms and MLP; none of them is called.
    nothing, o_proj = nn.Identity(), attention.o_proj
    layer = BlockLayer(attention, nothing, nothing, nothing, is_attention_alone=True)
    fault, leaves_bias = layer.in_the_way(), attention.plain.get(type(o_proj).forward)
    if not fault and leaves_bias is not None and leaves_bias(o_proj) is not None:
        fault = "its output projection returns its bias beside its output"
    for module in () if fault else (*attention.inputs.projections, o_proj):
        if not goes_by_token(module, attention.plain):  # guard: no tokens meet in a projection
            fault = f"{type(module).__name__} is no plain linear layer, and may mix tokens"
    if fault:
        raise ValueError(
            f"{call.where}: schedule= makes a Block, in chunks of tokens, which this layer can't "
            f"run in: {fault}; return a Schedule or a Windowed"
        )
    here = LayerCall(layer, call, Options(position_embeddings, None, None, args, kwargs))
    recompute = here.block.recomputes if torch.is_grad_enabled() else "none"
    run_segment(None, here, hidden, recompute)
    attend(here, hidden, recompute)
    return run_segment(here, None, hidden, recompute)


class _Region(RecomputeRegion):
    """A segment and the attention behind it, recomputed from hidden states and o.

    In backward, the MLP is recomputed under the last exchanges of do. Then q, k and v of the next
    layer travel again, each under the MLP of the next chunk.

    Args:
        done: As for `run_segment`.
        following: As for `run_segment`.
        hidden: As for `run_segment`.
    """

    def __init__(self, done: LayerCall | None, following: LayerCall | None, hidden: Tensor):
        here = done or following
        assert here is not None
        super().__init__(here.call.where, hidden.device)
        self.done = None if done is None else done.recomputed()
        # A copy, since the call itself holds this region: a circle would keep both alive.
        self.following = None if following is None else following.recomputed()
        self.hidden, self.has_gradient = hidden.detach(), hidden.requires_grad
        self.version = hidden._version
        # Whether `attend` ran; not so if the q, k and v that were started are never used.
        self.attends = False

    def attend(self, here: LayerCall, hidden: Tensor, keep: bool) -> None:
        """Run the attention of this region in forward.

        Args:
            here: The call of the attention, the region's ``following``.
            hidden: Hidden states that the layer is given.
            keep: Whether to save what attention's backward reads instead of recomputing attention.
        """
        if keep and any(token.requires_grad for token in here.tokens.values()):
            here.saved_attention = SavedAttention(here.call, here.layer.attention.head_dim)
        elif keep:
            # q, k and v need no gradient, so only parameters of attention may need one. What
            # attention saves for those is not known: it is recomputed nevertheless.
            here.call.run_by(by_chunks(here.call.geometry.kinds, here.block.chunks, "all"))
        with self.watched():
            walk_attention(here, hidden)
        # A new copy, since saved attention and the order are set by now.
        self.attends, self.following = True, here.recomputed()
        # The segment behind notes the o that it receives, for its own region to recompute from.
        here.region, here.received_o = None, {}

    def run(self) -> None:
        """Run the segment again, and the attention if it ran in forward.

        Raises:
            RuntimeError: if the hidden states were changed in place since forward.
        """
        if self.hidden._version != self.version:  # guard: held, and not changed
            raise RuntimeError(
                f"{self.where}: the hidden states in front of it were changed in place before "
                "backward could use them"
            )
        # New calls each time, since several backwards may run through one graph.
        done = None if self.done is None else self.done.recomputed()
        following = None if self.following is None else self.following.recomputed()
        for unit in _units(done, following):
            unit.unshard()  # guard: whole where they are used again
        hidden = self.hidden.detach().requires_grad_(self.has_gradient)
        if following is not None:
            following.is_idle = not self.attends
        with self.as_before(0):
            _segment(done, following, hidden)
        if following is not None and self.attends:
            with self.as_before(1):
                walk_attention(following, hidden)


def _segment(
    done: LayerCall | None, following: LayerCall | None, hidden: Tensor, watch: Watch | None = None
) -> Tensor:
    """Walk the program from the finishes of o to the starts of the next layer's q, k and v.

    All modules of the segment are called once, one inside the other, and ``body`` runs the chunks
    inside of them. Arguments and result are those of `run_segment`.
    """
    here = done or following
    assert here is not None
    roots: list[nn.Module] = []
    if done is not None:
        roots += done.layer.ends
    if following is not None:
        roots += following.layer.begins
    called: dict[nn.Module, None] = {}
    for root in roots:
        for module in root.modules():
            if type(module).forward is not nn.Module.forward:  # a list of modules is never called
                called[module] = None
    given = {} if done is None else done.tokens

    def body(hidden: Tensor, *tokens: Tensor) -> tuple[Tensor, ...]:
        # The tokens as the hooks have changed them.
        given.update(zip(given, tokens))
        # Where weight gradients wait: those of the MLP in ``late``, made in `walk_attention`; all
        # others here.
        late = [] if done is None or done.mlp_wgrads is None else [done.mlp_wgrads]
        known = {*late[0].slots, *late[0].stacks, *late[0].others} if late else ()
        plain = here.layer.attention.plain
        wgrads = Wgrads(roots, here.call.where, plain, at_once=not late, besides=known)
        shadows = Shadows(*late, wgrads)
        runner = _Segment(done, following, shadows, hidden, watch)
        segment = here.block.recomputed_segment if here.is_recomputed else here.block.segment
        if done is None:
            segment = head(segment)
        elif following is None:
            segment = tail(segment)
        runner.walk(segment)
        outs = [] if done is None else [join(runner.xs, runner.seq_dim, runner.ranges)]
        shadows.end()
        if following is not None:
            outs += following.tokens.values()
        return tuple(outs)

    # The tokens are inputs and outputs of the call, since hooks on it (of FSDP, for instance) must
    # see all that leads to the modules' parameters.
    inputs = hidden, *given.values()
    # A recomputation has unsharded them already (`_Region.run`).
    units = [] if here.is_recomputed else _units(following)
    if done is not None:
        for unit in units:  # guard: the successor's weights are whole
            inputs = sharded.enter(unit, inputs)
    outs = iter(call_through(list(called), body, *inputs))
    out = hidden if done is None else next(outs)
    if following is not None:
        following.tokens.update(zip(following.tokens, outs))
    return out


class _Segment(Runner):
    """Performs the steps of a segment, chunk by chunk, inside the calls of all its modules.

    Attributes:
        done: The attention that was run; None in front of the first.
        following: The next attention; None behind the last.
        xs: Hidden states of each chunk.
        of_groups: o of each head group of a chunk.
        values: q, k and v of a chunk.
    """

    def __init__(
        self,
        done: LayerCall | None,
        following: LayerCall | None,
        shadows: Shadows,
        hidden: Tensor,
        watch: Watch | None,
    ):
        here = done or following
        assert here is not None
        super().__init__(here.call)
        self.done, self.following, self.shadows = done, following, shadows
        self.seq_dim = here.call.geometry.seq_dim
        self.ranges: list[Ranges] = [(tokens,) for tokens in here.ranges()]
        self.xs = list(cut(hidden, self.seq_dim, self.ranges))
        if watch is not None and self.xs[0].requires_grad:
            # A single chunk is ``hidden`` itself; a view of it has a node of its own to watch.
            self.xs = self.xs if len(self.xs) > 1 else [hidden.view_as(hidden)]
            watch(self.xs[0].grad_fn, hidden)
        self.rotations = [] if following is None else following.rotations()
        self.of_groups: list[Tensor] = []

    def range(self, step: Step) -> Any:
        of = self.following if step.op is Op.PROJECT else self.done
        if of is not None:
            self.call = of.call  # whose name a profiler shows
        return super().range(step)

    def finish(self, step: Step) -> None:
        assert self.done is not None
        self.of_groups.append(self.done.finish_o(step))

    def merge(self, step: Step) -> None:
        """Project o of a chunk, and add the residual unless the attention runs alone."""
        done = self.done
        assert done is not None
        if done.is_recomputed:
            # The program of a recomputation has no finishes of o.
            finishes = (Step(Op.FINISH, O, False, group, step.chunk) for group in done.call.groups)
            self.of_groups = [done.saved_o(finish) for finish in finishes]
        o = join_heads(done.call, dict(enumerate(self.of_groups))).flatten(2)
        self.of_groups.clear()
        y = _with_bias(self.shadows.of(done.layer.attention.o_proj)(o))
        self.xs[step.chunk] = y if done.layer.is_attention_alone else self.xs[step.chunk] + y

    def mlp(self, step: Step) -> None:
        assert self.done is not None
        layer, x = self.done.layer, self.xs[step.chunk]
        if layer.is_attention_alone:
            return
        y = x + _with_bias(self.shadows.of(layer.mlp)(self.shadows.of(layer.norm_mid)(x)))
        if torch.is_grad_enabled() and not (y.numel() and y.requires_grad):
            y = self.shadows.tied(y, layer.norm_mid, layer.mlp)
        self.xs[step.chunk] = y

    def project(self, step: Step) -> None:
        """Make q, k and v of a chunk for the next attention, from the hidden states behind it."""
        following, chunk = self.following, step.chunk
        assert following is not None
        x = self.shadows.of(following.layer.norm_in)(self.xs[chunk])
        project = following.layer.attention.inputs.whole(
            following.call, x, self.rotations[chunk], self.shadows.of
        )
        self.values = {part: project(*part) for part in following.call.schedule.parts}

    def start(self, step: Step) -> None:
        following = self.following
        assert following is not None
        sent = [self.values.pop(part) for part in step.parts]
        # Nothing is sent in the recomputation of a call that never attended; on no rank, since all
        # ranks were given other hidden states then.
        if not following.is_idle:
            following.tokens[step.exchange] = following.exchange(step).start(*sent)


def _units(*calls: LayerCall | None) -> list[Any]:
    """Return the units of FSDP that calls belong to, see Note [Units of FSDP2] in `sharded`."""
    units = [call.layer.unit for call in calls if call is not None]
    return [unit for unit in units if unit is not None]


def _with_bias(y: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    """Add the bias that some modules return beside their output."""
    if isinstance(y, Tensor):
        return y
    y, bias = y
    return y if bias is None else y + bias
