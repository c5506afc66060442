"""Writes down what a training run did: loss and gradient norm of every step, parameters at the end, exchanges.

MEGATRON_RECORD names the file; rank 0 writes it after step MEGATRON_RECORD_STEPS.
"""

import os
from collections import Counter

import torch


class Run:
    def __init__(self):
        self.losses, self.norms, self.parameters, self.gradients = [], [], {}, {}  # gradients of the first step
        self.exchanges, self.sent_bytes = Counter(), Counter()  # "async" and "sync"
        self.micro = []


def _gradient(parameter):
    from deepspeed.utils import safe_get_full_grad

    grad = safe_get_full_grad(parameter)
    return None if grad is None else grad.double()


def install():
    path = os.environ.get("MEGATRON_RECORD")
    if path is None:
        return
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine

    run, last = Run(), int(os.environ["MEGATRON_RECORD_STEPS"])
    backward, step, exchange = DeepSpeedEngine.backward, DeepSpeedEngine.step, torch.distributed.all_to_all_single

    def recording_backward(self, loss, *args, **kwargs):
        run.micro.append(loss.item())
        return backward(self, loss, *args, **kwargs)

    def recording_step(self, *args, **kwargs):
        boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            gradients = {name: g for name, p in self.module.named_parameters() if (g := _gradient(p)) is not None}
            run.norms.append(sum(g.square().sum().item() for g in gradients.values()) ** 0.5)
            run.gradients = run.gradients or {name: g.clone() for name, g in gradients.items()}
        result = step(self, *args, **kwargs)
        if boundary:
            run.losses.append(sum(run.micro) / len(run.micro))
            run.micro.clear()
            if len(run.losses) == last:
                with deepspeed.zero.GatheredParameters(list(self.module.parameters())):
                    run.parameters = {name: p.detach().float().clone() for name, p in self.module.named_parameters()}
                if torch.distributed.get_rank() == 0:
                    torch.save(vars(run), path)
        return result

    def recording_exchange(output, input, *args, **kwargs):
        kind = "async" if kwargs.get("async_op") else "sync"
        run.exchanges[kind] += 1
        run.sent_bytes[kind] += input.numel() * input.element_size()
        return exchange(output, input, *args, **kwargs)

    DeepSpeedEngine.backward, DeepSpeedEngine.step = recording_backward, recording_step
    torch.distributed.all_to_all_single = recording_exchange
