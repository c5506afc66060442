"""Runs a function once a module of a framework is loaded, without loading the module.

So a framework may be imported before this package or after it, by whomever.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def after_import(name: str, action: Callable[[], object]) -> None:
    """Run ``action`` now if the module ``name`` is loaded, else at the end of its import.

    An importer sees the module as ``action`` leaves it, also by ``from name import ...``.

    Args:
        name: The module's name.
        action: Called without arguments, once: after the first import that succeeds. An error that
            it raises fails the import.
    """
    if name in sys.modules:
        action()
    else:
        # First, since a finder is asked only for what the finders in front of it don't find.
        sys.meta_path.insert(0, _Watcher(name, action))


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds a module by the other finders, and has a function run behind the module's own code."""

    def __init__(self, name: str, action: Callable[[], object]):
        self.name, self.action, self.is_searching = name, action, False

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the other finders' spec of the module, which will call the function; else None."""
        if name != self.name or self.is_searching:
            return None
        # The search below asks all finders, this one too.
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_searching = False
        if spec is None or spec.loader is None:
            return spec
        # One method of the loader is replaced, by an attribute of the object. A loader of our own
        # would lack the methods by which tools read the module's source and resources.
        loader, execute = vars(spec.loader), spec.loader.exec_module

        def exec_module(module: Any) -> None:
            """Run the module's code, then the function; take the replacement out again."""
            loader.pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:
                # Before the function, which may import as it likes.
                sys.meta_path.remove(self)
                self.action()

        loader["exec_module"] = exec_module
        return spec
