# SPDX-License-Identifier: Apache-2.0
"""Reports of an agent: the state of its backends, and the full report of its host.

A report on the bus has a format number. Unknown keys are ignored, so that a newer sender may add
some; a report of a newer format is refused. The tests have golden messages of each released format.

``GET /hardware`` of the internal contract has devices in a format of its own.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import not_
from types import MappingProxyType
from typing import Any, Self

from cyborg.core import naming
from cyborg.core.codec import Serializable, as_list, wire
from cyborg.core.drivers import registry
from cyborg.core.drivers.desired_state import MAX_BACKENDS
from cyborg.core.drivers.registry import MAX_OPTIONS, DriverEntry, Setting
from cyborg.core.errors import Invalid
from cyborg.core.hosts import NO_IDENTITY, Identity
from cyborg.core.inventory import capability
from cyborg.core.inventory.device import NOT_OFFERED, Device
from cyborg.core.inventory.device_set import Activation
from cyborg.core.text import sanitize
from cyborg.core.validation import (
    check_integer,
    find_duplicate,
    integer,
    malformed,
    optional,
    string,
)

FORMAT = 1
# Remarks of one backend.
MAX_REMARKS = 64
# Characters of the name of a provider, as in Placement.
MAX_PROVIDER_NAME = 200


class BackendStatus(StrEnum):
    """Status of one backend on one host."""

    DISCOVERING = "DISCOVERING"
    READY = "READY"
    ERROR = "ERROR"


def _load_remarks(remarks: Any) -> tuple[str, ...]:
    return tuple(sanitize(string(remark)) for remark in as_list(remarks))


@dataclass(frozen=True, slots=True)
class BackendState(Serializable):
    """State of one backend; ``error`` is a sentence, or None.

    ``remarks`` are warnings about its configuration, ``settings`` its effective options. Both are
    None in a heartbeat. ``cordoned`` is set after too many failed discoveries in a row: its handles
    that the host must prepare or clean are not allocated until a discovery succeeds.
    """

    name: str
    driver: str
    status: BackendStatus
    error: str | None = None
    # Left out if empty or False: the digest stays equal to that of an older release.
    remarks: tuple[str, ...] | None = field(
        default=(), metadata=wire(omit=not_, load=_load_remarks)
    )
    settings: tuple[Setting, ...] | None = field(default=(), metadata=wire(omit=not_))
    cordoned: bool = field(
        default=False, metadata=wire(omit=not_, load=lambda value: value is True)
    )

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "error", sanitize(self.error) or "no message")

    def without_details(self) -> Self:
        """Return the state without the fields that a heartbeat does not have."""
        # A heartbeat is sent often, and these are its only large fields.
        return replace(self, remarks=None, settings=None)

    @classmethod
    def load_without_details(cls, body: Any) -> Self:
        """Parse a state, ignoring the fields that a heartbeat does not have.

        Raise KeyError, TypeError or ValueError if it is malformed.
        """
        return cls.from_dict({**body, "remarks": [], "settings": []}).without_details()

    def check_limits(self) -> None:
        """Raise Invalid, with the field, if the database cannot store the state."""
        _check_length("backend name", self.name)
        _check_length("driver name", self.driver)
        _check_length("error", self.error, self.name, max_length=65535)
        remarks, settings = self.remarks or (), self.settings or ()
        for remark in remarks:
            _check_length("remark", remark, self.name, max_length=4096)
        for setting in settings:
            _check_length("option name", setting.name, self.name)
        if len(remarks) > MAX_REMARKS or len(settings) > MAX_OPTIONS:
            raise Invalid(
                f"backend {self.name} has {len(remarks)} remarks and {len(settings)} options; at "
                f"most {MAX_REMARKS} and {MAX_OPTIONS} are allowed",
                field="backends",
            )


def check_backends(states: Sequence[BackendState]) -> None:
    """Raise Invalid if the database cannot store these backends of one host."""
    for state in states:
        state.check_limits()
    if find_duplicate(state.name for state in states) is not None:
        raise Invalid("two backends have the same name", field="drivers")


def parse_backends(bodies: Any) -> list[BackendState]:
    """Parse the states of the backends of a host. Raise Invalid."""
    if not isinstance(bodies, Sequence) or len(bodies) > MAX_BACKENDS:
        raise Invalid(f"drivers must be a list of at most {MAX_BACKENDS} objects", field="drivers")
    with malformed("drivers", "drivers"):
        states = [BackendState.load_without_details(body) for body in bodies]
    check_backends(states)
    return states


def _check_length(
    kind: str, value: str | None, backend: str | None = None, max_length: int = 255
) -> None:
    """Raise Invalid for text that is too long, or not printable apart from line ends."""
    if value is None or (len(value) <= max_length and value.replace("\n", "").isprintable()):
        return
    owner = f" of {backend}" if backend else ""
    raise Invalid(
        f"{kind}{owner} has more than {max_length} characters or is not printable", field=kind
    )


@dataclass(frozen=True, slots=True)
class Report(Serializable):
    """Inventory of a host at one time.

    ``epoch`` is the uuid of the agent's process, ``generation`` counts its reports from 1, and
    ``digest`` is also in its heartbeats. A backend in ERROR has its last known devices. ``drivers``
    are the drivers installed on the host, None from an agent that does not report them.
    """

    host: str
    epoch: str
    generation: int
    digest: str
    backends: Sequence[BackendState]
    devices: Sequence[Device]
    identity: Identity = field(default_factory=Identity)
    # Left out by an agent that does not report drivers; the stored ones then stay.
    drivers: Sequence[DriverEntry] | None = field(
        default=None,
        metadata=wire(dump=registry.dump, load=registry.load, omit=lambda drivers: drivers is None),
    )

    def __post_init__(self) -> None:
        deployables = [p for device in self.devices for p in device.deployables]
        for noun, objects in (("device", self.devices), ("deployable", deployables)):
            if (address := find_duplicate(item.address for item in objects)) is not None:
                raise Invalid(
                    f"host {self.host} reports a duplicate {noun} {address}", field="address"
                )

    def dump(self) -> dict[str, Any]:
        """Return the report as a message for the bus."""
        return {"format": FORMAT, **self.to_dict()}

    @classmethod
    def load(cls, body: Any) -> Self:
        """Parse the message of a report. Raise Invalid if it is malformed."""
        with malformed("report", "report"):
            if not 1 <= (number := integer(body["format"])) <= FORMAT:
                raise Invalid(
                    f"report format {number} is unknown, expected 1 to {FORMAT}", field="format"
                )
            return cls.from_dict(body)

    def check_limits(self) -> None:
        """Raise Invalid, with the field, if the database cannot store the report.

        Only conductors call this; an agent sends its report unchecked.
        """
        check_backends(self.backends)
        _check_length("host", self.host)
        _check_length("digest", self.digest, max_length=64)
        check_integer("generation", self.generation)
        for device in self.devices:
            for deployable in device.deployables:
                name = naming.provider_name(self.host, deployable.address)
                _check_length("provider name", name, max_length=MAX_PROVIDER_NAME)


def digest(
    devices: Sequence[Device],
    backends: Sequence[BackendState],
    identity: Identity = NO_IDENTITY,
    drivers: Sequence[DriverEntry] | None = None,
) -> str:
    """Return the SHA-256 of a host's state; the order of devices and backends does not matter."""
    body: dict[str, Any] = {
        "devices": [_sorted_dict(d) for d in sorted(devices, key=lambda d: d.address)],
        "backends": [b.to_dict() for b in sorted(backends, key=lambda b: b.name)],
    }
    if identity != NO_IDENTITY:
        # Left out if empty: the digest stays equal to that of an older release.
        body["identity"] = identity.to_dict()
    if drivers is not None:
        body["drivers"] = registry.dump(drivers)
    # One canonical text: agent and conductor compute the digest of equal values in two processes.
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sorted_dict(device: Device) -> dict[str, Any]:
    """Return a device as plain values, deployables and handles sorted by address."""
    body = device.to_dict()
    for deployable in body["deployables"]:
        deployable["handles"].sort(key=_address)
    body["deployables"].sort(key=_address)
    return body


