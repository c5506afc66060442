"""Runs the exchanges of one layer's o and of the next layer's q, k, v under the MLP between them.

Between two attentions nothing mixes tokens. So that part, a *segment*, runs in chunks of every
rank's tokens: chunk c of o is projected, goes through the MLP, and its q, k, v of the next layer
travel, while the exchanges of other chunks are under way. Backward is the mirror image, as
everywhere in this package. `schedule.block` draws both. `chain` puts layers together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.arguments import bind_arguments
from ..attention.runtime import sharded
from ..attention.runtime.deferred import Shadows, Wgrads
from ..attention.runtime.execution import Call, attend_group, attend_in_pieces
from ..attention.runtime.linear import call_through
from ..attention.runtime.parts import cut, join
from ..attention.runtime.recorded import Gathering, join_heads
from ..attention.runtime.runner import Runner
from ..attention.runtime.slices import Ranges
from ..attention.self_attention import SelfAttention
from ..exchange.chunks import ChunkedExchange
from ..exchange.exchange import Exchange, Half, run_halves
from ..exchange.layout import chunk_of
from ..rotary import Rotary
from ..schedule import (
    Block,
    Exchanged,
    O,
    Op,
    Recompute,
    Step,
    by_chunks,
    head,
    tail,
    without_o,
)
from .block_layer import BlockLayer, Options
from .recompute_region import RecomputeRegion
from .saved_attention import AttendSaved, OutputExchange, Saved, SavedAttention

Watch = Callable[[Any, Tensor], None]


class LayerCall:
    """One call of a layer's attention, with the exchanges that are under way to it and from it.

    The segment in front makes and starts its q, k and v, `attend` runs it and starts its o, and the
    segment behind it finishes o. So a call is handed from one segment to the next.

    Attributes:
        layer: The layer.
        call: The geometry and the sp group.
        options: What the layer was called with.
        block: The schedule.
        mlp_wgrads: Collects the weight gradients of the MLP behind the attention until all chunks
            are through; None where they are computed chunk by chunk.
        exchanges: Exchanges that were started and not finished.
        tokens: The tokens of autograd of these exchanges.
        region: The region that will recompute this attention in backward; None if none will, and
            once the attention has run.
        is_recomputed: Whether this call recomputes an earlier one, in backward.
        is_idle: Whether the call that this one recomputes never attended, since its q, k and v were
            not used; then they are not sent again.
        saved_attention: What was saved of attention; None if attention is recomputed, or nothing.
        saved_tensors: The tensors that attention's backward reads beside q, k, v and o.
        received_o: For each exchange of o (a head group and a chunk), the o that this rank
            received, and whether it has a gradient; None where the segment behind this attention
            will not be recomputed.
    """

    def __init__(self, layer: BlockLayer, call: Call, block: Block, options: Options):
        self.layer, self.call, self.options = layer, call, options
        self.run_by(block)
        self.mlp_wgrads: Wgrads | None = None
        self.exchanges: dict[Exchanged, Exchange] = {}
        self.tokens: dict[Exchanged, Tensor] = {}
        self.region: _Region | None = None
        self.is_recomputed = self.is_idle = False
        self.saved_attention: SavedAttention | None = None
        self.saved_tensors: Saved = {}
        self.received_o: dict[Exchanged, tuple[Tensor, bool]] | None = None

    def run_by(self, block: Block) -> None:
        """Follow ``block`` from now on: its steps, and the names of its exchanges."""
        self.block = block
        self.call.run_by(block)

    def recomputed(self) -> LayerCall:
        """Return a new call that recomputes this one; it shares what was saved and received."""
        made = LayerCall(self.layer, self.call, self.block, self.options)
        made.saved_attention, made.saved_tensors = self.saved_attention, self.saved_tensors
        made.received_o, made.is_recomputed = self.received_o, True
        return made

    def finish_o(self, step: Step) -> Tensor:
        """Finish the exchange of one head group's o, for a chunk of tokens, and return it.

        Called by the segment behind the attention, in forward; `saved_o` takes its place where that
        segment is recomputed, for which o is noted.
        """
        key = step.exchange
        o = self.exchanges.pop(key).finish(self.tokens.pop(key))
        if self.received_o is not None:
            self.received_o[key] = o.detach(), o.requires_grad
        return o

    def saved_o(self, step: Step) -> Tensor:
        """Return a chunk of o that forward received, in place of `finish_o` in a recomputation."""
        assert self.received_o is not None
        o, has_gradient = self.received_o[step.exchange]
        if self.saved_attention is None:
            return o.detach().requires_grad_(has_gradient)
        # The chunk goes through the finish of its exchange once more, which sends nothing: its node
        # then saves o anew.
        exchange = self.exchange(step)
        assert isinstance(exchange, OutputExchange)
        exchange.received = o
        return exchange.finish(o.new_empty(0).requires_grad_(has_gradient))

    def exchange(self, step: Step) -> Exchange:
        """Make and note the exchange that a step starts, and do not start it."""
        make: Callable[..., Exchange] = Exchange
        if self.saved_attention is not None and step.tensors == O:
            make = partial(OutputExchange, self.saved_attention, step.exchange)
        dims = (self.layer.attention.head_dim,) * len(step.tensors)
        exchange = self.exchanges[step.exchange] = self.call.exchange(step, dims, make)
        return exchange

    def ranges(self) -> list[tuple[int, int]]:
        """Return for each chunk its range of this rank's tokens, [start, stop)."""
        length = self.call.geometry.seq_lens[self.call.geometry.sp_rank]
        return [chunk_of(length, chunk, self.block.chunks) for chunk in range(self.block.chunks)]

    def rotations(self) -> list[Callable[[Tensor], Tensor] | None]:
        """Return for each chunk the function that rotates its q or k; None for no rotation."""
        attention = self.layer.attention
        rope = attention.inputs.rope
        if rope is None:
            return [None] * self.block.chunks
        assert isinstance(rope, Rotary)
        tables = rope.of(self.options.position_embeddings, attention.head_dim)
        if tables is None:
            return [None] * self.block.chunks
        # The tables broadcast to [b, s/P, h, d] or [s/P, b, h, d]: the dimension of the tokens.
        dim = -3 if attention.batch_first else -4

        def rotation(start: int, stop: int) -> Callable[[Tensor], Tensor]:
            mine = []
            for table in tables:
                # One row for all tokens serves every chunk.
                is_shared = table.dim() < -dim or table.shape[dim] == 1
                mine.append(table if is_shared else table.narrow(dim, start, stop - start))
            return lambda heads: rope.rotate(heads, *mine)

        return [rotation(*tokens) for tokens in self.ranges()]


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
            head_dim = here.layer.attention.head_dim
            here.saved_attention = SavedAttention(partial(_beside, here.call, head_dim))
        elif keep:
            # q, k and v need no gradient, so only parameters of attention may need one. What
            # attention saves for those is not known: it is recomputed nevertheless.
            here.run_by(by_chunks(here.call.geometry.kinds, here.block.chunks, "all"))
        with self.watched():
            _attend(here, hidden)
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
                _attend(following, hidden)


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
    nothing, block, o_proj = nn.Identity(), call.schedule, attention.o_proj
    assert isinstance(block, Block)
    layer = BlockLayer(attention, nothing, nothing, nothing, is_attention_alone=True)
    fault, leaves_bias = layer.in_the_way(), attention.plain.get(type(o_proj).forward)
    if not fault and leaves_bias is not None and leaves_bias(o_proj) is not None:
        fault = "its output projection returns its bias beside its output"
    if fault:
        raise ValueError(
            f"{call.where}: schedule= makes a Block, in chunks of tokens, which this layer can't "
            f"run in: {fault}; return a Schedule or a Windowed"
        )
    here = LayerCall(layer, call, block, Options(position_embeddings, None, None, args, kwargs))
    recompute = block.recomputes if torch.is_grad_enabled() else "none"
    run_segment(None, here, hidden, recompute)
    attend(here, hidden, recompute)
    return run_segment(here, None, hidden, recompute)


