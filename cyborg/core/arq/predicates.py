# SPDX-License-Identifier: Apache-2.0
"""The predicates that a provider and its handles must meet for a request group.

One list serves all answers to the question why a server gets no device: the error of a failed bind
(``core.arq.selection``), the explanation of a device profile (``core.arq.explanation``) and its
capacity (``core.arq.capacity``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from cyborg.core import naming
from cyborg.core.described_enum import DescribedEnum
from cyborg.core.inventory.device_state import DeviceCondition, DeviceFacts, evaluate


class Predicate(DescribedEnum):
    """Predicates in the order of evaluation; the description is the text of the failure.

    The value is the stable code of the failure. What a device is comes before its condition: a
    device of another class does not serve a group, whatever its condition. What a handle is comes
    last.
    """

    RESOURCE_CLASS = "resource_class", "resource class differs"
    OTHER_LAYOUT = "other_layout", "device has another layout"
    TRAIT_MISSING = "trait_missing", "trait missing"
    TRAIT_FORBIDDEN = "trait_forbidden", "trait forbidden"
    TOO_FEW_HANDLES = "too_few_handles", "provider has too few handles"
    HOST_DOWN = "host_down", "agent of the host is down"
    UNDELIVERABLE = "undeliverable", "device cannot be attached to an instance"
    MAINTAINING = "maintaining", "device is under maintenance"
    BACKEND_DISABLED = (
        "disabled",
        "its driver is disabled, being uninstalled or cordoned, or it waits for another layout",
    )
    UNHEALTHY = "unhealthy", "device is unhealthy"
    SETUP_REQUIRED = "setup_required", "setup required"
    REBOOT_REQUIRED = "reboot_required", "reboot required"
    RESTORE_FAILED = (
        "restore_failed",
        "device could not be prepared again after a reboot of its host",
    )
    FAILING = "failing", "the last prepare jobs of the device failed"
    PROGRAMMING = "programming", "device is being programmed"
    DRAINING = "draining", "device is draining"
    UNPUBLISHED = "unpublished", "Placement does not have the provider"
    TAKEN = "taken", "handle is taken"
    TAKEN_IN_CALL = "taken_in_call", "claimed by another request of this call"
    CLEANING = "cleaning", "handle is being cleaned"
    ATTACH_TARGET = "attach_target", "handle cannot be attached to the target of the group"
    QUOTA = "quota", "quota of the project is exceeded"

    @property
    def position(self) -> int:
        """Return the position in the order of evaluation, from 0."""
        return _POSITIONS[self]

    @property
    def remedy(self) -> str:
        """Return what to do, for an operator."""
        return _REMEDIES[self]


_POSITIONS: Mapping[Predicate, int] = {p: number for number, p in enumerate(Predicate)}

MATCHING = frozenset(
    {
        Predicate.RESOURCE_CLASS,
        Predicate.OTHER_LAYOUT,
        Predicate.TRAIT_MISSING,
        Predicate.TRAIT_FORBIDDEN,
    }
)
"""Predicates about what a device is: a device that fails one is not meant for the group."""

# Commands are those of an operator: a project cannot change a device.
_REMEDIES: Mapping[Predicate, str] = {
    Predicate.RESOURCE_CLASS: "request a resource class that a device has: cyborg deployable-list",
    Predicate.OTHER_LAYOUT: "change the layout of an idle device: cyborg device-layout-set",
    Predicate.TRAIT_MISSING: (
        "compare the group with the traits of the deployable: cyborg deployable-list --long"
    ),
    Predicate.TRAIT_FORBIDDEN: (
        "compare the group with the traits of the deployable: cyborg deployable-list --long"
    ),
    Predicate.TOO_FEW_HANDLES: (
        "request fewer units in a group: all of them come from one provider"
    ),
    Predicate.HOST_DOWN: "start the agent of the host: cyborg service-list",
    Predicate.UNDELIVERABLE: "see undeliverable_reason in cyborg device-show",
    Predicate.MAINTAINING: "cyborg device-enable when the maintenance has ended",
    Predicate.BACKEND_DISABLED: "see the backend in cyborg driver-show and cyborg job-list",
    Predicate.UNHEALTHY: "see health_reason in cyborg device-show",
    Predicate.SETUP_REQUIRED: "see the remarks in cyborg hardware-list and the log of the agent",
    Predicate.REBOOT_REQUIRED: "reboot the host",
    Predicate.RESTORE_FAILED: "see job_errors in cyborg device-show; this is retried",
    Predicate.FAILING: (
        "correct the cause in job_errors of cyborg device-show, then cyborg device-enable"
    ),
    Predicate.PROGRAMMING: "wait for the job: cyborg job-list",
    Predicate.DRAINING: (
        "see why the host does not report the device: cyborg hardware-list; it is removed when its "
        "last instance releases it"
    ),
    Predicate.UNPUBLISHED: (
        "see error in cyborg deployable-list --long; without one, wait some seconds"
    ),
    Predicate.TAKEN: "see the owners in cyborg accelerator-list; delete a server, or add devices",
    Predicate.TAKEN_IN_CALL: "request fewer units, or spread the groups over more providers",
    Predicate.CLEANING: "wait for the job: cyborg job-list --kind release",
    Predicate.ATTACH_TARGET: (
        "set physical_networks in the section of the driver nic, or require the trait "
        "CUSTOM_PHYSNET_<NETWORK>"
    ),
    Predicate.QUOTA: "release accelerators of the project, or raise its limit",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A predicate that fails, and the text with its details."""

    predicate: Predicate
    text: str


def fail(predicate: Predicate, detail: str = "") -> Failure:
    """Return the failure of a predicate, with details such as the name of a trait."""
    text = predicate.description
    return Failure(predicate, f"{text}: {detail}" if detail else text)


@lru_cache(maxsize=4096)
def device_failures(facts: DeviceFacts) -> tuple[Predicate, ...]:
    """Return the predicates about the condition of a device that fail, in order.

    ``core.inventory.device_state`` has the rules. The results are cached: the handles of a device
    have the same facts.
    """
    reasons = evaluate(facts).reasons
    return tuple(sorted((_BY_CONDITION[reason] for reason in reasons), key=_POSITIONS.__getitem__))


_BY_CONDITION: Mapping[DeviceCondition, Predicate] = {
    condition: Predicate(condition.value)
    for condition in DeviceCondition
    if condition is not DeviceCondition.READY
}


def trait_failures(
    required: frozenset[str], forbidden: frozenset[str], traits: frozenset[str]
) -> list[Failure]:
    """Return a failure for each trait that is missing or forbidden.

    Every provider of this service has the trait OWNER_CYBORG in Placement: no driver reports it.
    """
    missing = required - traits - _OWN_TRAITS
    unwanted = forbidden & (traits | _OWN_TRAITS)
    return [
        *(fail(Predicate.TRAIT_MISSING, name) for name in sorted(missing)),
        *(fail(Predicate.TRAIT_FORBIDDEN, name) for name in sorted(unwanted)),
    ]


def find_trait_failure(
    required: frozenset[str], forbidden: frozenset[str], traits: frozenset[str]
) -> Failure | None:
    """Return the first of ``trait_failures``, in less time; None if there is none."""
    if missing := required - traits - _OWN_TRAITS:
        return fail(Predicate.TRAIT_MISSING, min(missing))
    if forbidden and (unwanted := forbidden & (traits | _OWN_TRAITS)):
        return fail(Predicate.TRAIT_FORBIDDEN, min(unwanted))
    return None


_OWN_TRAITS = frozenset({naming.OWNER_TRAIT})
