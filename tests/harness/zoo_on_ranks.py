"""Runs models with programs of the zoo (`tests.harness.zoo`) on ranks, and compares the overlap with stock Ulysses.

`tests.harness.zoo` judges programs in one process, but some faults show only on several ranks. The overlapped model first runs
while the program's changed lines have no effect, then with the program active. Logits and gradients of the active models are
compared.
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

    Leaves out programs with further arguments, and dropout: a rank with fewer heads draws other
    random numbers.
    """
    return [name for name, program in PROGRAMS.items() if not program.given and not name.startswith("dropout")]


def fill(model, program):
    """Replace a model's layers by layers of the program, equal on every rank; return the modules whose forward is the program."""
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
    """Return {name of the program: (verdict, reason)}; the verdict is "right", "refused" or "wrong"."""
    found = {}
    for name in chosen:
        program, tokens = PROGRAMS[name], batches(1)[0]
        with sequence_parallel_model(2, **EXACT) as (model, group):
            activate(program, fill(model, program))
            try:
                stock = outcome(model, tokens, rank, 2, group)
            except Exception as error:  # of any kind: stock Ulysses can't run the model, so there is nothing to compare
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
            except AssertionError:  # from `worst`: other parameters have gradients than with stock Ulysses
                found[name] = "wrong", "other gradients are there"
    return found
