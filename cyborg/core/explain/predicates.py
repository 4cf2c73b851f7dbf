# SPDX-License-Identifier: Apache-2.0
"""The predicates that a provider and its handles must meet for a request group.

One list serves all answers to the question why a server gets no device: the error of a failed bind
(``core.explain.selection``), the explanation of a device profile (``core.explain.explanation``) and
its capacity (``core.explain.capacity``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from cyborg.core import naming
from cyborg.core.inventory.device_state import DeviceCondition, DeviceFacts, evaluate
from cyborg.core.inventory.reference_names import find_counterpart
from cyborg.core.text import DescribedEnum


class Predicate(DescribedEnum):
    """Predicates in the order of evaluation; the description is the text of the failure.

    The value is the stable code of the failure. Properties of a device come before its conditions:
    a device of another class does not serve a group, whatever its condition. Properties of a handle
    come last.
    """

    RESOURCE_CLASS = "resource_class", "resource class differs"
    OTHER_LAYOUT = "other_layout", "device has another layout"
    TRAIT_MISSING = "trait_missing", "trait missing"
    TRAIT_FORBIDDEN = "trait_forbidden", "trait forbidden"
    NUMA_NODE = "numa_node", "NUMA node differs"
    SET_SIZE = "set_size", "device set has another number of devices"
    IN_DEVICE_SETS = "in_device_sets", "device is allocated in device sets only"
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
    WITHHELD = "withheld", "device set is not offered"
    UNPUBLISHED = "unpublished", "Placement does not have the provider"
    TAKEN = "taken", "handle is taken"
    TAKEN_IN_CALL = "taken_in_call", "claimed by another request of this call"
    CLEANING = "cleaning", "handle is being cleaned"
    ATTACH_TARGET = "attach_target", "handle cannot be attached to the target of the group"
    QUOTA = "quota", "quota of the project is exceeded"
    OTHER_GROUP = "other_group", "the host cannot serve another group of the request"

    @property
    def position(self) -> int:
        """Return the position in the order of evaluation, from 0."""
        return _POSITIONS[self]

    @property
    def remedy(self) -> str:
        """Return what to do, for an operator."""
        return _REMEDIES[self]


_POSITIONS: Mapping[Predicate, int] = {p: number for number, p in enumerate(Predicate)}

# Predicates about what a device is: a device that fails one is not meant for the group.
#
# NUMA_NODE is none of them: the device is of the right kind, in the wrong place, so that its
# handles are lost for the group.
MATCHING = frozenset(
    {
        Predicate.RESOURCE_CLASS,
        Predicate.OTHER_LAYOUT,
        Predicate.TRAIT_MISSING,
        Predicate.TRAIT_FORBIDDEN,
        Predicate.SET_SIZE,
        Predicate.IN_DEVICE_SETS,
    }
)

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
    Predicate.NUMA_NODE: (
        "request another NUMA node, or none: cyborg device-list --long has the node of each device"
    ),
    Predicate.SET_SIZE: (
        "request as many units in one group as a device set has: cyborg device-set-list"
    ),
    Predicate.IN_DEVICE_SETS: "bind to the provider of a device set: cyborg device-set-list",
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
    Predicate.WITHHELD: (
        "release the servers that have devices of the set, or request another size: the reason "
        "names the set or the device"
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
    Predicate.OTHER_GROUP: "see the reasons of this group for the other providers of the host",
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
    required: frozenset[str],
    forbidden: frozenset[str],
    traits: frozenset[str],
    numa_node: int | None = None,
) -> list[Failure]:
    """Return a failure for each trait that is missing or forbidden, in the order of predicates.

    ``numa_node`` is the NUMA node of the device, None if it is unknown. A trait of a NUMA node is
    the only condition about NUMA that a group can have. It fails as NUMA_NODE. Every provider of
    this service has the trait OWNER_CYBORG in Placement: no driver reports it.
    """
    missing = sorted(required - traits - _OWN_TRAITS)
    unwanted = sorted(forbidden & (traits | _OWN_TRAITS))
    failures = [
        *(_fail_missing(name, numa_node) for name in missing),
        *(_fail_forbidden(name, numa_node) for name in unwanted),
    ]
    return sorted(failures, key=lambda failure: failure.predicate.position)


def find_trait_failure(
    required: frozenset[str],
    forbidden: frozenset[str],
    traits: frozenset[str],
    numa_node: int | None = None,
) -> Failure | None:
    """Return the first of ``trait_failures``, in less time; None if there is none."""
    # The usual case without building texts: this runs for each provider and group. The union of
    # traits is built only for a group that forbids one.
    is_missing = bool(required - traits - _OWN_TRAITS)
    is_forbidden = bool(forbidden) and not forbidden.isdisjoint(traits | _OWN_TRAITS)
    if not is_missing and not is_forbidden:
        return None
    return trait_failures(required, forbidden, traits, numa_node)[0]


def _fail_missing(trait: str, numa_node: int | None) -> Failure:
    """Return the failure of a required trait that a device does not have."""
    required = naming.parse_numa_trait(trait)
    # A device on the required node without the trait: its driver does not report the trait.
    if required is None or required == numa_node:
        ours = find_counterpart(trait)
        remark = "" if ours is None else f" (of OpenStack Cyborg, here {ours})"
        return fail(Predicate.TRAIT_MISSING, f"{trait}{remark}")
    node = "the node of the device is unknown" if numa_node is None else f"device has {numa_node}"
    return fail(Predicate.NUMA_NODE, f"{node}, the group requires {required}")


def _fail_forbidden(trait: str, numa_node: int | None) -> Failure:
    """Return the failure of a forbidden trait that a device has."""
    forbidden = naming.parse_numa_trait(trait)
    if forbidden is None or forbidden != numa_node:
        return fail(Predicate.TRAIT_FORBIDDEN, trait)
    return fail(Predicate.NUMA_NODE, f"device has {numa_node}, which the group forbids")


_OWN_TRAITS = frozenset({naming.OWNER_TRAIT})
