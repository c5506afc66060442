"""Tells whether the projections of a layer in a chain work token by token."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import nn

from ...attention.runtime.linear import Plain, goes_by_token
from .accounting import LoadedGlobal
from .tokenwise import Form, fixed_state, probe_tokenwise


class _Result(NamedTuple):
    """Holds the result of a probe, and what the result depends on.

    Attributes:
        reason: Why the projection may mix tokens; empty if it goes token by token.
        state: Its `fixed_state`.
        loaded_globals: The globals that its code loaded.
    """

    reason: str
    state: list[tuple]
    loaded_globals: list[LoadedGlobal]


class ProjectionProbe:
    """Probes projections that are no plain linear layers, and keeps the results.

    Args:
        form: How the layers of their framework are written.
    """

    def __init__(self, form: Form):
        self._form = form
        # Weak, since adapters come and go.
        self._results: weakref.WeakKeyDictionary[nn.Module, _Result] = weakref.WeakKeyDictionary()

    def why_not(self, module: nn.Module, size: int, plain: Plain) -> str:
        """Explain why a projection of tokens [.., size] may mix them; empty if it does not.

        A plain linear layer is known by its forward. Any other module is probed when it is first
        asked for, and again after a change.
        """
        if goes_by_token(module, plain):
            return ""
        state, result = fixed_state(module), self._results.get(module)
        is_known = result is not None and result.state == state
        if result is None or not is_known or any(x.has_changed() for x in result.loaded_globals):
            result = self._results[module] = self._probe(module, size, state)
        return result.reason  # guard: projections go token by token

    def _probe(self, module: nn.Module, size: int, state: list[tuple]) -> _Result:
        try:
            loaded = probe_tokenwise(
                "projection", module, size, form=self._form, norm=False, resizes=True
            )
        except Exception as error:  # of any kind: the code was not made for this
            return _Result(str(error) or type(error).__name__, state, [])
        return _Result("", state, loaded)
