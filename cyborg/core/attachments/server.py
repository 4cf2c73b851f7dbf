# SPDX-License-Identifier: Apache-2.0
"""Decisions about a server of Nova: whether it can get devices, and whether its guest has them.

Mediated devices are handles that Nova gives to a guest again after their release. At a hard
reboot, and at a start after a stop, Nova's driver for libvirt reads the mediated devices of the
definition of the guest, and adds them to its new definition. It adds those of accelerator requests
that it does not find any more, too. The uuid of a mediated device is that of its attach handle, and
so the next owner of the handle has a device with the same uuid: the former guest gets this device
if it starts first. Other handles, such as PCI functions, are those of the present accelerator
requests at each start.

Nova deletes the definition at a rebuild, and when the server leaves its host. In the mode live,
the agent removes the device from the definition. So such handles are not attached in the mode
next-boot, and get no successor. Attachments of earlier releases may have them: their release
requires the proof of ``has_no_guest`` and ``renewing_actions``, with ``keeps_devices``.

VFIO handles are not attached in that mode, and get no successor, for another reason: Nova never
attaches them. The agent does, as soon as their ARQs are bound, and not at the next start.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cyborg.core.attachments.attachment import Mode
from cyborg.core.errors import Conflict, NotFound, Unavailable, WrongState
from cyborg.core.inventory.device import HandleType

# Types of handles that the definition of a guest keeps.
MEDIATED_TYPES = frozenset({HandleType.MDEV})
# Types of handles that are attached in the mode live only.
LIVE_TYPES = frozenset({*MEDIATED_TYPES, HandleType.VFIO})


def has_mediated_device(types: Collection[str]) -> bool:
    """Return whether the definition of a guest keeps a handle of these types."""
    return not MEDIATED_TYPES.isdisjoint(types)


def needs_live(types: Collection[str]) -> bool:
    """Return whether a handle of these types can be attached in the mode live only."""
    return not LIVE_TYPES.isdisjoint(types)


def check_mode(types: Collection[str], mode: Mode, selected: str) -> None:
    """Raise Conflict if a handle of these types could not be detached in a mode."""
    if mode is not Mode.NEXT_BOOT:
        return
    if has_mediated_device(types):
        raise Conflict(
            f"mode: {selected} needs a mediated device, which Nova gives to the guest again at "
            f"each reboot and start, also after a detach: use the mode {Mode.LIVE}",
            field="mode",
        )
    if needs_live(types):
        raise Conflict(
            f"mode: {selected} needs a device that the agent attaches, and not Nova: use the mode "
            f"{Mode.LIVE}",
            field="mode",
        )


def check_exchangeable(types: Collection[str], context: str) -> None:
    """Raise Conflict if handles of these types cannot be exchanged for those of a successor."""
    if has_mediated_device(types):
        raise Conflict(
            f"device context {context} has a mediated device, which Nova gives to the guest again "
            "at each reboot and start: it gets no successor; shelve or delete the server to "
            "empty the device",
            device_context=context,
        )
    if needs_live(types):
        raise Conflict(
            f"device context {context} has a device that the agent attaches, and not Nova: it gets "
            "no successor; shelve or delete the server to empty the device",
            device_context=context,
        )


def ports_error(server: str, free: int, needed: int) -> str:
    """Return why a guest cannot get devices, and what to do."""
    return (
        f"server {server} has {free} free PCIe root ports, and needs {needed}: set [libvirt] "
        "num_pcie_ports in nova.conf of its host, and hard reboot the server, or detach another "
        "device of it"
    )


def kept_error(server: str) -> str:
    """Return what the release of a mediated device waits for."""
    return (
        f"server {server} may have mediated devices, which Nova gives to its guest again at each "
        "reboot and start: rebuild, shelve or delete the server"
    )


# Extra spec of a flavor. Nova asks for the ARQs of an instance only if its flavor has one.
PROFILE_KEY = "accel:device_profile"

ACTIVE, STOPPED, OFFLOADED = "ACTIVE", "SHUTOFF", "SHELVED_OFFLOADED"
ATTACHABLE = (ACTIVE, STOPPED)
# States in which a server cannot get a successor, but may be able to later.
RESUMABLE = ("PAUSED", "SUSPENDED", "ERROR")
_ATTACHABLE = {Mode.NEXT_BOOT: ATTACHABLE, Mode.LIVE: (ACTIVE,)}

# Statuses in which Nova keeps no copy of the guest from which it starts the guest again.
#
# A rescued server has such a copy, with the devices that it had before the rescue.
_SETTLED = frozenset({ACTIVE, "PAUSED", STOPPED, OFFLOADED, "DELETED"})

# Actions that may start the guest with the devices that the ARQs name then.
COMPOSING_ACTIONS = frozenset(
    {
        *("create", "evacuate", "live-migration", "migrate", "reboot", "rebuild", "rescue"),
        *("resize", "restore", "resume", "start", "unrescue", "unshelve"),
    }
)
# Actions that start the guest with exactly the devices that the ARQs name then, with the event of
# nova-compute that proves it: Nova records an action before it acts, and keeps it if it fails.
#
# A reboot must be hard: after a soft reboot the guest has the devices that it had before.
RENEWING_EVENTS: Mapping[str, str] = {
    "reboot": "compute_reboot_instance",
    "rebuild": "compute_rebuild_instance",
    "start": "compute_start_instance",
}

# Renewing actions before which Nova deletes the definition of the guest, so that they prove it for
# mediated devices too. The docstring of this module has the reason.
_REDEFINING_ACTIONS = frozenset({"rebuild"})

MAX_CANDIDATES = 5  # actions whose events are read at a time


@dataclass(frozen=True, slots=True)
class Server:
    """A server as Nova shows it to an administrator.

    ``host`` and ``node`` are None for a server without a host, and also if Nova does not show the
    host: then ``host_visible`` is False. ``task`` is Nova's task state. ``profile`` is the device
    profile of its flavor, None if there is none.
    """

    uuid: str
    status: str
    project: str
    host: str | None
    node: str | None
    task: str | None
    locked: bool
    profile: str | None
    host_visible: bool = True


@dataclass(frozen=True, slots=True)
class Action:
    """An action of a server: its name, and the request and the user that caused it."""

    name: str
    request: str
    user: str | None


@dataclass(frozen=True, slots=True)
class Event:
    """An event of an action: its name, whether it has ended, and its result."""

    name: str
    ended: bool
    result: str | None


def check_server(server: Server | None, uuid: str, project: str | None, mode: Mode) -> Server:
    """Return the server if it can get devices in a mode.

    ``project`` is the only project of which the caller may change servers; None means any. Raise
    NotFound, WrongState, Conflict.
    """
    if server is None or (project is not None and server.project != project):
        raise NotFound(f"instance_uuid: no server {uuid}", field="instance_uuid")
    details = {"field": "instance_uuid", "instance": uuid}
    if server.status not in _ATTACHABLE[mode]:
        raise WrongState(
            f"instance_uuid: server {uuid} is {server.status}, an accelerator can be attached "
            f"({mode}) to a server in {' or '.join(_ATTACHABLE[mode])} only",
            **details,
        )
    if server.task is not None:
        raise WrongState(
            f"instance_uuid: server {uuid} is busy ({server.task}), retry when Nova has finished",
            **details,
        )
    if server.locked:
        raise WrongState(f"instance_uuid: {locked_error(uuid)}", **details)
    if server.host is None or server.node is None:
        raise WrongState(f"instance_uuid: {_no_host(uuid)}", **details)
    if server.profile is None and mode is Mode.NEXT_BOOT:
        raise Conflict(
            f"instance_uuid: the flavor of server {uuid} has no extra spec {PROFILE_KEY}, so Nova "
            f"ignores its accelerator requests; create a server with such a flavor, or use the "
            f"mode {Mode.LIVE}",
            **details,
        )
    return server


def check_replaceable(server: Server, profile: str) -> None:
    """Raise WrongState or Conflict unless a successor can replace a device of the server.

    ``profile`` is the hidden profile of the device context. The server has no task. It may be
    locked, because the successor does not restart it.
    """
    if server.status not in ATTACHABLE:
        raise WrongState(
            f"server {server.uuid} is {server.status}: a successor needs a server in "
            f"{' or '.join(ATTACHABLE)}",
            instance=server.uuid,
        )
    if server.host is None or server.node is None:
        raise WrongState(_no_host(server.uuid), instance=server.uuid)
    check_profile(server, profile)


def check_profile(server: Server, profile: str) -> None:
    """Raise Conflict unless the flavor of a server has the hidden profile of a device context.

    Nova may otherwise have used the context for a Neutron port. The binding of a port names the
    device: at its next start the guest would get the old device again.
    """
    if server.profile != profile:
        raise Conflict(
            f"the flavor of server {server.uuid} has the device profile {server.profile}, not "
            f"{profile}: the device context may belong to a port of the server, and the binding "
            "of the port names the device, so the context gets no successor",
            instance=server.uuid,
        )


def locked_error(uuid: str) -> str:
    """Return why a server cannot be changed now, and what to do."""
    return f"server {uuid} is locked, unlock it first"


def _no_host(uuid: str) -> str:
    return (
        f"server {uuid} has no host, or Nova does not show the host to the user of [nova]: give "
        "this user the role that Nova requires for it"
    )


def newer_actions(actions: Sequence[Action], marker: str) -> Sequence[Action]:
    """Return the actions that are newer than the action whose request is ``marker``.

    ``actions`` are in the order of Nova, the newest first. The marker of a server without actions
    is empty.
    """
    for number, action in enumerate(actions):
        if action.request == marker:
            return actions[:number]
    return actions


def is_missing(actions: Sequence[Action], marker: str) -> bool:
    """Return whether Nova no longer lists the action of a marker."""
    return marker != "" and all(action.request != marker for action in actions)


def latest_marker(actions: Sequence[Action]) -> str:
    """Return the marker of the newest action, for ``newer_actions``."""
    return actions[0].request if actions else ""


def may_have_composed(actions: Sequence[Action], marker: str) -> bool:
    """Return whether the guest may have been started since the marker."""
    return any(action.name in COMPOSING_ACTIONS for action in newer_actions(actions, marker))


def renewing_actions(
    actions: Sequence[Action], marker: str, user: str | None, *, keeps_devices: bool = False
) -> Sequence[Action]:
    """Return the newest actions since the marker that may have started the guest with new devices.

    ``user`` is the user of our requests: all its reboots are hard reboots. Without ``user``, no
    reboot is returned, since it may be a soft reboot. If the marker is not among the actions,
    return none. With ``keeps_devices``, the definition of the guest keeps a device: reboots and
    starts are not returned, since they prove nothing.
    """
    if is_missing(actions, marker):
        return ()
    renewing = [
        action
        for action in newer_actions(actions, marker)
        if action.name in (_REDEFINING_ACTIONS if keeps_devices else RENEWING_EVENTS)
        and (action.name != "reboot" or (user is not None and action.user == user))
    ]
    return renewing[:MAX_CANDIDATES]


def has_renewed(action: Action, events: Sequence[Event]) -> bool:
    """Return whether the events of an action prove that the guest was started with new devices."""
    return any(event.ended and event.result == "Success" for event in _proofs(action, events))


def is_pending(action: Action, events: Sequence[Event]) -> bool:
    """Return whether Nova has not completed a renewing action."""
    return not any(event.ended for event in _proofs(action, events))


def has_begun(action: Action, events: Sequence[Event]) -> bool:
    """Return whether nova-compute has begun a renewing action.

    Its message may be lost, for example if nova-compute has stopped meanwhile.
    """
    return bool(_proofs(action, events))


def _proofs(action: Action, events: Sequence[Event]) -> list[Event]:
    """Return the events of nova-compute for a renewing action."""
    name = RENEWING_EVENTS.get(action.name)
    return [event for event in events if event.name == name]


def is_settled(server: Server) -> bool:
    """Return whether the host can prove which devices the guest has: no task changes it."""
    return server.status in _SETTLED and server.task is None


def runs_on(server: Server, node: str) -> bool:
    """Return whether Nova shows that a node runs the guest."""
    return server.status in (ACTIVE, "PAUSED") and server.node == node


def has_no_guest(server: Server, *, keeps_devices: bool = False) -> bool:
    """Return whether no host runs the guest, and Nova is not about to start it.

    With ``keeps_devices``, the definition of the guest keeps a device: then no host may have the
    definition, and a stopped server has one. Raise Unavailable if Nova does not show it.
    """
    if server.status == OFFLOADED or (is_stopped(server) and not keeps_devices):
        return True
    if server.status == "UNKNOWN" or not server.host_visible:
        raise Unavailable(
            f"Nova does not show whether server {server.uuid} ({server.status}) has a host: its "
            "cell is not available, or the user of [nova] lacks the role that shows hosts"
        )
    return server.host is None


def is_idle(server: Server) -> bool:
    """Return whether Nova has completed its last task of a running server."""
    return server.status == ACTIVE and server.task is None


def is_idle_or_stopped(server: Server) -> bool:
    """Return whether Nova has completed its last task of a running or stopped server."""
    return is_idle(server) or is_stopped(server)


def is_stopped(server: Server) -> bool:
    """Return whether the guest is stopped, and Nova is not about to start it."""
    return server.status == STOPPED and server.task is None
