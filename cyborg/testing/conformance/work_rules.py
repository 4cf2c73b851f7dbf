# SPDX-License-Identifier: Apache-2.0
"""Conformance rules for setup and partitioning, measure, prepare, release, sanitise and program."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cyborg.core.inventory.device import Ability, Device, Layout, count_handles
from cyborg.core.inventory.device_state import Measurement
from cyborg.core.jobs.job import WorkItem
from cyborg.core.naming import is_accelerator_class
from cyborg.drivers.base import SetupInterface
from cyborg.testing.conformance.discovery_rules import difference
from cyborg.testing.conformance.environment import (
    INSTANCE,
    CallResult,
    Environment,
    RuleBlocked,
    RuleViolated,
    rule,
)

# No driver has a layout of this name.
UNKNOWN = "conformance-unknown"

setup_rule = partial(
    rule, source="SetupInterface.setup", changes_host=True, protocol=SetupInterface
)
layouts_rule = partial(rule, source="PartitionInterface.layouts", ability=Ability.PARTITIONS)
partition_rule = partial(
    rule, source="PartitionInterface.partition", ability=Ability.PARTITIONS, changes_host=True
)


@setup_rule("setup() of a host that is set up raises no exception.")
def setup_is_idempotent(env: Environment) -> None:
    """Check repeated calls of setup(), also on a second object."""
    # A reload creates a new object.
    driver: Any = env.create()
    other: Any = env.create()
    env.must_succeed("setup()", driver.setup)
    env.must_succeed("setup() again", driver.setup)
    env.must_succeed("setup() by another object", other.setup)


@setup_rule("A repeated setup() does not change the result of discover().")
def setup_preserves_devices(env: Environment) -> None:
    """Check that setup() keeps all devices."""
    # A reload must not remove devices in use.
    driver: Any = env.create()
    env.must_succeed("setup()", driver.setup)
    original = env.rediscover(driver)
    env.must_succeed("setup() again", driver.setup)
    if change := difference(original, env.rediscover(driver)):
        raise RuleViolated(f"after setup() again: {change}")


@layouts_rule("layouts() returns a sequence of Layout with unique names, within the time limit.")
def layouts_are_valid(env: Environment) -> None:
    """Check the layouts of each discovered device."""
    driver, found = env.discovered_devices()
    for device in found:
        call = env.call(partial(driver.layouts, device))
        if call.failure is not None:
            raise RuleViolated(f"layouts() of {device.address} {call.failure}")
        layouts = call.value
        if not _are_layouts(layouts):
            raise RuleViolated(
                f"layouts() of {device.address} does not return a sequence of Layout"
            )
        names = [layout.name for layout in layouts]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise RuleViolated(f"two layouts of {device.address} have the name {duplicates[0]}")
        for layout in layouts:
            if unknown := sorted(name for name in layout.offers if not is_accelerator_class(name)):
                raise RuleViolated(
                    f"layout {layout.name} has the invalid resource class {unknown[0]!r}"
                )


@layouts_rule("One of the layouts of a device is the current one.")
def layouts_include_current(env: Environment) -> None:
    """Check that layouts() includes the current layout."""
    # It is needed to restore a device.
    driver, found = env.discovered_devices()
    for device in found:
        _current_layout(device, _layouts(env, driver, device))


@layouts_rule("layouts() changes nothing: no write, process or connection.")
def layouts_is_read_only(env: Environment) -> None:
    """Check that layouts() of the first device has no side effects."""
    driver, found = env.discovered_devices()
    for device in found[:1]:
        call = env.call(partial(driver.layouts, device))
        if call.effects:
            raise RuleViolated(call.effects[0])


@partition_rule("discover() after partition() shows the layout, also after a repeated call.")
def partition_is_discovered(env: Environment) -> None:
    """Check that two objects discover the new layout, then restore the device."""
    # A second object: the layout is a state of the device, not of the driver.
    driver = env.create_discovered()
    device, item = _first_device(env)
    layouts = _layouts(env, driver, device)
    original = _current_layout(device, layouts)
    # Without another layout the current one is applied again.
    expected = next((layout for layout in layouts if not layout.matches(device)), original)
    try:
        for call in ("partition()", "partition() again"):
            env.must_succeed(call, lambda: driver.partition(item, expected.name))
            for suffix, observer in (("", driver), (" by another object", env.create())):
                _require_layout(env.rediscover(observer), item, expected, f"after {call}{suffix}")
    finally:
        # Without an exception here: it would hide the violation that was found.
        restored = env.call(lambda: driver.partition(item, original.name))
    if restored.failure is not None:
        raise RuleViolated(f"partition() back to {original.name} {restored.failure}")
    _require_layout(env.rediscover(driver), item, original, "after partition() back")


@partition_rule("partition() with an unknown layout raises an exception and changes nothing.")
def partition_rejects_unknown_layout(env: Environment) -> None:
    """Check that partition() rejects an unknown layout."""
    # The layouts can change after a request.
    driver = env.create_discovered()
    device, item = _first_device(env)
    original = _current_layout(device, _layouts(env, driver, device))
    call = env.call(lambda: driver.partition(item, UNKNOWN))
    if call.timed_out:
        raise RuleViolated(f"partition() {call.failure}")
    if call.error is None:
        raise RuleViolated(f"partition() to {UNKNOWN!r} raises no exception")
    _require_layout(env.rediscover(driver), item, original, f"after partition() to {UNKNOWN!r}")


def _first_device(env: Environment) -> tuple[Device, WorkItem]:
    """Return the first device and a work item for it. Raise RuleBlocked without a device."""
    found = env.discovered_devices()[1]
    if not found:
        raise RuleBlocked("no device is discovered on this host")
    device = found[0]
    # Without a deployable: a layout is that of the whole device.
    return device, WorkItem(backend="conformance", device=device.address, deployable="")


def _layouts(env: Environment, driver: Any, device: Device) -> Sequence[Layout]:
    call = env.call(lambda: driver.layouts(device))
    if call.failure is not None:
        raise RuleBlocked(f"layouts() {call.failure}")
    if not _are_layouts(call.value):
        raise RuleBlocked("layouts() does not return a sequence of Layout")
    layouts: Sequence[Layout] = call.value
    return layouts


def _are_layouts(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(item, Layout) for item in value)


def _current_layout(device: Device, layouts: Sequence[Layout]) -> Layout:
    """Return the current layout of a device. Raise RuleViolated if no layout matches."""
    for layout in layouts:
        if layout.matches(device):
            return layout
    names = ", ".join(layout.name for layout in layouts) or "none"
    raise RuleViolated(f"device {device.address} matches none of its layouts: {names}")


def _require_layout(found: Sequence[Device], item: WorkItem, expected: Layout, when: str) -> None:
    """Raise RuleViolated unless the device of the item has the layout."""
    device = next((device for device in found if device.address == item.device), None)
    if device is None:
        raise RuleViolated(f"{when} device {item.device} is no longer discovered")
    if not expected.matches(device):
        raise RuleViolated(
            f"{when} device {item.device} does not have the layout {expected.name}: it offers "
            f"{count_handles(device)}, expected {dict(expected.offers)}"
        )


# An address that no device and no handle has.
MISSING = "conformance-missing"

measure_rule = partial(rule, source="MeasureInterface.measure", ability=Ability.MEASURES)
_prepares = partial(rule, ability=Ability.PREPARES, changes_host=True)
prepare_rule = partial(_prepares, source="PrepareInterface.prepare")
release_rule = partial(_prepares, source="PrepareInterface.release")
sanitise_rule = partial(
    rule, source="SanitiseInterface.sanitise", ability=Ability.SANITISES, changes_host=True
)


@measure_rule("measure() returns within the time limit and raises no exception.")
def measure_is_in_time(env: Environment) -> None:
    """Check the duration of measure()."""
    # The agent calls it often, in the thread of discover(), which it would delay.
    _, _, call = _measure(env)
    if call.failure is not None:
        raise RuleViolated(f"measure() {call.failure}")


@measure_rule("measure() returns measurements only of the given devices.")
def measure_returns_measurements(env: Environment) -> None:
    """Check that measure() returns measurements only for addresses of the given devices."""
    _, found, call = _measure(env)
    measurements = _require_measurements(call)
    if not isinstance(measurements, Mapping):
        raise RuleViolated(
            f"measure() returns a {type(measurements).__name__}; expected a mapping by address"
        )
    for address, measurement in measurements.items():
        if not isinstance(measurement, Measurement):
            raise RuleViolated(f"for {address} measure() returns a {type(measurement).__name__}")
    if unknown := sorted(set(map(str, measurements)) - {d.address for d in found}):
        raise RuleViolated(
            f"measure() returns a measurement of {unknown[0]}, which is none of the given devices"
        )


@measure_rule("measure() changes nothing: no write, process or connection.")
def measure_is_read_only(env: Environment) -> None:
    """Check that measure() has no side effects."""
    # It runs while servers use the devices.
    _, _, call = _measure(env)
    if call.effects:
        raise RuleViolated(call.effects[0])


@measure_rule("measure() of no device or of a missing device raises no exception.")
def measure_accepts_missing_devices(env: Environment) -> None:
    """Check measure() for a missing device."""
    # A card can be removed after a discovery.
    driver, found = env.discovered_devices()
    cases: list[tuple[str, Sequence[Device]]] = [("no device", [])]
    if found:
        cases.append(("a missing device", [replace(found[0], address=MISSING)]))
    for name, devices in cases:
        env.must_succeed(f"measure() of {name}", partial(driver.measure, devices))


@measure_rule("The reason of a health state does not change while the state is the same.")
def health_reasons_are_stable(env: Environment) -> None:
    """Check that two measurements have the same reason."""
    # A different reason causes a report.
    driver, found, call = _measure(env)
    first = _require_measurements(call)
    second = _require_measurements(env.call(lambda: driver.measure(found)))
    for address in sorted({*first} & {*second}):
        old, new = first[address], second[address]
        if old.health == new.health and old.reason != new.reason:
            raise RuleViolated(f"reason for {address}: {old.reason!r}, then {new.reason!r}")


@prepare_rule("prepare() of a prepared handle raises no exception.")
def prepare_is_idempotent(env: Environment) -> None:
    """Check repeated calls of prepare()."""
    # A restarted agent repeats calls that it had started.
    driver, other = env.create_discovered(), env.create_discovered()
    item = env.first_item()
    try:
        env.must_succeed("prepare()", lambda: driver.prepare(item, INSTANCE))
        env.must_succeed("prepare() again", lambda: driver.prepare(item, INSTANCE))
        env.must_succeed("prepare() by another object", lambda: other.prepare(item, INSTANCE))
    finally:
        env.call(lambda: driver.release(item))


@rule(
    "A prepared handle is still discovered with the same address.",
    "Driver.discover",
    Ability.PREPARES,
    changes_host=True,
)
def prepared_handles_are_discovered(env: Environment) -> None:
    """Check that a prepared handle is still discovered."""
    # Otherwise it would be drained.
    driver, item = env.create_discovered(), env.first_item()
    try:
        env.must_succeed("prepare()", lambda: driver.prepare(item, INSTANCE))
        found = env.rediscover(driver)
    finally:
        # Not must_succeed: another rule is about release, and its error would hide that of prepare.
        env.call(lambda: driver.release(item))
    _require_discovered(found, item)


@release_rule("release() of a prepared handle, also repeated, raises no exception.")
def release_is_idempotent(env: Environment) -> None:
    """Check repeated calls of release(), also on a second object."""
    # As after a restart: the agent may have been killed before it recorded the end.
    driver, other = env.create_discovered(), env.create_discovered()
    item = env.first_item()
    env.must_succeed("prepare()", lambda: driver.prepare(item, INSTANCE))
    env.must_succeed("release()", lambda: driver.release(item))
    env.must_succeed("release() again", lambda: driver.release(item))
    env.must_succeed("prepare() after release()", lambda: driver.prepare(item, INSTANCE))
    env.must_succeed("release() by another object", lambda: other.release(item))


@release_rule("release() of a handle that was never prepared raises no exception.")
def release_accepts_unprepared(env: Environment) -> None:
    """Check release() of an unprepared handle."""
    # A failed job releases all of its handles.
    driver, item = env.create_discovered(), env.first_item()
    env.must_succeed("release()", lambda: driver.release(item))


@release_rule("release() of a missing handle or device raises no exception.")
def release_accepts_missing(env: Environment) -> None:
    """Check the call for missing items."""
    # After an exception the agent repeats the call forever.
    _accept_missing(env, "release")


@sanitise_rule("sanitise() of a handle, also repeated, raises no exception.")
def sanitise_is_idempotent(env: Environment) -> None:
    """Check repeated calls of sanitise() after release(), also on a second object."""
    # The agent retries until the handle is clean, also after a restart.
    driver, other = env.create_discovered(), env.create_discovered()
    item = env.first_item()
    if Ability.PREPARES in driver.abilities:
        env.must_succeed("prepare()", lambda: driver.prepare(item, INSTANCE))
        env.must_succeed("release()", lambda: driver.release(item))
    env.must_succeed("sanitise()", lambda: driver.sanitise(item))
    env.must_succeed("sanitise() again", lambda: driver.sanitise(item))
    env.must_succeed("sanitise() by another object", lambda: other.sanitise(item))


@rule(
    "A sanitised handle is still discovered and can be prepared.",
    "Driver.discover",
    Ability.SANITISES,
    changes_host=True,
)
def sanitised_handles_are_discovered(env: Environment) -> None:
    """Check that a sanitised handle is still discovered."""
    # The next instance uses it.
    driver, item = env.create_discovered(), env.first_item()
    env.must_succeed("sanitise()", lambda: driver.sanitise(item))
    _require_discovered(env.rediscover(driver), item)
    if Ability.PREPARES in driver.abilities:
        try:
            env.must_succeed("prepare() after sanitise()", lambda: driver.prepare(item, INSTANCE))
        finally:
            env.call(lambda: driver.release(item))


@sanitise_rule("sanitise() of a missing handle or device raises no exception.")
def sanitise_accepts_missing(env: Environment) -> None:
    """Check the call for missing items."""
    # After an exception the agent repeats the call forever.
    _accept_missing(env, "sanitise")


@rule(
    "discover() after program() shows the image, also after a repeated call.",
    "ProgramInterface.program",
    Ability.PROGRAMS,
    changes_host=True,
    needs_image=True,
)
def programmed_image_is_discovered(env: Environment) -> None:
    """Check that the programmed image is discovered as the bitstream_id of the deployable."""
    # Twice: the agent repeats a call that it had started before it was killed.
    image = env.subject.image
    # An empty name of the handle: the image is for the whole deployable.
    driver, item = env.create_discovered(), env.first_item(name="")
    for call in ("program()", "program() again"):
        env.must_succeed(call, lambda: driver.program(item, image))
        images = {
            (device.address, deployable.address): deployable.bitstream_id
            for device in env.rediscover(driver)
            for deployable in device.deployables
        }
        shown = images.get((item.device, item.deployable))
        if shown != image:
            raise RuleViolated(
                f"after {call} of {image} the bitstream_id of {item.deployable} is {shown!r}"
            )


def _accept_missing(env: Environment, method: str) -> None:
    """Check that a method raises no exception for a missing handle and a missing device."""
    driver = env.create_discovered()
    # A handle that is missing on a device that exists, and one of a device that is missing.
    for item in (
        env.first_item(MISSING),
        WorkItem(backend="conformance", device=MISSING, deployable=MISSING, handle=MISSING),
    ):
        env.must_succeed(
            f"{method}() of {item.deployable}, {item.handle}",
            partial(getattr(driver, method), item),
        )


def _require_discovered(found: Sequence[Device], item: WorkItem) -> None:
    """Raise RuleViolated unless the handle of the item is discovered."""
    discovered = {
        (device.address, deployable.address, handle.address)
        for device in found
        for deployable in device.deployables
        for handle in deployable.handles
    }
    if (item.device, item.deployable, item.handle) not in discovered:
        raise RuleViolated(f"the handle {item.handle} of {item.deployable} is no longer discovered")


def _measure(env: Environment) -> tuple[Any, list[Device], CallResult]:
    """Return a driver object, its devices and the result of measure() for them."""
    driver, found = env.discovered_devices()
    return driver, found, env.call(lambda: driver.measure(found))


def _require_measurements(call: CallResult) -> Any:
    if call.failure is not None:
        raise RuleBlocked(f"measure() {call.failure}")
    return call.value
