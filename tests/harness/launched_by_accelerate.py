"""A training script without a word of this package: ``accelerate launch ... -m ds_sp_overlap run -m tests.harness.launched_by_accelerate``.

Prints the layers that were overlapped and the loss of a step.
"""

import deepspeed
import torch
from accelerate import Accelerator

from tests.harness.models import batches, overlapped_layers, tiny

if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it would be built here
    accelerator, model = Accelerator(), tiny()
    examples = [{"input_ids": row, "labels": row, "position_ids": torch.arange(len(row))} for row in batches(2).flatten(0, 1)]
    loader = torch.utils.data.DataLoader(examples, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), ignore_index=-100)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    # One text: the ranks share standard output, and several would be mixed with those of another rank.
    accelerator.print(f"overlapped {overlapped_layers(model)} trained {bool(loss.isfinite())}")
