"""Judge whether a model whose layers run a program of the zoo (`tests.harness.zoo`) is what stock Ulysses makes of it, on these ranks.

A reading that is right in one process may still be driven wrongly. So the same ranks run the model under DeepSpeed's own Ulysses, and
overlapped: first while the program's line does nothing, then active, which is when logits and gradients are compared.
"""

import torch

import ds_sp_overlap
from tests.harness.models import EXACT, batches, outcome, sequence_parallel_model, worst
from tests.harness.zoo import PROGRAMS, build, change

MODES = {
    "layer": {"head_groups": 2},
    "window": {"head_groups": 2, "window": 1},
    "kept": {"head_groups": 2, "checkpointing": "keep"},
}


def names():
    """Return the names of the programs that a model can run.

    Leaves out programs with arguments of their own, and those with dropout: a rank with fewer heads
    draws other random numbers.
    """
    return [name for name, program in PROGRAMS.items() if not program.given and not name.startswith("dropout")]


def fill(model, program):
    """Put layers of the program into a model, alike on every rank; returns the modules whose forward it is."""
    torch.manual_seed(0)
    built = [build(program, model.config) for _ in model.model.layers]
    for at, (layer, _) in enumerate(built):
        layer.self_attn.layer_idx = at
        model.model.layers[at] = layer
    return [module for _, module in built]


@torch.no_grad()
def activate(program, modules):
    for module in modules:
        change(module, program.activate)


def verdicts(rank, chosen, config):
    """Say of each of the programs: "right", "refused" or "wrong", and why."""
    found = {}
    for name in chosen:
        program, tokens = PROGRAMS[name], batches(1)[0]
        with sequence_parallel_model(2, **EXACT) as (model, group):
            activate(program, fill(model, program))
            try:
                stock = outcome(model, tokens, rank, 2, group)
            except Exception as error:  # of any kind: it can't be trained at all
                found[name] = "refused", f"by stock: {error}"
                continue
            modules = fill(model, program)
            try:
                ds_sp_overlap.enable(model, config, group)
                outcome(model, tokens, rank, 2, group)
                activate(program, modules)
                error = worst(outcome(model, tokens, rank, 2, group), stock)
                found[name] = "right" if error < 1e-9 else "wrong", f"{error:.1e}"
            except (RuntimeError, ValueError) as error:
                found[name] = "refused", str(error)
            except AssertionError:  # other gradients than stock has
                found[name] = "wrong", "other gradients are there"
    return found
