"""Records a training run: loss and gradient norm of each step, gradients of the first step, final parameters, all-to-alls.

MEGATRON_RECORD names the file; rank 0 writes it after step MEGATRON_RECORD_STEPS.
"""

import os
from collections import Counter

import torch


def install():
    path = os.environ.get("MEGATRON_RECORD")
    if path is None:
        return
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine

    # "exchanges" counts all-to-alls by "async" and "sync".
    run = {"losses": [], "norms": [], "gradients": {}, "parameters": {}, "exchanges": Counter()}
    last, micro = int(os.environ["MEGATRON_RECORD_STEPS"]), []
    backward, step, exchange = DeepSpeedEngine.backward, DeepSpeedEngine.step, torch.distributed.all_to_all_single

    def recording_backward(self, loss, *args, **kwargs):
        micro.append(loss.item())
        return backward(self, loss, *args, **kwargs)

    def recording_step(self, *args, **kwargs):
        boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            found = {name: deepspeed.utils.safe_get_full_grad(p) for name, p in self.module.named_parameters()}
            found = {name: gradient.double() for name, gradient in found.items() if gradient is not None}
            run["norms"].append(sum(gradient.square().sum().item() for gradient in found.values()) ** 0.5)
            run["gradients"] = run["gradients"] or {name: gradient.clone() for name, gradient in found.items()}
        result = step(self, *args, **kwargs)
        if boundary:
            run["losses"].append(sum(micro) / len(micro))
            micro.clear()
            if len(run["losses"]) == last:
                with deepspeed.zero.GatheredParameters(list(self.module.parameters())):
                    run["parameters"] = {name: p.detach().float().clone() for name, p in self.module.named_parameters()}
                if torch.distributed.get_rank() == 0:
                    torch.save(run, path)
        return result

    def recording_exchange(*args, **kwargs):
        run["exchanges"]["async" if kwargs.get("async_op") else "sync"] += 1
        return exchange(*args, **kwargs)

    DeepSpeedEngine.backward, DeepSpeedEngine.step = recording_backward, recording_step
    torch.distributed.all_to_all_single = recording_exchange
