# SPDX-License-Identifier: Apache-2.0
"""/v2/devices: the devices that agents discovered, and their custody logs."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from cyborg.api import types
from cyborg.api.controller import PageRequest, RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.core.custody import Event
from cyborg.core.errors import Conflict, Invalid, NotFound, WrongState
from cyborg.core.inventory import device_state
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_state import DeviceCondition
from cyborg.core.maintenance import SuccessorMode
from cyborg.db.custody import read as custody
from cyborg.db.devices import read
from cyborg.db.handles import usage

STATUS_SINCE = (2, 3)
STATE_SINCE = (2, 4)
DELIVERABLE_SINCE = (2, 5)
MAINTENANCE_SINCE = (2, 6)
FILTERS = ("hostname", "type", "vendor")
STATUSES = types.Enum("enabled", "maintaining")
# Not Uuid: a text that is no uuid gets 404, as an unknown uuid does.
PATH = {"uuid": types.UuidOrName()}
STATE_FILTERS = {"status": STATUSES, "health": types.Enum(*Health), "address": types.Text()}
MORE_FILTERS = {
    **STATE_FILTERS,
    "deliverable": types.TRUTH,
    "model": types.Text(),
    "backend": types.Text(),
}


class Device(
    types.JsonObject,
    row=read.DeviceRow,
    only=(
        *("uuid", "type", "vendor", "model", "std_board_info", "vendor_board_info", "hostname"),
        *("created_at", "updated_at"),
    ),
    links=True,
):
    """A device as versions up to 2.2 show it. Both fields of board info are JSON in a string."""

    std_board_info = types.required(str)
    vendor_board_info = types.required(str)


class DeviceV23(Device):
    """A device as version 2.3 shows it; ``status`` is set by the operator."""

    status = types.required(STATUSES)


class DeviceV24(
    DeviceV23,
    row=read.DeviceRow,
    only=(
        *("health", "health_reason", "health_since", "address", "backend", "numa_node", "serial"),
        *("setup_required", "reboot_required", "draining", "placement"),
    ),
):
    """A device as version 2.4 shows it.

    Only accelerators of a device in state ``ready`` can be bound. ``state_reasons`` are all
    conditions that prevent this; ``state`` is the first of them. ``placement`` is the worst status
    of its resource providers, null if it has none.
    """

    state = types.required(types.Enum(*DeviceCondition))
    state_reasons = types.required([types.Enum(*DeviceCondition)])
    health = types.required(types.Enum(*Health))
    placement = types.optional(types.Enum("in_sync", "stale", "error"))


class DeviceV25(
    DeviceV24,
    row=read.DeviceRow,
    only=(
        *("deliverable", "undeliverable_reason", "topology", "layout", "layouts"),
        *("desired_layout", "job_errors"),
    ),
):
    """A device as version 2.5 shows it.

    A device that is not ``deliverable`` cannot be attached to an instance, for the reason
    ``undeliverable_reason``. ``topology`` is its place in the host, such as ``pci_path``.
    ``layout`` is the current layout of a device that can be partitioned, ``layouts`` are the names
    of all its layouts, and ``desired_layout`` is the layout that an operator applied last.
    ``job_errors`` are the errors of the last failed job of each kind, until one of the kind
    succeeds, and those of the open jobs that clean its handles or prepare them again after a reboot
    of the host.
    """

    # The names only; /layout has the layouts themselves.
    layouts = types.required([str])


class HandleOwner(types.JsonObject, row=read.OwnerRow):
    """An ARQ that owns a handle of a device under maintenance.

    ``device_context`` is the uuid of its device context, or null. ``successor`` is the state of the
    successor of this context, null if there is none; ``error`` is why there is none, or why the
    work on it waits.
    """

    arq = types.required(types.Uuid())
    device_context = types.optional(types.Uuid())


class Maintenance(types.JsonObject, row=read.MaintenanceRow):
    """The maintenance window of a device: who set it, when, until when, and how far it is drained.

    ``owned`` handles belong to ARQs, of which ``owners`` are the first 64; ``cleaning`` handles
    have no owner and are not clean yet. The device is drained when both numbers are 0.
    """

    successor = types.optional(types.Enum(SuccessorMode.AUTO))


class HandleUse(types.JsonObject, row=usage.ClassUseRow, only=("total", *usage.USES)):
    """The handles of a device by use, as in the summary; each handle counts once.

    A source of device sets has the members of its sets, which are handles of other devices, too.
    """


class DeviceV26(DeviceV25, row=read.DeviceRow, only=("maintenance", "use")):
    """A device as versions from 2.6 on show it; ``maintenance`` is null without a window."""

    use = types.required(HandleUse)


class MaintenanceChange(types.JsonObject):
    """The end of a maintenance window in ISO 8601, and whether device contexts get successors."""

    until = types.required(types.Text(64, min_length=1))
    successor = types.optional(types.Enum(*SuccessorMode))


# Conditions since 2.5, and those that older versions show instead. Most remedies of an
# undeliverable device are a setup of its host.
_NEAREST: Mapping[str, str] = {
    DeviceCondition.UNDELIVERABLE: DeviceCondition.SETUP_REQUIRED,
    DeviceCondition.RESTORE_FAILED: DeviceCondition.UNHEALTHY,
    DeviceCondition.FAILING: DeviceCondition.UNHEALTHY,
}


def conditions_at(request: RequestContext, reasons: Iterable[str]) -> list[str]:
    """Return the conditions of a device for the version of a request, without duplicates.

    Versions before 2.5 show others for conditions that they do not know.
    """
    if request.version >= DELIVERABLE_SINCE:
        return list(reasons)
    return list(dict.fromkeys(_NEAREST.get(reason, reason) for reason in reasons))


def show(request: RequestContext, row: read.DeviceRow) -> dict[str, Any]:
    """Return a device as JSON."""
    more: dict[str, Any] = {
        # JSON in a string, as OpenStack Cyborg has it.
        "std_board_info": json.dumps(row["std_board_info"]),
        "vendor_board_info": json.dumps(row["vendor_board_info"]),
    }
    if request.version < STATUS_SINCE:
        return request.serialize(Device, row, DEVICES.name, **more)
    if request.version < STATE_SINCE:
        return request.serialize(DeviceV23, row, DEVICES.name, **more)
    # Evaluated for each answer: a stored state would be late for what changes elsewhere, such as
    # the liveness of the agent. Only a device set can be withheld.
    status = device_state.evaluate_row(row, withheld=False)
    reasons = conditions_at(request, status.reasons)
    # The first reason as the version shows it, and not ``status.state``.
    state = reasons[0] if reasons else status.state
    more |= {"state": state, "state_reasons": reasons}
    more["layouts"] = [layout["name"] for layout in row["layouts"]]
    # Each version has its type: a field that it does not know must not be shown.
    kind = DeviceV24 if request.version < DELIVERABLE_SINCE else DeviceV25
    if request.version >= MAINTENANCE_SINCE:
        kind = DeviceV26
        more["use"] = _use(row, status.state)
    return request.serialize(kind, row, DEVICES.name, **more)


def _use(row: read.DeviceRow, state: DeviceCondition) -> dict[str, int]:
    """Return the handles of a device by use: those without an owner have the device's state."""
    # A copy, since it is changed below.
    use = dict(row["use"])
    if state == DeviceCondition.DRAINING:
        use["draining"] += use["free"] + use["dirty"]
        use["free"] = use["dirty"] = 0
    elif state != DeviceCondition.READY:
        use["cordoned"], use["free"] = use["free"], 0
    return {"total": sum(use.values()), **use}


