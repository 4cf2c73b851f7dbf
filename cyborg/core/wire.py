# SPDX-License-Identifier: Apache-2.0
"""Values of ``core`` as plain dicts, as they travel over the bus, and back.

Each message names its format. Readers ignore keys they do not know, so that a newer sender may add
some; a message of a newer format than ours is refused. Golden messages of each released format are
kept in the tests.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cyborg.core import catalogue
from cyborg.core.catalogue import Entry
from cyborg.core.device import (
    Ability,
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
    Health,
)
from cyborg.core.errors import Invalid
from cyborg.core.identity import Identity
from cyborg.core.plain import flag, integer, string, strings
from cyborg.core.report import BackendState, BackendStatus, Report

FORMAT = 1
NOBODY = Identity()


def dump_report(report: Report) -> dict[str, Any]:
    """Return a report as plain values."""
    return {
        "format": FORMAT,
        "host": report.host,
        "epoch": report.epoch,
        "generation": report.generation,
        "digest": report.digest,
        "backends": [dump_backend(b) for b in report.backends],
        "devices": [dump_device(d) for d in report.devices],
        "identity": dump_identity(report.identity),
        # Left out by an agent that does not tell, and then what is known stays.
        **({} if report.drivers is None else {"drivers": catalogue.dump(report.drivers)}),
    }


def load_report(body: Any) -> Report:
    """Read a report. Raises Invalid, saying which part is wrong."""
    try:
        if not 1 <= (number := integer(body["format"])) <= FORMAT:
            raise Invalid(
                f"report format {number} is unknown: this side reads up to {FORMAT}",
                field="format",
            )
        return Report(
            host=string(body["host"]),
            epoch=string(body["epoch"]),
            generation=integer(body["generation"]),
            digest=string(body["digest"]),
            backends=tuple(load_backend(b) for b in body["backends"]),
            devices=tuple(load_device(d) for d in body["devices"]),
            identity=load_identity(body.get("identity", {})),
            drivers=catalogue.load(body["drivers"]) if "drivers" in body else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as bad:
        raise Invalid(f"malformed report: {type(bad).__name__} {bad}", field="report") from bad


def dump_identity(identity: Identity) -> dict[str, Any]:
    """Return a host's identity as plain values."""
    return {
        "provider": identity.provider,
        "compute_id": identity.compute_id,
        "names": list(identity.names),
    }


def load_identity(body: Mapping[str, Any]) -> Identity:
    """Read a host's identity. Raises KeyError, TypeError, ValueError or Invalid."""
    provider, compute_id = body.get("provider"), body.get("compute_id")
    return Identity(
        provider=None if provider is None else string(provider),
        compute_id=None if compute_id is None else string(compute_id),
        names=tuple(string(name) for name in body.get("names", [])),
    )


def dump_backend(backend: BackendState) -> dict[str, Any]:
    """Return a backend's state as plain values."""
    return {
        "name": backend.name,
        "driver": backend.driver,
        "status": str(backend.status),
        "error": backend.error,
    }


def load_backend(body: Mapping[str, Any]) -> BackendState:
    """Read a backend's state. Raises KeyError, TypeError or ValueError."""
    error = body.get("error")
    return BackendState(
        name=string(body["name"]),
        driver=string(body["driver"]),
        status=BackendStatus(body["status"]),
        error=None if error is None else string(error),
    )


def dump_device(device: Device) -> dict[str, Any]:
    """Return a device and all below it as plain values."""
    return {
        "address": device.address,
        "type": str(device.type),
        "vendor": device.vendor,
        "model": device.model,
        "backend": device.backend,
        "std_board_info": dict(device.std_board_info),
        "vendor_board_info": dict(device.vendor_board_info),
        "numa_node": device.numa_node,
        "serial": device.serial,
        "health": str(device.health),
        # Left out when there is none: what an older side makes of a device has the same digest.
        **({} if device.health_reason is None else {"health_reason": device.health_reason}),
        "setup_required": device.setup_required,
        "reboot_required": device.reboot_required,
        "abilities": sorted(device.abilities),
        "deployables": [_dump_deployable(d) for d in device.deployables],
    }


def load_device(body: Mapping[str, Any]) -> Device:
    """Read a device and all below it. Raises KeyError, TypeError, ValueError or Invalid."""
    numa = body.get("numa_node")
    serial = body.get("serial")
    reason = body.get("health_reason")
    return Device(
        address=string(body["address"]),
        type=DeviceType(body["type"]),
        vendor=string(body["vendor"]),
        model=string(body["model"]),
        backend=string(body["backend"]),
        std_board_info=strings(body.get("std_board_info", {})),
        vendor_board_info=strings(body.get("vendor_board_info", {})),
        numa_node=None if numa is None else integer(numa),
        serial=None if serial is None else string(serial),
        health=Health(body.get("health", Health.OK)),
        health_reason=None if reason is None else string(reason),
        setup_required=flag(body.get("setup_required", False)),
        reboot_required=flag(body.get("reboot_required", False)),
        abilities=load_abilities(body.get("abilities", [])),
        deployables=tuple(_load_deployable(d) for d in body["deployables"]),
    )


def load_abilities(names: Any) -> frozenset[Ability]:
    """Read abilities; those that a newer sender may have are passed over. Raises TypeError."""
    if not isinstance(names, list):
        raise TypeError(f"expected a list, found {type(names).__name__}")
    return frozenset(a for a in Ability if a in [string(name) for name in names])


def digest(
    devices: Sequence[Device],
    backends: Sequence[BackendState],
    identity: Identity = NOBODY,
    drivers: Sequence[Entry] | None = None,
) -> str:
    """Return the fingerprint of a host's state: equal states give equal digests, in any order."""
    body: dict[str, Any] = {
        "devices": sorted((_ordered(d) for d in devices), key=lambda d: str(d["address"])),
        "backends": sorted((dump_backend(b) for b in backends), key=lambda b: str(b["name"])),
    }
    if identity != NOBODY:
        # Left out when there is none: an agent that tells none has the same digest as ever.
        body["identity"] = dump_identity(identity)
    if drivers is not None:
        body["drivers"] = catalogue.dump(drivers)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _ordered(device: Device) -> dict[str, Any]:
    """Return a device as plain values, its parts in the order of their addresses."""
    parts = (
        replace(part, handles=tuple(sorted(part.handles, key=lambda h: h.address)))
        for part in sorted(device.deployables, key=lambda p: p.address)
    )
    return {**dump_device(device.bare()), "deployables": [_dump_deployable(p) for p in parts]}


def _dump_deployable(deployable: Deployable) -> dict[str, Any]:
    return {
        "address": deployable.address,
        "resource_class": deployable.resource_class,
        "traits": sorted(deployable.traits),
        "attributes": dict(deployable.attributes),
        "parent": deployable.parent,
        "bitstream_id": deployable.bitstream_id,
        "handles": [
            {"address": h.address, "type": str(h.type), "info": dict(h.info)}
            for h in deployable.handles
        ],
    }


def _load_deployable(body: Mapping[str, Any]) -> Deployable:
    parent = body.get("parent")
    bitstream = body.get("bitstream_id")
    return Deployable(
        address=string(body["address"]),
        resource_class=string(body["resource_class"]),
        traits=frozenset(string(t) for t in body["traits"]),
        attributes=strings(body.get("attributes", {})),
        parent=None if parent is None else string(parent),
        bitstream_id=None if bitstream is None else string(bitstream),
        handles=tuple(
            AttachHandle(string(h["address"]), HandleType(h["type"]), strings(h.get("info", {})))
            for h in body["handles"]
        ),
    )
