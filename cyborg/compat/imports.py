# SPDX-License-Identifier: Apache-2.0
"""Start without parts of libraries that a process does not use."""

import importlib
import sys
from importlib import util
from types import ModuleType
from typing import Any


def hide_eventlet() -> None:
    """Make ``import eventlet`` raise ImportError in this process, unless it is imported already.

    futurist 3.5.0 and the other libraries that support eventlet then use threads.
    """
    # oslo.service requires eventlet, so it is installed, and oslo.messaging imports futurist, which
    # imports it then. This takes a third of the CPU time of a daemon's start.
    sys.modules.setdefault("eventlet", None)  # type: ignore[arg-type]  # None: not found


def defer_openstack() -> None:
    """Defer ``openstack/__init__.py`` to the first use of its names, unless it is imported."""
    # It imports openstack.connection and with it the proxies of all services: 0.15 s of CPU.
    # openstack.config and openstack.exceptions are all that the client needs.
    if "openstack" in sys.modules:
        return
    spec = util.find_spec("openstack")
    if spec is None:
        return  # the import of a submodule reports that openstacksdk is missing
    package = util.module_from_spec(spec)
    # util.LazyLoader would execute the package at the first import of a submodule.
    package.__class__ = _DeferredPackage
    sys.modules["openstack"] = package


def hide_osprofiler() -> None:
    """Make ``import osprofiler`` raise ImportError in this process, unless it is imported."""
    # If osprofiler is installed, keystoneauth1 imports it to send the headers of a trace. The
    # client starts no trace, and this import takes a third of the import time of keystoneauth1.
    sys.modules.setdefault("osprofiler", None)  # type: ignore[arg-type]  # None: not found


class _DeferredPackage(ModuleType):
    """A package that is executed when a name is used that is not one of its submodules."""

    def __getattr__(self, name: str) -> Any:
        if util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        self.__class__ = ModuleType  # type: ignore[assignment]  # also ends the recursion
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)
