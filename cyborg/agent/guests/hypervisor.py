# SPDX-License-Identifier: Apache-2.0
"""Interface of the hypervisor, as the agent needs it to change running guests."""

from dataclasses import dataclass
from typing import Protocol

from cyborg.core.errors import DriverFailed, Unavailable


class GuestBusy(Unavailable):
    """Another operation of the hypervisor on this guest did not end in time."""


class DeviceAbsent(DriverFailed):
    """The guest has no such device."""


@dataclass(frozen=True, slots=True)
class Domain:
    """The XML of a guest: as it runs now, and as its next start defines it.

    ``running`` is None if the guest does not run. ``defined`` is None if the guest is transient:
    the hypervisor has no definition of it.
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
        """Attach a device, given as XML, to the running guest. Raise NotFound."""

    def detach(self, instance: str, device: str, domain: Domain) -> None:
        """Request the removal of a device from each part of ``domain`` that is not None.

        A running guest may delay the removal, or ignore the request. Raise DeviceAbsent if the
        guest does not have the device and no earlier request to attach it is in progress. Raise
        NotFound if there is no such guest.
        """

    def close(self) -> None:
        """End the connection; do not wait for a call that hangs."""