def _address(body: dict[str, Any]) -> str:
    return str(body["address"])


@dataclass(frozen=True, slots=True)
class ObservedDeployable:
    """A deployable as the agent observes it.

    ``activation`` is that of a set which is a partition of a fabric; None for others, and while the
    fabric does not answer.
    """

    resource_class: str
    handles: frozenset[str]
    activation: Activation | None = None


@dataclass(frozen=True, slots=True)
class ObservedDevice:
    """A device as the agent observes it.

    ``deployables`` are by address; None from an agent that does not send them.
    """

    backend: str
    deployables: Mapping[str, ObservedDeployable] | None


@dataclass(frozen=True, slots=True)
class Hardware:
    """Answer of an agent: devices by address, and the errors of backends that are not ready.

    The errors are by backend name; the error of a backend in its first discovery is None.
    """

    devices: Mapping[str, ObservedDevice] = field(default_factory=dict)
    failed_backends: Mapping[str, str | None] = field(default_factory=dict)


def dump_device(device: Device, uuid: str | None = None) -> dict[str, Any]:
    """Return a device in the format of the contract; the agent does not know its ``uuid``.

    ``num`` is the number of handles. The capability tree is empty if the driver reports none.
    """
    return {
        "uuid": uuid,
        **_dump_hardware(
            {
                "num": sum(len(deployable.handles) for deployable in device.deployables),
                "type": str(device.type),
                "vendor": device.vendor,
                "std_board_info": device.std_board_info,
                "vendor_board_info": device.vendor_board_info,
                "setup_required": device.setup_required,
                "reboot_required": device.reboot_required,
                "address": device.address,
                "driver": device.backend,
                "numa_node": device.numa_node,
                "health": str(device.health),
                "serial": device.serial,
            }
        ),
        "deployables": [
            {
                "address": deployable.address,
                "resource_class": deployable.resource_class,
                "handles": [handle.address for handle in deployable.handles],
            }
            for deployable in device.deployables
        ],
    }


