# SPDX-License-Identifier: Apache-2.0
"""The services that a backend offers: functions such as ``crypto.ipsec.aes``, and how much of each.

The first word is the resource class in small letters, without ``CUSTOM_``; a whole GPU (``PGPU``)
is ``gpu``. The others are the way down the capability tree of the device; one without a tree, or
with a tree that ``capability`` refuses, offers the first word alone. Written in capitals, with
``CUSTOM_`` before it and ``_`` for the dots, a function is the trait that a profile asks for.

What is counted are accelerators: handles that one instance can have. A function has as many in
total as its devices have handles, but no more of a device than each ``num`` on the way down its
tree allows. Handles that a request owns, and those that are being cleaned, are in use, and each
counts as a use of every function of its device, for nobody knows which of them its holder uses.
Free is what could be given out now: a device that is closed has its handles in the total, and none
of them free. So used and free never come to more than the total, and to less where something is
closed.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

import os_resource_classes

from cyborg.core import capability
from cyborg.core.errors import Invalid

MAX_NAME = 255
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
_CUSTOM = "CUSTOM_"
_ROOTS = {"PGPU": "gpu"}


@dataclass(frozen=True, slots=True)
class Holding:
    """The handles of one resource class on one device, of which ``free`` could be given out now.

    ``used`` are owned or being cleaned; ``tree`` is the text of the capability tree, as
    ``capability.told`` gives it.
    """

    resource_class: str
    total: int
    used: int
    free: int
    tree: str = ""


@dataclass(frozen=True, slots=True)
class Function:
    """A function and how many accelerators have it, are in use, and are free."""

    name: str
    total: int
    used: int
    free: int


def functions(holdings: Iterable[Holding], within: str | None = None) -> tuple[Function, ...]:
    """Return what holdings come to, in the order of the names.

    ``within`` leaves alone the function of that name and those below it.
    """
    sums: dict[str, tuple[int, int, int]] = {}
    for one in holdings:
        for name, limit in _limits(one.resource_class, one.tree):
            if within is None or name == within or name.startswith(f"{within}."):
                total = min(one.total, limit)
                used = min(one.used, total)
                before = sums.get(name, (0, 0, 0))
                here = (total, used, min(one.free, total - used))
                sums[name] = (before[0] + here[0], before[1] + here[1], before[2] + here[2])
    return tuple(Function(name, *sums[name]) for name in sorted(sums))


def offers(resource_class: str, tree: str, name: str) -> bool:
    """Tell whether a device with this tree has a function, in use or not."""
    return any(offered == name for offered, _ in _limits(resource_class, tree))


def classes(name: str) -> frozenset[str]:
    """Return the resource classes whose devices can have a function."""
    root = name.partition(".")[0]
    standard = {one for one in os_resource_classes.STANDARDS if _root(one) == root}
    return frozenset({_CUSTOM + root.upper()} | standard)


def parse(text: str) -> str:
    """Return the name of a function in its one spelling. Raises Invalid."""
    name = text.lower()
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise Invalid(
            f"function: {text[:60]!r} is the name of none; expected up to {MAX_NAME} letters, "
            "digits and _, in words with dots between, as in crypto.ipsec.aes",
            field="function",
        )
    return name


def _root(resource_class: str) -> str:
    return _ROOTS.get(resource_class) or resource_class.removeprefix(_CUSTOM).lower()


# A cloud has thousands of devices and few kinds of them.
@functools.lru_cache(maxsize=128)
def _limits(resource_class: str, text: str) -> tuple[tuple[str, int], ...]:
    root = _root(resource_class)
    try:
        tree = capability.check(capability.read(text))
        capability.traits(root, tree)
    except Invalid:
        tree = {}
    found = capability.limits(tree)
    return tuple((".".join((root, *path)), limit) for path, limit in found.items())
