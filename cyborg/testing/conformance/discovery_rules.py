# SPDX-License-Identifier: Apache-2.0
"""Conformance rules for discover()."""

import json
from collections.abc import Iterator, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from cyborg.core.errors import CyborgError
from cyborg.core.inventory.device import MAX_ADDRESS, Device
from cyborg.core.naming import is_accelerator_class, is_trait, provider_name
from cyborg.testing.conformance.environment import (
    Environment,
    RuleBlocked,
    RuleViolated,
    require_devices,
    rule,
)

MAX_PROVIDER = 200  # characters: the limit of Placement for the name of a provider
MAX_HOST = MAX_PROVIDER - MAX_ADDRESS - 1
_ROUNDS = 3  # discoveries after the first one, each of which opens more files if files leak


@rule("discover() raises no exception.", "Driver.discover")
def discover_succeeds(env: Environment) -> None:
    """Check that the first discovery raises no exception."""
    _, call = env.discovery(0)
    if call.timed_out:
        raise RuleBlocked(call.failure)
    if call.error is not None:
        raise RuleViolated(call.failure)


@rule("discover() returns within the time limit.", "Driver.discover")
def discover_is_in_time(env: Environment) -> None:
    """Check the duration of discover()."""
    # A slow discovery sets the backend to ERROR.
    _, call = env.discovery(0)
    if call.timed_out:
        raise RuleViolated(f"{call.failure}; the limit is {env.subject.limit:g} s")


@rule("discover() returns a sequence of Device.", "Driver.discover")
def discover_returns_devices(env: Environment) -> None:
    """Check the result type."""
    # A generator can be read only once, and a set has no order.
    _, call = env.discovery(0)
    if call.failure is not None:
        raise RuleBlocked(f"discover() {call.failure}")
    if not isinstance(call.value, Sequence) or isinstance(call.value, str | bytes):
        raise RuleViolated(f"discover() returns a {type(call.value).__name__}; expected a sequence")
    for device in call.value:
        if not isinstance(device, Device):
            raise RuleViolated(f"discover() returns a {type(device).__name__} among the devices")


@rule("The backend of each device is the backend of the object.", "Driver.discover")
def devices_name_their_backend(env: Environment) -> None:
    """Check the devices of two backends, to detect a driver that sets a constant backend name."""
    # A constant name would give the devices of both backends to one of them.
    found = {"conformance": env.discovered_devices()[1]}
    found["conformance-2"] = env.rediscover(env.create("conformance-2"))
    for name, devices in found.items():
        for device in devices:
            if device.backend != name:
                raise RuleViolated(
                    f"device {device.address} has the backend {device.backend!r}, expected {name!r}"
                )


@rule("The type of each device is DEVICE_TYPE, unless that is None.", "Driver.discover")
def devices_match_device_type(env: Environment) -> None:
    """Check the device types."""
    # Operators select drivers by DEVICE_TYPE before they install them.
    expected = env.subject.driver.DEVICE_TYPE
    for device in env.discovered_devices()[1]:
        if expected is not None and device.type != expected:
            raise RuleViolated(
                f"device {device.address} has the type {device.type}, expected {expected}"
            )


@rule("The addresses of devices and of deployables are unique.", "Driver.discover")
def addresses_are_unique(env: Environment) -> None:
    """Check that addresses are unique."""
    # They identify devices and are part of provider names.
    _, found = env.discovered_devices()
    device_addresses = [d.address for d in found]
    deployable_addresses = [p.address for d in found for p in d.deployables]
    for kind, addresses in (
        ("devices", device_addresses),
        ("deployables", deployable_addresses),
    ):
        if duplicates := sorted({a for a in addresses if addresses.count(a) > 1}):
            raise RuleViolated(f"two {kind} have the address {duplicates[0]}")


@rule("The address of each deployable fits into the name of a provider.", "Driver.discover")
def provider_names_are_valid(env: Environment) -> None:
    """Check the address length."""
    # Placement accepts 200 characters for ``<host>_<address>``.
    for device in env.discovered_devices()[1]:
        for deployable in device.deployables:
            name = provider_name("h" * MAX_HOST, deployable.address)
            if len(name) > MAX_PROVIDER or not name.isprintable():
                raise RuleViolated(
                    f"the address {deployable.address!r} does not have 1 to {MAX_ADDRESS} "
                    "printable characters"
                )


