# SPDX-License-Identifier: Apache-2.0
"""Rules that choose functions of the PCI bus.

A rule is one line of ``key=value`` pairs. What it matches by::

    vendor=8086            four hexadecimal digits
    product=37c8|37c9      any of several values
    class=0b40             how the six digits of the class code start
    address=0000:3d:*      a shell pattern
    product=!37c9          not this value

and what it says of what it matches::

    type=QAT  resource_class=CUSTOM_QAT  traits=CUSTOM_A|CUSTOM_B  action=offer|skip
    kernel_driver=vfio-pci|nvidia        it is sick while it has none of these

All keys of a rule must match, and of a list of rules the first that matches decides.
"""

import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cyborg.core.device import DeviceType
from cyborg.core.names import is_resource_class, is_trait
from cyborg.drivers.sysfs import PciFunction

MATCHERS = ("vendor", "product", "class", "address")
RESULTS = ("type", "resource_class", "traits", "action", "kernel_driver")
_ACTIONS = ("offer", "skip")
_ID = re.compile(r"^[0-9a-f]{4}$")
_CLASS = re.compile(r"^[0-9a-f]{1,6}$")
_DRIVER = re.compile(r"^[A-Za-z0-9_-]{1,64}$")
_ADDRESS = re.compile(r"^[0-9a-f:.*?\[\]!-]{1,64}$")


class Unreadable(ValueError):
    """A rule that does not parse: what was found in it, and what is expected there."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"found {found!r}; expected {expected}")
        self.found = found
        self.expected = expected


@dataclass(frozen=True, slots=True)
class Values:
    """Alternatives of one key: one of the wanted, if there are any, and none of the unwanted."""

    wanted: tuple[str, ...]
    unwanted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; ``type`` and ``resource_class`` are None where the class code shall decide.

    Without ``kernel_drivers`` any will do, and none.
    """

    vendor: Values | None = None
    product: Values | None = None
    class_code: Values | None = None
    address: Values | None = None
    type: DeviceType | None = None
    resource_class: str | None = None
    traits: frozenset[str] = frozenset()
    skip: bool = False
    kernel_drivers: frozenset[str] = frozenset()

    def matches(self, function: PciFunction) -> bool:
        """Tell whether every key of the rule fits the function."""
        return (
            _fits(self.vendor, function.vendor, operator.eq)
            and _fits(self.product, function.product, operator.eq)
            and _fits(self.class_code, function.class_code, str.startswith)
            and _fits(self.address, function.address, fnmatch.fnmatchcase)
        )


def first(rules: Sequence[Rule], function: PciFunction) -> Rule | None:
    """Return the rule that decides about a function; None when none matches or it says skip."""
    for rule in rules:
        if rule.matches(function):
            return None if rule.skip else rule
    return None


def parse(text: str) -> Rule:
    """Read one rule. Raises Unreadable."""
    pairs = _pairs(text)
    return Rule(
        vendor=_values(pairs, "vendor", _ID, "four hexadecimal digits, such as vendor=8086"),
        product=_values(pairs, "product", _ID, "four hexadecimal digits, such as product=37c8"),
        class_code=_values(
            pairs, "class", _CLASS, "one to six hexadecimal digits, such as class=0b40"
        ),
        address=_values(
            pairs, "address", _ADDRESS, "a pattern of PCI addresses, such as address=0000:3d:*"
        ),
        type=_type(pairs.get("type")),
        resource_class=_resource_class(pairs.get("resource_class")),
        traits=_traits(pairs.get("traits")),
        skip=_action(pairs.get("action")),
        kernel_drivers=_drivers(pairs.get("kernel_driver")),
    )


def _fits(values: Values | None, found: str, fits: Callable[[str, str], bool]) -> bool:
    if values is None:
        return True
    if any(fits(found, value) for value in values.unwanted):
        return False
    return not values.wanted or any(fits(found, value) for value in values.wanted)


def _pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value or key not in (*MATCHERS, *RESULTS):
            raise Unreadable(
                part.strip(), f"key=value with a key of {', '.join((*MATCHERS, *RESULTS))}"
            )
        if key in pairs:
            raise Unreadable(part.strip(), f"{key} once in a rule; alternatives are written a|b")
        pairs[key] = value
    if not set(pairs) & set(MATCHERS):
        raise Unreadable(text, f"at least one of {', '.join(MATCHERS)}; address=* matches all")
    return pairs


def _values(
    pairs: Mapping[str, str], key: str, form: re.Pattern[str], expected: str
) -> Values | None:
    if key not in pairs:
        return None
    wanted: list[str] = []
    unwanted: list[str] = []
    for alternative in pairs[key].lower().split("|"):
        plain = alternative.strip()
        negated = plain.startswith("!")
        plain = plain.removeprefix("!")
        if key != "address":
            plain = plain.removeprefix("0x")
        if key == "class":
            plain = plain.rstrip("*")
        if not form.match(plain):
            raise Unreadable(f"{key}={pairs[key]}", expected)
        (unwanted if negated else wanted).append(plain)
    return Values(tuple(wanted), tuple(unwanted))


def _type(value: str | None) -> DeviceType | None:
    try:
        return None if value is None else DeviceType(value.upper())
    except ValueError:
        raise Unreadable(f"type={value}", f"one of {', '.join(DeviceType)}") from None


def _resource_class(value: str | None) -> str | None:
    if value is not None and not is_resource_class(value):
        raise Unreadable(
            f"resource_class={value}", "a standard resource class, such as PGPU, or CUSTOM_NAME"
        )
    return value


def _traits(value: str | None) -> frozenset[str]:
    names = frozenset() if value is None else frozenset(t.strip() for t in value.split("|"))
    if not all(is_trait(name) for name in names):
        raise Unreadable(f"traits={value}", "standard traits or CUSTOM_NAME, as CUSTOM_A|CUSTOM_B")
    return names


def _drivers(value: str | None) -> frozenset[str]:
    names = frozenset() if value is None else frozenset(d.strip() for d in value.split("|"))
    if not all(_DRIVER.match(name) for name in names):
        raise Unreadable(
            f"kernel_driver={value}", "names of kernel drivers, such as kernel_driver=vfio-pci"
        )
    return names


def _action(value: str | None) -> bool:
    if value is not None and value not in _ACTIONS:
        raise Unreadable(f"action={value}", f"one of {', '.join(_ACTIONS)}")
    return value == "skip"
