# SPDX-License-Identifier: Apache-2.0
"""What the agent needs of a hypervisor to change running guests."""

from dataclasses import dataclass
from typing import Protocol

from cyborg.core.errors import DriverFailed, Unavailable


class GuestBusy(Unavailable):
    """Another operation of the hypervisor on this guest did not end in time."""


class DeviceAbsent(DriverFailed):
    """The guest has no such device."""


@dataclass(frozen=True, slots=True)
class Domain:
    """The XML of a guest: of the running one, and of the one that its next start uses.

    ``running`` is None if the guest does not run. ``defined`` is None if the hypervisor forgets the
    guest when it ends.
    """

    running: str | None
    defined: str | None


class Hypervisor(Protocol):
    """Guests of this host, by the uuids of their instances.

    Every method may raise Unavailable if the hypervisor does not answer in time, GuestBusy if only
    this guest is not available, and DriverFailed with its reason if it refuses.
    """

    def describe(self, instance: str) -> Domain | None:
        """Return a guest, or None if this host has none with this uuid."""

    def attach(self, instance: str, device: str) -> None:
        """Attach a device, as XML, to the running guest. Raise NotFound without the guest."""

    def detach(self, instance: str, device: str, domain: Domain) -> None:
        """Request the removal of a device from each part of ``domain`` that is not None.

        A running guest may delay the removal, or ignore the request. Raise DeviceAbsent without the
        device: an earlier request to attach it to the running guest is not in progress any more.
        Raise NotFound without the guest.
        """

    def close(self) -> None:
        """End the connection; do not wait for a call that hangs."""
