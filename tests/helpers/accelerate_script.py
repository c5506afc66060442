"""What a user of Accelerate writes: its DeepSpeed sequence-parallel backend, with an ``sp_overlap`` section."""

import os
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig

import ds_sp_overlap
from tests.helpers.models import BATCH, batches, ds_config, forget_sequence_parallel, overlapped_layers, tiny


@mock.patch.dict(os.environ, ACCELERATE_USE_DEEPSPEED="true")  # as `accelerate launch` does
def train_with_accelerate(rank, section, steps=4):
    """Losses and the layers that are overlapped."""
    tokens = batches(steps).flatten(0, 1)
    examples = [{"input_ids": row, "labels": row.clone(), "position_ids": torch.arange(len(row))} for row in tokens]
    config = ds_config(2, optimizer="SGD")
    del config["optimizer"]
    if section is not None:
        config["sp_overlap"] = section
    model = tiny(initializer_range=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            parallelism_config=ParallelismConfig(
                sp_size=2,
                sp_backend="deepspeed",
                sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa"),
            ),
        )
        loader = torch.utils.data.DataLoader(examples, batch_size=BATCH)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        inner = accelerator.unwrap_model(model)
        bound, losses = overlapped_layers(inner), []
        group = model.mpu.get_sequence_parallel_group()
        for batch in loader:
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
            labels = batch["shift_labels"].flatten()
            share = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
            count = (labels != -100).sum()
            torch.distributed.all_reduce(count, group=group)
            accelerator.backward(share / count)
            optimizer.step()
            optimizer.zero_grad()
            total = share.detach().clone()
            torch.distributed.all_reduce(total, group=group)
            losses.append((total / count).item())
        ds_sp_overlap.disable(inner)
        return losses, bound
    finally:
        forget_sequence_parallel()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()
