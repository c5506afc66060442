"""The ``sp_overlap`` section of a DeepSpeed config, validated."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError


class SpOverlapConfig(BaseModel):
    """The keys of ``sp_overlap``. Each switch works alone, so that each gain can be measured alone.

    enabled          False: as if the section were not there
    head_groups      G, or "auto": 2 where every rank has at least two query heads, else 1
    projections      compute q, k, v and the output projection part by part under the exchanges; False: call them whole
    wgrad            compute the output projection's wgrad under the exchange of do; False: together with its dgrad
    kernels          which pack/unpack: "torch" is PyTorch's own copies, "cuda" the compiled ones and no others; "auto"
                     PyTorch's, until a GPU has run the compiled ones
    transport        which mover of bytes: "c10d" is deepspeed.comm; "auto" the best there is
    on_unsupported   a layer that can't be overlapped: "warn" and leave it as it is, or "error"
    check            compare every exchange of each layer's first call with a plain one; slow
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enabled: bool = True
    head_groups: Literal["auto"] | int = "auto"
    projections: bool = True
    wgrad: bool = True
    kernels: Literal["auto", "cuda", "torch"] = "auto"
    transport: Literal["auto", "c10d"] = "auto"
    on_unsupported: Literal["warn", "error"] = "warn"
    check: bool = False

    def groups_for(self, heads: int, sp_size: int) -> int:
        """G for a layer of ``heads`` query heads; whether that many are possible is for `Geometry` to say."""
        return max(1, min(2, heads // sp_size)) if self.head_groups == "auto" else self.head_groups

    @classmethod
    def parse(cls, section: Any) -> SpOverlapConfig:
        """Validate a section. Raises ValueError with every fault in it, the value and what would be valid."""
        if isinstance(section, cls):
            return section
        if not isinstance(section, dict):
            raise ValueError(f'sp_overlap: expected a section such as {{"enabled": true}}, got {section!r}')
        try:
            config = cls.model_validate(section)
        except ValidationError as error:
            raise ValueError("; ".join(dict.fromkeys(map(cls._explain, error.errors())))) from None
        if config.head_groups != "auto" and config.head_groups < 1:
            raise ValueError(f'sp_overlap.head_groups must be "auto" or at least 1, got {config.head_groups}')
        return config

    @classmethod
    def _explain(cls, fault: dict) -> str:
        key = str(fault["loc"][0])
        if fault["type"] == "extra_forbidden":
            if key in _LATER:
                return f"sp_overlap.{key} is not available in this version; remove it"
            near = difflib.get_close_matches(key, cls.model_fields, n=1, cutoff=0.0)[0]
            return f"sp_overlap.{key}: unknown key; did you mean {near!r}? Valid keys: {', '.join(cls.model_fields)}"
        if key not in _VALID:
            return f"sp_overlap: {key!r} is no key; valid keys: {', '.join(cls.model_fields)}"
        if fault["input"] in _LATER.get(key, ()):
            return f"sp_overlap.{key}: {fault['input']!r} is not available in this version; use {_VALID[key]}"
        return f"sp_overlap.{key} must be {_VALID[key]}, got {fault['input']!r}"


_LATER: dict[str, tuple] = {"transport": ("copy_engine",), "policy": (), "timeline": ()}
_VALID = {
    **dict.fromkeys(("enabled", "projections", "wgrad", "check"), "true or false"),
    "head_groups": 'a whole number of at least 1, or "auto"',
    "kernels": '"auto", "cuda" or "torch"',
    "transport": '"auto" or "c10d"',
    "on_unsupported": '"warn" or "error"',
}