def attend(here: LayerCall, hidden: Tensor, recompute: Recompute) -> None:
    """Run the attention whose q, k and v are under way, and start its o.

    Args:
        here: The call of the attention.
        hidden: Hidden states that the layer is given.
        recompute: What of the layer is recomputed in backward.
    """
    if here.region is None:
        _attend(here, hidden)
    else:
        here.region.attend(here, hidden, keep=recompute == "but attention")


def _beside(call: Call, head_dim: int, key: Exchanged) -> Exchange:
    """Make the exchange that takes a chunk of o, and do with it, to attention in backward.

    ``key`` names the exchange of the chunk of o in forward.
    """
    tensors, group, chunk = key
    step = Step(Op.START, tensors, True, group, chunk, beside=tensors)
    return call.exchange(step, (head_dim,) * 2)


def _attend(here: LayerCall, hidden: Tensor) -> None:
    """Walk the program from the finishes of q, k and v to the starts of o.

    In forward, and again in backward for a recomputed call. Collective in the first call of a kind
    where attention is saved: the ranks agree whether o travels in backward.
    """
    if here.region is None and not here.is_recomputed and not here.layer.is_attention_alone:
        # Made here, its node comes behind the starts of dq, dk and dv in backward, and hides their
        # first chunk.
        attention = here.layer.attention
        here.mlp_wgrads = Wgrads([here.layer.mlp], here.call.where, attention.plain, here=True)
    runner = _Attention(here, hidden)
    if here.is_recomputed:
        runner.walk(here.block.recomputed_attention)
        return
    runner.walk(here.block.attention_steps)
    saved = here.saved_attention
    if saved is not None:
        saved.reads_o = runner.watched.agree(saved.reads_o, saved.foreign)
        if not saved.reads_o:
            here.run_by(without_o(here.block))


