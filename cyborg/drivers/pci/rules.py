# SPDX-License-Identifier: Apache-2.0
"""Rules that select PCI functions.

A rule is one line of ``key=value`` pairs. Keys that match a function::

    vendor=8086            four hexadecimal digits
    product=37c8|37c9      any of several values
    subsystem_vendor=1028  vendor id of the card's maker; also subsystem_product
    class=0b40             prefix of the six digits of the class code
    address=0000:3d:*      a shell pattern
    numa_node=0            a decimal number
    product=!37c9          any value except this one, or no value
    functions=whole|vf|all virtual functions (vf), all other functions (whole), or both

Without ``functions`` a rule matches virtual functions of all devices except GPUs: these look like
the whole card. A rule with ``action=skip`` matches all functions.

Keys that set properties of the matched functions::

    type=QAT  resource_class=CUSTOM_QAT  traits=CUSTOM_A|CUSTOM_B  action=offer|skip
    kernel_driver=vfio-pci|nvidia        the function is unhealthy while bound to another driver
    erase=purge|clear                    how the driver nvme erases the function: see ErasePolicy
    active_port=offer|withhold           whether a network port that is up with a link is offered

A rule matches if all its keys match. In a list of rules the first one that matches applies. There
is no key for the current kernel driver, because it changes while a server uses the function.
"""

import fnmatch
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from cyborg.core.inventory.device import DeviceType
from cyborg.core.naming import ACCELERATOR_CLASSES, is_accelerator_class, is_trait
from cyborg.drivers.base import InvalidOption
from cyborg.drivers.kernel.nvme import ERASE, ErasePolicy
from cyborg.drivers.pci import classes
from cyborg.drivers.sysfs import PciFunction

SCOPE = "functions"
RESULTS = ("type", "resource_class", "traits", "action", "kernel_driver", "active_port")
_ID = re.compile(r"^[0-9a-f]{4}$")
_CLASS = re.compile(r"^[0-9a-f]{1,6}$")
_DRIVER = re.compile(r"^[A-Za-z0-9_-]{1,64}$")
_NUMBER = re.compile(r"^(0|[1-9][0-9]{0,4})$")
_ADDRESS = re.compile(r"^[0-9a-f:.*?\[\]!-]{1,64}$")


@dataclass(frozen=True, slots=True)
class _Matcher:
    """A key that matches: the form of its values, and what it compares with the values.

    ``fits(found, value)`` compares what ``read`` returns of a PCI function with one value.
    """

    form: re.Pattern[str]
    expected: str
    read: Callable[[PciFunction], str | None]
    fits: Callable[[str, str], bool] = operator.eq


def _numa_node(function: PciFunction) -> str | None:
    return None if function.numa_node is None else str(function.numa_node)


_DIGITS = "four hexadecimal digits"
_MATCHERS: Mapping[str, _Matcher] = {
    "vendor": _Matcher(_ID, f"{_DIGITS}, such as vendor=8086", attrgetter("vendor")),
    "product": _Matcher(_ID, f"{_DIGITS}, such as product=37c8", attrgetter("product")),
    "subsystem_vendor": _Matcher(
        _ID, f"{_DIGITS}, as subsystem_vendor=1028", attrgetter("subsystem_vendor")
    ),
    "subsystem_product": _Matcher(
        _ID, f"{_DIGITS}, as subsystem_product=1f9b", attrgetter("subsystem_product")
    ),
    "class": _Matcher(
        _CLASS,
        "one to six hexadecimal digits, such as class=0b40",
        attrgetter("class_code"),
        str.startswith,
    ),
    "address": _Matcher(
        _ADDRESS,
        "a pattern of PCI addresses, such as address=0000:3d:*",
        attrgetter("address"),
        fnmatch.fnmatchcase,
    ),
    "numa_node": _Matcher(_NUMBER, "a number, such as numa_node=0", _numa_node),
}
MATCHERS = tuple(_MATCHERS)
KEYS = (*MATCHERS, SCOPE, *RESULTS)


