# SPDX-License-Identifier: Apache-2.0
"""Accelerators as users see them: an attach handle with its state and its owner's label.

The label (name, description, tags) belongs to the ARQ that owns the handle, and is removed with
the ARQ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, cast

from cyborg.core.binding.states import ArqState
from cyborg.core.errors import Invalid
from cyborg.core.text import DescribedEnum
from cyborg.core.validation import check_optional_text, check_text

MAX_NAME = 255
MAX_DESCRIPTION = 1024
MAX_TAG = 60
MAX_TAGS = 50


class AcceleratorState(DescribedEnum):
    """States of an accelerator. If several states apply, the first in this list is shown."""

    DRAINING = "draining", "No longer present on the host; removed when its owner releases it."
    PREPARING = "preparing", "Owned by an ARQ; the host prepares it."
    BOUND = "bound", "Owned by an ARQ; the instance can use it."
    ERROR = "error", "Released, but the host failed to clean it; this is retried."
    DIRTY = "dirty", "Released; the host must clean it before the next use."
    CORDONED = "cordoned", "Free, but its device is not schedulable."
    FREE = "free", "Available for the next matching ARQ."


@dataclass(frozen=True, slots=True)
class AcceleratorFacts:
    """Facts that decide the state of an accelerator.

    ``owner_state`` is the state of the owning ARQ, None without an owner. ``cleaning_failed`` is
    set if the job that cleans the handle has failed at least once. ``draining`` is set if the
    handle, its deployable or its device is draining. ``schedulable`` is set if the device is: see
    ``core.inventory.device_state.DeviceStatus``.
    """

    owner_state: str | None = None
    needs_cleaning: bool = False
    cleaning_failed: bool = False
    draining: bool = False
    schedulable: bool = True


class Label(TypedDict, total=False):
    """New values of the fields of a label; a field that is missing does not change."""

    name: str | None
    description: str | None
    tags: list[str]


def evaluate(facts: AcceleratorFacts) -> AcceleratorState:
    """Return the state of an accelerator.

    An accelerator with an owner is PREPARING if the owner is in state BindStarted, else BOUND. A
    draining accelerator is always DRAINING.
    """
    if facts.draining:
        return AcceleratorState.DRAINING
    if facts.owner_state is not None:
        started = facts.owner_state == ArqState.BIND_STARTED
        return AcceleratorState.PREPARING if started else AcceleratorState.BOUND
    if facts.needs_cleaning:
        return AcceleratorState.ERROR if facts.cleaning_failed else AcceleratorState.DIRTY
    return AcceleratorState.FREE if facts.schedulable else AcceleratorState.CORDONED


def parse_label(body: Any) -> Label:
    """Parse the changes of a label: any of ``name``, ``description`` and ``tags``.

    None removes a name or description, an empty list removes all tags, and duplicate tags are
    dropped. Raise Invalid with the name of the field.
    """
    if not isinstance(body, Mapping):
        raise Invalid("a label must be an object", field="body")
    if unknown := sorted(str(name) for name in body if name not in _READERS):
        raise Invalid(
            f"{unknown[0][:40]}: unknown field, expected {', '.join(_READERS)}", field=unknown[0]
        )
    if not body:
        raise Invalid(f"nothing to change: expected any of {', '.join(_READERS)}", field="body")
    return cast(Label, {name: _READERS[name](value) for name, value in body.items()})


def parse_tags(value: Any) -> list[str]:
    """Parse the tags of a label. Raise Invalid with the field ``tags``."""
    if not isinstance(value, list | tuple) or len(value) > MAX_TAGS:
        raise Invalid(f"tags: expected a list of at most {MAX_TAGS} tags", field="tags")
    return list(dict.fromkeys(check_text("tags", tag, MAX_TAG) for tag in value))


def _description(value: Any) -> str | None:
    if value is None:
        return None
    # A text of line ends alone is no description: it removes the one that is there.
    if isinstance(value, str) and not value.replace("\n", "").replace("\t", ""):
        return None
    return check_text("description", value, MAX_DESCRIPTION, allowed="\n\t")


_READERS: Mapping[str, Any] = {
    "name": partial(check_optional_text, "name"),
    "description": _description,
    "tags": parse_tags,
}
