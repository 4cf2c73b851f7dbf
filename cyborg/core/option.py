# SPDX-License-Identifier: Apache-2.0
"""An option of a driver: what it is called, of what kind, and how a value of it is read.

The same declarations serve the configuration file of an agent, which oslo.config reads, and values
that come by the API, which are read here before anything is touched.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cyborg.core.driver import hint, near
from cyborg.core.errors import Invalid
from cyborg.core.plain import string

Kind = Literal["str", "int", "float", "bool", "list", "multi"]
"""The type of an option; ``list`` is one comma separated line, ``multi`` a line for each value."""

MAX_VALUE = 4096  # characters of one text
MAX_VALUES = 256  # of a list
LISTS: frozenset[str] = frozenset({"list", "multi"})
_FLAGS = {"true": True, "yes": True, "on": True, "1": True}
_FLAGS |= {"false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a driver, read from the section that is named after the backend."""

    name: str
    kind: Kind
    default: Any
    help: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        default = list(self.default) if self.kind in LISTS else self.default
        return {"name": self.name, "kind": self.kind, "default": default, "help": self.help}


def load(body: Mapping[str, Any]) -> Option:
    """Read plain values. Raises KeyError, TypeError or ValueError."""
    kind = string(body["kind"])
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind of option {kind[:40]!r}")
    return Option(string(body["name"]), kind, body.get("default"), string(body["help"]))  # type: ignore[arg-type]


def parse_all(options: Sequence[Option], config: Any, *, unset: bool = False) -> dict[str, Any]:
    """Read values by name: as JSON has them, or as text, as a command line has them.

    With ``unset`` None is a value of any option: that nothing is wanted of it.

    Raises Invalid for a name that no option has, saying which are near, and for a value that is not
    of its option's kind.
    """
    if not isinstance(config, Mapping):
        raise Invalid("config must be an object of option names and values", field="config")
    known = {option.name: option for option in options}
    for name in config:
        if name not in known:
            alike = near(str(name), known)
            raise Invalid(
                f"config: the driver has no option {str(name)[:255]!r}{hint(alike) or '.'} "
                f"Its options are {', '.join(known) or 'none'}",
                field="config",
                near=alike,
            )
    return {
        name: None if unset and value is None else parse(known[name], value)
        for name, value in config.items()
    }


def parse(option: Option, value: Any) -> Any:
    """Read a value of an option, JSON's or text. Raises Invalid."""
    try:
        return _READERS[option.kind](value)
    except (TypeError, ValueError, OverflowError) as bad:
        raise Invalid(
            f"config: {option.name}: found {str(value)[:255]!r}; expected a value of type "
            f"{option.kind}",
            field="config",
            option=option.name,
        ) from bad


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
    word = string(value).lower()
    if word not in _FLAGS:
        raise ValueError
    return _FLAGS[word]


def _values(value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or len(value) > MAX_VALUES:
        raise TypeError
    return [_str(one) for one in value]


def _list(value: Any) -> list[str]:
    if isinstance(value, str):
        return _values([part.strip() for part in value.split(",") if part.strip()])
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
