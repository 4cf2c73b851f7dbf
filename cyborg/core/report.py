# SPDX-License-Identifier: Apache-2.0
"""What an agent tells of its host: the hello, and the full report behind its digest."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cyborg.core.catalogue import Entry
from cyborg.core.device import Device
from cyborg.core.errors import Invalid
from cyborg.core.identity import Identity
from cyborg.core.text import clean


class BackendStatus(StrEnum):
    """How one configured driver on one host is doing."""

    DISCOVERING = "DISCOVERING"
    READY = "READY"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class BackendState:
    """One backend as its agent sees it; ``error`` is a sentence, None when all is well."""

    name: str
    driver: str
    status: BackendStatus
    error: str | None = None

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "error", clean(self.error) or "no message")


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a host has, as of one moment.

    ``epoch`` is the uuid of the agent's life, ``generation`` counts its reports from 1 and
    ``digest`` is the one its hellos carry. Of a backend in ERROR the devices are those it saw last.
    ``drivers`` are those that are installed on the host, None from an agent that does not tell.
    """

    host: str
    epoch: str
    generation: int
    digest: str
    backends: Sequence[BackendState]
    devices: Sequence[Device]
    identity: Identity = field(default_factory=Identity)
    drivers: Sequence[Entry] | None = None

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for address in (d.address for d in self.devices):
            if address in seen:
                raise Invalid(
                    f"host {self.host} reports the device {address} twice", field="address"
                )
            seen.add(address)
        parts: set[str] = set()
        for part in (p.address for d in self.devices for p in d.deployables):
            if part in parts:
                raise Invalid(
                    f"host {self.host} reports the deployable {part} twice", field="address"
                )
            parts.add(part)
