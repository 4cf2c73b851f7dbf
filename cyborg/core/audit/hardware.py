# SPDX-License-Identifier: Apache-2.0
"""Audit of the hardware that the agent observes against the host's records in the database."""

from collections.abc import Collection, Iterator

from cyborg.core.audit.model import Finding, Kind
from cyborg.core.audit.sources import DeployableRecord, DeviceRecord, HandleRecord, HostSnapshot
from cyborg.core.text import join_limited
from cyborg.core.wire.hardware import Hardware, ObservedDeployable, ObservedDevice

MAX_NAMES = 5
"""Names of a list in an explanation; of the others only the number is given."""


def compare_hardware(snapshot: HostSnapshot) -> Iterator[Finding]:
    """Yield the findings about hardware. An unreachable agent is one finding."""
    if snapshot.unreachable_reason is not None:
        yield _hardware_finding(
            snapshot,
            Kind.AGENT_UNREACHABLE,
            "agent",
            f"hardware: {snapshot.unreachable_reason}; the hardware is unknown",
        )
    failed = snapshot.hardware.failed_backends if snapshot.hardware is not None else {}
    for backend, error in sorted(failed.items()):
        if error is not None:
            yield _hardware_finding(
                snapshot,
                Kind.BACKEND_UNAVAILABLE,
                f"backend {backend}",
                f"hardware: discovery fails ({error}); the database has the last known devices",
            )
    recorded = {device.address: device for device in snapshot.database.devices}
    for device in recorded.values():
        if not _is_programming(device):
            if snapshot.hardware is not None:
                yield from _compare_device(snapshot, snapshot.hardware, device)
            if device.backend not in failed:
                yield from _drained_not_removed(snapshot, device)
    if snapshot.hardware is not None:
        for address, observed in sorted(snapshot.hardware.devices.items()):
            if address not in recorded:
                yield _hardware_finding(
                    snapshot,
                    Kind.DEVICE_UNRECORDED,
                    f"device {address}",
                    f"hardware: backend {observed.backend} has it; database: no such device",
                )


def _compare_device(
    snapshot: HostSnapshot, hardware: Hardware, device: DeviceRecord
) -> Iterator[Finding]:
    observed = hardware.devices.get(device.address)
    name = f"device {device.address}"
    if observed is None:
        # A report has no news of the devices of a backend whose discovery fails.
        if not device.draining and device.backend not in hardware.failed_backends:
            text = "hardware: no such device; database: the device exists and is not draining"
            yield _hardware_finding(snapshot, Kind.DEVICE_VANISHED, name, text)
    elif device.draining:
        text = f"hardware: backend {observed.backend} has it; database: the device is draining"
        yield _hardware_finding(snapshot, Kind.DEVICE_RETURNED, name, text)
    else:
        yield from _compare_deployables(snapshot, device, observed)


def _compare_deployables(
    snapshot: HostSnapshot, device: DeviceRecord, observed: ObservedDevice
) -> Iterator[Finding]:
    if observed.deployables is None:  # an agent of the previous release
        return
    recorded = {deployable.address: deployable for deployable in device.deployables}
    for address, deployable in sorted(observed.deployables.items()):
        record = recorded.get(address)
        if record is None or record.draining:
            recorded_as = "no such deployable" if record is None else "the deployable is draining"
            text = (
                f"hardware: {deployable.resource_class}, {len(deployable.handles)} handles; "
                f"database: {recorded_as}"
            )
            yield _hardware_finding(
                snapshot, Kind.DEPLOYABLE_UNRECORDED, f"deployable {address}", text
            )
        else:
            yield from _compare_deployable(snapshot, record, deployable)
    for address, record in sorted(recorded.items()):
        if address not in observed.deployables and not record.draining:
            text = (
                "hardware: no such deployable; database: the deployable exists and is not draining"
            )
            yield _hardware_finding(
                snapshot, Kind.DEPLOYABLE_VANISHED, f"deployable {address}", text
            )


def _compare_deployable(
    snapshot: HostSnapshot, record: DeployableRecord, deployable: ObservedDeployable
) -> Iterator[Finding]:
    name = f"deployable {record.address}"
    if record.resource_class != deployable.resource_class:
        text = (
            f"hardware: class {deployable.resource_class}; database: class {record.resource_class}"
        )
        yield _hardware_finding(snapshot, Kind.DEPLOYABLE_DIFFERS, name, text)
    offered = {handle.address for handle in record.handles if not handle.draining}
    if offered != deployable.handles:
        text = (
            f"only hardware: handles {_name_handles(deployable.handles - offered)}; "
            f"only database: {_name_handles(offered - deployable.handles)}"
        )
        yield _hardware_finding(snapshot, Kind.HANDLES_DIFFER, name, text)


def _drained_not_removed(snapshot: HostSnapshot, device: DeviceRecord) -> Iterator[Finding]:
    """Yield a finding if draining handles or deployables without an owner are still recorded."""
    idle: list[HandleRecord] = []
    draining_deployables = 0
    for deployable in device.deployables:
        draining = [
            h for h in deployable.handles if (device.draining or deployable.draining or h.draining)
        ]
        idle += [handle for handle in draining if not handle.in_use]
        draining_deployables += deployable.draining and not any(
            handle.in_use for handle in deployable.handles
        )
    in_use = any(
        handle.in_use for deployable in device.deployables for handle in deployable.handles
    )
    if idle or draining_deployables or (device.draining and not in_use):
        yield _hardware_finding(
            snapshot,
            Kind.DRAINED_NOT_REMOVED,
            f"device {device.address}",
            f"database: {len(idle)} draining handles have no owner and need no cleaning",
        )


def _is_programming(device: DeviceRecord) -> bool:
    # Reports do not change such a device until the job has ended.
    return any(deployable.programming for deployable in device.deployables)


def _name_handles(names: Collection[str]) -> str:
    return join_limited(sorted(names), MAX_NAMES) or "none"


def _hardware_finding(snapshot: HostSnapshot, kind: Kind, name: str, text: str) -> Finding:
    return Finding(snapshot.host, kind, name, text, kind.repair)
