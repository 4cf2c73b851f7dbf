# SPDX-License-Identifier: Apache-2.0
"""Comparison of the loaded code of a driver with the code that is installed now.

Python keeps a module that it has imported. So after an upgrade of a driver's package, a new backend
would run the old code, or old modules together with new ones.
"""

import hashlib
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType


class LoadedCode:
    """Versions and files of the loaded drivers. Not thread-safe.

    The files of a driver are those of the modules in the package that has the driver's module.
    """

    def __init__(self) -> None:
        self._versions: dict[str, str | None] = {}  # of the distribution, by driver
        self._modules: dict[str, tuple[ModuleType, bytes | None]] = {}  # with the SHA-256, by name

    def record(self, point: EntryPoint, *, loaded: bool) -> None:
        """Record the modules that the import of a driver has left, also if the import failed.

        ``loaded`` is whether it succeeded.
        """
        if loaded and point.name not in self._versions:
            self._versions[point.name] = _version(point)
        for name, module in _modules(point).items():
            if name not in self._modules or self._modules[name][0] is not module:
                self._modules[name] = module, _digest(module)

    def find_change(self, point: EntryPoint) -> str | None:
        """Return how the installed code of a driver differs from the loaded code, None if equal."""
        installed = _version(point)
        loaded = self._versions.get(point.name, installed)
        if loaded != installed:
            return f"version {installed} of its package is installed, version {loaded} is loaded"
        for name, module in _modules(point).items():
            if name in self._modules and self._modules[name] != (module, _digest(module)):
                return f"the installed file {module.__file__} differs from the loaded code"
        return None


def _version(point: EntryPoint) -> str | None:
    try:
        return None if point.dist is None else point.dist.version
    except (KeyError, OSError, ValueError):  # damaged metadata
        return None


def _modules(point: EntryPoint) -> dict[str, ModuleType]:
    """Return the imported modules of the package that has the module of an entry point."""
    package = point.module.rpartition(".")[0] or point.module
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name == package or name.startswith(f"{package}.")
    }


def _digest(module: ModuleType) -> bytes | None:
    """Return the SHA-256 of a module's file, None without one."""
    path = getattr(module, "__file__", None)
    if path is None:
        return None
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:
        return None
