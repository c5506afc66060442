"""A chain of layers trained by DeepSpeed: gradients of every ZeRO stage equal the whole sequence's, and layers stay in one chain."""

from dataclasses import replace

import deepspeed
import pytest
import torch

from ds_sp_overlap.schedule import by_chunks, order
from tests.harness import blocks, layers
from tests.harness.blocks import Blocks
from tests.harness.guards import Guard, Watched, must_notice
from tests.harness.models import ds_config
from tests.harness.ranks import on_ranks
from tests.harness.transports import Recording

SHAPE = Blocks(4, 2, 8, 2, (6, 4), norms=True, chunks=2, dtype=torch.float32, config={"head_groups": 2})
STEPS = 4  # the first starts nothing ahead; ZeRO-3 learns the order of the modules in the second


def trained(rank, stage, accumulation, recompute):
    """The largest relative difference of a gradient of the last step, and the order of its forward's exchanges."""
    whole, mine, mover = blocks.Model(SHAPE), blocks.Model(SHAPE), Recording()
    x, dy = layers.whole_inputs(SHAPE)
    (whole(x) * dy).sum().backward()
    blocks.enchain(mine, replace(SHAPE, recompute=recompute), rank, torch.distributed.group.WORLD, mover)
    config = ds_config(stage, accumulation, optimizer="SGD", gradient_clipping=0.0)
    config["optimizer"]["params"]["lr"] = 0.0
    engine, *_ = deepspeed.initialize(model=mine, config=config)
    local_x, local_dy = (layers.my_slice(SHAPE, rank, t) for t in (x, dy))
    errors = {}
    for step in range(STEPS):
        for micro in range(accumulation):
            mover.log.clear()
            y = engine(local_x.clone().requires_grad_())
            forward = list(mover.log)
            engine.backward((y * local_dy).sum())
            if step == STEPS - 1 and micro == accumulation - 1:
                for name, parameter in engine.module.named_parameters():
                    got = 2 * deepspeed.utils.safe_get_full_grad(parameter)  # two ranks are averaged
                    errors[name] = layers.reference.relative_error(got, whole.get_parameter(name).grad)
            engine.step()
    engine.destroy()
    return max(errors.values()), len(errors), forward


@pytest.mark.singles
@pytest.mark.parametrize("recompute", ["none", "all", "but attention"])
@pytest.mark.parametrize("stage,accumulation", [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1), (3, 2)])
def test_gradients_of_every_stage_equal_the_whole_sequences(stage, accumulation, recompute):
    """fp32: 1e-6 are roundings of sums in another order; a mistake gives more than 1e-3.

    In fp64 there is nothing more to see: DeepSpeed refuses it at stage 0, and keeps gradients in fp32 from stage 1 on.
    """
    chain = by_chunks(("qkv", "q"), 2).chain(blocks.LAYERS)  # two KV heads on two ranks
    for error, count, forward in on_ranks(2, trained, stage, accumulation, recompute):
        assert error < 1e-5 and count == 3 * 11
        assert forward == order(chain, chain.forward)


def faults_of_zero_3(rank):
    error, *_ = trained(rank, 3, 1, "all")
    return [] if error < 1e-5 else [f"gradients off by {error}"]


def test_the_suite_notices_weights_that_are_gathered_for_backward_before_the_layer_is_run_again():
    must_notice(Watched(Guard("run again, then gathered for backward", without="pass"), faults_of_zero_3, raises=True))
