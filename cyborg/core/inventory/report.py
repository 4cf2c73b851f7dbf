# SPDX-License-Identifier: Apache-2.0
"""Reports of an agent: the state of its backends, and the full report of its host."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import not_
from typing import Any

from cyborg.core.codec import Serializable, as_list, wire
from cyborg.core.drivers import registry
from cyborg.core.drivers.options import Setting
from cyborg.core.drivers.registry import DriverEntry
from cyborg.core.errors import Invalid
from cyborg.core.hosts.identity import Identity
from cyborg.core.inventory.device import Device
from cyborg.core.text import sanitize
from cyborg.core.validation import string

MAX_REMARKS = 64  # of one backend


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
    that need host work are not allocated until a discovery succeeds.
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

    def without_details(self) -> "BackendState":
        """Return the state without the fields that a heartbeat does not have."""
        return replace(self, remarks=None, settings=None)


@dataclass(frozen=True, slots=True)
class Report(Serializable):
    """Inventory of a host at one time.

    ``epoch`` is the uuid of the agent's process, ``generation`` counts its reports from 1, and
    ``digest`` is also in its heartbeats. A backend in ERROR has its last known devices. ``drivers``
    are those installed on the host, None from an agent that does not report them.
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
        addresses: set[str] = set()
        for address in (d.address for d in self.devices):
            if address in addresses:
                raise Invalid(
                    f"host {self.host} reports a duplicate device {address}", field="address"
                )
            addresses.add(address)
        deployables: set[str] = set()
        for address in (p.address for d in self.devices for p in d.deployables):
            if address in deployables:
                raise Invalid(
                    f"host {self.host} reports a duplicate deployable {address}", field="address"
                )
            deployables.add(address)
