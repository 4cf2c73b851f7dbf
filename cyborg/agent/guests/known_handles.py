# SPDX-License-Identifier: Apache-2.0
"""Check that a backend of this host manages a device, before a guest gets the device.

Without this check, a message to this agent could give a guest any PCI function of the host.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cyborg.agent.backends.backend import Backend
from cyborg.core.inventory.device import AttachHandle, Deployable, HandleType
from cyborg.core.inventory.report import BackendStatus
from cyborg.core.naming import handle_uuid
from cyborg.drivers.base import UseInterface


def make_check(host: str, backends: Sequence[Backend]) -> Callable[[Mapping[str, Any]], bool]:
    """Return a function that returns whether one of these backends has the handle of an ARQ."""

    def is_known(arq: Mapping[str, Any]) -> bool:
        expected = (arq["attach_handle_type"], dict(arq["attach_handle_info"]))
        # The info of a mediated device is that of its parent; its uuid identifies it.
        uuid = arq["attach_handle_uuid"]
        return any(
            expected == (handle.type, dict(handle.info))
            and (
                handle.type is not HandleType.MDEV
                or uuid == handle_uuid(host, deployable.address, handle.address)
            )
            for backend in backends
            for deployable, handle in _handles(backend)
        )

    return is_known


def make_use_check(backends: Sequence[Backend]) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that raises DriverFailed if the host uses the device of an ARQ now."""

    def check_unused(arq: Mapping[str, Any]) -> None:
        if arq["attach_handle_type"] != HandleType.PCI:
            return  # for example a mediated device, which exists only for its server
        info = dict(arq["attach_handle_info"])
        for backend in backends:
            if isinstance(backend.driver, UseInterface):
                for _, handle in _handles(backend):
                    if dict(handle.info) == info:
                        backend.driver.check_unused(handle.address)

    return check_unused


def _handles(backend: Backend) -> Iterator[tuple[Deployable, AttachHandle]]:
    """Yield the handles that a backend has discovered, each with its deployable."""
    for device in backend.snapshot.devices:
        for deployable in device.deployables:
            for handle in deployable.handles:
                yield deployable, handle


def make_pending_check(backends: Sequence[Backend]) -> Callable[[], bool]:
    """Return a function that returns whether a backend may discover further devices soon.

    After a start of the agent, no backend has devices before its first discovery has ended.
    """

    def is_pending() -> bool:
        return any(backend.snapshot.state.status != BackendStatus.READY for backend in backends)

    return is_pending
