"""What a user of Accelerate writes: its DeepSpeed sequence-parallel backend, with an ``sp_overlap`` section."""

import itertools
import json
import os
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig

import ds_sp_overlap
from tests.harness.clients import fresh
from tests.harness.models import BATCH, batches, ds_config, overlapped_layers, tiny


def train_with_accelerate(rank, section, stage=2, folder=None, steps=4):
    """Losses and the layers that are overlapped; the config is a dict, or a JSON in ``folder``."""
    tokens = batches(2 * steps).flatten(0, 1)
    examples = [{"input_ids": row, "labels": row.clone(), "position_ids": torch.arange(len(row))} for row in tokens]
    config = ds_config(stage, optimizer="SGD")
    del config["optimizer"]
    if section is not None:
        config["sp_overlap"] = section
    if folder is not None:
        path = Path(folder) / f"{rank}.json"
        path.write_text(json.dumps(config))
        config = str(path)
    arguments = dict(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=ParallelismConfig(
            sp_size=2, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
        ),
    )
    with mock.patch.dict(os.environ, ACCELERATE_USE_DEEPSPEED="true"):  # as `accelerate launch` does
        return _train(arguments, examples, steps)


def _train(arguments, examples, steps):
    model = tiny(initializer_range=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fresh():
        accelerator = Accelerator(**arguments, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
        loader = torch.utils.data.DataLoader(examples, batch_size=BATCH)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        inner = accelerator.unwrap_model(model)
        bound, losses = overlapped_layers(inner), []
        group = model.mpu.get_sequence_parallel_group()
        for batch in itertools.islice(loader, steps):
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
        model.destroy()
        return losses, bound
