# SPDX-License-Identifier: Apache-2.0
"""What listeners are told: every type of notification, the objects it carries, their versions.

An event type is ``<noun>.<verb>.<phase>``: ``start`` when work begins that takes time, ``end`` when
it is done, ``error`` when it failed. The message carries one object in the schema of its noun. A
new field raises the schema's minor version; a field that goes or changes its meaning, the major.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any


class Priority(StrEnum):
    """How urgent a notification is; listeners subscribe by it."""

    INFO = "INFO"
    ERROR = "ERROR"


class Event(StrEnum):
    """The event types."""

    REQUEST_CREATED = "accelerator_request.create.end"
    BIND_STARTED = "accelerator_request.bind.start"
    BOUND = "accelerator_request.bind.end"
    BIND_FAILED = "accelerator_request.bind.error"
    UNBOUND = "accelerator_request.unbind.end"
    REQUEST_DELETED = "accelerator_request.delete.end"
    ORPHAN_FREED = "accelerator_request.reclaim.end"
    PROFILE_CREATED = "device_profile.create.end"
    PROFILE_DELETED = "device_profile.delete.end"
    DEVICE_ENABLED = "device.enable.end"
    DEVICE_DISABLED = "device.disable.end"
    DEVICE_LOST = "device.lost.error"
    DEVICE_UNHEALTHY = "device.health.error"
    DEVICE_HEALTHY = "device.health.end"
    REQUEST_LOST = "accelerator_request.lost.error"
    REQUEST_UNHEALTHY = "accelerator_request.health.error"
    REQUEST_HEALTHY = "accelerator_request.health.end"
    SERVICE_DOWN = "service.down.error"
    SERVICE_UP = "service.up.end"
    PROGRAM_STARTED = "deployable.program.start"
    PROGRAMMED = "deployable.program.end"
    PROGRAM_FAILED = "deployable.program.error"


@dataclass(frozen=True, slots=True)
class Schema:
    """The object that a notification carries: its name, its version and its fields."""

    name: str
    version: str
    fields: tuple[str, ...]


SCHEMAS: Mapping[str, Schema] = {
    schema.name: schema
    for schema in (
        Schema(
            "accelerator_request",
            "1.0",
            (
                "uuid",
                "state",
                "device_profile_name",
                "device_profile_group_id",
                "resource_class",
                "project_id",
                "hostname",
                "device_rp_uuid",
                "instance_uuid",
                "error",
            ),
        ),
        Schema("device_profile", "1.0", ("uuid", "name", "description", "groups")),
        Schema(
            "device",
            "1.0",
            ("uuid", "hostname", "address", "type", "vendor", "model", "health", "status"),
        ),
        Schema("service", "1.0", ("uuid", "binary", "hostname", "last_seen_at", "down_since")),
        Schema(
            "deployable",
            "1.0",
            (
                "uuid",
                "name",
                "hostname",
                "device_uuid",
                "rp_uuid",
                "resource_class",
                "bitstream_id",
                "image",
                "error",
            ),
        ),
    )
}

SENTENCES: Mapping[Event, str] = {
    Event.REQUEST_CREATED: "A request was made from a profile.",
    Event.BIND_STARTED: "A handle is claimed and its host prepares the device.",
    Event.BOUND: "The request owns a handle that its instance can use.",
    Event.BIND_FAILED: "The host could not prepare the device; no handle is held.",
    Event.UNBOUND: "The request gave its handle back.",
    Event.REQUEST_DELETED: "The request is gone, and so is its hold on a handle.",
    Event.ORPHAN_FREED: "The instance has no allocation any longer; the request was unbound.",
    Event.PROFILE_CREATED: "A device profile was made.",
    Event.PROFILE_DELETED: "A device profile is gone.",
    Event.DEVICE_ENABLED: "A device is open to new requests.",
    Event.DEVICE_DISABLED: "A device is closed to new requests.",
    Event.DEVICE_LOST: "A device of which something is bound is gone from its host.",
    Event.DEVICE_UNHEALTHY: "A device is sick and closed to new requests.",
    Event.DEVICE_HEALTHY: "A device that was sick has been well for long enough and is open.",
    Event.REQUEST_LOST: "The device that the request holds a part of is gone from its host.",
    Event.REQUEST_UNHEALTHY: "The device that the request holds a part of is sick.",
    Event.REQUEST_HEALTHY: "The device that the request holds a part of is well again.",
    Event.SERVICE_DOWN: "An agent has been silent for too long; what its host has is closed.",
    Event.SERVICE_UP: "An agent that was down speaks again; what its host has is open.",
    Event.PROGRAM_STARTED: "A host was told to load an image into a deployable.",
    Event.PROGRAMMED: "The image is loaded.",
    Event.PROGRAM_FAILED: "The image could not be loaded.",
}

# What an object lacks when there is nothing to say of it.
_OPTIONAL = frozenset({"error", "image"})


def schema_of(event: Event) -> Schema:
    """Return the schema of the object that an event type carries."""
    return SCHEMAS[event.partition(".")[0]]


def priority_of(event: Event) -> Priority:
    """Return how urgent an event type is."""
    return Priority.ERROR if event.endswith(".error") else Priority.INFO


def notification(
    event: Event, row: Mapping[str, Any], *, id_: str, at: datetime, request_id: str | None
) -> dict[str, Any]:
    """Return a notification of a row, which may hold more than the schema's fields.

    ``id_`` is the notification's own uuid, by which a listener knows one that comes twice; ``at``
    is naive UTC; ``request_id`` is that of the call that brought it about. Raises KeyError when the
    row lacks a field.
    """
    schema = schema_of(event)
    return {
        "event_type": str(event),
        "priority": str(priority_of(event)),
        "payload": {
            "schema": schema.name,
            "version": schema.version,
            "notification_id": id_,
            "occurred_at": at.replace(tzinfo=UTC).isoformat(),
            "request_id": request_id,
            "data": {
                name: row.get(name) if name in _OPTIONAL else row[name] for name in schema.fields
            },
        },
    }
