"""Simulate steps in which a projection is one product for all head groups, relative to steps with one product for each group.

    python benchmarks/whole_products.py

Fewer and larger products save calls of the host. But then no group's exchange can begin before the projection of all groups, and no
output projection before o of all groups has arrived. Simulates forward and backward of the attention layer on 8 H100, without an
MLP, and with a host and copies that take no time.
"""

import itertools
import sys
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.simulated import Costs, Rates  # noqa: E402
from ds_sp_overlap.schedule import O, Op, Step, by_head_groups, simulate  # noqa: E402
from ds_sp_overlap.tools.planner.costs import LayerShape  # noqa: E402

LAYERS = {"Llama-1B": (2048, 32, 8, 64), "Llama-8B": (4096, 32, 8, 128), "Llama-70B": (8192, 64, 8, 128)}
RANKS, TOKENS, GB_S = 8, (1024, 2048, 8192, 32768), (22.5, 45, 340)
MATMUL, ATTENTION = 600e12, 400e12


def whole_products(groups: int) -> tuple[list[Step], list[Step]]:
    """Return forward and backward of G head groups, with one product for each projection; group 0 sends all KV heads."""

    def of_groups(op, what, grad, order):
        return [Step(op, what, grad, group) for group in order]

    q, first, last = ("q",), range(groups), range(groups)[::-1]
    forward = [*of_groups(Op.PROJECT, q, False, first), Step(Op.START, q, False, 0)]
    for kind in "kv":
        forward += [Step(op, (kind,), False, 0) for op in (Op.PROJECT, Op.START)]
    forward += of_groups(Op.START, q, False, first[1:])
    for group in first:
        forward += [Step(Op.FINISH, (kind,), False, group) for kind in ("q" if group else "qkv")]
        forward += [Step(Op.ATTEND, O, False, group), Step(Op.START, O, False, group)]
    forward += [*of_groups(Op.FINISH, O, False, first), *of_groups(Op.MERGE, O, False, first)]
    backward = [*of_groups(Op.DGRAD, O, True, last), *of_groups(Op.START, O, True, last), *of_groups(Op.WGRAD, O, True, first)]
    for group in last:
        backward += [Step(Op.FINISH, O, True, group), Step(Op.ATTEND, O, True, group)]
        backward += [Step(Op.START, (kind,), True, group) for kind in ("q" if group else "vkq")]
    for kind in "vk":
        backward += [Step(op, (kind,), True, 0) for op in (Op.FINISH, Op.DGRAD, Op.WGRAD)]
    backward += of_groups(Op.FINISH, q, True, last)
    return forward, [*backward, *of_groups(Op.DGRAD, q, True, last), *of_groups(Op.WGRAD, q, True, last)]


def main() -> None:
    rows = []
    for (name, (width, heads, kv_heads, head_dim)), tokens, gb_s in itertools.product(LAYERS.items(), TOKENS, GB_S):
        layer, ratios = LayerShape(width, heads, kv_heads, head_dim, tokens * RANKS, RANKS), []
        for groups in (2, 4):
            costs = Costs(layer, Rates(MATMUL, ATTENTION, 1e9 * gb_s, 0.0), groups)
            schedule = by_head_groups(costs.geometry.kinds)
            assert costs.geometry.kinds[1:] == ("q",) * (groups - 1)
            parted, whole = (
                simulate(schedule, (*forward, *backward), costs.ms).step_ms
                for forward, backward in ((schedule.forward, schedule.backward), whole_products(groups))
            )
            ratios.append(f"{whole / parted:.3f}")
        rows.append((name, tokens, gb_s, *ratios))
    print(tabulate(rows, ("layer", "tokens a rank", "GB/s", "G = 2", "G = 4")))


if __name__ == "__main__":
    main()
