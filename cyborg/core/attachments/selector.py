# SPDX-License-Identifier: Apache-2.0
"""What an attachment attaches: a device profile, a device context or one accelerator."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cyborg.core.attachments.attachment import (
    AttachmentState,
    Mode,
    describe_target,
    parse_mode,
    parse_target,
    request_key,
)
from cyborg.core.binding.accelerator import AcceleratorState
from cyborg.core.binding.profile import (
    ATTACHMENT_PREFIX,
    HIDDEN_PREFIX,
    hidden_profile_name,
    is_hidden_profile_name,
    parse_name,
)
from cyborg.core.contexts.states import LEASED, USABLE
from cyborg.core.errors import Conflict, Invalid, WrongState
from cyborg.core.text import join_limited
from cyborg.core.validation import parse_uuid

PROFILE, CONTEXT, ACCELERATOR = "device_profile", "device_context", "accelerator"
SELECTORS = (PROFILE, CONTEXT, ACCELERATOR)
MAX_NAMED = 10  # accelerators in an error; the rest is counted


@dataclass(frozen=True, slots=True)
class Selector:
    """One of the selectors of a request, and its value: a name of a profile, or a uuid."""

    field: str
    value: str

    @property
    def context(self) -> str | None:
        """Return the uuid of the device context, None if another object is attached."""
        return self.value if self.field == CONTEXT else None

    @property
    def accelerator(self) -> str | None:
        """Return the uuid of the accelerator, None if another object is attached."""
        return self.value if self.field == ACCELERATOR else None

    @property
    def key(self) -> str:
        """Return the part of ``request_key`` that identifies the selection.

        No device profile can have the name of a hidden one, so the keys are distinct.
        """
        if self.field == CONTEXT:
            return hidden_profile_name(self.value)
        return f"{ATTACHMENT_PREFIX}{self.value}" if self.field == ACCELERATOR else self.value

    def values(self) -> dict[str, str | None]:
        """Return the columns of the attachment that identify what it attaches."""
        # The profile of an accelerator has the uuid of the attachment: see ``profile_name``.
        name = {} if self.field == ACCELERATOR else {"device_profile_name": self.key}
        return {
            **name,
            "device_context": self.context,
            "accelerator": self.accelerator,
        }

    def describe(self) -> str:
        """Return the text for what is attached, for messages."""
        return describe(self.key, self.context, self.accelerator)

    def profile_name(self, attachment: str) -> str:
        """Return the name of the profile with the groups; ``attachment`` is a uuid."""
        # An accelerator has no profile: a hidden one of the attachment has its group.
        return f"{ATTACHMENT_PREFIX}{attachment}" if self.field == ACCELERATOR else self.key


def check_selector(request: Mapping[str, Any]) -> str:
    """Return the only selector that a request has. Raise Invalid if it has none or several."""
    given = [name for name in SELECTORS if request.get(name) is not None]
    if len(given) != 1:
        field = given[-1] if given else SELECTORS[0]
        raise Invalid(
            f"{field}: expected exactly one of {', '.join(SELECTORS)}, found "
            f"{' and '.join(given) or 'none'}",
            field=field,
        )
    return given[0]


def parse_selector(request: Mapping[str, Any]) -> Selector:
    """Return the selector of a request. Raise Invalid, which names the field."""
    field = check_selector(request)
    if field != PROFILE:
        return Selector(field, parse_uuid(request[field], field))
    name = parse_name(request[field], field)
    if is_hidden_profile_name(name):
        is_context = name.lower().startswith(HIDDEN_PREFIX)
        instead = (
            f"its device context as {CONTEXT}"
            if is_context
            else f"the uuid of a free accelerator as {ACCELERATOR}"
        )
        raise Invalid(f"{field}: {name} is a hidden profile; give {instead}", field=field)
    return Selector(field, name)


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """A checked request: what is attached, to which instance or host, and how.

    ``uuid`` is None unless the caller has chosen the uuid of the attachment.
    """

    instance: str | None
    host: str | None
    selector: Selector
    mode: Mode
    reboot: bool
    uuid: str | None

    @property
    def key(self) -> str | None:
        """Return the key by which a repeated request without a uuid finds its attachment."""
        if self.uuid is not None:
            return None
        return request_key(self.instance, self.host, self.selector.key)

    def columns(self) -> dict[str, str | None]:
        """Return the columns of the attachment that the request determines."""
        target = {} if self.host is None else {"hostname": self.host}
        selected = self.selector.values()
        return {"instance_uuid": self.instance, "mode": str(self.mode), **selected, **target}


def parse_attach(request: Any) -> AttachRequest:
    """Parse a request to attach. Raise Invalid, which names the field."""
    if not isinstance(request, Mapping):
        raise Invalid("expected an object", field="body")
    instance, host = parse_target(request)
    selector = parse_selector(request)
    mode = parse_mode(request.get("mode"), for_host=instance is None)
    reboot = request.get("reboot", False)
    if not isinstance(reboot, bool):
        raise Invalid("reboot must be true or false", field="reboot")
    if reboot and mode is not Mode.NEXT_BOOT:
        raise Invalid(f"reboot: the mode {mode} needs no reboot", field="reboot")
    uuid = request.get("uuid")
    uuid = None if uuid is None else parse_uuid(uuid, "uuid")
    return AttachRequest(instance, host, selector, mode, reboot, uuid)


def check_context(
    uuid: str, *, state: str, project: str | None, instance: str | None, server_project: str
) -> None:
    """Raise WrongState or Conflict unless a device context can be attached now.

    ``state``, ``project`` and ``instance`` are those of the context. A context with a lease can be
    attached: the attachment takes its handles. The bind checks this again, with the context locked.
    """
    if project != server_project:
        raise Conflict(
            f"{CONTEXT}: device context {uuid} belongs to project {project}, and the server to "
            f"project {server_project}",
            field=CONTEXT,
        )
    if state not in USABLE | LEASED:
        raise WrongState(
            f"{CONTEXT}: device context {uuid} is {state}"
            + (f", instance {instance}" if instance else "")
            + f"; only a context that is {' or '.join(sorted(USABLE))}, or has a lease, can be "
            "attached: unbind it, or detach it, first",
            field=CONTEXT,
            state=state,
        )


def check_accelerator(uuid: str, state: str) -> None:
    """Raise WrongState unless an accelerator can be attached to a server now.

    Placement decides whether it is on the host of the server, and the bind whether it is free.
    """
    if state != AcceleratorState.FREE:
        raise WrongState(
            f"{ACCELERATOR}: accelerator {uuid} is {state}, only a free accelerator can be "
            "attached: cyborg accelerator-show has the reason",
            field=ACCELERATOR,
            state=state,
        )


def other_host_error(
    accelerator: str, host: str, server: str, server_host: str, *, shows_hosts: bool
) -> Conflict:
    """Return the error for an accelerator that is on another host than the server.

    ``shows_hosts`` is whether the caller sees the hosts of the cloud.
    """
    if not shows_hosts:
        return Conflict(
            f"{ACCELERATOR}: accelerator {accelerator} is not on the host of server {server}: give "
            f"a {PROFILE}, with which Placement chooses an accelerator there",
            field=ACCELERATOR,
        )
    return Conflict(
        f"{ACCELERATOR}: accelerator {accelerator} is on host {host}, and server {server} on host "
        f"{server_host}: choose a free accelerator of the host of the server (cyborg "
        f"accelerator-list --state free), or give a {PROFILE}",
        field=ACCELERATOR,
        host=host,
        server_host=server_host,
    )


def other_lease_error(context: str, host: str, server: str, server_host: str) -> Conflict:
    """Return the error for a device context with a lease of another host than the server's."""
    return Conflict(
        f"{CONTEXT}: device context {context} has a lease for host {host}, and server {server} is "
        f"on host {server_host}: attach it to a server on the host of the lease, or unbind it "
        "first",
        field=CONTEXT,
        host=host,
        server_host=server_host,
    )


