"""Moves exchanges by the GPUs' copy engines, inside one node, so that exchanges take no SM.

The config selects this transport by ``"transport": "copy_engine"``. The transport has not yet run
on several GPUs.

`CopyEngine` takes the first of these two engines that every rank has:

    fast-ulysses   its all-to-all of pitched copies (https://github.com/triple-mu/fast-ulysses,
                   docs/api.md)
    NCCL           its zero-CTA all-to-all,
                   https://docs.pytorch.org/docs/2.11/symmetric_memory.html#copy-engine-collectives

Both engines move equal parts only. Exchanges whose parts differ go through `C10d`. All ranks choose
alike between engine and `C10d`, since uneven heads or lengths make the parts differ on every rank.
(The exception would be ranks that share query heads; `call_geometry` refuses such layers.)
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..warn import warn_once
from .layout import all_equal
from .transport import C10d, Handle, Sizes, backend_of, communicator

OLDEST_NCCL = (2, 28)


class FastUlysses:
    """Moves an exchange by mode 1 of fast-ulysses, as ``[1, P, 1, bytes]``: row p goes to rank p.

    Costs one copy into a buffer before the transfer, and one copy out of a buffer after it.
    """

    NAME = "fast-ulysses"
    # The largest sp size. The bytes of a part must be a multiple of ALIGNMENT_BYTES, and less than
    # LIMIT_BYTES.
    LARGEST_RANKS, ALIGNMENT_BYTES, LIMIT_BYTES = 8, 16, 2**31

    def __init__(self, group: Any):
        import fast_ulysses

        self.group = fast_ulysses.UlyssesGroup(group)

    @classmethod
    def lacks(cls, sp_group: Any) -> str:
        """Return why this engine can't work here; empty if it can."""
        if importlib.util.find_spec("fast_ulysses") is None:
            return "fast-ulysses is not installed (pip install fast-ulysses)"
        if sp_group.size > cls.LARGEST_RANKS:
            return f"fast-ulysses works up to sp size {cls.LARGEST_RANKS}"
        return ""

    def takes(self, part: int, x: Tensor) -> bool:
        """Return whether the engine can move parts of ``part`` elements of the dtype of ``x``."""
        size = part * x.element_size()
        return size % self.ALIGNMENT_BYTES == 0 and 0 < size < self.LIMIT_BYTES

    def launch(self, send: Tensor, recv: Tensor) -> Any:
        """Launch the all-to-all of equal parts."""
        rows = self.group.world_size
        sent = send.view(torch.uint8).view(1, rows, 1, -1)
        received = recv.view(torch.uint8).view(1, 1, rows, -1)
        return self.group.all_to_all_4d_async(sent, mode=1, out=received)


