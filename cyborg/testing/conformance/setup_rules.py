# SPDX-License-Identifier: Apache-2.0
"""Conformance rules for the setup of a host and for the partitioning of devices."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from cyborg.core.inventory.device import Ability, Device, Layout, count_handles
from cyborg.core.jobs.job import WorkItem
from cyborg.core.naming import is_accelerator_class
from cyborg.drivers.base import SetupInterface
from cyborg.testing.conformance.discovery_rules import difference
from cyborg.testing.conformance.environment import (
    CallResult,
    Environment,
    RuleBlocked,
    RuleViolated,
    describe_failure,
)
from cyborg.testing.conformance.rules import rule

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
    """Check repeated calls of setup(), also on a second object: a reload creates a new object."""
    driver: Any = env.create()
    other: Any = env.create()
    env.must_succeed("setup()", driver.setup)
    env.must_succeed("setup() again", driver.setup)
    env.must_succeed("setup() by another object", other.setup)


@setup_rule("A repeated setup() does not change the result of discover().")
def setup_preserves_devices(env: Environment) -> None:
    """Check that setup() keeps all devices: a reload must not remove devices in use."""
    driver: Any = env.create()
    env.must_succeed("setup()", driver.setup)
    original = env.rediscover(driver)
    env.must_succeed("setup() again", driver.setup)
    if change := difference(original, env.rediscover(driver)):
        raise RuleViolated(f"after setup() again: {change}")


@layouts_rule("layouts() returns a sequence of Layout with unique names, within the time limit.")
def layouts_are_valid(env: Environment) -> None:
    """Check the layouts of each discovered device."""
    driver: Any
    driver, found = env.discovered_devices()
    for device in found:
        call = env.call(partial(driver.layouts, device))
        if call.timed_out or call.error is not None:
            raise RuleViolated(f"layouts() of {device.address} {describe_failure(call)}")
        layouts = call.value
        if not isinstance(layouts, Sequence) or not all(
            isinstance(item, Layout) for item in layouts
        ):
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
    """Check that layouts() includes the current layout, which is needed to restore a device."""
    driver, found = env.discovered_devices()
    for device in found:
        _current_layout(device, _layouts(env, driver, device))


@layouts_rule("layouts() changes nothing: no write, process or connection.")
def layouts_is_read_only(env: Environment) -> None:
    """Check that layouts() of the first device has no side effects."""
    driver: Any
    driver, found = env.discovered_devices()
    for device in found[:1]:
        call: CallResult = env.call(partial(driver.layouts, device))
        if call.effects:
            raise RuleViolated(call.effects[0])


@partition_rule("discover() after partition() shows the layout, also after a repeated call.")
def partition_is_discovered(env: Environment) -> None:
    """Check that two objects discover the new layout, then restore the device."""
    driver: Any = env.create_discovered()
    device, item = _first_device(env)
    layouts = _layouts(env, driver, device)
    original = _current_layout(device, layouts)
    expected = next((layout for layout in layouts if not layout.matches(device)), original)
    try:
        for call in ("partition()", "partition() again"):
            env.must_succeed(call, lambda: driver.partition(item, expected.name))
            for suffix, observer in (("", driver), (" by another object", env.create())):
                _require_layout(env.rediscover(observer), item, expected, f"after {call}{suffix}")
    finally:
        restored = env.call(lambda: driver.partition(item, original.name))
    if restored.timed_out or restored.error is not None:
        raise RuleViolated(f"partition() back to {original.name} {describe_failure(restored)}")
    _require_layout(env.rediscover(driver), item, original, "after partition() back")


@partition_rule("partition() with an unknown layout raises an exception and changes nothing.")
def partition_rejects_unknown_layout(env: Environment) -> None:
    """Check that partition() rejects an unknown layout: the layouts can change after a request."""
    driver: Any = env.create_discovered()
    device, item = _first_device(env)
    original = _current_layout(device, _layouts(env, driver, device))
    call = env.call(lambda: driver.partition(item, UNKNOWN))
    if call.timed_out:
        raise RuleViolated(f"partition() {describe_failure(call)}")
    if call.error is None:
        raise RuleViolated(f"partition() to {UNKNOWN!r} raises no exception")
    _require_layout(env.rediscover(driver), item, original, f"after partition() to {UNKNOWN!r}")


def _first_device(env: Environment) -> tuple[Device, WorkItem]:
    """Return the first device and a work item for it. Raise RuleBlocked without a device."""
    found = env.discovered_devices()[1]
    if not found:
        raise RuleBlocked("no device is discovered on this host")
    return found[0], WorkItem("conformance", found[0].address, "")


def _layouts(env: Environment, driver: Any, device: Device) -> Sequence[Layout]:
    call = env.call(lambda: driver.layouts(device))
    if call.timed_out or call.error is not None:
        raise RuleBlocked(f"layouts() {describe_failure(call)}")
    layouts = call.value
    if not isinstance(layouts, Sequence) or not all(isinstance(item, Layout) for item in layouts):
        raise RuleBlocked("layouts() does not return a sequence of Layout")
    return layouts


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
