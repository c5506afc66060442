"""PyTorch's own check of what the operators say they do to their arguments."""

import torch


def opchecks(namespace):
    op = getattr(torch.ops, namespace)
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    tables = torch.randn(3, 4), torch.randn(3, 4)
    starts, stops = [0, 2, 0, 0, 0, 1], [2, 4, 1, 2, 1, 2]
    wires = [torch.zeros(96), torch.zeros(72), torch.zeros(48)]
    calls = {
        "pack": (q, 1, [0, 1], [2, 4], torch.zeros(120)),
        "unpack": (torch.zeros(120), 1, [0, 1], [2, 4], q.clone()),
        "pack_qkv": ([q, k, k], [torch.zeros(4, 8), None, None], *tables, False, 2, starts, stops, wires),
        "unpack_qkv": (wires, *tables, True, 2, starts, stops, [q.clone(), k.clone(), k.clone()]),
    }
    return {name: torch.library.opcheck(getattr(op, name).default, call) for name, call in calls.items()}
