"""Cuts the schedule of a layer into pieces, and compiles each piece to functions once.

    piece         consecutive steps that one node of autograd runs (`nodes`), forward and backward
    variant       two functions: a piece compiled for given shapes and needed gradients
    operation     a function on named values (`operations`), which the variants call

Note [Pieces]
~~~~~~~~~~~~~
The programs are cut where foreign code runs: at local attention, at projections that are called
whole, at RoPE of the caller. Foreign code runs between two pieces, and autograd records it as
usual. The programs are also cut between the sections of a schedule, since a node keeps its inputs
and its incoming gradients alive until it returns.

Each piece but the last returns an empty tensor, the token, and the next piece takes this token. So
a backward that reaches the last piece runs all pieces in reverse, also where local attention on
this rank does not use q, k or v. In this way, all ranks make the same exchanges.

A layer that has a window is one piece. Its backward recomputes q, k and v, and uses autograd only
for the backward of local attention, one head group at a time.

Note [What a node saves]
~~~~~~~~~~~~~~~~~~~~~~~~
A node saves the values of forward that its backward reads. The node uses ``save_for_backward``, so
that hooks for saved tensors see the values, and autograd detects in-place changes. Every value is
freed after its last use (`flat`). Compiling a variant determines its saved values and last uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ...exchange.streams import refuse_captured
from ...profiling.ranges import is_profiled
from ...schedule import O, Op, Program, Schedule, Step
from ...schedule.steps import section, section_of
from .compiler import Compiler, Kind
from .execution import Call
from .flat import Flat, Name, Operation, flat, gradients

# Around a layer with a window, a checkpoint that saves attention saves the values whose names begin
# with these words.
OF_CHECKPOINT = ("merged", "kept")


@dataclass(eq=False)
class Variant:
    """Holds the compiled functions of a piece, for given shapes, dtypes and needed gradients.

    Attributes:
        needs: For each part exchanged so far, and each input of a node so far: whether the gradient
            is needed.
        kinds: For each input of a node so far: shape and dtype; None for an input that is None.
        forward: Takes the inputs of the node. Returns the outputs of the node, then the values that
            ``held`` names.
        backward: Takes the values that ``saved`` names, then the gradients of the node's outputs.
            Returns the gradient of each input, or None.
        again: In a window: the forward of a recompute, if the checkpoint saved attention. Takes the
            inputs of the node, then o of all groups. Returns the same as ``forward``.
        saved: The names of the values that the node saves for backward.
        held: The names in ``saved``, and those of the values that a checkpoint saves.
        undifferentiable: The indices of the outputs whose gradients are not needed.
    """

    needs: dict[Name, bool]
    kinds: dict[Name, Kind | None]
    forward: Flat
    backward: Flat
    again: Any
    saved: list[Name]
    held: list[Name]
    undifferentiable: list[int]


@dataclass(eq=False)
class Piece:
    """Holds consecutive steps that one node runs, see Note [Pieces].

    Attributes:
        section: The steps' section of the schedule; empty with a window.
        foreign: The steps that run outside of nodes, before the piece.
        forward: The steps of the piece in forward.
        backward: The steps of the piece in backward.
        takes: The names of the node's inputs, unless the piece is an end (`nodes.End`).
        gives: The names of the node's outputs.
        variants: The compiled variants.
    """

    section: str
    foreign: Program
    forward: Program
    backward: Program
    takes: tuple[Name, ...]
    gives: tuple[Name, ...]
    variants: dict[tuple, Variant] = field(default_factory=dict)

    def variant(
        self, call: Call, names: tuple[Name, ...], needs: tuple[bool, ...], given: Sequence[Any]
    ) -> Variant:
        """Return the variant for the given inputs of a node; compile a missing variant.

        Args:
            call: The call; ``call.variant`` is the variant of the previous piece.
            names: The names of the inputs.
            needs: For each input, whether it needs a gradient.
            given: The inputs.
        """
        kinds = []
        for x in given:
            kinds.append(None if x is None else (x.shape, x.dtype))
        # The previous piece's variant was compiled for the form of this call. So in the key, that
        # variant can stand for the form.
        key = (call.variant or call.form, names, needs, is_profiled(), *kinds)
        variant = self.variants.get(key)
        if variant is None:
            refuse_captured(
                call.where,
                "a call is the first of its kind (shapes, dtypes, gradients); run the same step "
                "before",
            )
            if len(self.variants) >= _MOST:
                self.variants.clear()
            variant = self.variants[key] = _compiled(self, call, names, needs, kinds)
        return variant


# The limit on variants of a piece. For instance, each sequence length needs a variant.
_MOST = 256


def _compiled(
    piece: Piece,
    call: Call,
    names: tuple[Name, ...],
    needs: tuple[bool, ...],
    kinds: list[Kind | None],
) -> Variant:
    """Compile a variant.

    Args:
        piece: The piece.
        call: The call.
        names: The names of the inputs.
        needs: For each input, whether it needs a gradient.
        kinds: For each input, its shape and dtype; None for an input that is None.
    """
    needed, kinds_of = dict(zip(names, needs)), dict(zip(names, kinds))
    if call.variant is not None:
        needed, kinds_of = call.variant.needs | needed, call.variant.kinds | kinds_of
    backward = call.schedule.backward if call.schedule.is_windowed else piece.backward
    for step in piece.forward:
        if step.op is not Op.START:
            continue
        for part in step.parts:
            if step.tensors == O:
                needed[part] = needed["token"] or needed.get(part, False)
            elif call.projections is not None:
                needed[part] = call.projections.is_needed(  # guard: only what is needed
                    part, needed
                )
    if call.schedule.is_windowed:
        # ``reaches`` must be equal on all ranks. In the first call, the ranks compare which
        # projections and norms need a gradient. The ranks don't compare ``learned``: users must
        # give the same arguments on all ranks.
        learned = [needed[name] for name in names if name[0] == "learned"]
        reaches = any(learned) or any(needed[kind, 0] for kind in "qkv")
        for group in call.groups:
            needed["o", group] = reaches
        if not reaches:
            # Only Wo and its bias need a gradient, so backward recomputes and exchanges nothing.
            backward = tuple(s for s in backward if s.op is Op.WGRAD and s.tensors == O)
    compiler = Compiler(call, needed, kinds_of)
    program = piece.forward  # guard: starts in the order drawn
    forward = compiler.compile(program)
    back = compiler.compile(backward, backward=True) if any(needs) else []
    of_forward = [*names]
    for operation in forward:
        of_forward += operation.writes
    saved = _saved(back, of_forward)
    held, again = dict.fromkeys(saved), None
    if call.schedule.is_windowed:
        held.update(dict.fromkeys(name for name in of_forward if name[0] in OF_CHECKPOINT))
        attended = [("o", group) for group in call.groups]
        merges = tuple(step for step in piece.forward if step.op is Op.MERGE)
        again = flat(compiler.compile(merges), [*names, *attended], [*piece.gives, *held])
    return Variant(
        needs=needed,
        kinds=kinds_of,
        forward=flat(forward, names, [*piece.gives, *held]),
        backward=flat(back, saved + gradients(piece.gives), gradients(names)),
        again=again,
        saved=saved,
        held=list(held),
        undifferentiable=[
            place
            for place, name in enumerate(piece.gives)
            if name != "token" and not needed.get(name, True)
        ],
    )


def _saved(operations: list[Operation], of_forward: list[Name]) -> list[Name]:
    """Return the names ``of_forward`` that the operations of backward read before writing them."""
    read = {}
    left = set(of_forward)
    for operation in operations:
        read.update(dict.fromkeys(name for name in operation.reads if name in left))
        left.difference_update(operation.writes)
    return list(read)


@lru_cache(maxsize=_MOST)
def pieces_of(schedule: Schedule, ends: tuple[str, ...], given: bool, arrives: bool) -> list[Piece]:
    """Cut the programs of a schedule into pieces, see Note [Pieces]; cached.

    Args:
        schedule: The schedule.
        ends: Those of the sections "inputs" and "output" whose projections are computed part by
            part.
        given: Whether the caller passes q, k and v, so that no step projects.
        arrives: Whether foreign code (RoPE of the caller) changes q, k and v after their exchange.
    """
    if schedule.is_windowed:
        return [Piece("", (), schedule.forward, schedule.backward, takes=(), gives=("y",))]
    # For each piece: the foreign steps before the piece, and the steps of the piece.
    cut: list[tuple[list[Step], list[Step]]] = [([], [])]
    for step in schedule.forward:
        of_projections = step.op is Op.PROJECT and "inputs" not in ends
        if of_projections and given or step.op is Op.MERGE and "output" not in ends:
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
        name = section_of(own[0])
        takes: list[Name] = ["token"]
        gives: list[Name] = ["token"]
        if name in ends:
            backward = section(schedule.backward, name)  # guard: the wgrad comes last
            gives = ["y"] if name == "output" else gives
        else:
            backward = tuple(step.mirror for step in reversed(own))  # guard: in the order drawn
            for step in own:
                if step.on_wire:
                    (takes if step.op is Op.START else gives).extend(step.parts)
        steps = tuple(foreign), tuple(own), backward
        pieces.append(Piece(name, *steps, tuple(takes), tuple(gives)))
    return pieces
