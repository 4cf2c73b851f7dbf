# SPDX-License-Identifier: Apache-2.0
"""Functions of a backend, and the number of accelerators that have each function.

A function is a capability of a device, such as ``crypto.ipsec.aes``; it is not a PCI function. The
first element of its name is the resource class in lower case without ``CUSTOM_``; ``PGPU`` is
``gpu``. The other elements are a path in the capability tree of the device. A device without a
valid tree has only the function named after its resource class. A profile requires a function by
its trait: ``CUSTOM_CRYPTO_IPSEC_AES`` for ``crypto.ipsec.aes``.

An accelerator is a handle. The total of a function is the number of handles of its devices; for
each device it is limited by every ``num`` on the path. Handles that have an owner or are being
cleaned are used. A used handle counts for every function of its device, as the function that its
owner uses is unknown. Free handles can be allocated now: a device that is not schedulable has none.
So used plus free is at most the total, and less if a device is not schedulable.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from cyborg.core.errors import Invalid
from cyborg.core.inventory import capability

MAX_NAME = 255
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
_CUSTOM = "CUSTOM_"
_CLASS_ALIASES = {"PGPU": "gpu"}


@dataclass(frozen=True, slots=True)
class HandleUsage:
    """Numbers of handles of one resource class on one device: in total, used and free.

    Used handles have an owner or are being cleaned, free handles can be allocated now. ``tree`` is
    the device's capability tree as ``capability.encoded_text`` returns it.
    """

    resource_class: str
    total: int
    used: int
    free: int
    tree: str = ""


@dataclass(frozen=True, slots=True)
class Function:
    """A function, with the numbers of its accelerators: in total, used and free."""

    name: str
    total: int
    used: int
    free: int


def summarize_functions(
    usages: Iterable[HandleUsage], within: str | None = None
) -> tuple[Function, ...]:
    """Return the functions of all usages, sorted by name.

    With ``within`` only the function of that name and the functions below it are returned.
    """
    sums: dict[str, tuple[int, int, int]] = {}
    for usage in usages:
        for name, limit in _limits(usage.resource_class, usage.tree):
            if within is None or name == within or name.startswith(f"{within}."):
                total = min(usage.total, limit)
                used = min(usage.used, total)
                sums_before = sums.get(name, (0, 0, 0))
                free = min(usage.free, total - used)
                sums[name] = (sums_before[0] + total, sums_before[1] + used, sums_before[2] + free)
    return tuple(Function(name, *sums[name]) for name in sorted(sums))


def names_of(resource_class: str, tree: str) -> frozenset[str]:
    """Return the functions of a device of this resource class and capability tree.

    No name is longer than MAX_NAME, as a tree whose traits would be longer is not valid.
    """
    return frozenset(name for name, _ in _limits(resource_class, tree))


def parse_name(text: str) -> str:
    """Return the name of a function in lower case. Raise Invalid if it is not valid."""
    name = text.lower()
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise Invalid(
            f"function: invalid name {text[:60]!r}, expected up to {MAX_NAME} letters, digits and "
            "_, in elements separated by dots, such as crypto.ipsec.aes",
            field="function",
        )
    return name


def root_of(resource_class: str) -> str:
    """Return the first element of the function names of a resource class."""
    return _CLASS_ALIASES.get(resource_class) or resource_class.removeprefix(_CUSTOM).lower()


# Cached: a cloud has thousands of devices of a few models.
@functools.lru_cache(maxsize=128)
def _limits(resource_class: str, text: str) -> tuple[tuple[str, int], ...]:
    root = root_of(resource_class)
    try:
        tree = capability.validate(capability.decode_tree(text))
        capability.build_traits(root, tree)
    except Invalid:
        tree = {}
    found = capability.function_limits(tree)
    return tuple((".".join((root, *path)), limit) for path, limit in found.items())
