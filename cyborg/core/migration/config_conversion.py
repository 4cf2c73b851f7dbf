# SPDX-License-Identifier: Apache-2.0
"""Convert the configuration of OpenStack Cyborg, releases 12 to 17.

Options of libraries, and options with the same name and meaning, are kept. The others are renamed,
converted to rules of drivers, or dropped with a reason.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cyborg.core.migration.reference_drivers import COUNTERPARTS

Settings = Mapping[str, Mapping[str, Sequence[str]]]
"""The values of each option by section and name; an option that is repeated has several."""

LIBRARIES = frozenset(
    {
        *("keystone_authtoken", "oslo_messaging_notifications", "oslo_messaging_rabbit"),
        *("oslo_middleware", "oslo_policy"),
    }
)
"""Sections of libraries that both services use."""

BUS = frozenset(
    {"control_exchange", "executor_thread_pool_size", "rpc_response_timeout", "transport_url"}
)
"""Options of oslo.messaging in the section ``DEFAULT``."""

SERVICES = frozenset({"glance", "nova", "placement"})
"""Sections with the credentials for other services, which keystoneauth reads in both services."""

RENAMED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("api", "api_workers"): ("api", "workers"),
}

REASONS: Mapping[tuple[str, str], str] = {
    ("api", "api_paste_config"): "the middleware of the API cannot be configured",
    ("api", "enable_ssl_api"): "a reverse proxy terminates TLS: see the installation guide",
    ("database", "mysql_engine"): "the tables use InnoDB",
    ("DEFAULT", "bind_timeout"): "[conductor] has options for the times of host work",
    ("DEFAULT", "fatal_exception_format_errors"): "it was for tests",
    ("DEFAULT", "periodic_interval"): "[agent] discovery_interval is the nearest option",
    ("DEFAULT", "thread_pool_size"): "[DEFAULT] executor_thread_pool_size is the nearest option",
    ("gpu_devices", "filter_sriov_vfs"): (
        "rules of the option devices offer no virtual function of a GPU without functions=vf"
    ),
}

_PCI, _GPU, _NVME, _VGPU = "pci", "gpu_devices", "nvme", "vgpu_"
_SPEC_KEYS = {"vendor_id": "vendor", "product_id": "product", "address": "address"}
_VALUE = re.compile(r"[0-9A-Za-z:.*?]+")
_NO_OPTION = "this service has no such option"


@dataclass(slots=True)
class Conversion:
    """The converted options, and notes: what was dropped or must be checked, and why."""

    settings: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def set(self, section: str, name: str, values: Sequence[str]) -> None:
        """Add values of an option."""
        self.settings.setdefault(section, {}).setdefault(name, []).extend(values)

    def drop(self, section: str, name: str, reason: str) -> None:
        """Note that an option is dropped."""
        self.notes.append(f"[{section}] {name} is dropped: {reason}")

    def render(self) -> str:
        """Return the text of a configuration file; the notes are comments at its begin."""
        lines = [f"# {note}" for note in self.notes]
        for section in sorted(self.settings, key=lambda name: (name != "DEFAULT", name)):
            lines += ["", f"[{section}]"]
            for name, values in sorted(self.settings[section].items()):
                lines += [f"{name} = {value}" for value in values]
        return "\n".join(lines).lstrip("\n") + "\n"


def convert(settings: Settings, known: Mapping[str, Collection[str]]) -> Conversion:
    """Return the converted configuration.

    ``known`` has the names of the options of this service by section, with those of ``BUS`` and of
    the log in the section ``DEFAULT``.
    """
    result = Conversion()
    for section, options in settings.items():
        for name, values in options.items():
            _convert_option(result, known, section, name, values)
    _convert_vgpus(result, settings)
    backends = result.settings.get("agent", {}).get("enabled_drivers", [""])[0].split(",")
    for backend in sorted({"crypto", "fpga", "nic", "nvme"} & set(backends)):
        if backend not in result.settings:
            result.notes.append(
                f"[{backend}] needs rules: this service offers no device that no rule selects"
            )
    return result


def _convert_option(
    result: Conversion,
    known: Mapping[str, Collection[str]],
    section: str,
    name: str,
    values: Sequence[str],
) -> None:
    place = (section, name)
    if section in LIBRARIES | SERVICES:
        result.set(section, name, values)
    elif place in RENAMED:
        result.set(*RENAMED[place], values)
    elif place == ("agent", "enabled_drivers"):
        _convert_drivers(result, values)
    elif place == (_PCI, "passthrough_whitelist"):
        _convert_specs(result, "generic", place, values)
    elif place == (_NVME, "device_spec"):
        _convert_specs(result, "nvme", place, values)
    elif section == _GPU and name == "enabled_vgpu_types":
        pass  # with the sections of the types
    elif section.startswith(_VGPU) and name == "device_addresses":
        pass
    elif place in REASONS:
        result.drop(section, name, REASONS[place])
    elif name in known.get(section, ()):
        result.set(section, name, values)
    else:
        result.drop(section, name, _NO_OPTION)


def _convert_drivers(result: Conversion, values: Sequence[str]) -> None:
    backends: list[str] = []
    for name in _split(values):
        backend = COUNTERPARTS.get(name)
        if backend is None:
            result.notes.append(
                f"[agent] enabled_drivers: {name} has no counterpart; the driver generic offers "
                "any PCI function"
            )
        elif backend not in backends:
            backends.append(backend)
    result.set("agent", "enabled_drivers", [",".join(backends)])
    if "gpu" in backends:
        # The other driver offers every display controller of NVIDIA as a whole, and virtual
        # functions too, unless filter_sriov_vfs is set; a rule here offers no virtual function.
        result.set("gpu", "devices", ["vendor=10de,class=03"])
    if "fake" in backends:
        result.set("agent", "allow_reference_drivers", ["true"])


def _convert_specs(
    result: Conversion, backend: str, place: tuple[str, str], values: Sequence[str]
) -> None:
    """Convert JSON objects that select PCI functions to rules."""
    for value in values:
        try:
            loaded = json.loads(value)
        except ValueError:
            result.drop(*place, f"{value} is no JSON")
            continue
        for spec in loaded if isinstance(loaded, list) else [loaded]:
            rule = _make_rule(spec)
            if rule is None:
                result.drop(*place, f"{json.dumps(spec)} has no rule with the same meaning")
                continue
            result.set(backend, "devices", [rule])
            if ignored := sorted(set(spec) - set(_SPEC_KEYS)):
                result.notes.append(
                    f"[{backend}] devices = {rule}: the keys {', '.join(ignored)} are dropped"
                )


def _make_rule(spec: Any) -> str | None:
    if not isinstance(spec, dict):
        return None
    parts = []
    for key, name in _SPEC_KEYS.items():
        value = spec.get(key, "*")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            return None
        if value != "*":
            parts.append(f"{name}={value}")
    return ",".join(parts) or None


def _convert_vgpus(result: Conversion, settings: Settings) -> None:
    for mdev_type in _split(settings.get(_GPU, {}).get("enabled_vgpu_types", ())):
        section = settings.get(f"{_VGPU}{mdev_type}", {})
        addresses = _split(section.get("device_addresses", ()))
        rules = [f"address={address},type={mdev_type}" for address in addresses]
        result.set("gpu", "mdev_types", rules or [f"vendor=10de,type={mdev_type}"])


def _split(values: Sequence[str]) -> list[str]:
    return [item.strip() for value in values for item in value.split(",") if item.strip()]
