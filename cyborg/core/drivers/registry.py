# SPDX-License-Identifier: Apache-2.0
"""Drivers: their entry points on a host, their options, and their counterparts elsewhere.

The declarations of options are used for the agent's configuration file, which oslo.config reads,
and for values from the API, which are parsed here before any change. An option for a path, a
command or a secret is ``host_only``: it can be set in the host's configuration file only.

Only a driver that is installed on a host can be enabled there. Code is never sent over the API or
the bus.
"""

import difflib
import hashlib
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeVar, get_args

from cyborg.core.codec import Serializable, as_list, wire
from cyborg.core.errors import Invalid
from cyborg.core.text import sanitize
from cyborg.core.validation import check_text, find_duplicate, optional, string

# The driver of this service for each driver; None without a counterpart.
COUNTERPARTS: Mapping[str, str | None] = {
    "fake_driver": "fake",
    "huawei_ascend_driver": "generic",
    "inspur_fpga_driver": "fpga",
    "inspur_nvme_ssd_driver": "nvme",
    "intel_fpga_driver": "fpga",
    "intel_nic_driver": "nic",
    "intel_qat_driver": "crypto",
    "nvidia_gpu_driver": "gpu",
    "nvmf_spdk_driver": None,
    "pci_driver": "generic",
    "xilinx_fpga_driver": "fpga",
}


def describe_counterpart(name: str) -> str | None:
    """Return the remedy for the name of a driver of OpenStack Cyborg, None for any other name."""
    if name not in COUNTERPARTS:
        return None
    driver = COUNTERPARTS[name]
    remedy = "has no counterpart" if driver is None else f"is the driver {driver!r} here"
    return (
        f"which is a driver of OpenStack Cyborg and {remedy}; convert the configuration file with "
        "cyborg-status convert-config"
    )


# A namespace of our own: a driver has no row, and every API must return the same uuid for it.
_DRIVERS = uuid.UUID("0b0d5a6c-5d3e-5c57-8f4f-6a8a1c9d2e70")
MAX_SUGGESTIONS = 3
R = TypeVar("R", bound=Mapping[str, Any])


def driver_uuid(name: str) -> str:
    """Return the uuid of a driver, the same in every cloud (uuid5 of RFC 9562)."""
    return str(uuid.uuid5(_DRIVERS, name))


def version_of(name: str, versions: Any) -> str | None:
    """Return the version of a driver from the ``versions`` of an agent's heartbeat, or None.

    ``versions`` is not validated: the version is None if it is not text.
    """
    drivers = versions.get("drivers") if isinstance(versions, Mapping) else None
    version = drivers.get(name) if isinstance(drivers, Mapping) else None
    return version if isinstance(version, str) else None


def common_version(versions: Iterable[str | None]) -> str | None:
    """Return the version that all hosts have; None if versions differ or a host has no version."""
    distinct = set(versions)
    return distinct.pop() if len(distinct) == 1 else None


def newest_row(rows: Sequence[R]) -> R | None:
    """Return the first row with the newest ``version``; None if there are no rows.

    Only the numbers of a version are compared; a row without a version is the oldest.
    """
    return max(rows, key=lambda row: _numbers(row["version"]), default=None)


def closest_names(name: str, names: Iterable[str]) -> list[str]:
    """Return up to MAX_SUGGESTIONS of ``names`` that are similar to ``name``, best first."""
    # Cut, because the time of a comparison grows with the square of the length.
    return difflib.get_close_matches(name[:255], sorted(set(names)), n=MAX_SUGGESTIONS)


def format_hint(alike: Sequence[str]) -> str:
    """Return the end of an error message with suggestions; empty if there are none."""
    return f"; did you mean {' or '.join(alike)}?" if alike else ""


def describe_unknown(name: str, names: Iterable[str]) -> str:
    """Return the message for a driver that no agent has; ``names`` are those of the others."""
    counterpart = describe_counterpart(name)
    if counterpart is not None:
        return f"no agent has a driver {name[:255]!r}, {counterpart}"
    hint = format_hint(closest_names(name, names)) or "; GET /v2/drivers lists the known ones"
    return f"no agent has a driver {name[:255]!r}{hint}"


def _numbers(version: str | None) -> list[int]:
    # Cut: Python refuses to parse a number of thousands of digits.
    return [int(number[:18]) for number in re.findall(r"[0-9]+", version or "")]