DEVICES = Collection("devices", "device", read, DeviceV26, show=show)


class Controller(Resource):
    """The operations on devices."""

    @DEVICES.list_operation(
        query={
            **dict.fromkeys(FILTERS, types.Text()),
            **MORE_FILTERS,
            "filters.field": types.Repeated(types.Enum(*FILTERS)),
            "filters.value": types.Repeated(types.Text()),
        },
        query_since={
            **dict.fromkeys(STATE_FILTERS, STATE_SINCE),
            "deliverable": DELIVERABLE_SINCE,
            "model": MAINTENANCE_SINCE,
            "backend": MAINTENANCE_SINCE,
        },
    )
    def find(self, request: RequestContext, page: PageRequest, **filters: Any) -> Any:
        """List devices. Filters that no device matches give an empty list."""
        criteria = _merge_filters(filters)
        # None: one field has two different values, as python-cyborgclient can send them.
        if criteria is None:
            return DEVICES.document(request, ([], None))
        deliverable = filters["deliverable"]
        # These cannot be given in ``filters.``: there is nothing to merge.
        own_filters = {
            "deliverable": None if deliverable is None else deliverable == "true",
            "model": filters["model"],
            "backend": filters["backend"],
        }
        return DEVICES.document(request, self.read_page(page, read.find, **criteria, **own_filters))

    get = DEVICES.get("Show one device.", path=PATH)

    @DEVICES.operation("POST devices/{uuid}/enable", path=PATH)
    def enable(self, request: RequestContext, uuid: str) -> None:
        """Enable a device: new ARQs can be bound to it. A failing device is tried again."""
        self.context.conductor.device_set_status(_parse_device(uuid), "enabled")

    @DEVICES.operation("POST devices/{uuid}/disable", path=PATH)
    def disable(self, request: RequestContext, uuid: str) -> None:
        """Disable a device: no new ARQs are bound to it, existing bindings stay."""
        self.context.conductor.device_set_status(_parse_device(uuid), "maintaining")

    @DEVICES.operation(
        "PUT devices/{uuid}/maintenance", since=MAINTENANCE_SINCE, path=PATH, raises=(Conflict,)
    )
    def maintain(self, request: RequestContext, uuid: str, body: MaintenanceChange) -> None:
        """Begin the maintenance window of a device, or change it.

        Until its end no new ARQs are bound to the device; existing bindings stay. With a successor,
        each device context that is bound to an instance gets another device of the host, which the
        instance has from its next start. A change without ``successor`` keeps the present choice.
        """
        window = {
            "uuid": _parse_device(uuid),
            "until": body.until,
            # None keeps the present choice.
            "successor": body.successor or None,
            "user_id": request.caller.context.user_id,
        }
        self.context.conductor.device_maintain(window)

    @DEVICES.operation(
        "DELETE devices/{uuid}/maintenance",
        "maintain",
        since=MAINTENANCE_SINCE,
        path=PATH,
        raises=(WrongState,),
    )
    def end_maintenance(self, request: RequestContext, uuid: str) -> None:
        """End the maintenance window of a device now."""
        self.context.conductor.device_end_maintenance(_parse_device(uuid))


