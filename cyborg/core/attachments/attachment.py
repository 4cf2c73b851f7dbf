# SPDX-License-Identifier: Apache-2.0
"""Attachments: accelerators attached to an existing instance or to a host, and their steps.

A step is recorded before it begins, and can be repeated. FLOWS has the steps of each mode. Only
``expose`` lets Nova find the ARQs of an attachment, and ``hide`` ends this. Between both, Nova may
give the devices to the guest. In the mode next-boot, ``guest`` proves that the guest has no device
before ``release`` frees it. In the mode live, ``guest`` waits until Nova has no task for the
server: then no start of the guest is in progress that has read the ARQs before ``hide``. Then
``unplug`` detaches the devices on the host, and proves that the guest has none. If Nova has begun
an action after ``guest``, ``guest`` is repeated, because the action may have started the guest with
its old devices.

In the mode host there is no guest. The attachment itself is the consumer in Placement.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

from cyborg.core.errors import Invalid
from cyborg.core.life_cycle import LifeCycle, Transition
from cyborg.core.text import DescribedEnum
from cyborg.core.validation import check_text, parse_uuid


class Mode(DescribedEnum):
    """How the guest gets the devices."""

    NEXT_BOOT = "next-boot", "Nova attaches the devices when it starts the guest the next time."
    LIVE = "live", "The host attaches the devices to the running guest, and after each start."
    HOST = "host", "The host itself uses the devices, no instance does."


class AttachmentState(DescribedEnum):
    """States of an attachment."""

    ATTACHING = "attaching", "Being attached, or being undone after an error."
    ATTACHED = "attached", "The devices belong to the instance or host; the mode tells since when."
    DETACHING = "detaching", "Being detached; the attachment is deleted at the end."
    ERROR = "error", "The attach failed and was undone; nothing of it is left."


class AttachmentEvent(StrEnum):
    """Events that change the state of an attachment."""

    COMPLETE = "complete"
    FAIL = "fail"
    REBOOT = "reboot"
    DETACH = "detach"
    CANCEL = "cancel"
    EXCHANGE = "exchange"
    RETRY = "retry"


_S, _E = AttachmentState, AttachmentEvent
ATTACHMENT_LIFE_CYCLE = LifeCycle(
    "attachment",
    _S.ATTACHING,
    (
        Transition(
            _E.COMPLETE,
            (_S.ATTACHING,),
            _S.ATTACHED,
            "all steps are complete, or the guest has the devices despite a failure",
        ),
        Transition(_E.FAIL, (_S.ATTACHING,), _S.ERROR, "a step has failed, and all is undone"),
        Transition(
            _E.REBOOT, (_S.ATTACHED,), _S.ATTACHING, "a later request adds a reboot (next-boot)"
        ),
        Transition(_E.DETACH, (_S.ATTACHED,), _S.DETACHING),
        Transition(_E.CANCEL, (_S.ATTACHING,), _S.DETACHING, effects="the undo begins"),
        Transition(
            _E.EXCHANGE,
            (_S.ATTACHING,),
            _S.DETACHING,
            "the new handles of a successor are ready",
            "the device context gets the new handles, and the attachment the old ones",
        ),
        Transition(_E.RETRY, (_S.ERROR,), _S.ATTACHING, "a successor is still needed"),
    ),
    deletable=frozenset({_S.DETACHING, _S.ERROR}),
)

# States in which an attachment has a next step.
WORKING_STATES = frozenset({AttachmentState.ATTACHING, AttachmentState.DETACHING})


class Step(StrEnum):
    """Steps of the work on an attachment."""

    ALLOCATE = "allocate"  # choose providers, extend the allocation of the instance
    BIND = "bind"  # create the ARQs and bind them, hidden from Nova
    PREPARE = "prepare"  # wait until the host has prepared the devices
    PLUG = "plug"  # live: attach the devices to the running guest
    EXPOSE = "expose"  # let Nova find the ARQs
    REBOOT = "reboot"  # ask Nova for a hard reboot
    HIDE = "hide"  # Nova must not find the ARQs any more
    GUEST = "guest"  # wait until the guest cannot have the devices; live: until Nova has no task
    UNPLUG = "unplug"  # live: take the devices from the guest, and wait until it has none of them
    RELEASE = "release"  # unbind the ARQs, which frees the handles
    CLEAN = "clean"  # wait until the host has cleaned the devices
    SHRINK = "shrink"  # reduce the allocation of the instance by what was added


@dataclass(frozen=True, slots=True)
class Flow:
    """The steps of an attach, each with the first step of its undo, and the steps of a detach.

    The undo of an attach that has failed, or was cancelled, is the rest of the detach.
    """

    attach: Mapping[Step, Step]
    detach: tuple[Step, ...]


# A failed ``bind`` leaves no ARQ, because it is one transaction: only the allocation is undone.
_CLAIM = {Step.ALLOCATE: Step.SHRINK, Step.BIND: Step.SHRINK, Step.PREPARE: Step.RELEASE}
_RELEASE = (Step.RELEASE, Step.CLEAN, Step.SHRINK)
FLOWS: Mapping[Mode, Flow] = {
    Mode.NEXT_BOOT: Flow(
        # No guest can have a device before ``expose`` has ended: its undo waits for no guest.
        attach={**_CLAIM, Step.EXPOSE: Step.RELEASE, Step.REBOOT: Step.HIDE},
        detach=(Step.HIDE, Step.GUEST, *_RELEASE),
    ),
    Mode.LIVE: Flow(
        # The job of ``plug`` may have changed the guest, also if it has failed.
        attach={**_CLAIM, Step.PLUG: Step.HIDE, Step.EXPOSE: Step.HIDE},
        detach=(Step.HIDE, Step.GUEST, Step.UNPLUG, *_RELEASE),
    ),
    # No guest can have the devices: nothing is shown to Nova, and nothing waits for a guest.
    Mode.HOST: Flow(attach=_CLAIM, detach=_RELEASE),
}
ATTACH_STEPS = tuple(step for step in Step if any(step in flow.attach for flow in FLOWS.values()))
RELEASE_STEPS = tuple(step for step in Step if step not in ATTACH_STEPS)


def find_step(step: str | None, mode: Mode) -> Step | None:
    """Return the step that a row records, None if its mode has no such step: it is damaged."""
    flow = FLOWS[mode]
    return next(
        (candidate for candidate in (*flow.attach, *flow.detach) if candidate == step), None
    )


def first_undo_step(failed: Step, mode: Mode) -> Step:
    """Return the first step of the undo after an attach has failed at a step."""
    return FLOWS[mode].attach[failed]


def first_detach_step(mode: Mode) -> Step:
    """Return the first step of a detach."""
    return FLOWS[mode].detach[0]


def next_step(step: Step, mode: Mode, *, reboot: bool = False) -> Step | None:
    """Return the step that follows a completed one; None after the last one.

    Without ``reboot`` the attachment does not ask for a reboot, and leaves out this step.
    """
    flow = FLOWS[mode]
    steps = tuple(flow.attach) if step in flow.attach else flow.detach
    following = steps[steps.index(step) + 1 :]
    if not following or (following[0] is Step.REBOOT and not reboot):
        return None
    return following[0]


def can_get_reboot(state: str, failure: str | None, *, reboot: bool) -> bool:
    """Return whether a later request can add a reboot to an attachment in the mode next-boot.

    ``failure`` is why an attach is undone, ``reboot`` whether the attachment asks for one already.
    An attached one waits for the next start of the guest: the step ``reboot`` finds whether it has
    happened.
    """
    if reboot:
        return False
    is_attach = state == AttachmentState.ATTACHING and failure is None
    return is_attach or state == AttachmentState.ATTACHED


def parse_target(request: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the instance's uuid and the host's name of a request.

    Exactly one of them is given, the other is None. Raise Invalid.
    """
    instance, host = request.get("instance_uuid"), request.get("hostname")
    if (instance is None) == (host is None):
        raise Invalid(
            "instance_uuid: expected either instance_uuid or hostname, found "
            f"{'none' if instance is None else 'both'}",
            field="instance_uuid",
        )
    if instance is not None:
        return parse_uuid(instance, "instance_uuid"), None
    return None, check_text("hostname", host)


def parse_mode(value: Any, *, for_host: bool = False) -> Mode:
    """Return the mode; the default is next-boot, or host if ``for_host``. Raise Invalid."""
    modes = [mode for mode in Mode if (mode is Mode.HOST) == for_host]
    if value is None:
        return modes[0]  # NEXT_BOOT is declared before LIVE
    if value in modes:
        return Mode(value)
    target = "a host" if for_host else "an instance"
    raise Invalid(
        f"mode: {str(value)[:60]!r} is not supported for {target}, expected {' or '.join(modes)}",
        field="mode",
    )


def request_key(instance: str | None, host: str | None, selected: str) -> str:
    """Return the key by which a repeated request without a uuid finds its attachment.

    ``selected`` is the key of what is attached.
    """
    # The name of a host can be as long as the column alone.
    target = instance or str(uuid5(NAMESPACE_DNS, host or ""))
    return f"{target}/{selected}"


def describe_target(instance: str | None, host: str) -> str:
    """Return the text that names the target of an attachment: a server, or a host itself."""
    return f"host {host}" if instance is None else f"server {instance}"