# The type of an option; ``list`` is one comma separated line, ``multi`` a line for each value.
Kind = Literal["str", "int", "float", "bool", "list", "multi"]

# Characters of one text.
MAX_VALUE = 4096
# Elements of a list.
MAX_VALUES = 256
HIDDEN = "***"
LISTS: frozenset[str] = frozenset({"list", "multi"})
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLEANS |= {"false": False, "no": False, "off": False, "0": False}


def _load_kind(value: Any) -> Any:
    if string(value) not in get_args(Kind):
        raise ValueError(f"unknown kind of option {value[:40]!r}")
    return value


@dataclass(frozen=True, slots=True)
class Option(Serializable):
    """One option of a driver, in the configuration section named after the backend.

    A ``host_only`` option is read from the host's configuration file only. An option must be
    host_only if it is a file path, a command or anything else that would let an API user act as
    the agent's user. The value of a ``secret`` is never shown. Raise ValueError for a secret that
    is not host_only: values from the API are stored in the database.
    """

    name: str
    kind: Kind = field(metadata=wire(load=_load_kind))
    default: Any
    help: str
    host_only: bool = False
    secret: bool = False

    def __post_init__(self) -> None:
        if self.secret and not self.host_only:
            raise ValueError(f"option {self.name!r:.255} is secret, and must be host_only")


class Source(StrEnum):
    """Source of the effective value of an option."""

    DEFAULT = "default"
    FILE = "file"  # the configuration of the host: its file, or the environment of the agent
    API = "api"


