# SPDX-License-Identifier: Apache-2.0
"""What is offered on real machines, as their operators would say; each has a public source."""

from pathlib import Path
from typing import Any

import pytest

from cyborg.core.inventory.device import NOT_OFFERED, Device
from cyborg.drivers.generic import GenericDriver
from cyborg.testing import machine
from cyborg.tests.fixtures.drivers import family_drivers

DRIVERS = family_drivers()
# Traits that follow from the ids and the place of each function.
PLACE = ("CUSTOM_PCI_", "CUSTOM_PCIE_ROOT_", "CUSTOM_NUMA_NODE_")
NAMES = machine.machine_names()


def describe(driver: str, device: Device) -> dict[str, Any]:
    """Return a row of the table of a machine."""
    row: dict[str, Any] = {"device": device.address, "driver": driver, "type": str(device.type)}
    if device.numa_node is not None:
        row["numa_node"] = device.numa_node
    if (reason := device.vendor_board_info.get(NOT_OFFERED)) is not None:
        row["withheld"] = reason
    if device.undeliverable_reason is not None and not reason:
        row["obstacle"] = device.undeliverable_reason
    if device.deployables:
        (part,) = device.deployables
        row["class"] = part.resource_class
        row["handles"] = len(part.handles)
        row["traits"] = sorted(t for t in part.traits if not t.startswith(PLACE))
    return row


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_machine_offers_what_its_operator_expects(name: str, tmp_path: Path) -> None:
    facts = machine.load_machine(name)
    root = machine.build_machine(facts, tmp_path).root
    found: list[dict[str, Any]] = []
    for driver, class_ in DRIVERS.items():
        backend = class_(driver, {"devices": [machine.rule_of_machine(facts)]}, root)
        found += [describe(driver, device) for device in backend.discover()]
    # generic for what no driver of a family has, and only the functions that the table names.
    cards = {row["device"] for row in facts["expected"] if row["driver"] == "generic"}
    named = [f["address"] for f in facts["functions"] if {f["address"], f.get("physfn")} & cards]
    if named:
        rules = [f"address={address},functions=all" for address in named]
        backend = GenericDriver("generic", {"devices": rules}, root)
        found += [describe("generic", device) for device in backend.discover()]
    key = ("driver", "device")
    expected = sorted(facts["expected"], key=lambda row: [row[k] for k in key])
    assert sorted(found, key=lambda row: [row[k] for k in key]) == expected


@pytest.mark.parametrize("name", NAMES)
def test_machine_has_a_source(name: str) -> None:
    facts = machine.load_machine(name)
    assert "https://" in facts["source"]
    addresses = {function["address"] for function in facts["functions"]}
    assert addresses >= {row["device"] for row in facts["expected"]}