class ZeroCta:
    """Moves an exchange by NCCL's all-to-all with the zero-CTA policy, between symmetric buffers.

    Costs one copy into a buffer before the transfer, and one copy out of a buffer after it.
    """

    NAME = "NCCL"

    def __init__(self, group: Any):
        import torch.distributed._symmetric_memory as symmetric

        self.symmetric = symmetric
        # The attribute is missing in torch's stub.
        policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
        self.group = communicator(group, self, cta_policy=policy)
        symmetric.set_backend("NCCL")
        # The (source, target) pairs of buffers that no exchange uses now, by size, dtype and
        # device.
        self.free: dict[tuple, list[tuple[Tensor, Tensor]]] = {}

    @classmethod
    def lacks(cls, sp_group: Any) -> str:
        """Return why this engine can't work here; empty if it can."""
        if not hasattr(getattr(dist, "ProcessGroupNCCL", None), "NCCL_CTA_POLICY_ZERO"):
            return f"torch {torch.__version__} has no zero-CTA policy of NCCL"
        version = torch.cuda.nccl.version()
        if version[:2] < OLDEST_NCCL:
            number = ".".join(map(str, version))
            return f"NCCL {number} has no copy-engine all-to-all, which came with 2.28"
        return ""

    def takes(self, part: int, x: Tensor) -> bool:
        """Return whether the engine can move parts of ``part`` elements of the dtype of ``x``."""
        return part > 0

    def launch(self, send: Tensor, recv: Tensor) -> Any:
        """Launch the all-to-all of equal parts; ``recv`` is written when the handle is waited for.

        Collective. Allocates a pair of buffers, which is collective too, if no pair is free.
        """
        key = (send.numel(), send.dtype, send.device)
        # All ranks take the same pair: they take and give back pairs in the same program order.
        pairs = self.free.setdefault(key, [])
        source, target = pairs.pop() if pairs else (self._buffer(send), self._buffer(send))
        source.copy_(send.view(-1))
        work = dist.all_to_all_single(target, source, group=self.group, async_op=True)

        def wait() -> None:
            work.wait()
            recv.view(-1).copy_(target)
            pairs.append((source, target))

        return SimpleNamespace(wait=wait)

    def _buffer(self, like: Tensor) -> Tensor:
        """Allocate a symmetric buffer with the elements and dtype of ``like``. Collective."""
        buffer = self.symmetric.empty(like.numel(), dtype=like.dtype, device=like.device)
        self.symmetric.rendezvous(buffer, group=self.group.group_name)
        return buffer


# The engines, in order of preference.
ENGINES: tuple[type[FastUlysses] | type[ZeroCta], ...] = (FastUlysses, ZeroCta)


class CopyEngine:
    """Moves exchanges of equal parts by a copy engine, others by `C10d`.

    Args:
        settings: Fields of NCCL's configuration for the communicator of `C10d`.
    """

    # The chosen engine, which `prepare` sets.
    engine: FastUlysses | ZeroCta

    def __init__(self, settings: dict[str, int] | None = None) -> None:
        self.rest = C10d(own=True, settings=settings)

    def prepare(self, sp_group: Any) -> None:
        """Choose the first engine that every rank has, see `Named.prepare`.

        Raises:
            ValueError: on all ranks alike, if no engine works on all ranks, the sp group's backend
                is not NCCL, or the sp group spans several nodes.
        """
        sp_group.find_nodes()
        backend, nodes = backend_of(sp_group.group, "cuda"), len(set(sp_group.nodes))
        # A reason why no engine can work, the same on all ranks; empty if there is no such reason.
        all_lack = "" if backend == "nccl" else f"the sp group's backend is {backend}, not nccl"
        if nodes > 1:
            all_lack = f"the sp group spans {nodes} nodes; copy engines reach one"
        every = sp_group.gather([all_lack or engine.lacks(sp_group) for engine in ENGINES])
        # For each engine, the reason of the first rank that can't use it; empty if all ranks can.
        lacks = [next(filter(None, of_ranks), "") for of_ranks in zip(*every)]
        if all(lacks):
            # Name a reason once if it holds for both engines.
            why = "; ".join(dict.fromkeys(lacks))
            raise ValueError(
                f'sp_overlap.transport: "copy_engine" can\'t work here: {why}; use "auto"'
            )
        chosen = ENGINES[lacks.index("")]
        try:
            self.engine = chosen(sp_group.group)
        except RuntimeError as error:
            # All ranks raise together, since both libraries compare the ranks before they raise.
            raise ValueError(
                f'sp_overlap.transport: "copy_engine" through {chosen.NAME}: {error}; use "auto"'
            ) from error
        self.rest.prepare(sp_group)

    def launch(
        self, send: Tensor, recv: Tensor, send_sizes: Sizes, recv_sizes: Sizes, *rest: Any
    ) -> Handle:
        if all_equal(send_sizes, recv_sizes) and self.engine.takes(send_sizes[0], send):
            return self.engine.launch(send, recv)
        warn_once(
            "sp_overlap: copy engines can't move parts that are not equal or not aligned; such "
            "exchanges go through c10d"
        )
        return self.rest.launch(send, recv, send_sizes, recv_sizes, *rest)
