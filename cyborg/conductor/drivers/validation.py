# SPDX-License-Identifier: Apache-2.0
"""Validation of requests on drivers, and the errors for rejected requests."""

from collections.abc import Mapping, Sequence
from typing import Any

from cyborg.conductor.drivers.targets import MAX_NAMED, BackendTarget
from cyborg.core.address import PciAddress
from cyborg.core.binding.arqs import describe_user
from cyborg.core.drivers import desired_state
from cyborg.core.drivers.desired_state import DesiredStatus
from cyborg.core.drivers.rollout import StepState
from cyborg.core.errors import Conflict, InUse, Invalid
from cyborg.core.text import join_limited
from cyborg.core.validation import check_text
from cyborg.db.drivers.rollouts import HolderRow

MAX_HOSTS = 10_000
MAX_CONFIG = 65536  # characters of JSON


def initial_step_state(
    driver: str, backend: str, host: str, existing: BackendTarget | None, parsed: Mapping[int, Any]
) -> StepState:
    """Return the first state of an installation step on a host. Raise Conflict.

    ``existing`` is the backend if the host has it; ``parsed`` is the requested configuration by
    the agent's row id.
    """
    if existing is None or existing.desired is DesiredStatus.ABSENT:
        return StepState.WAITING
    if existing.driver != driver:
        raise Conflict(
            f"backend {backend} of host {host} has driver {existing.driver}; choose another name",
            host=host,
            driver=existing.driver,
        )
    config, requested = existing.config, parsed[existing.service_id]
    if any(name not in config or config[name] != requested[name] for name in requested):
        raise Conflict(
            f"backend {backend} of host {host} already exists with another configuration; use "
            "update-driver to change it",
            host=host,
        )
    # A desired state that the agent could not apply, or has not received, is requested again.
    done = existing.applied and existing.desired is not DesiredStatus.DISABLED
    return StepState.DONE if done else StepState.WAITING


def driver_busy(driver: str, job: str, details: str = "") -> Conflict:
    """Return the error for a driver that another job is changing."""
    return Conflict(f"driver {driver} is being changed: wait for job {job}{details}", job=job)


def driver_in_use(
    driver: str, in_use: Mapping[tuple[str, str], int], holders: Sequence[HolderRow]
) -> InUse:
    """Return the error for a driver whose accelerators are in use.

    ``in_use`` counts the handles by host and backend; ``holders`` are some of the ARQs that own
    them.
    """
    names = [f"{row['uuid']} ({describe_user(row['instance_uuid'])})" for row in holders]
    total = sum(in_use.values())
    users = f", by {join_limited(names, MAX_NAMED, total)}" if names else ""
    return InUse(
        f"driver {driver} cannot be uninstalled: {total} accelerators are in use or being cleaned"
        f"{users}; drain waits for them, force does not",
        requests=[row["uuid"] for row in holders],
    )


def ensure_unused(holders: Sequence[str], dirty: int, address: str, host: str) -> None:
    """Raise InUse if ARQs own handles of the device, or if handles of it are being cleaned.

    ``holders`` are the uuids of these ARQs, ``dirty`` is the number of handles to be cleaned.
    """
    if not holders and not dirty:
        return
    reason = f"{dirty} of its handles are being cleaned"
    if holders:
        reason = f"its holders are {join_limited(holders, MAX_NAMED)}"
    raise InUse(
        f"device {address} of {host} cannot be released: {reason}",
        requests=holders[:MAX_NAMED],
    )


def read_backend(backend: Any) -> str | None:
    """Return the name of a backend, or None. Raise Invalid."""
    return None if backend is None else desired_state.parse_backend_name(backend)


def read_hosts(hosts: Any) -> list[str] | None:
    """Return the sorted unique names of hosts, None for all hosts. Raise Invalid."""
    if hosts is None:
        return None
    if not isinstance(hosts, list | tuple) or not 1 <= len(hosts) <= MAX_HOSTS:
        raise Invalid(f"hosts must be a list of 1 to {MAX_HOSTS} names", field="hosts")
    return sorted({check_text("hosts", host) for host in hosts})


def read_config(config: Any) -> Mapping[str, Any]:
    """Return options and their values, which only a driver can validate. Raise Invalid."""
    if config is None:
        return {}
    if not isinstance(config, Mapping) or len(str(config)) > MAX_CONFIG:
        raise Invalid(
            f"config must be an object of at most {MAX_CONFIG} characters", field="config"
        )
    return config


def read_address(address: Any) -> str:
    """Return the address of a device as drivers write it. Raise Invalid."""
    text = check_text("address", address, 120)
    try:
        return str(PciAddress.parse(text))
    except Invalid:
        return text  # the address of a device on another bus