@dataclass(frozen=True, slots=True)
class Values:
    """Values that a key matches.

    These are the values in ``accepted`` (any value if ``accepted`` is empty) that are not in
    ``rejected``.
    """

    accepted: tuple[str, ...]
    rejected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for PCI functions: ``conditions`` has the values of the keys that match.

    If ``type`` or ``resource_class`` is None, the class code of the function determines it.

    An empty ``kernel_drivers`` permits any kernel driver, or none. ``scope`` is the value of the
    key ``functions``, None without it. ``erase`` is in the order of preference, and empty without
    the key. With ``offers_active_port``, a network port that is up with a link does not count as
    used by the host.
    """

    conditions: Mapping[str, Values] = field(default_factory=dict)
    type: DeviceType | None = None
    resource_class: str | None = None
    traits: frozenset[str] = frozenset()
    skip: bool = False
    kernel_drivers: frozenset[str] = frozenset()
    scope: str | None = None
    erase: tuple[ErasePolicy, ...] = ()
    offers_active_port: bool = False

    def matches(self, function: PciFunction) -> bool:
        """Return whether every key of the rule matches the PCI function."""
        return self._fits_scope(function) and all(
            _fits(_MATCHERS[key], values, function) for key, values in self.conditions.items()
        )

    def _fits_scope(self, function: PciFunction) -> bool:
        # Virtual functions of a GPU look like the whole card: a rule for cards must not offer them.
        default = "all" if self.skip or not classes.is_gpu(function) else "whole"
        scope = self.scope or default
        return scope == "all" or (scope == "vf") == (function.physfn is not None)


def matching_rule(rules: Sequence[Rule], function: PciFunction) -> Rule | None:
    """Return the first rule that matches a PCI function.

    Return None if no rule matches, or if the action of that rule is skip.
    """
    number = matching_index(rules, function)
    return None if number is None or rules[number].skip else rules[number]


def matching_index(rules: Sequence[Rule], function: PciFunction) -> int | None:
    """Return the index of the first rule that matches a PCI function; None if no rule matches."""
    return next((n for n, rule in enumerate(rules) if rule.matches(function)), None)


def parse(text: str, keys: Collection[str] = KEYS, driver: str = "generic") -> Rule:
    """Parse a rule of a driver with these keys. Raise InvalidOption if it is invalid."""
    pairs = _pairs(text, keys, driver)
    scope = _scope(pairs)
    return Rule(
        conditions={key: _values(key, pairs[key]) for key in MATCHERS if key in pairs},
        type=_type(pairs.get("type")),
        resource_class=_resource_class(pairs.get("resource_class")),
        traits=_traits(pairs.get("traits")),
        skip=_choice(pairs, "action", "offer", "skip") == "skip",
        kernel_drivers=_drivers(pairs.get("kernel_driver")),
        scope=scope,
        erase=_erase(pairs.get(ERASE)),
        offers_active_port=_choice(pairs, "active_port", "offer", "withhold") == "offer",
    )


def _fits(matcher: _Matcher, values: Values, function: PciFunction) -> bool:
    found = matcher.read(function)
    # A property that is not known, such as the NUMA node, fits only "any value except".
    if found is None:
        return not values.accepted
    if any(matcher.fits(found, value) for value in values.rejected):
        return False
    return not values.accepted or any(matcher.fits(found, value) for value in values.accepted)


def _pairs(text: str, keys: Collection[str], driver: str) -> dict[str, str]:
    """Return the keys and values of a rule. Raise InvalidOption."""
    pairs: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        # An operator may expect that any driver erases drives, so this key has its own message.
        if key == ERASE and key not in keys:
            raise InvalidOption(
                part.strip(),
                f"no {key}: the driver {driver} does not erase devices, the driver nvme does",
            )
        if not equals or not value or key not in keys:
            raise InvalidOption(part.strip(), f"key=value with a key of {', '.join(keys)}")
        if key in pairs:
            raise InvalidOption(
                part.strip(), f"{key} only once in a rule; separate alternatives with |"
            )
        pairs[key] = value
    # A rule that matches everything must say so: most likely a key was forgotten.
    if not set(pairs) & set(MATCHERS):
        raise InvalidOption(text, f"at least one of {', '.join(MATCHERS)}; address=* matches all")
    return pairs


def _values(key: str, text: str) -> Values:
    """Return the alternatives that a value accepts, and those with ``!`` it rejects."""
    accepted: list[str] = []
    rejected: list[str] = []
    for alternative in text.lower().split("|"):
        value = alternative.strip()
        negated = value.startswith("!")
        value = value.removeprefix("!")
        # sysfs writes ids with 0x. A * after the digits of a class changes nothing: these are a
        # prefix.
        if key != "address":
            value = value.removeprefix("0x")
        if key == "class":
            value = value.rstrip("*")
        if not _MATCHERS[key].form.match(value):
            raise InvalidOption(f"{key}={text}", _MATCHERS[key].expected)
        (rejected if negated else accepted).append(value)
    return Values(tuple(accepted), tuple(rejected))


def _scope(pairs: Mapping[str, str]) -> str | None:
    value = _choice(pairs, SCOPE, "whole", "vf", "all")
    if value == "all" and "resource_class" in pairs:
        raise InvalidOption(
            f"{SCOPE}=all",
            "a rule for functions=whole and one for functions=vf: a server that asks for the "
            "resource class of a whole card must not get a virtual function",
        )
    return value


def _type(value: str | None) -> DeviceType | None:
    try:
        return None if value is None else DeviceType(value.upper())
    except ValueError:
        raise InvalidOption(f"type={value}", f"one of {', '.join(DeviceType)}") from None


def _resource_class(value: str | None) -> str | None:
    if value is not None and not is_accelerator_class(value):
        raise InvalidOption(
            f"resource_class={value}",
            f"one of {', '.join(sorted(ACCELERATOR_CLASSES))}, or CUSTOM_NAME; other standard "
            "resource classes belong to Nova",
        )
    return value


def _traits(value: str | None) -> frozenset[str]:
    names = frozenset() if value is None else frozenset(t.strip() for t in value.split("|"))
    if not all(is_trait(name) for name in names):
        raise InvalidOption(
            f"traits={value}", "standard traits or CUSTOM_NAME, such as CUSTOM_A|CUSTOM_B"
        )
    return names


def _drivers(value: str | None) -> frozenset[str]:
    names = frozenset() if value is None else frozenset(d.strip() for d in value.split("|"))
    if not all(_DRIVER.match(name) for name in names):
        raise InvalidOption(
            f"kernel_driver={value}", "names of kernel drivers, such as kernel_driver=vfio-pci"
        )
    return names


def _erase(value: str | None) -> tuple[ErasePolicy, ...]:
    names = [] if value is None else [name.strip() for name in value.split("|")]
    try:
        return tuple(dict.fromkeys(ErasePolicy(name) for name in names))
    except ValueError:
        raise InvalidOption(
            f"{ERASE}={value}",
            f"values of {', '.join(ErasePolicy)}, the preferred one first, such as "
            f"{ERASE}={ErasePolicy.PURGE}|{ErasePolicy.CLEAR}",
        ) from None


def _choice(pairs: Mapping[str, str], key: str, *choices: str) -> str | None:
    """Return the value of a key that has one of these values; None without the key."""
    value = pairs.get(key)
    if value is not None and value not in choices:
        raise InvalidOption(f"{key}={value}", f"one of {', '.join(choices)}")
    return value
