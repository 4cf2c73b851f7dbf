# SPDX-License-Identifier: Apache-2.0
"""Successors: replacement devices for the device contexts of a device under maintenance.

A successor is an attachment of devices that replace others::

    allocate -> bind -> prepare -> expose -> guest -> release -> clean -> shrink

The steps up to ``expose`` are those of an attach. ``expose`` exchanges the handles: the ARQs of the
context, which Nova finds, get the new handles, and the hidden ARQs of the attachment get the old
ones. From then on, the attachment is a detach of the old handles.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cyborg.core.attachments.attachment import AttachmentState, Step
from cyborg.core.contexts.refusals import public_text
from cyborg.core.errors import Conflict
from cyborg.core.explain.explanation import GroupDemand, ProviderState, find_first_failure
from cyborg.core.explain.predicates import Failure, Predicate
from cyborg.core.explain.request_fit import evaluate_request
from cyborg.core.text import join_limited

MAX_SHOWN = 3  # providers in a text


@dataclass(frozen=True, slots=True)
class OwnedUnit:
    """An ARQ that owns a handle: its row id, the number of its group, and its provider."""

    arq_id: int
    group: int
    provider: str


def pair_units(
    old: Sequence[OwnedUnit], new: Sequence[OwnedUnit]
) -> list[tuple[OwnedUnit, OwnedUnit]]:
    """Return pairs of an old unit and a new one of the same group.

    Raise Conflict if a group has different numbers of old and new units: the context has changed.
    """
    pairs: list[tuple[OwnedUnit, OwnedUnit]] = []
    old_units, new_units = _by_group(old), _by_group(new)
    for group in sorted({*old_units, *new_units}):
        before, after = old_units[group], new_units[group]
        if len(before) != len(after):
            raise Conflict(
                f"group {group} has {len(before)} accelerators to replace and {len(after)} "
                "successors: the device context has changed"
            )
        pairs += zip(before, after, strict=True)
    return pairs


def _by_group(units: Iterable[OwnedUnit]) -> defaultdict[int, list[OwnedUnit]]:
    by_group = defaultdict[int, list[OwnedUnit]](list)
    # By id, so that each attempt makes the same pairs.
    for unit in sorted(units, key=lambda unit: unit.arq_id):
        by_group[unit.group].append(unit)
    return by_group


def describe_work(state: str | None, step: str | None) -> str:
    """Return why a context cannot be deleted during the work on its successor, and what to do."""
    if state == AttachmentState.DETACHING and step in (Step.HIDE, Step.GUEST):
        return (
            "a device that it had was exchanged for maintenance, and may still be in use by the "
            "guest; stop or delete the server"
        )
    if state == AttachmentState.DETACHING:
        return "a device that it had is being released after its maintenance; retry soon"
    return "the successor that it was to get for a maintenance is being undone; retry soon"


def describe_missing(
    demands: Sequence[GroupDemand], providers: Sequence[ProviderState], device: str | None
) -> str:
    """Return why no device of a host can serve the groups, by the first failure of each provider.

    ``providers`` are the providers of the host. ``device`` is the uuid of the device to replace,
    None for an attachment. Members of a project see the text of an attachment: it has numbers of
    devices instead of their addresses and details. The text of a successor is for administrators.
    """
    others = [provider for provider in providers if provider.device_uuid != device]
    for demand in demands:
        failures = [
            (provider, failure)
            for provider in others
            if (failure := find_first_failure(demand, provider)) is not None
        ]
        if len(failures) < len(others):
            continue  # a provider without a failure can serve the group
        if device is None:
            reason = _summarize(failures) or "no device"
        else:
            texts = [f"{provider.device}: {failure.text}" for provider, failure in failures]
            reason = join_limited(texts, MAX_SHOWN, separator="; ", nouns="devices")
            reason = reason or "no other device"
        return f"group {demand.number}: {reason}"
    # Each group fits alone: several groups may compete for the same handles.
    fit = evaluate_request(demands, others)
    for host in fit.counts.hosts:
        for failure in fit.joint(host).values():
            if failure.predicate is Predicate.TAKEN_IN_CALL:
                return failure.text
    return "each group fits alone, but not all groups together, or Placement has no room"


def _summarize(failures: Iterable[tuple[ProviderState, Failure]]) -> str:
    """Return the reasons, each with its number of devices."""
    # A device with several providers counts once for each reason.
    devices = {(public_text(failure), provider.device_uuid): None for provider, failure in failures}
    counts = Counter(text for text, _ in devices)
    texts = [f"{text} ({count} devices)" for text, count in counts.most_common()]
    return join_limited(texts, MAX_SHOWN, separator="; ", nouns="reasons")