def _parse_device(uuid: str) -> str:
    """Return the uuid of a path. Raise NotFound if it cannot be one."""
    try:
        return str(types.load(types.Uuid(), uuid, "uuid"))
    except Invalid:
        raise NotFound(f"no device {uuid}") from None


def _merge_filters(filters: Mapping[str, Any]) -> dict[str, str] | None:
    """Return one dict of all filters: ``name=value`` and pairs of ``filters.field`` and ``.value``.

    Return None if no device can match them.
    """
    fields, values = filters["filters.field"] or [], filters["filters.value"] or []
    if len(fields) != len(values):
        raise Invalid("filters.field and filters.value must come in pairs", field="filters.field")
    merged: dict[str, str] = {}
    names = (*FILTERS, *STATE_FILTERS)
    plain = [(name, filters[name]) for name in names if filters[name] is not None]
    for name, value in [*plain, *zip(fields, values, strict=True)]:
        # No device has two values of one field, but python-cyborgclient can send such filters.
        if merged.setdefault(name, value) != value:
            return None
    return merged


EVENTS = types.Enum(*Event)


class CustodyRecord(types.JsonObject, row=custody.RecordRow, names={"host": "hostname"}):
    """A record of a custody log.

    ``details`` depends on ``event``. ``sequence`` and ``hash`` are null until a conductor has added
    the record to the chain of the device; until then ``signature`` is that of the conductor that
    wrote the record, if it has a key.
    """

    event = types.required(EVENTS)
    details = types.required(types.Validated("object", dict))


class CustodyChain(
    types.JsonObject,
    row=custody.ChainRow,
    only=("sequence", "hash", "base_sequence", "base_hash", "signature"),
):
    """The ends of the hash chain of a device.

    ``sequence`` and ``hash`` are values of the last record in the chain. ``base_sequence`` and
    ``base_hash`` are values of the last record that was deleted because of its age. ``signature``
    is that of the conductor that wrote them, if it has a key.
    """


class CustodyLog(types.JsonObject):
    """A page of the custody log of a device; ``chain`` is null while the chain has no record."""

    custody = types.required([CustodyRecord])
    chain = types.optional(CustodyChain)
    custody_links = types.optional([types.Link])


CUSTODY = Collection("devices", "custody", custody, CustodyRecord, since=(2, 5), key="custody")


class CustodyController(Resource):
    """The operations on custody logs."""

    @CUSTODY.operation(
        "GET devices/{uuid}/custody",
        "get_all",
        answer=CustodyLog,
        paged=True,
        query={"event": EVENTS},
    )
    def list_custody(
        self, request: RequestContext, uuid: str, page: PageRequest, event: str | None
    ) -> Any:
        """List the custody records of a device, also of a removed device."""
        with self.context.reader.connect() as connection:
            # Before the records, so that all records of the chain are in the list.
            chain = custody.chain(connection, uuid)
            rows, marker = page.read(
                lambda window: custody.find(connection, page=window, device_uuid=uuid, event=event)
            )
            if not rows and chain is None and not custody.has_device(connection, uuid):
                raise NotFound(f"no device {uuid}")
        document = {
            "custody": [types.serialize(CustodyRecord, row) for row in rows],
            "chain": None if chain is None else types.serialize(CustodyChain, chain),
        }
        return request.add_next_link(document, f"devices/{uuid}/custody", "custody", marker)
