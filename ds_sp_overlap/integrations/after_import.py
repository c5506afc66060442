"""Runs a function after the import of a framework's module, without importing the module itself.

So a program may import a framework before this package or after it.
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

    Every import of the module, also by ``from name import ...``, sees the changes of ``action``.

    Args:
        name: The module's name.
        action: Called without arguments, once, after the first import that succeeds. If ``action``
            raises an error, the import fails with it.
    """
    if name in sys.modules:
        action()
    else:
        # Insert in front of all finders, since Python stops at the first one that finds a module.
        sys.meta_path.insert(0, _Watcher(name, action))


class _Watcher(importlib.abc.MetaPathFinder):
    """Leaves it to other finders to find a module, and runs a function after the module's code."""

    def __init__(self, name: str, action: Callable[[], object]):
        self.name, self.action, self.is_searching = name, action, False

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the other finders' spec of the module, changed to call the function.

        Returns None for any other module.
        """
        if name != self.name or self.is_searching:
            return None
        # The search below asks all finders, including this one, which must then find nothing.
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_searching = False
        if spec is None or spec.loader is None:
            return spec
        # Replace one method of this loader object. A loader class of our own would lack the methods
        # by which tools read the module's source and resources.
        loader, execute = vars(spec.loader), spec.loader.exec_module

        def exec_module(module: Any) -> None:
            """Restore the loader, run the module's code, then call the function."""
            loader.pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:
                # Remove the watcher first, since the function may import modules itself.
                sys.meta_path.remove(self)
                self.action()

        loader["exec_module"] = exec_module
        return spec
