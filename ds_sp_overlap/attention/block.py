"""The exchanges of one layer's o and of the next layer's q, k, v under the MLP between them.

Between two attentions nothing mixes tokens. So that part, a *segment*, runs in chunks of every rank's tokens: chunk c of o is
projected, goes through the MLP, and its q, k, v of the next layer travel, while the exchanges of other chunks are under way. Backward
is the mirror image, as everywhere in this package. `schedule.block` draws both. `chain` puts layers together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..exchange.chunks import finish_chunks, start_chunks
from ..exchange.exchange import Exchange
from ..exchange.layout import chunk_of
from ..profiling.ranges import NOTHING, is_profiled, named
from ..rotary import Rotary
from ..schedule import Block, Step
from .block_layer import BlockLayer, Options
from .deferred import Shadows, Wgrads
from .execution import Call, attend_group, with_kv
from .heads import calling
from .kept_o import Held, Kept, attend_kept, finish_kept
from .layer import with_head_dim
from .linear import call_through
from .rerun import Stretch
from .slices import Ranges, cut, join

Rerun = Literal["none", "all", "but attention"]
Watch = Callable[[Any, Tensor], None]
Key = tuple[str, int, int]  # an exchange: what it moves, of which head group, of which chunk


class LayerCall:
    """One call of a layer's attention: who holds what, its program, and what is under way to it or from it.

    stretch   of which it is a part, where it will be run again
    again     it is run again; ``idle`` if its attention never ran
    kept      what is kept of attention, if it is; the tensors of it are ``held``
    o         chunks of it, local, and whether they have gradients; where the output will be run again
    """

    def __init__(self, layer: BlockLayer, call: Call, block: Block, options: Options):
        self.layer, self.call, self.block, self.options = layer, call, block, options
        call.run_by(block)
        self.mlp_wgrads: Wgrads | None = None
        self.exchanges: dict[Key, Exchange] = {}
        self.tokens: dict[Key, Tensor] = {}
        self.stretch: _Stretch | None = None
        self.again = self.idle = False
        self.kept: Kept | None = None
        self.held: Held = {}
        self.o: dict[Key, tuple[Tensor, bool]] | None = None

    def anew(self) -> LayerCall:
        """For the same call, run again."""
        made = LayerCall(self.layer, self.call, self.block, self.options)
        made.kept, made.held, made.o, made.again = self.kept, self.held, self.o, True
        return made

    def finish_o(self, key: Key) -> Tensor:
        """A chunk of o."""
        if self.again:
            assert self.o is not None
            o, has_gradient = self.o[key]
            token = o.new_empty(0).requires_grad_(has_gradient)
            o = o.detach().requires_grad_(has_gradient)
            return o if self.kept is None else finish_kept(self.kept, key, None, o.detach(), token)
        exchange, token = self.exchanges.pop(key), self.tokens.pop(key)
        kept = self.kept if torch.is_grad_enabled() else None
        o = exchange.finish(token) if kept is None else finish_kept(kept, key, exchange, None, token)
        if self.o is not None:
            self.o[key] = o.detach(), o.requires_grad
        return o

    def exchange(self, of: str, group: int, chunk: int) -> Exchange:
        """A new exchange; q, k and v have the head dim of the layer."""
        call, dims = self.call, (self.layer.attention.head_dim,) * len(of)
        layout = call.geometry.of_chunk(of, group, dims, chunk, self.block.chunks)
        exchange = Exchange(call.channel, layout, call.where, self.block.name(of, group, chunk), call.checked)
        self.exchanges[of, group, chunk] = exchange
        return exchange

    def named(self, step: Step) -> Any:
        """A range of a profiler, named as in the drawing of the program."""
        return named(self.call.where, self.block.label(step)) if is_profiled() else NOTHING

    def ranges(self) -> list[tuple[int, int]]:
        """This rank's tokens of each chunk."""
        length = self.call.geometry.seq_lens[self.call.geometry.sp_rank]
        return [chunk_of(length, chunk, self.block.chunks) for chunk in range(self.block.chunks)]

    def rotations(self) -> list[Callable[[Tensor], Tensor] | None]:
        """What rotates q and k of each chunk."""
        attention = self.layer.attention
        rope = attention.rope
        if rope is None:
            return [None] * self.block.chunks
        assert isinstance(rope, Rotary)
        tables = rope.of(self.options.position_embeddings, attention.head_dim)
        if tables is None:
            return [None] * self.block.chunks
        dim = -3 if attention.batch_first else -4  # of the tokens, from the right

        def rotation(start: int, stop: int) -> Callable[[Tensor], Tensor]:
            mine = [x if x.dim() < -dim or x.shape[dim] == 1 else x.narrow(dim, start, stop - start) for x in tables]
            return lambda heads: rope.rotate(heads, *mine)

        return [rotation(*tokens) for tokens in self.ranges()]