def dump_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a database row of a device in the format of the contract.

    In addition to its own columns the row has host, driver (None if the agent no longer has the
    backend), backend and num. An unknown type or health of a newer release is not changed.
    """
    return {
        "uuid": row["uuid"],
        "host": row["host"],
        "backend": row["backend"],
        **_dump_hardware(row),
        "not_offered": row.get("vendor_board_info", {}).get(NOT_OFFERED),
    }


def _dump_hardware(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a device as the contract of external drivers writes it."""
    board = facts["std_board_info"]
    return {
        "acc_specs": {
            "remote": int(board.get("remote") == "1"),
            "num": facts["num"],
            "device_type": facts["type"],
            "acc_capability": capability.from_board_info(facts.get("vendor_board_info", {})),
        },
        "acc_status": {
            "setup_required": facts["setup_required"],
            "reboot_required": facts["reboot_required"],
        },
        "address": facts["address"],
        "driver": facts["driver"],
        "vendor_id": board.get("vendor_id", facts["vendor"]),
        "product_id": board.get("product_id"),
        "numa_node": facts["numa_node"],
        "health": facts["health"],
        "serial": facts["serial"],
    }


def dump_answer(
    devices: Sequence[Device],
    states: Sequence[BackendState],
    activations: Mapping[str, Activation] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return an agent's answer to ``GET /hardware``.

    ``activations`` are those of partitions by the address of the deployable. They are in no report:
    each boot would change its digest.
    """
    hardware = [dump_device(device) for device in devices]
    for body in hardware:
        for deployable in body["deployables"]:
            if (activation := activations.get(deployable["address"])) is not None:
                deployable["activation"] = str(activation)
    return {
        "hardware": hardware,
        "backends": [state.without_details().to_dict() for state in states],
    }


def load_answer(body: Any) -> Hardware:
    """Parse the answer of an agent of this or the previous release. Raise Invalid."""
    with malformed("hardware", "hardware"):
        states = [BackendState.load_without_details(state) for state in body.get("backends", ())]
        failed = [state for state in states if state.status is not BackendStatus.READY]
        return Hardware(
            devices={string(item["address"]): _load_device(item) for item in body["hardware"]},
            failed_backends={state.name: state.error for state in failed},
        )


def _load_device(body: Mapping[str, Any]) -> ObservedDevice:
    """Return a device in an answer of an agent; one of the previous release has no deployables."""
    bodies = body.get("deployables")
    if bodies is None:
        return ObservedDevice(string(body["driver"]), deployables=None)
    deployables = {
        string(deployable["address"]): ObservedDeployable(
            string(deployable["resource_class"]),
            frozenset(string(h) for h in deployable["handles"]),
            optional(Activation, deployable.get("activation")),
        )
        for deployable in bodies
    }
    return ObservedDevice(string(body["driver"]), deployables)
