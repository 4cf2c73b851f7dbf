# SPDX-License-Identifier: Apache-2.0
"""The plugins of the library: one for each attach handle type.

A plugin is an entry point of the group ``cyborg.os_acc.plugin``. Its name is the attach handle type
in lower case, and it refers to a subclass of ``Plugin``, which is created without arguments.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any
from xml.etree.ElementTree import Element

from stevedore import ExtensionManager

from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.text import join_limited
from cyborg.os_acc.arq import BoundArq

NAMESPACE = "cyborg.os_acc.plugin"
_MAX_NAMES = 20  # in an error message


class Plugin(ABC):
    """Renders the devices of one attach handle type."""

    @abstractmethod
    def get_config(self, arq: BoundArq) -> dict[str, str]:
        """Return the values that a hypervisor driver needs. Raise Invalid with the field.

        Every value must be checked here: ``build_hostdev`` gets nothing else.
        """

    @abstractmethod
    def build_hostdev(self, config: Mapping[str, str]) -> Element:
        """Return the element ``hostdev`` of libvirt's domain XML, without an alias."""


def load_plugin(handle_type: str) -> Plugin:
    """Return the plugin of an attach handle type.

    Raise Invalid if there is none, or DriverFailed if it cannot be loaded.
    """
    plugins, errors = _load_all()
    name = handle_type.lower()
    if name in errors:
        raise DriverFailed(
            f"the plugin {name} of {NAMESPACE} cannot be loaded: {errors[name]}; correct or "
            "uninstall its package"
        )
    if name not in plugins:
        types = join_limited(sorted(key.upper() for key in plugins), _MAX_NAMES)
        raise Invalid(
            f"attach_handle_type: no plugin for {handle_type!r}, the installed ones are for "
            f"{types}",
            field="attach_handle_type",
        )
    return plugins[name]


# Scanning the installed packages takes longer than all calls of a guest together. A package that is
# installed later is found after a restart.
@functools.cache
def _load_all() -> tuple[Mapping[str, Plugin], Mapping[str, str]]:
    """Return the plugins by name, and the errors of those that cannot be loaded."""
    errors: dict[str, str] = {}

    def note_failure(manager: Any, entry: EntryPoint, exc: BaseException) -> None:
        errors[entry.name] = f"{type(exc).__name__}: {exc}"

    manager: ExtensionManager[Any] = ExtensionManager(
        NAMESPACE, invoke_on_load=True, on_load_failure_callback=note_failure
    )
    plugins: dict[str, Plugin] = {}
    for extension in manager:
        name, plugin = extension.name, extension.obj
        if name in plugins:
            errors[name] = "several packages have a plugin of this name"
        elif not isinstance(plugin, Plugin):
            errors[name] = f"{extension.entry_point.value} is no subclass of {Plugin.__name__}"
        else:
            plugins[name] = plugin
    return plugins, errors