@rule("Resource classes and traits are standard or custom ones.", "Driver.discover")
def classes_and_traits_are_valid(env: Environment) -> None:
    """Check resource classes and traits."""
    # The agent omits a device with an invalid name: Placement would refuse the provider.
    for device in env.discovered_devices()[1]:
        for deployable in device.deployables:
            if not is_accelerator_class(deployable.resource_class):
                raise RuleViolated(
                    f"{deployable.address} has the invalid resource class "
                    f"{deployable.resource_class!r}"
                )
            if unknown := sorted(name for name in deployable.traits if not is_trait(name)):
                raise RuleViolated(f"{deployable.address} has the unknown trait {unknown[0]!r}")


@rule("Devices survive serialisation unchanged.", "Driver.discover")
def devices_are_serialisable(env: Environment) -> None:
    """Check the types of all fields."""
    # A dataclass does not check them: a number instead of a string fails in the conductor.
    for device in env.discovered_devices()[1]:
        try:
            received = Device.from_dict(json.loads(json.dumps(device.to_dict())))
        except (CyborgError, TypeError, ValueError, KeyError, AttributeError) as exc:
            raise RuleViolated(f"device {device.address} cannot be serialised: {exc}") from exc
        if received != device:
            raise RuleViolated(f"device {device.address}: {difference([device], [received])}")


@rule("Repeated discoveries of an unchanged host are equal.", "Driver.discover")
def discovery_is_stable(env: Environment) -> None:
    """Check that three discoveries return the same devices."""
    # A difference, as of a counter or of the order of a set, causes a full report each time.
    _, previous = env.discovered_devices()
    for index in (1, 2):
        if change := difference(previous, require_devices(env.discovery(index)[1])):
            raise RuleViolated(f"second discovery: {change}")


@rule("Two objects of one backend discover equal devices.", "Driver.discover")
def discovery_is_reproducible(env: Environment) -> None:
    """Check that a second object finds the same devices."""
    # It is the object after a restart of the agent, which must report what it reported before.
    _, previous = env.discovered_devices()
    if change := difference(previous, env.rediscover(env.create())):
        raise RuleViolated(f"discovery of a second object: {change}")


@rule("discover() changes nothing: no write, process or connection.", "Driver.discover")
def discover_is_read_only(env: Environment) -> None:
    """Check two discoveries for side effects."""
    # A side effect may occur only once, in the first discovery or after it.
    for index in (0, 1):
        if effects := env.discovery(index)[1].effects:
            raise RuleViolated(effects[0])


@rule("discover() leaves no running thread.", "Driver.discover")
def discover_leaks_no_thread(env: Environment) -> None:
    """Check that no thread remains after discover()."""
    # The agent has one thread per backend.
    _, call = env.discovery(0)
    if call.timed_out:
        raise RuleBlocked(f"discover() {call.failure}")
    for result in (call, env.discovery(1)[1]):
        if result.leaked_threads:
            raise RuleViolated(f"the thread {result.leaked_threads[0]} is still running")


@rule("discover() does not leak file descriptors.", "Driver.discover")
def discover_leaks_no_descriptor(env: Environment) -> None:
    """Check that repeated discoveries do not leave more and more files open."""
    # Several: a library may open a file once, and keep it.
    env.discovered_devices()
    counts: list[int] = []
    for index in range(_ROUNDS + 1):
        call = env.discovery(index)[1]
        require_devices(call)
        counts.append(call.descriptors)
        if counts != sorted(set(counts)):
            return  # one discovery opened no more files than the previous one
    raise RuleViolated(f"the number of open descriptors grows: {', '.join(map(str, counts))}")


@rule("discover() raises no exception on a host with an empty sysfs.", "Driver.discover")
def discover_accepts_empty_host(env: Environment) -> None:
    """Check a discovery on a host without devices."""
    # Operators enable one list of drivers on all hosts, also on hosts without the hardware.
    with TemporaryDirectory(prefix="conformance-") as root:
        driver = env.create(sysfs_root=root)
        env.must_succeed("with an empty sysfs discover()", driver.discover)


def difference(previous: Sequence[Device], current: Sequence[Device]) -> str | None:
    """Return the first difference of two discoveries as text; None if only the order differs."""
    first, second = ({d.address: _flatten(d) for d in devices} for devices in (previous, current))
    # Sorted, so that the message is the same in each run of the kit.
    for address in sorted({*first, *second}):
        if address not in first or address not in second:
            return f"device {address} is in only one of two discoveries"
        old, new = first[address], second[address]
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                return f"device {address}: {key} was {old.get(key)!r}, then {new.get(key)!r}"
    return None


def _flatten(device: Device) -> dict[str, Any]:
    return dict(_leaves("", device.to_dict()))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each scalar value with its path; objects in a list are identified by address."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), child)
    # By address and not by position: one new handle would otherwise change all that follow.
    elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        for child in value:
            yield from _leaves(f"{path}[{child.get('address')}]", child)
    else:
        yield path, value
