# SPDX-License-Identifier: Apache-2.0
"""An accelerator as its user sees it: one attach handle, who holds it, and what it is called there.

The label (name, description, tags) belongs to the request that holds the handle and goes with it:
the next holder finds none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cyborg.core.errors import Invalid
from cyborg.core.states import RequestState

LONGEST_NAME = 255
LONGEST_DESCRIPTION = 1024
LONGEST_TAG = 60
MAX_TAGS = 50


class State(StrEnum):
    """The states of an accelerator. Where several hold at once, the first of them here is shown."""

    DRAINING = "draining"
    PREPARING = "preparing"
    BOUND = "bound"
    DIRTY = "dirty"
    CLOSED = "closed"
    FREE = "free"


SENTENCES: Mapping[State, str] = {
    State.DRAINING: "The host does not have it any longer; it goes when its holder gives it up.",
    State.PREPARING: "A request holds it and the host prepares it.",
    State.BOUND: "A request holds it and the instance can have it.",
    State.DIRTY: "Its last holder has left and the host must clean it first.",
    State.CLOSED: "Nobody holds it, and its device gives nothing out.",
    State.FREE: "The next request that fits can have it.",
}

if missing := set(State) - set(SENTENCES):
    raise AssertionError(f"states without a sentence: {sorted(missing)}")


@dataclass(frozen=True, slots=True)
class Facts:
    """All that decides the state of an accelerator.

    ``holder`` is the state of the request that holds it, None without one. ``draining`` is of the
    handle, its part or its device; ``is_open`` what ``core.life`` says of the device.
    """

    holder: str | None = None
    prepared: bool = False
    draining: bool = False
    is_open: bool = True


def decide(facts: Facts) -> State:
    """Return the state that facts come to.

    A holder in whatever state but BindStarted counts as bound: it alone has the handle.
    """
    if facts.draining:
        return State.DRAINING
    if facts.holder is not None:
        started = facts.holder == RequestState.BIND_STARTED
        return State.PREPARING if started else State.BOUND
    if facts.prepared:
        return State.DIRTY
    return State.FREE if facts.is_open else State.CLOSED


def parse_label(body: Any) -> dict[str, Any]:
    """Read what a label is to become: of ``name``, ``description`` and ``tags`` those that change.

    None takes a name or a description away, an empty list all tags; a tag that is given twice
    counts once. Raises Invalid, naming the field.
    """
    if not isinstance(body, Mapping):
        raise Invalid("a label must be an object", field="body")
    if unknown := sorted(str(name) for name in body if name not in _READERS):
        raise Invalid(
            f"{unknown[0][:40]}: unknown field; known are {', '.join(_READERS)}", field=unknown[0]
        )
    if not body:
        raise Invalid(f"nothing to change: expected any of {', '.join(_READERS)}", field="body")
    return {name: _READERS[name](value) for name, value in body.items()}


def parse_tags(value: Any) -> list[str]:
    """Read the tags of a label. Raises Invalid, naming ``tags``."""
    if not isinstance(value, list | tuple) or len(value) > MAX_TAGS:
        raise Invalid(f"tags: expected a list of at most {MAX_TAGS}", field="tags")
    return list(dict.fromkeys(_text("tags", tag, LONGEST_TAG) for tag in value))


def _name(value: Any) -> str | None:
    return None if value is None else _text("name", value, LONGEST_NAME)


def _description(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and not value.replace("\n", "").replace("\t", ""):
        return None
    return _text("description", value, LONGEST_DESCRIPTION, also="\n\t")


def _text(field: str, value: Any, longest: int, also: str = "") -> str:
    plain = value.translate(dict.fromkeys(map(ord, also))) if isinstance(value, str) else ""
    if not plain or len(value) > longest or not plain.isprintable():
        raise Invalid(
            f"{field}: {str(value)[:40]!r} is not usable: expected 1 to {longest} printable "
            "characters",
            field=field,
        )
    return str(value)


_READERS: Mapping[str, Any] = {"name": _name, "description": _description, "tags": parse_tags}
