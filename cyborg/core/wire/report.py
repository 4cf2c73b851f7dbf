# SPDX-License-Identifier: Apache-2.0
"""Serialisation of reports to plain dicts for the bus, and back.

Each message has a format number. Unknown keys are ignored, so that a newer sender may add some; a
message of a newer format is refused. The tests have golden messages of each released format.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from cyborg.core.drivers import registry
from cyborg.core.drivers.registry import DriverEntry
from cyborg.core.errors import Invalid
from cyborg.core.hosts.identity import Identity
from cyborg.core.inventory.device import Device
from cyborg.core.inventory.report import BackendState, Report
from cyborg.core.validation import integer

FORMAT = 1
NO_IDENTITY = Identity()


def dump_report(report: Report) -> dict[str, Any]:
    """Return a report as plain values."""
    return {"format": FORMAT, **report.to_dict()}


def load_report(body: Any) -> Report:
    """Parse a report. Raise Invalid if it is malformed."""
    try:
        if not 1 <= (number := integer(body["format"])) <= FORMAT:
            raise Invalid(
                f"report format {number} is unknown, expected 1 to {FORMAT}",
                field="format",
            )
        return Report.from_dict(body)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise Invalid(f"malformed report: {type(exc).__name__} {exc}", field="report") from exc


def dump_backend(backend: BackendState) -> dict[str, Any]:
    """Return a backend's state as plain values, without the fields of full reports."""
    return backend.without_details().to_dict()


def load_backend(body: Any) -> BackendState:
    """Parse a backend's state without the fields of full reports.

    Raise KeyError, TypeError or ValueError if it is malformed.
    """
    return BackendState.from_dict({**body, "remarks": [], "settings": []}).without_details()


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