class _Stretch(Stretch):
    """A segment, and the attention behind it, of which hidden states and o are held, and what is kept of attention.

    In backward the MLP is run again under the last exchanges of do, and q, k and v of the next layer travel again under the MLP.
    """

    def __init__(self, done: LayerCall | None, following: LayerCall | None, hidden: Tensor):
        here = done or following
        assert here is not None
        super().__init__(here.call.where, hidden.device)
        self.done = None if done is None else done.anew()
        self.following = None if following is None else following.anew()  # which is under way itself, and leads here
        self.hidden, self.has_gradient, self.version = hidden.detach(), hidden.requires_grad, hidden._version
        self.attends = False

    def attend(self, here: LayerCall, hidden: Tensor, keep: bool) -> None:
        """The second part, the first time."""
        if keep and any(token.requires_grad for token in here.tokens.values()):
            here.kept = Kept(partial(_beside, here.call, here.block, here.layer.attention.head_dim))
        with self.watched():
            _attend(here, hidden)
        here.stretch, here.o, self.attends, self.following = None, {}, True, here.anew()

    def run(self) -> None:
        if self.hidden._version != self.version:  # guard: held, and not changed
            raise RuntimeError(
                f"{self.where}: the hidden states in front of it were changed in place before backward could use them"
            )
        done = None if self.done is None else self.done.anew()
        following = None if self.following is None else self.following.anew()
        hidden = self.hidden.detach().requires_grad_(self.has_gradient)
        if following is not None:
            following.idle = not self.attends
        with self.as_before(0):
            _segment(done, following, hidden)
        if following is not None and self.attends:
            with self.as_before(1):
                _attend(following, hidden)


def run_segment(
    done: LayerCall | None, following: LayerCall | None, hidden: Tensor, rerun: Rerun, watch: Watch | None = None
) -> Tensor:
    """Run what lies between two attentions; start q, k and v of the second, whose tokens ``following`` gets.

    done        the attention that was run; None in front of the first, where ``hidden`` is returned
    following   the next one; None behind the last
    rerun       unless it is "none", autograd keeps nothing: the segment will be run again
    watch       is called with the node of autograd through which the residual gives its part of a gradient, and its hidden states
    """
    if rerun == "none":
        return _segment(done, following, hidden, watch)
    stretch = _Stretch(done, following, hidden)
    with stretch.watched():
        out = _segment(done, following, hidden, watch)
    if following is not None:
        following.stretch = stretch
    return out if done is None else stretch.behind(out)


def attend(here: LayerCall, hidden: Tensor, rerun: Rerun) -> None:
    """Run the attention whose q, k and v are under way, and start its o.

    hidden   as the layer is given
    """
    if here.stretch is None:
        _attend(here, hidden)
    else:
        here.stretch.attend(here, hidden, keep=rerun == "but attention")


def _beside(call: Call, block: Block, head_dim: int, key: Key) -> Exchange:
    """An exchange of a chunk of o and of do, towards attention."""
    _, group, chunk = key
    layout = call.geometry.of_chunk("qq", group, (head_dim, head_dim), chunk, block.chunks)
    return Exchange(call.channel, layout, call.where, block.name("odo", group, chunk), call.checked)


