"""Validates the ``sp_overlap`` section of a DeepSpeed config."""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

# A whole number of at least 1.
Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    """Validates a section of the config; raises an error for unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _default(cls, section: Any) -> Any:
        """Drop the keys that ask for their default, before pydantic validates the section.

        A key asks for its default by the value null; or by "auto", unless "auto" is a value of the
        key's own type.
        """
        if not isinstance(section, dict):
            return section
        said = dict(section)
        for key, field in cls.model_fields.items():
            # If null is the default, keep the key, so that it counts as set: with ``"tiles": null``
            # a window does not turn tiles on.
            if key not in said or field.is_required() or said[key] is field.default is None:
                continue
            # "auto" asks for the default if the type of the key does not list "auto".
            auto_is_default = "'auto'" not in str(field.annotation)
            if said[key] is None or auto_is_default and said[key] == "auto":
                del said[key]
        return said


class PolicyConfig(_Section):
    """Sets how ``"head_groups": "auto"`` is resolved.

    Attributes:
        warmup_steps: The optimizer steps in which layers of one shape try candidates; 0 times
            nothing and takes the default number of groups.
    """

    # At least 8: `autotune.trial` runs each of four candidates twice, once untimed and once timed.
    warmup_steps: Literal[0] | Annotated[int, Field(ge=8)] = 16


class TimelineConfig(_Section):
    """Sets the steps in which the cost of each exchange is recorded (`profiling.timeline`).

    Attributes:
        path: The folder for the trace files.
        steps: The first and the last optimizer step, counted from 0. The default lies after the
            steps that the policy times.
    """

    path: str
    steps: list[int] = [20, 22]


class SpOverlapConfig(_Section):
    """Holds the keys of ``sp_overlap``.

    Each switch works independently of the others, so that its gain can be measured by itself. Every
    key accepts null or "auto" for its default.

    Attributes:
        enabled: False: as if the section were not there.
        head_groups: G, the number of head groups. "auto": the fastest G in the first steps, timed
            as ``policy`` says.
        shares: r, the number of ranks that share their query heads, each with 1/r of the queries;
            must divide the sp size. "auto": 1 if the query heads divide by the sp size; else the
            smallest r for which the heads divide by P / r, if local attention accepts a range of
            the queries and the largest amount that a rank receives does not grow (`shares_for`).
        kv_once_per_node: Whether k and v travel over the network once to each node, and inside the
            node from rank to rank. For nodes in which several ranks need the same KV heads.
        window: W, the largest number of head groups in memory at a time. null: all groups. A window
            saves memory, since backward recomputes q, k and v. A window also changes the defaults
            of other keys: ``head_groups`` is the largest G, ``tiles`` is "auto", and
            ``checkpointing`` saves attention over every checkpoint that allows it.
        checkpointing: Under activation checkpointing, "recompute" recomputes attention with the
            rest of the layer. "keep" saves o and the log-sum-exp, so that the recomputed forward
            runs neither attention nor its exchanges. "offload" saves o and the log-sum-exp in host
            memory.
        tiles: The number of tokens that norms and dense MLPs of decoder layers process at a time,
            in forward and backward. "auto", the default with a window: as many tokens as keep a
            tile's temporaries below half of the layer's input. null: all tokens at once.
        projections: Compute the q, k, v and output projections part by part, during exchanges.
            False: call each projection once, on the whole input.
        wgrad: Compute the wgrad of the output projection during the exchange of do. False: together
            with its dgrad.
        kernels: The kernels that pack and unpack. "torch": PyTorch's own copies. "compiled": the
            CUDA kernels and no others. "auto": the CUDA kernels if NCCL carries the sp group and
            all ranks have these kernels (built once where nvcc is found); else PyTorch's copies.
        transport: The mover of bytes. "c10d": deepspeed.comm over the sp group. "auto": the same;
            but over a separate communicator if NCCL carries the group. "copy_engine": the GPUs'
            copy engines, inside one node.
        max_ctas: The largest number of blocks, and so of SMs, of NCCL's kernels in the separate
            communicator. "auto": 16 in one node, 4 over several; see Note [Blocks of a
            communicator] in `transport`.
        min_ctas: The smallest number of these blocks. "auto": NCCL chooses.
        cga_cluster_size: The number of blocks in a cluster of NCCL's kernels. "auto": NCCL chooses.
        on_unsupported: For a layer that can't be overlapped: "warn" logs a warning and leaves the
            layer as it is; "error" raises an error.
        documents: Where documents of a packed sequence may begin. "anywhere": where position_ids
            start again; if they start again on every rank, an error is raised, since this is mostly
            a mistake. "per_rank": every rank may begin with a new document.
        policy: How ``"head_groups": "auto"`` is resolved.
        timeline: The steps in which the cost of each exchange is recorded; None: no steps.
        check: Compare every exchange of each layer's first call with a plain exchange; slow.
    """

    enabled: bool = True
    head_groups: Literal["auto"] | Count = "auto"
    shares: Literal["auto"] | Count = "auto"
    kv_once_per_node: bool = False
    window: Count | None = None
    checkpointing: Literal["recompute", "keep", "offload"] = "recompute"
    tiles: Literal["auto"] | Count | None = None
    projections: bool = True
    wgrad: bool = True
    kernels: Literal["auto", "compiled", "torch"] = "auto"
    transport: Literal["auto", "c10d", "copy_engine"] = "auto"
    # NCCL defines the next three keys in ncclConfig_t (nccl.h).
    max_ctas: Literal["auto"] | Count = "auto"
    min_ctas: Literal["auto"] | Count = "auto"
    cga_cluster_size: Literal["auto"] | Annotated[int, Field(ge=0, le=8)] = "auto"
    on_unsupported: Literal["warn", "error"] = "warn"
    documents: Literal["anywhere", "per_rank"] = "anywhere"
    policy: PolicyConfig = PolicyConfig()
    timeline: TimelineConfig | None = None
    check: bool = False

    @property
    def of_sp_group(self) -> dict[str, Any]:
        """Return the keyword arguments of `SPGroup` that the section sets."""
        settings = {}
        for key in ("max_ctas", "min_ctas", "cga_cluster_size"):
            value = getattr(self, key)
            if value != "auto":
                settings[key] = value
        return dict(kernels=self.kernels, settings=settings, overlaps=self.enabled)

    def of_own_layer(self) -> SpOverlapConfig:
        """Return the config for a layer of this package's own classes.

        Such a layer has no other forward to run if ``enabled`` is false. The returned config then
        switches overlap off: one head group, and projections that are called whole. Besides,
        `of_sp_group` makes the layer wait for each exchange at once.
        """
        if self.enabled:
            return self
        off = dict(head_groups=1, window=None, checkpointing="recompute", projections=False)
        return self.model_copy(update={**off, "wgrad": False})

    @property
    def keeps_where_possible(self) -> bool:
        """Return whether a checkpoint's recompute reuses attention wherever the checkpoint allows.

        Under other checkpoints, the recompute runs attention again. True with a window, unless the
        section sets ``checkpointing``.
        """
        return self.window is not None and "checkpointing" not in self.model_fields_set

    @property
    def saves_attention(self) -> bool:
        """Return whether recomputes reuse attention: under all checkpoints, or where possible."""
        return self.checkpointing != "recompute" or self.keeps_where_possible

    @property
    def times_groups(self) -> bool:
        """Return whether timing chooses G; with a window, only if the section says "auto" for G."""
        is_asked = self.window is None or "head_groups" in self.model_fields_set
        return self.head_groups == "auto" and self.policy.warmup_steps > 0 and is_asked

    def window_of(self, groups: int) -> int | None:
        """Return W for a layer of ``groups`` head groups; None if the layer runs without a window.

        Without a window, q, k and v are saved for backward.
        """
        if self.window is not None:
            return min(self.window, groups)
        # "keep" and "offload" save o; backward projects and exchanges q, k and v again. With half
        # of the groups at a time, this needs no more memory than DeepSpeed's own layer.
        return None if self.checkpointing == "recompute" else max(1, groups // 2)

    def groups_for(self, heads: int, parts: int, windowed: bool = False) -> int:
        """Return the number of head groups G of a layer.

        For "auto", returns the largest G if the layer has a window and G is not timed. Otherwise
        returns 2, or 1 if a part has one query head; timing may change this G later.

        Args:
            heads: The number of query heads.
            parts: The number of parts into which the query heads are split: P / r, if r ranks share
                query heads.
            windowed: Whether the layer can run with a window.
        """
        # `Geometry` checks that G is not too large, and that the shares divide the ranks.
        if self.head_groups != "auto":
            return self.head_groups
        most = heads // max(parts, 1)
        if windowed and self.window is not None and not self.times_groups:
            return max(1, most)
        return max(1, min(2, most))

    @classmethod
    def parse(cls, section: Any) -> SpOverlapConfig:
        """Validate a section.

        Args:
            section: A dict; or a `SpOverlapConfig`, which is returned unchanged.

        Raises:
            ValueError: if the section is not valid. The message names all unknown keys and wrong
                values, and the valid keys and values.
        """
        if isinstance(section, cls):
            return section
        if not isinstance(section, dict):
            raise ValueError(
                f'sp_overlap: expected a section such as {{"enabled": true}}, got {section!r}'
            )
        try:
            config = cls.model_validate(section)
        except ValidationError as error:
            raise ValueError(_explain(error)) from None
        config._check_blocks()
        if config.window is not None and "tiles" not in config.model_fields_set:
            config = config.model_copy(update={"tiles": "auto"})
        steps = config.timeline.steps if config.timeline else [0, 0]
        if len(steps) != 2 or not 0 <= steps[0] <= steps[1]:
            raise ValueError(
                "sp_overlap.timeline.steps must be the first and the last step, such as [20, 22], "
                f"got {steps}"
            )
        return config

    def _check_blocks(self) -> None:
        """Check the settings of the blocks of NCCL's kernels.

        Raises:
            ValueError: if ``min_ctas`` exceeds ``max_ctas``, or if one of the settings is combined with
                the transport "c10d".
        """
        given = self.of_sp_group["settings"]
        if given and self.transport == "c10d":
            raise ValueError(
                f'sp_overlap.{next(iter(given))}: "transport": "c10d" has no communicator of its '
                "own that this could be said of; leave out one of the two"
            )
        if given.get("min_ctas", 1) > given.get("max_ctas", math.inf):
            raise ValueError(
                f"sp_overlap.min_ctas must be at most sp_overlap.max_ctas, {given['max_ctas']}, "
                f"got {given['min_ctas']}"
            )


_SECTIONS: dict[str, type[BaseModel]] = {"policy": PolicyConfig, "timeline": TimelineConfig}
_KEYS = list(SpOverlapConfig.model_fields)
for _name, _section in _SECTIONS.items():
    _KEYS += [f"{_name}.{_key}" for _key in _section.model_fields]


def _explain(error: ValidationError) -> str:
    """Return a message with all faults that pydantic found: for each key, its value and limits."""
    messages = {}
    for fault in error.errors():
        key, *rest = map(str, fault["loc"])
        # Append a key of a nested section. Elsewhere, ``rest`` is no key, but an index or type.
        key = ".".join([key, *rest[:1]]) if key in _SECTIONS else key
        limit = fault["msg"].replace("Input should", "must")
        if fault["type"] == "extra_forbidden":
            # The key may be a valid key of another section.
            places = {name.rpartition(".")[2]: name for name in _KEYS} | {
                name: name for name in _KEYS
            }
            near = difflib.get_close_matches(key.lower(), places, n=1)
            hint = f"; did you mean {places[near[0]]!r}?" if near else "."
            messages[key] = f"unknown key{hint} Valid keys: {', '.join(_KEYS)}"
        elif key in messages:
            messages[key] += "" if limit in messages[key] else f", or {limit}"
        else:
            messages[key] = f"got {fault['input']!r}; {limit}"
    return "; ".join(f"sp_overlap.{key}: {text}" for key, text in messages.items())