def _reportable(value: Any) -> Any:
    # The report must not fail for one option: its default may be any object of the driver.
    if isinstance(value, list | tuple):
        return [_reportable(element) for element in value[:MAX_VALUES]]
    if (
        value is None
        or isinstance(value, bool | int)
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return value
    return sanitize(str(value), MAX_VALUE)


@dataclass(frozen=True, slots=True)
class Setting(Serializable):
    """Effective value of one option of a backend; ``HIDDEN`` for a secret."""

    name: str
    value: Any = field(metadata=wire(load=_reportable))
    source: Source


def list_settings(
    options: Sequence[Option], values: Mapping[str, Any], sources: Mapping[str, Source]
) -> tuple[Setting, ...]:
    """Return the effective options of a backend in a form that can be reported.

    They have the order of the declarations. The source of an option that is not in ``sources`` is
    DEFAULT. A value that JSON cannot represent becomes text, and a value that is too long is cut.
    """
    settings = []
    for option in options:
        value = values.get(option.name, option.default)
        shown = HIDDEN if option.secret and value else _reportable(value)
        settings.append(Setting(option.name, shown, sources.get(option.name, Source.DEFAULT)))
    return tuple(settings)


def parse_values(options: Sequence[Option], config: Any, *, unset: bool = False) -> dict[str, Any]:
    """Parse option values from the API or the bus: JSON values, or text as on a command line.

    If ``unset`` is set, None is a valid value of every option: it removes the option from the
    desired state. Raise Invalid for an unknown option (with similar names), for an option that is
    host_only, and for a value of the wrong type.
    """
    if not isinstance(config, Mapping):
        raise Invalid("config must be an object of option names and values", field="config")
    by_name = {option.name: option for option in options}
    for name in config:
        if name not in by_name:
            alike = closest_names(str(name), by_name)
            raise Invalid(
                f"config: the driver has no option {str(name)[:255]!r}{format_hint(alike) or '.'} "
                f"Its options are {', '.join(by_name) or 'none'}",
                field="config",
                near=alike,
            )
        # None is allowed: it removes a value that was set before the option became host_only.
        if by_name[name].host_only and not (unset and config[name] is None):
            raise Invalid(
                f"config: {name}: can only be set in the configuration file of the host, in the "
                "section of the backend",
                field="config",
                option=name,
            )
    return {
        name: None if unset and value is None else parse_value(by_name[name], value)
        for name, value in config.items()
    }


def parse_value(option: Option, value: Any) -> Any:
    """Parse a value of an option, from JSON or text. Raise Invalid for the wrong type."""
    try:
        return _READERS[option.kind](value)
    except (TypeError, ValueError, OverflowError) as exc:
        raise Invalid(
            f"config: {option.name}: found {str(value)[:255]!r}; expected a value of type "
            f"{option.kind}",
            field="config",
            option=option.name,
        ) from exc


def _str(value: Any) -> str:
    text = string(value)
    if len(text) > MAX_VALUE or any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ValueError
    return text


def _int(value: Any) -> int:
    # True is an integer in Python, and no number of an option.
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    number = float(value)
    # NaN and infinity cannot be sent as JSON.
    if not math.isfinite(number):
        raise ValueError
    return number


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = string(value).lower()
    if text not in _BOOLEANS:
        raise ValueError
    return _BOOLEANS[text]


def _values(value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or len(value) > MAX_VALUES:
        raise TypeError
    return [_str(element) for element in value]


def _list(value: Any) -> list[str]:
    # On the command line a list is one text.
    if isinstance(value, str):
        return _values([item.strip() for item in value.split(",") if item.strip()])
    return _values(value)


def _multi(value: Any) -> list[str]:
    return _values([value] if isinstance(value, str) else value)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "str": _str,
    "int": _int,
    "float": _float,
    "bool": _bool,
    "list": _list,
    "multi": _multi,
}


# Drivers of one host.
MAX_ENTRIES = 256
# Options of one driver.
MAX_OPTIONS = 256
MAX_NAME = 255
MAX_ERROR = 1000


class Support(StrEnum):
    """Support level of a driver, as its author declares it."""

    SUPPORTED = "supported"
    EXPERIMENTAL = "experimental"
    REFERENCE = "reference"  # to be copied from and tested with
    DEPRECATED = "deprecated"
    UNKNOWN = "unknown"


def _load_text(value: Any) -> str | None:
    return optional(lambda text: sanitize(string(text))[:MAX_ERROR], value)


def _load_name(value: Any) -> str:
    return check_text("drivers", value, MAX_NAME, subject="driver name")


def _load_support(value: Any) -> Support:
    # A newer agent may have a level that this release does not know.
    return Support(value) if string(value) in list(Support) else Support.UNKNOWN


def _load_abilities(values: Any) -> tuple[str, ...]:
    return tuple(string(ability)[:40] for ability in as_list(values)[:40])


def _load_options(values: Any) -> tuple[Option, ...]:
    if not isinstance(values, list) or len(values) > MAX_OPTIONS:
        raise Invalid(
            f"options of a driver must be a list of at most {MAX_OPTIONS} objects", field="drivers"
        )
    return tuple(map(Option.from_dict, values))


@dataclass(frozen=True, slots=True)
class DriverEntry(Serializable):
    """One driver installed on a host.

    ``type`` is the ``DeviceType`` of its devices, None for any type. ``abilities`` has each ability
    that the driver may have, depending on its configuration. ``error`` is the reason why it cannot
    be imported; then only the name is known. ``installable`` is False if the host's configuration
    does not allow users of the API to add a backend of the driver.
    """

    name: str = field(metadata=wire(load=_load_name))
    version: str | None = field(default=None, metadata=wire(load=_load_text))
    type: str | None = field(default=None, metadata=wire(load=_load_text))
    support: Support = field(default=Support.UNKNOWN, metadata=wire(load=_load_support))
    abilities: tuple[str, ...] = field(default=(), metadata=wire(dump=sorted, load=_load_abilities))
    options: tuple[Option, ...] = field(default=(), metadata=wire(load=_load_options))
    error: str | None = field(default=None, metadata=wire(load=_load_text))
    installable: bool = True


def dump(entries: Sequence[DriverEntry]) -> list[dict[str, Any]]:
    """Return a host's drivers as plain values, sorted by name."""
    return [entry.to_dict() for entry in sorted(entries, key=lambda entry: entry.name)]


def load(body: Any) -> tuple[DriverEntry, ...]:
    """Parse a host's drivers.

    Raise Invalid, KeyError, TypeError or ValueError if they are malformed.
    """
    if not isinstance(body, list) or len(body) > MAX_ENTRIES:
        raise Invalid(f"drivers must be a list of at most {MAX_ENTRIES} objects", field="drivers")
    entries = tuple(map(DriverEntry.from_dict, body))
    if find_duplicate(entry.name for entry in entries) is not None:
        raise Invalid("drivers: two drivers have the same name", field="drivers")
    return entries


def fingerprint(entries: Sequence[DriverEntry]) -> str:
    """Return the SHA-256 of a host's drivers; their order does not matter."""
    # One canonical text, as for the digest of a report.
    text = json.dumps(dump(entries), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