def lease_scope_error(context: str, state: str) -> WrongState:
    """Return the error for a caller, limited to a project, who attaches a context with a lease.

    The service that reserved the context has the epoch of the lease, and needs the lease.
    """
    return WrongState(
        f"{CONTEXT}: device context {context} is {state}: its lease is for the service that made "
        "it, and only an administrator can attach it; use another context, or unbind this one "
        "with its epoch first",
        field=CONTEXT,
        state=state,
    )


def check_whole(attachment: str, accelerators: Collection[str], accelerator: str) -> None:
    """Raise Conflict if an attachment holds other accelerators than the one to detach."""
    if others := sorted(set(accelerators) - {accelerator}):
        shown = join_limited(others, MAX_NAMED)
        raise Conflict(
            f"{ACCELERATOR}: attachment {attachment} holds accelerator {accelerator} and also "
            f"{shown}, and is detached as a whole: detach the attachment",
            field=ACCELERATOR,
            attachment=attachment,
            accelerators=others,
        )


def describe(profile: str, context: str | None, accelerator: str | None) -> str:
    """Return the text that names the selection of an attachment, for messages."""
    if accelerator is not None:
        return f"accelerator {accelerator}"
    return f"device context {context}" if context is not None else f"profile {profile}"


def attached_error(
    context: str, instance: str | None, host: str | None, state: str | None
) -> WrongState:
    """Return the error of a call that would take a context from the attachment that uses it.

    ``instance`` is None if the context is attached to ``host``. ``state`` is that of the
    attachment, which decides the advice: a detach is refused while the attach or its undo is in
    progress.
    """
    # The name of the host is used only without an instance, and is not None then.
    target = describe_target(instance, host or "")
    if state == AttachmentState.ATTACHING:
        text = f"is being attached to {target}, or this is undone: wait until it has ended"
    elif state == AttachmentState.DETACHING:
        text = f"is being detached from {target}: wait until it has ended"
    else:
        command = "detach-host" if instance is None else "detach-instance"
        text = f"is attached to {target}: detach it with {command} first"
    return WrongState(
        f"device context {context} {text}",
        device_context=context,
        instance=instance,
    )
