# SPDX-License-Identifier: Apache-2.0
"""Options of drivers: their declarations and the parsing of their values.

The declarations are used for the agent's configuration file, which oslo.config reads, and for
values from the API, which are parsed here before any change. An option for a path, a command or a
secret is ``host_only``: it can be set in the host's configuration file only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

from cyborg.core.codec import Serializable, wire
from cyborg.core.drivers.driver import closest_names, format_hint
from cyborg.core.errors import Invalid
from cyborg.core.text import sanitize
from cyborg.core.validation import string

Kind = Literal["str", "int", "float", "bool", "list", "multi"]
"""The type of an option; ``list`` is one comma separated line, ``multi`` a line for each value."""

MAX_VALUE = 4096  # characters of one text
MAX_VALUES = 256  # of a list
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
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    number = float(value)
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
