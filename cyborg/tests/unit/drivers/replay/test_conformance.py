# SPDX-License-Identifier: Apache-2.0
"""The conformance kit with the drivers of each capture of a card, host work included.

The kit gets the class of a driver and a root of sysfs. A replay replaces the host work of a driver
by arguments of its constructor, so the kit gets a subclass with these arguments. No rule is left
out: what a replay does not simulate, such as MIG, is no ability that these options enable.
"""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.inventory.device import Ability
from cyborg.drivers.base import Driver
from cyborg.drivers.fpga.driver import FpgaDriver
from cyborg.drivers.pci.driver import PciDriver
from cyborg.drivers.replay.host import ReplayedHost
from cyborg.testing import captures
from cyborg.testing.conformance.kit import Outcome, run_rules
from cyborg.tests.fixtures.drivers import pci_drivers
from cyborg.tests.fixtures.hosts.directory_images import DirectoryImages
from cyborg.tests.fixtures.hosts.gbs import make_gbs

INTERFACE, FUNCTION = "9346116da52d5ca8b06aa9a389ef7c8d", "d8424dc4a4a3c413f89e433683f9040b"
MORE_OPTIONS: Mapping[str, Mapping[str, object]] = {
    "generic": {"reset": "required"},
    "nic": {"reset": "if_possible"},
}
# What the rules let each driver do to a host, at least.
WORK: Mapping[str, set[Ability]] = {
    "crypto": {Ability.PARTITIONS},
    "fpga": {Ability.PREPARES, Ability.PROGRAMS},
    "generic": {Ability.SANITISES},
    "gpu": {Ability.PREPARES},
    "nic": {Ability.PARTITIONS, Ability.SANITISES},
    "nvme": {Ability.SANITISES},
}


def test_each_driver_has_options_and_work() -> None:
    """A new driver needs both, or the next test does not run it."""
    assert set(pci_drivers()) == set(WORK) == set(captures.DRIVERS)
    assert set(captures.RESOURCE_CLASSES) == set(captures.DRIVERS)


def replayed_class(driver: type[Driver], host: ReplayedHost, images: DirectoryImages) -> Any:
    """Return a class that does its host work on a replayed host."""
    arguments = (host.access,) if issubclass(driver, PciDriver) else ()

    class Replayed(driver):  # type: ignore[misc, valid-type]
        __module__ = driver.__module__  # this test module has forbidden imports

        def __init__(self, backend: str, options: Any, sysfs_root: str | Path = "/sys") -> None:
            super().__init__(backend, options, sysfs_root, *arguments)
            if isinstance(self, FpgaDriver):
                self.images = images

    return Replayed


@pytest.mark.slow
@pytest.mark.parametrize("name", captures.capture_names())
def test_driver_of_a_capture_passes_all_rules(name: str, tmp_path: Path) -> None:
    images = DirectoryImages(tmp_path / "images")
    content = make_gbs(INTERFACE, FUNCTION)
    properties = {"region_id": INTERFACE, "function_id": FUNCTION}
    image = images.add(str(uuid.UUID(int=1, version=4)), content, **properties)
    host = ReplayedHost(captures.load(name))
    try:
        tested = []
        for driver in pci_drivers().values():
            options = {**captures.DRIVERS[driver.name], **MORE_OPTIONS.get(driver.name, {})}
            if not host.create_driver(driver, driver.name, options).discover():
                continue
            tested.append(driver.name)
            results = run_rules(
                replayed_class(driver, host, images),
                options,
                sysfs_root=host.sysfs_root,
                work=True,
                image=image,
                entry_point=driver.name,
                limit=60.0,
            )
            failures = (Outcome.FAILED, Outcome.BLOCKED)
            assert {r.rule.name: r.reason for r in results if r.outcome in failures} == {}
            skipped = [r.reason for r in results if r.outcome is Outcome.SKIPPED]
            assert all(reason.startswith("the driver does not ") for reason in skipped), skipped
            passed = {r.rule.ability for r in results if r.outcome is Outcome.PASSED}
            assert passed >= {Ability.MEASURES, *WORK[driver.name]}
        assert tested
    finally:
        host.close()
