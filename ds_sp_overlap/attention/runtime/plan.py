"""Runs a layer by lists of operations that are compiled from its schedule once.

    piece         consecutive steps that one node of autograd runs, in forward and in backward
    variant       the operations of a piece, for what needs a gradient: two flat lists
    operation     a function of registers (`operations`)

Note [Pieces]
~~~~~~~~~~~~~
The programs are cut where foreign code runs: at local attention, at projections that are called
whole, at RoPE of the caller. Foreign code runs between two pieces, once, in the graph outside, as
everywhere else in PyTorch. They are cut between the sections of a schedule too: a node keeps its
inputs and its incoming gradients alive until it returns.

Each piece but the last returns an empty tensor, the token, which the next piece takes. So a
backward that reaches the last piece runs all of them, in reverse, on every rank: whatever local
attention reads on one rank, all ranks exchange the same.

A layer that has a window is one piece. Its backward computes q, k and v again, and asks autograd
for the backward of local attention alone, one head group at a time.

Note [What a node saves]
~~~~~~~~~~~~~~~~~~~~~~~~
A node saves the registers that its backward reads and none of its operations writes. It does so by
``save_for_backward``: hooks for saved tensors see them, and autograd notices changes. A register is
let go of behind its last use. Both are found when a variant is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ...exchange.exchange import Node, refuse_second_derivatives
from ...profiling.ranges import is_profiled
from ...schedule import O, Op, Part, Program, Schedule, Step, Windowed, without_o
from ...schedule.steps import section_of
from ..memory.checkpoint_cache import CheckpointPass
from ..memory.forward_state import Random
from .execution import Call
from .operations import Operations
from .registers import Name, Names, Operation, listed

# The first words of registers that hold no tensor, of those that hold a list of tensors, and of
# those that backward alone writes.
_OBJECTS, _LISTS = ("attended",), ("kept",)
_OF_BACKWARD = ("d", "d rows", "d heads", "pieces")


@dataclass(eq=False)
class Variant:
    """The operations of a piece, for what needs a gradient.

    Attributes:
        names: The registers.
        needs: By name, whether the gradient of each part that was exchanged so far is needed, and
            of each input.
        head_dims: By name, the head dim of each part that was exchanged so far.
        forward: What runs in forward.
        again: What runs in forward where a checkpoint has saved attention.
        backward: What runs in backward.
        inputs: The registers of what the node is given.
        outputs: The registers of what it returns, behind the token.
        undifferentiable: The places of those of ``outputs`` whose gradients nobody needs.
        saved: The registers that are saved: of tensors, of lists of tensors, of anything else.
        gradients: The registers of the gradients of ``outputs``.
        results: The registers of the gradients of ``inputs``; None for one that has none.
    """

    names: Names
    needs: dict[Name, bool]
    head_dims: dict[Name, int]
    forward: list[Operation]
    again: list[Operation]
    backward: list[Operation]
    inputs: list[int]
    outputs: list[int]
    undifferentiable: list[int]
    saved: tuple[list[int], list[int], list[int]]
    gradients: list[int]
    results: list[int | None]

    def taking(self, given: Sequence[Any]) -> list[Any]:
        """Return registers with the inputs of the node in place."""
        registers: list[Any] = [None] * len(self.names)
        for index, x in zip(self.inputs, given):
            registers[index] = x
        return registers


@dataclass(eq=False)
class Piece:
    """Consecutive steps that one node runs, see Note [Pieces].

    Attributes:
        section: The section of the schedule that the steps are from.
        foreign: The steps that run in front of it, in the graph outside.
        forward: Its steps in forward.
        backward: Its steps in backward.
        takes: What it takes from the graph outside, behind the token and in front of parameters.
        gives: What it returns to the graph outside, behind the token.
        is_last: Whether there is none behind it.
    """

    section: str
    foreign: Program
    forward: Program
    backward: Program
    takes: tuple[Part, ...] = ()
    gives: tuple[Part, ...] = ()
    is_last: bool = False

    def __post_init__(self) -> None:
        self._variants: dict[tuple, Variant] = {}
        # Whether it returns the layer's output, and no token.
        self.returns_y = self.is_last and not self.gives
        # The names of what it takes.
        self.names = tuple([("value", *part) for part in self.takes])

    def variant(
        self, call: Call, names: tuple[Name, ...], needs: tuple[bool, ...], given: Sequence[Any]
    ) -> Variant:
        """Return the variant for the inputs of a node; compile it in the first call of its kind.

        Args:
            call: The call, whose ``variant`` is that of the piece before.
            names: Of the inputs.
            needs: For the token and each input, whether it needs a gradient.
            given: The inputs.
        """
        profiled = is_profiled()
        dtypes = tuple([x.dtype for x in given[:2] if x is not None])
        shapes = tuple([None if x is None else x.shape for x in given])
        key = (call.variant, call.form, call.schedule, names, needs, shapes, dtypes, profiled)
        variant = self._variants.get(key)
        if variant is None:
            if len(self._variants) >= _MOST:
                self._variants.clear()
            variant = _compiled(self, call, names, needs, shapes, dtypes, profiled)
            self._variants[key] = variant
        return variant


# Variants that a piece keeps: one for each length of the sequence, among others.
_MOST = 256


def _compiled(
    piece: Piece,
    call: Call,
    names: tuple[Name, ...],
    needs: tuple[bool, ...],
    shapes: tuple[Any, ...],
    dtypes: tuple[torch.dtype | None, ...],
    profiled: bool,
) -> Variant:
    """Compile a variant; the arguments are those of `Piece.variant` and what it found."""
    registers, of_inputs = Names(), dict(zip(names, needs[1:]))
    inputs = [registers(*name) for name in names]
    of_parts = dict(call.variant.needs) if call.variant else {}
    head_dims = dict(call.variant.head_dims) if call.variant else {}
    of_parts.update(of_inputs)
    backward = piece.backward
    if call.is_windowed:
        backward = call.schedule.backward
    for step in piece.forward:
        if step.op is not Op.START:
            continue
        for part in step.parts:
            name = ("value", *part)
            if step.tensors == O:
                of_parts[name] = needs[0] or of_inputs.get(name, False)
            elif call.projections is not None:
                of_parts[name] = call.projections.is_needed(  # guard: only what is needed
                    part, of_inputs
                )
    if call.is_windowed:
        # Alike on all ranks: which projections and norms learn was compared in the first call.
        # Which tensors attention learns was not; no rank may learn others.
        learned = [needed for name, needed in of_inputs.items() if name[0] == "learned"]
        reaches = any(learned) or any(of_parts["value", kind, 0] for kind in "qkv")
        for group in call.groups:
            of_parts["value", "o", group] = reaches
        if not reaches:
            # Only dWo and its bias then: nothing is recomputed or exchanged.
            backward = tuple(s for s in backward if s.op is Op.WGRAD and s.tensors == O)
    of_names: dict[Name, Any] = dict(zip(names, shapes))
    of_names.update(zip((("x dtype",), ("product dtype",)), dtypes))
    compiler = Operations(registers, call, of_parts, of_names, head_dims)
    program = piece.forward  # guard: starts in the order drawn
    forward = compiler.compile(program, False, profiled)
    again = compiler.compile(call.schedule.recompute, False, profiled)
    given_back: list[Name] = [("value", *part) for part in piece.gives]
    if piece.returns_y:
        given_back = [("y",)]
    outputs = [registers(*name) for name in given_back]
    gradients = [registers("d", *name) for name in given_back]
    back: list[Operation] = []
    if any(needs):
        back = compiler.compile(backward, True, profiled)
    saved, written = _saved(back, list(registers))
    of_results = [registers("d", *name) for name in names]
    results = [index if index in written else None for index in of_results]
    keep = {*outputs, *(index for of_kind in saved for index in of_kind)}
    for name, index in registers.items():
        # A checkpoint takes what attention made.
        if call.is_windowed and name[0] in ("merged", "attended", "kept"):
            keep.add(index)
    return Variant(
        names=registers,
        needs=of_parts,
        head_dims=head_dims,
        forward=listed(forward, keep),
        again=listed(again, keep),
        backward=listed(back, set(of_results)),
        inputs=inputs,
        outputs=outputs,
        undifferentiable=[
            place for place, name in enumerate(given_back) if not of_parts.get(name, True)
        ],
        saved=saved,
        gradients=gradients,
        results=results,
    )


def _saved(
    operations: list[Operation], names: list[Name]
) -> tuple[tuple[list[int], list[int], list[int]], set[int]]:
    """Return what a backward reads from forward, by kind; and what the backward writes."""
    read: dict[int, None] = {}
    written: set[int] = set()
    for operation in operations:
        for index in operation.reads:
            if index not in written and names[index][0] not in _OF_BACKWARD:
                read[index] = None
        written.update(operation.writes)
    tensors, lists, objects = list[int](), list[int](), list[int]()
    for index in read:
        word = names[index][0]
        (objects if word in _OBJECTS else lists if word in _LISTS else tensors).append(index)
    return (tensors, lists, objects), written


def run(operations: list[Operation], registers: list, call: Call) -> None:
    """Run operations, and let go of each register behind its last use."""
    get = registers.__getitem__
    for function, reads, writes, dead in operations:
        made = function(call, *map(get, reads))
        if len(writes) == 1:
            registers[writes[0]] = made
        else:
            for index, x in zip(writes, made):
                registers[index] = x
        del made
        for index in dead:
            registers[index] = None  # guard: let go behind its last use


def _save(ctx: Any, variant: Variant, registers: list[Any]) -> None:
    """Save what the backward of a variant reads, see Note [What a node saves]."""
    tensors, lists, objects = variant.saved
    ctx.variant, of = variant, registers.__getitem__
    ctx.objects, of_lists = list(map(of, objects)), list(map(of, lists))
    ctx.sizes = list(map(len, of_lists))
    saved = list(map(of, tensors))  # guard: unchanged
    ctx.save_for_backward(*saved, *chain(*of_lists))


def _restored(ctx: Any, gradients: Sequence[Tensor | None]) -> list[Any]:
    """Return the registers of a backward, with what was saved and the incoming gradients."""
    variant, saved = ctx.variant, iter(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    registers: list[Any] = [None] * len(variant.names)
    tensors, lists, objects = variant.saved
    for index in tensors:
        registers[index] = next(saved)
    for index, size in zip(lists, ctx.sizes):
        registers[index] = list(islice(saved, size))
    for index, x in zip(objects, ctx.objects):
        registers[index] = x
    for index, gradient in zip(variant.gradients, gradients):
        registers[index] = gradient
    return registers


def _results(variant: Variant, registers: list[Any]) -> list[Tensor | None]:
    return [None if index is None else registers[index] for index in variant.results]


class _Node(Node):
    """The node of a piece: its token, and the inputs that ``names`` names."""

    @staticmethod
    def forward(ctx, piece: Piece, call: Call, names: tuple[Name, ...], token, *given):
        # A gradient that one rank lacks is zero, as autograd makes it: other ranks exchange theirs.
        variant = piece.variant(call, names, ctx.needs_input_grad[3:], given)
        registers = variant.taking(given)
        run(variant.forward, registers, call)
        ctx.call = call
        _save(ctx, variant, registers)
        outputs = list(map(registers.__getitem__, variant.outputs))
        call.variant = variant
        if variant.undifferentiable:
            ctx.mark_non_differentiable(*[outputs[place] for place in variant.undifferentiable])
        if piece.returns_y:
            return outputs[0]
        return call.empty.new_empty(0), *outputs

    @staticmethod
    def backward(ctx, *gradients):
        call, variant = ctx.call, ctx.variant
        refuse_second_derivatives(call.where)
        # Empty: it only makes autograd run the piece before.
        token = call.empty if ctx.needs_input_grad[3] else None
        device = call.autocast["device_type"]
        registers = _restored(ctx, gradients[len(gradients) - len(variant.gradients) :])
        del gradients
        if torch.is_autocast_enabled(device):
            # That of backward alone: the operands of products were cast in forward.
            with torch.autocast(device, enabled=False):
                run(variant.backward, registers, call)
        else:
            run(variant.backward, registers, call)
        return None, None, None, token, *_results(variant, registers)


def run_piece(
    piece: Piece, call: Call, names: tuple[Name, ...], token: Any, given: list[Any]
) -> Any:
    """Run a piece, as a node where autograd records; return as the node does."""
    # Forward-mode differentiation, which may run without gradients, is refused by the node.
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return _Node.apply(piece, call, names, token, *given)
    call.variant = piece.variant(call, names, (False,) * (1 + len(given)), given)
    registers = call.variant.taking(given)
    run(call.variant.forward, registers, call)
    outputs = [registers[index] for index in call.variant.outputs]
    if piece.returns_y:
        return outputs[0]
    return call.empty, *outputs


class _Window(Node):
    """The one node of a layer that has a window; its inputs are those that ``names`` names.

    Backward walks the program of `Windowed`: it computes q, k and v again.
    """

    @staticmethod
    def forward(ctx, piece, call, names, checkpoint, offload, recorded, *given):
        """Walk the forward program, or only its merges where a checkpoint has saved attention."""
        needs = (False, *(recorded and needed for needed in ctx.needs_input_grad[6:]))
        variant = piece.variant(call, names, needs, given)
        registers, device = variant.taking(given), given[0].device
        if checkpoint is not None and checkpoint.is_recompute:
            # The checkpoint has saved what attention made: only the merges run again. This node has
            # no backward. It saves tensors for the checkpoint, which hands them to the node of the
            # first run, whose backward runs.
            tensors, (rest, after) = checkpoint.take(call.where)
            for name, index in variant.names.items():
                made = rest.get(name, tensors.get(name))
                if name[0] == "merged":
                    made = made.view(*given[0].shape[:2], made.shape[-1])
                    registers[variant.names["value", "o", name[1]]] = made
                elif made is not None:
                    registers[index] = made
            run(variant.again, registers, call)
            if after is not None:
                after.set()  # guard: what is drawn behind attention is as before
        else:
            before = Random.now(device) if checkpoint is not None else None
            run(variant.forward, registers, call)
            if checkpoint is not None:
                after = Random.now(device)
                tensors, rest = {}, {}
                for name, index in variant.names.items():
                    if name[0] in ("merged", "kept"):
                        tensors[name] = registers[index]
                    elif name[0] == "attended":
                        # The checkpoint saves no graphs, which may lead to the checkpoint itself.
                        # Backward uses the graphs of this node.
                        rest[name] = replace(  # guard: nothing circular
                            registers[index], edges=None
                        )
                moved = None if after == before else after
                checkpoint.put(call.where, tensors, (rest, moved), offload, call.local.tensors)
        attended = [registers[i] for name, i in variant.names.items() if name[0] == "attended"]
        attended = [record for record in attended if record is not None]
        if attended:
            reads_o = any(record.reads_o for record in attended)
            foreign = next((record.foreign for record in attended if record.foreign), "")
            # Collective in the first call of a kind.
            if not call.local.agree(reads_o, foreign):
                call.schedule = without_o(call.schedule)
                variant = piece.variant(call, names, needs, given)
        ctx.call = call
        _save(ctx, variant, registers)
        return registers[variant.outputs[0]]

    @staticmethod
    def backward(ctx, dy):
        """Walk the backward program in the autocast state of forward."""
        call, variant = ctx.call, ctx.variant
        refuse_second_derivatives(call.where)
        registers = _restored(ctx, (dy,))
        with torch.autocast(**call.autocast):  # guard: q, k and v are made as before
            run(variant.backward, registers, call)
        return None, None, None, None, None, None, *_results(variant, registers)


@dataclass
class End:
    """A projection of a layer that is computed part by part: those of q, k and v, or that of o.

    Attributes:
        modules: The modules to call with `linear.call_through`, so that their weights are whole.
        names: The names of the registers of ``tensors``.
        tensors: Gives weights and biases, and what else the end reads; called inside of the call.
    """

    modules: list[nn.Module]
    names: tuple[Name, ...]
    tensors: Callable[[], list[Any]]


def run_end(piece: Piece, call: Call, end: End, first: Tensor) -> Any:
    """Run the piece of an end, inside of the call of its modules, which hand on ``first``.

    That is x for the projections of q, k and v, else the token.
    """
    if piece.section == "inputs":
        return run_piece(piece, call, end.names, None, [first, *end.tensors()])
    return run_piece(piece, call, end.names, first, end.tensors())


def run_window(
    piece: Piece, call: Call, end: End, checkpoint: CheckpointPass | None, offload: bool, x: Tensor
) -> Tensor:
    """Run the piece of a window, inside of the call of its modules, which hand on ``x``."""
    how = checkpoint, offload, torch.is_grad_enabled()
    return _Window.apply(piece, call, end.names, *how, x, *end.tensors())


# Pieces by the identity of their schedule, which they keep.
_pieces: dict[tuple, tuple[Schedule, list[Piece]]] = {}


def pieces_of(
    schedule: Schedule, inputs: bool, output: bool, given: bool = False, arrives: bool = False
) -> list[Piece]:
    """Cut the programs of a schedule into pieces, see Note [Pieces].

    Args:
        schedule: The schedule.
        inputs: Whether the projections of q, k and v are computed part by part.
        output: Whether the output projection is.
        given: Whether q, k and v are there before the first piece.
        arrives: Whether foreign code changes q, k and v on arrival.
    """
    key = id(schedule), inputs, output, given, arrives
    if key not in _pieces:
        if len(_pieces) >= _MOST:
            _pieces.clear()
        _pieces[key] = schedule, _cut(schedule, inputs, output, given, arrives)
    return _pieces[key][1]


def _cut(schedule: Schedule, inputs: bool, output: bool, given: bool, arrives: bool) -> list[Piece]:
    """Cut the programs of a schedule; the arguments are those of `pieces_of`."""
    if isinstance(schedule, Windowed):
        return [Piece("", (), schedule.forward, schedule.backward, is_last=True)]
    # For each piece, the foreign steps in front of it, and its own.
    cut: list[tuple[list[Step], list[Step]]] = [([], [])]
    for step in schedule.forward:
        of_projections = step.op is Op.PROJECT and not inputs
        if of_projections and given or step.op is Op.MERGE and not output:
            continue
        is_foreign = of_projections or step.op is Op.ATTEND
        foreign, own = cut[-1]
        if own and (is_foreign or section_of(own[-1]) != section_of(step)):
            cut.append(([], []))
        cut[-1][not is_foreign].append(step)
        if arrives and step.op is Op.FINISH and step.tensors != O:
            cut.append(([step], []))
    pieces = []
    for foreign, own in cut:
        section = section_of(own[0])
        backward = tuple(step.mirror for step in reversed(own))  # guard: in the order drawn
        if section == "inputs" and inputs:
            backward = schedule.backward_of_inputs
        if section == "output" and output:
            backward = schedule.backward_of_output  # guard: the wgrad comes last
        takes, gives = list[Part](), list[Part]()
        for step in own:
            if step.op is Op.START and (step.tensors == O or not inputs):
                takes += step.parts
            if step.op is Op.FINISH and (step.tensors != O or not output):
                gives += step.parts
        of_piece = tuple(foreign), tuple(own), backward, tuple(takes), tuple(gives)
        pieces.append(Piece(section, *of_piece, is_last=own is cut[-1][1]))
    return pieces