class _Attention(Gathering):
    """Performs the steps of attention in a chain. All chunks of a tensor arrive, and leave, in one
    node of autograd.

    Attributes:
        here: The call of the attention.
        watched: The local attention, with the tensors that it learns.
        values: q, k, v of head groups, of the whole sequence.
        attended: o of the group that was attended last, and q, k, v that it was made of; empty
            where attention is saved, since attention and the starts are one node then.
    """

    def __init__(self, here: LayerCall, hidden: Tensor):
        super().__init__(here.call)
        attention, call, options = here.layer.attention, here.call, here.options
        args, kwargs = options.args, options.kwargs
        attend = bind_arguments(attention.local_attention, call, args, kwargs)
        self.here, self.attend_group = here, attend
        self.watched = attention.local_of(call, hidden, attend, args, kwargs)
        self.attended: tuple[Tensor, ...] = ()

    # A step only waits here for the same step of the other chunks (`joins`); `perform` does it.
    finish = start = Gathering.gather

    def joins(self, gathered: list[Step], step: Step) -> bool:
        return step._replace(chunk=gathered[0].chunk) == gathered[0]

    def perform(self, steps: list[Step]) -> None:
        (self.arrive if steps[0].op is Op.FINISH else self.leave)(steps)

    def arrive(self, steps: list[Step]) -> None:
        """Finish the exchanges of all chunks of q, k and v of a group."""
        here, keys = self.here, [step.exchange for step in steps]
        exchanges = [here.exchanges.pop(key) for key in keys]
        tokens = tuple(here.tokens.pop(key) for key in keys)
        (arrived,) = run_halves([Half(ChunkedExchange(exchanges), tokens)])
        self.values.update(zip(steps[0].parts, arrived))
        # Attention is not recomputed: a node that does not attend saves its tensors again.
        if here.is_recomputed and here.saved_attention is not None:
            self._attend_saved(steps[0].group, {})

    def attend(self, step: Step) -> None:
        """Attend with a head group; `leave` runs attention that is saved."""
        self.flush()
        if self.here.saved_attention is None:
            heads = self.heads(step.group)
            o = attend_group(self.call, self.attend_group, step.group, *heads)
            self.attended = o, *heads

    def leave(self, steps: list[Step]) -> None:
        """Start the exchanges of all chunks of o of a group."""
        here, attended = self.here, self.attended
        self.attended = ()
        exchanges = {step.exchange: here.exchange(step) for step in steps}
        if here.saved_attention is not None:
            started = self._attend_saved(steps[0].group, exchanges)
        else:
            chunked = ChunkedExchange(list(exchanges.values()))
            if here.region is not None:
                chunked.meanwhile = here.region.when_needed
            (started,) = run_halves([Half(chunked, attended, starts=True)])
        here.tokens.update(zip(exchanges, started))

    def _attend_saved(self, group: int, exchanges: dict[Exchanged, Exchange]) -> tuple[Tensor, ...]:
        """Attend and start the exchanges of o, in one node.

        Without ``exchanges``, in a recomputation, the node only saves its tensors again.

        Returns:
            A token for each exchange; without exchanges, one that nobody uses.
        """
        here, one = self.here, partial(attend_in_pieces, self.call, self.attend_group, group)
        assert here.saved_attention is not None
        of_call = here.saved_attention, here.saved_tensors, group, one, self.watched, exchanges
        return AttendSaved.apply(*of_call, *self.heads(group), *self.watched.learned)


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
        # Where weight gradients wait: those of the MLP in ``late``, made in `_attend`; others here.
        late = [] if done is None or done.mlp_wgrads is None else [done.mlp_wgrads]
        known = {*late[0].slots, *late[0].stacks} if late else ()
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
    """Performs the steps between two attentions, chunk by chunk, inside all their modules.

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
        """Project o of a chunk, and add the residual."""
        done = self.done
        assert done is not None
        if done.is_recomputed:
            # The program of a recomputation has no finishes of o.
            finishes = (Step(Op.FINISH, O, False, at, step.chunk) for at in done.call.groups)
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
        y = self.shadows.of(layer.mlp)(self.shadows.of(layer.norm_mid)(x))
        self.xs[step.chunk] = x + _with_bias(y)

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
