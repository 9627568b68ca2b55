"""Do something once a module has been imported, without importing it."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _OnImport(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        then = self.waiting.pop(fullname, None)
        if then is None:
            return None
        spec = importlib.util.find_spec(fullname)  # by the other finders: this one no longer waits for it
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for act in then:
                act(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _OnImport()


def on_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then(module)`` when ``name`` is imported, or at once where it already is."""
    if name in sys.modules:
        then(sys.modules[name])
        return
    _finder.waiting.setdefault(name, []).append(then)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
