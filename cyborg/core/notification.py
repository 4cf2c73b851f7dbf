# SPDX-License-Identifier: Apache-2.0
"""Notifications: event types, payload schemas and their versions.

An event type is ``<noun>.<verb>.<phase>``: ``start`` when a long operation begins, ``end`` when it
is done, ``error`` when it failed; only ``error`` has the priority ERROR. The payload is one object
in the schema of the noun. A new field raises the minor version of the schema. A removed field, or a
field with a new meaning, raises the major version.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cyborg.core.text import DescribedEnum


class Event(DescribedEnum):
    """Event types."""

    REQUEST_CREATED = "accelerator_request.create.end", "An ARQ was created from a device profile."
    BIND_STARTED = (
        "accelerator_request.bind.start",
        "A handle is claimed and the host prepares the device.",
    )
    BOUND = "accelerator_request.bind.end", "The ARQ owns a handle that its instance can use."
    BIND_FAILED = (
        "accelerator_request.bind.error",
        "The host could not prepare the device; the ARQ owns no handle.",
    )
    UNBOUND = "accelerator_request.unbind.end", "The ARQ released its handle."
    UNBIND_FAILED = (
        "accelerator_request.unbind.error",
        "The host could not clean the released handle in time; this is retried.",
    )
    REQUEST_DELETED = (
        "accelerator_request.delete.end",
        "The ARQ was deleted and its handle released.",
    )
    ORPHAN_FREED = (
        "accelerator_request.reclaim.end",
        "The instance has no allocation; the ARQ was unbound or deleted.",
    )
    REQUEST_RESTORED = (
        "accelerator_request.restore.end",
        "The device of a bound ARQ was prepared again after its host had rebooted.",
    )
    RESTORE_FAILED = (
        "accelerator_request.restore.error",
        "The device of a bound ARQ could not be prepared again; this is retried.",
    )
    REQUEST_ATTACHED = (
        "accelerator_request.attach.end",
        "The running guest got the device of a bound ARQ from the agent of its host.",
    )
    ATTACH_FAILED = (
        "accelerator_request.attach.error",
        "A running guest lacks the device of a bound ARQ for too long; this is retried.",
    )
    PROFILE_CREATED = "device_profile.create.end", "A device profile was created."
    PROFILE_DELETED = "device_profile.delete.end", "A device profile was deleted."
    DEVICE_ENABLED = "device.enable.end", "An operator enabled a device."
    DEVICE_DISABLED = "device.disable.end", "An operator disabled a device."
    MAINTENANCE_STARTED = (
        "device.maintenance.start",
        "The maintenance window of a device began; no new ARQs are bound to it.",
    )
    MAINTENANCE_ENDED = (
        "device.maintenance.end",
        "The maintenance window of a device ended, by itself or by an operator.",
    )
    DEVICE_LOST = "device.lost.error", "A device with bound handles was removed from its host."
    DEVICE_UNHEALTHY = "device.health.error", "A device is unhealthy and cordoned."
    DEVICE_HEALTHY = (
        "device.health.end",
        "A device was healthy for the recovery window and is uncordoned.",
    )
    LAYOUT_APPLIED = "device.layout.end", "A layout was applied to a device."
    LAYOUT_FAILED = (
        "device.layout.error",
        "A layout could not be applied to a device; after a reboot this is retried.",
    )
    REQUEST_LOST = (
        "accelerator_request.lost.error",
        "The device of the ARQ's handle was removed from its host.",
    )
    REQUEST_UNHEALTHY = (
        "accelerator_request.health.error",
        "The device of the ARQ's handle is unhealthy.",
    )
    REQUEST_HEALTHY = (
        "accelerator_request.health.end",
        "The device of the ARQ's handle is healthy again.",
    )
    SERVICE_DOWN = (
        "service.down.error",
        "An agent missed too many heartbeats; its host is cordoned.",
    )
    SERVICE_UP = (
        "service.up.end",
        "An agent that was down sends heartbeats again; its host is uncordoned.",
    )
    PROGRAM_STARTED = (
        "deployable.program.start",
        "A host was requested to program an image into a deployable.",
    )
    PROGRAMMED = "deployable.program.end", "The image was programmed."
    PROGRAM_FAILED = (
        "deployable.program.error",
        "The image could not be programmed; after a reboot this is retried.",
    )
    CONTEXT_CREATED = "device_context.create.end", "A device context was created."
    CONTEXT_UPDATED = "device_context.update.end", "A device context was changed by its project."
    CONTEXT_DELETED = "device_context.delete.end", "A device context was deleted."
    CONTEXT_EXPIRED = "device_context.expire.end", "An unbound device context expired."
    CONTEXT_RESERVE_STARTED = (
        "device_context.reserve.start",
        "Handles are claimed for a lease, and a host prepares the devices.",
    )
    CONTEXT_RESERVED = (
        "device_context.reserve.end",
        "A device context is reserved: it can be bound before its lease ends.",
    )
    CONTEXT_RESERVE_FAILED = (
        "device_context.reserve.error",
        "A host could not prepare the devices of a device context; its lease has ended.",
    )
    CONTEXT_BIND_STARTED = (
        "device_context.bind.start",
        "Handles are claimed for a device context, and a host prepares the devices.",
    )
    CONTEXT_BOUND = "device_context.bind.end", "A device context is bound to an instance."
    CONTEXT_FAILED = (
        "device_context.bind.error",
        "A device context could not be bound; it owns no handle.",
    )
    CONTEXT_UNBIND_STARTED = (
        "device_context.unbind.start",
        "A device context is being unbound, or its former handles are being cleaned.",
    )
    CONTEXT_UNBOUND = (
        "device_context.unbind.end",
        "A device context is unbound and can be bound again.",
    )
    CUSTODY_ANCHORED = (
        "custody.anchor.end",
        "The last records of custody logs, once a day, to be kept outside of the database.",
    )


@dataclass(frozen=True, slots=True)
class Schema:
    """Schema of a payload object: its name, version and fields."""

    name: str
    version: str
    fields: tuple[str, ...]


SCHEMAS: Mapping[str, Schema] = {
    name: Schema(name, version, tuple(fields.split()))
    for name, version, fields in (
        (
            "accelerator_request",
            "1.0",
            "uuid state device_profile_name device_profile_group_id resource_class project_id "
            "hostname device_rp_uuid instance_uuid error",
        ),
        ("device_profile", "1.0", "uuid name description groups"),
        ("device", "1.0", "uuid hostname address type vendor model health status layout error"),
        ("service", "1.0", "uuid binary hostname last_seen_at down_since"),
        (
            "deployable",
            "1.0",
            "uuid name hostname device_uuid rp_uuid resource_class bitstream_id image error",
        ),
        (
            "device_context",
            "1.0",
            "uuid name state project_id device_profile hostname instance_uuid error",
        ),
        ("custody", "1.0", "uuid chains"),
    )
}

# Fields that a row may lack; they are then None.
OPTIONAL_FIELDS = frozenset({"error", "image"})
