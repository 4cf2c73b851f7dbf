# SPDX-License-Identifier: Apache-2.0
"""Reading what operators ask of drivers, and saying why it cannot be."""

from collections.abc import Mapping, Sequence
from typing import Any

from cyborg.conductor import limits
from cyborg.conductor.driver_targets import Target
from cyborg.core import wanted
from cyborg.core.address import PciAddress
from cyborg.core.errors import Conflict, InUse, Invalid
from cyborg.core.rollout import StepState
from cyborg.core.wanted import Wish

MAX_HOSTS = 10_000
MAX_CONFIG = 65536  # characters of JSON
MAX_NAMED = 20  # hosts or requests that a refusal names


def installed(
    driver: str, backend: str, host: str, there: Target | None, parsed: Mapping[int, Any]
) -> StepState:
    """Return where an installation begins on a host. Raises Conflict."""
    if there is None or there.wish is Wish.ABSENT:
        return StepState.WAITING
    if there.driver != driver:
        raise Conflict(
            f"backend {backend} of host {host} is one of driver {there.driver}: name another",
            host=host,
            driver=there.driver,
        )
    given = parsed[there.service_id]
    if any(name not in there.config or there.config[name] != given[name] for name in given):
        raise Conflict(
            f"backend {backend} of host {host} is there already with another configuration: "
            "update-driver changes it",
            host=host,
        )
    # What its agent could not do, or has not heard of, is wanted of it once more.
    done = there.applied and there.wish is not Wish.DISABLED
    return StepState.DONE if done else StepState.WAITING


def busy(driver: str, job: str, more: str = "") -> Conflict:
    """Return the error that says that a driver is being changed, by which job."""
    return Conflict(f"driver {driver} is being changed: wait for job {job}{more}", job=job)


def in_use(
    driver: str, held: Mapping[tuple[str, str], int], holders: Sequence[Mapping[Any, Any]]
) -> InUse:
    """Return the error that names some of the requests that stand in the way."""
    named = [f"{row['uuid']} (instance {row['instance_uuid']})" for row in holders]
    what = f"{sum(held.values())} accelerators are in use or being cleaned"
    by = f", by {some(named, sum(held.values()))}" if named else ""
    return InUse(
        f"driver {driver} cannot be uninstalled: {what}{by}; drain waits for them, force does not",
        requests=[row["uuid"] for row in holders],
    )


def check_free(held: Sequence[str], dirty: int, address: str, host: str) -> None:
    """Raise InUse for a device that requests hold, or of which handles are being cleaned."""
    if not held and not dirty:
        return
    why = f"its holders are {some(held)}" if held else f"{dirty} of its handles are being cleaned"
    raise InUse(f"device {address} of {host} cannot be released: {why}", requests=held[:MAX_NAMED])


def some(names: Sequence[str], total: int | None = None) -> str:
    """Return the first of names, and how many more there are."""
    rest = (total or len(names)) - len(names[:MAX_NAMED])
    more = [f"{rest} more"] if rest > 0 else []
    return ", ".join([*names[:MAX_NAMED], *more])


def read_backend(backend: Any) -> str | None:
    """Return the name of a backend, or None. Raises Invalid."""
    return None if backend is None else wanted.backend_name(backend)


def read_hosts(hosts: Any) -> list[str] | None:
    """Return names of hosts, each once, or None for all. Raises Invalid."""
    if hosts is None:
        return None
    if not isinstance(hosts, list | tuple) or not 1 <= len(hosts) <= MAX_HOSTS:
        raise Invalid(f"hosts must be a list of 1 to {MAX_HOSTS} names", field="hosts")
    return sorted({limits.text("hosts", host) for host in hosts})


def read_config(config: Any) -> Mapping[str, Any]:
    """Return options and their values, which only a driver can judge. Raises Invalid."""
    if config is None:
        return {}
    if not isinstance(config, Mapping) or len(str(config)) > MAX_CONFIG:
        raise Invalid(
            f"config must be an object of at most {MAX_CONFIG} characters", field="config"
        )
    return config


def read_address(address: Any) -> str:
    """Return the address of a device as drivers write it. Raises Invalid."""
    text = limits.text("address", address, 120)
    try:
        return str(PciAddress.parse(text))
    except Invalid:
        return text  # of another bus