def _attend(here: LayerCall, hidden: Tensor) -> None:
    """Walk the program from the finishes of q, k and v to the starts of o."""
    call, (_, _, args, kwargs), attention = here.call, here.options, here.layer.attention
    if here.stretch is None and not here.again:
        # In backward it comes behind the starts of dq, dk and dv, whose first chunk nothing else hides.
        here.mlp_wgrads = Wgrads([here.layer.mlp], call.where, attention.plain, here=True)
    local = calling(attention.local_attention, call.geometry, args, kwargs)

    def attend(group: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return with_head_dim(local(group, q, k, v), q, call.where)

    kept, watched = here.kept, attention.watched(call, hidden, attend, args, kwargs)
    received: dict[tuple[str, int], Tensor] = {}
    attended: tuple[Tensor, ...] = ()
    for (act, group), same in groupby(here.block.attention_steps, key=lambda step: (step.act, step.group)):
        steps = list(same)
        keys = [step[1:] for step in steps]
        if act == "finish":
            arrived = finish_chunks([here.exchanges.pop(key) for key in keys], [here.tokens.pop(key) for key in keys])
            received.update(((kind, group), x) for kind, x in zip(steps[0].of, arrived))
            del arrived
        elif act == "attend":
            q = received.pop(("q", group))
            k, v = with_kv(call.geometry, "k", group, received), with_kv(call.geometry, "v", group, received)
            with call.named(steps[0]):
                if kept is None:
                    attended = attend_group(call, attend, group, q, k, v), q, k, v
                else:
                    attended = q, k, v
            del q, k, v
        elif kept is not None:
            one = partial(attend_group, call, attend, group)
            exchanges = {} if here.again else {key: here.exchange(*key) for key in keys}
            here.tokens.update(zip(keys, attend_kept(kept, here.held, group, one, watched, exchanges, *attended)))
            attended = ()
        elif not here.again:
            meanwhile = {} if here.stretch is None else dict(meanwhile=here.stretch.when_needed)
            here.tokens.update(zip(keys, start_chunks([here.exchange(*key) for key in keys], *attended, **meanwhile)))
            attended = ()
    if kept is not None and not here.again:
        kept.agree(watched)


def _segment(done: LayerCall | None, following: LayerCall | None, hidden: Tensor, watch: Watch | None = None) -> Tensor:
    """Walk the program from the finishes of o to the starts of the next layer's q, k and v."""
    here = done or following
    assert here is not None
    roots: list[nn.Module] = []
    if done is not None:
        roots += [done.layer.attention.o_proj, done.layer.norm_mid, done.layer.mlp]
    if following is not None:
        roots += [following.layer.norm_in, *following.layer.attention.inputs]
    called = dict.fromkeys(module for root in roots for module in root.modules() if type(module).forward is not nn.Module.forward)
    given = {} if done is None else done.tokens

    def body(hidden: Tensor, *tokens: Tensor) -> tuple[Tensor, ...]:
        given.update(zip(given, tokens))
        late = [] if done is None or done.mlp_wgrads is None else [done.mlp_wgrads]
        known = late[0].slots if late else ()
        plain = here.layer.attention.plain
        wgrads = Wgrads(roots, here.call.where, plain, at_once=not late, besides=known)
        shadows = Shadows(*late, wgrads)
        outs = _walk(done, following, shadows, hidden, watch)
        shadows.end()
        if following is not None:
            outs += following.tokens.values()
        return tuple(outs)

    outs = iter(call_through(list(called), body, hidden, *given.values()))
    out = hidden if done is None else next(outs)
    if following is not None:
        following.tokens.update(zip(following.tokens, outs))
    return out


def _walk(
    done: LayerCall | None, following: LayerCall | None, shadows: Shadows, hidden: Tensor, watch: Watch | None
) -> list[Tensor]:
    """The chunks of a segment, inside all its modules; returns its hidden states, unless it is in front of the first attention."""
    here = done or following
    assert here is not None
    seq_dim = here.call.geometry.seq_dim
    ranges: list[Ranges] = [(tokens,) for tokens in here.ranges()]
    xs = list(cut(hidden, seq_dim, ranges))
    if watch is not None and xs[0].requires_grad:
        xs = xs if len(xs) > 1 else [hidden.view_as(hidden)]
        watch(xs[0].grad_fn, hidden)
    rotations = [] if following is None else following.rotations()
    of_groups: list[Tensor] = []
    projected: dict[tuple[str, int], Tensor] = {}
    program = here.block.segment if done and following else here.block.tail if done else here.block.head
    for step in program:
        act, of, group, chunk = step
        if act == "finish":
            assert done is not None
            of_groups.append(done.finish_o(step[1:]))
        elif act == "start":
            assert following is not None
            sent = [projected.pop((kind, group)) for kind in of]
            if following.idle:
                continue
            following.tokens[step[1:]] = following.exchange(*step[1:]).start(*sent)
            del sent
        elif act == "project":
            assert following is not None
            with following.named(step):
                x = shadows.of(following.layer.norm_in)(xs[chunk])
                project = following.layer.attention.whole(following.call, x, rotations[chunk], shadows.of)
                projected = {part: project(*part) for part in following.call.schedule.parts}
            del x, project
        elif act == "merge":
            assert done is not None
            with done.named(step):
                o = join(of_groups, 2, [done.call.geometry.heads_of("q", each) for each in done.call.groups]).flatten(2)
                xs[chunk] = xs[chunk] + _with_bias(shadows.of(done.layer.attention.o_proj)(o))
            of_groups.clear()
            del o
        else:
            assert done is not None
            with done.named(step):
                x = shadows.of(done.layer.norm_mid)(xs[chunk])
                xs[chunk] = xs[chunk] + _with_bias(shadows.of(done.layer.mlp)(x))
            del x
    return [] if done is None else [join(xs, seq_dim, ranges)]


def _with_bias(y: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    """What a module returns, some of which leave their bias to be added."""
    if isinstance(y, Tensor):
        return y
    y, bias = y
    return y if bias is None else y + bias
