"""Runs the attention of a layer in a chain, between the exchanges of all its chunks."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..attention.arguments import bind_arguments
from ..attention.runtime.deferred import Wgrads
from ..attention.runtime.execution import attend_group, attend_in_pieces
from ..attention.runtime.recorded import Gathering
from ..exchange.chunks import ChunkedExchange
from ..exchange.exchange import Exchange, Half, run_halves
from ..schedule import Exchanged, Op, Step, without_o
from .layer_call import LayerCall
from .saved_attention import AttendSaved


def walk_attention(here: LayerCall, hidden: Tensor) -> None:
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
            here.call.run_by(without_o(here.block))


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
                chunked.meanwhile = here.region.recompute_if_alive
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
