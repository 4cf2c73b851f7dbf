# SPDX-License-Identifier: Apache-2.0
"""Device profiles of OpenStack Cyborg find devices of this service in a real Placement."""

import json
from typing import Any
from urllib.parse import urlencode

import pytest
import sqlalchemy as sa

from cyborg.cmd.dbsync_import import import_database
from cyborg.cmd.status_checks import check_profiles
from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.core.arq.profile import parse_groups
from cyborg.core.arq.request_groups import build_parameters, make_request_groups
from cyborg.core.inventory.device import AttachHandle, Deployable, Device, DeviceType, HandleType
from cyborg.db.read import device_profiles
from cyborg.db.reference import reader
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import former, publisher_setup
from cyborg.tests.fixtures.databases.placement import Node, placement_adapter
from cyborg.tests.fixtures.hosts.hosts import Host
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["placement_adapter"]

pytestmark = pytest.mark.matrix

# By the name of a profile: the resource class, the trait, and the device as our drivers report it.
CARDS: dict[str, tuple[str, str | None, DeviceType, str, str]] = {
    "gpu": ("PGPU", "CUSTOM_NVIDIA_1EB8", DeviceType.GPU, "10DE_1EB8", "PGPU"),
    "gpu-of-train": ("PGPU", "CUSTOM_GPU_NVIDIA", DeviceType.GPU, "10DE_1EB8", "PGPU"),
    "fpga": ("FPGA", "CUSTOM_FPGA_INTEL_PAC_ARRIA10", DeviceType.FPGA, "8086_09C4", "FPGA"),
    "qat": ("CUSTOM_QAT", None, DeviceType.QAT, "8086_37C8", "CUSTOM_CRYPTO"),
    "ssd": ("CUSTOM_SSD", "CUSTOM_SSD_INSPUR", DeviceType.SSD, "1BD4_1003", "CUSTOM_NVME"),
}


def make_devices() -> list[Device]:
    """Return a card for each profile, as our drivers report it."""
    devices = []
    for number, (_, _, type_, ids, resource_class) in enumerate(CARDS.values()):
        address = f"0000:{number + 1:02x}:00.0"
        traits = frozenset({f"CUSTOM_PCI_PRODUCT_{ids}"})
        handles = (AttachHandle(address, HandleType.PCI),)
        deployable = Deployable(address, resource_class, traits, handles)
        devices.append(Device(address, type_, ids[:4], "m", "cards", deployables=(deployable,)))
    return devices


def make_source() -> sa.Engine:
    """Return a database of OpenStack Cyborg with the profiles."""
    source = former.make_source()
    with source.begin() as tx:
        for resource_class, trait, *_ in CARDS.values():
            name = next(n for n, card in CARDS.items() if card[:2] == (resource_class, trait))
            group = {f"resources:{resource_class}": "1"}
            group |= {} if trait is None else {f"trait:{trait}": "required"}
            former.add(tx, reader.profiles, name, None, json.dumps({"groups": [group]}))
    return source


def find_candidates(node: Node, engine: sa.Engine) -> dict[str, int]:
    """Return the number of allocation candidates at a node for each profile."""
    found = {}
    with engine.connect() as connection:
        for row in device_profiles.find(connection):
            parameters = build_parameters(make_request_groups(parse_groups(row["groups"])))
            answer = node.client.get(f"/allocation_candidates?{urlencode(parameters)}")
            # Placement answers 400 for a trait or a resource class that it does not know.
            assert answer.status_code in (200, 400), answer.text
            requests: list[dict[str, Any]] = answer.json().get("allocation_requests", [])
            own = {child["uuid"] for child in node.children().values()}
            found[row["name"]] = sum(own >= set(r["allocations"]) for r in requests)
    return found


def test_imported_profiles_are_served_with_reference_traits(
    sqlite_engine: sa.Engine, placement_adapter: Any
) -> None:
    source = make_source()
    with source.connect() as connection:
        report = import_database(connection, sqlite_engine, lambda *_: None, dry_run=False)
    source.dispose()
    assert set(report.unserved) == set(CARDS)
    assert "CUSTOM_CRYPTO" in report.unserved["qat"]["CUSTOM_QAT"]
    node = Node(placement_adapter)
    host = Host(node.name)
    publisher = publisher_setup.make_publisher(sqlite_engine, node.placement)

    def report_devices(release: str) -> tuple[dict[str, int], str]:
        """Return the candidates by profile, and the result of the check, after a heartbeat."""
        conf = make_conf(conductor={"reference_traits": release})
        host.send(Hosts(conf, UnitOfWork(sqlite_engine)), *make_devices())
        for _ in range(len(CARDS) + 2):
            publisher.run_once()
        with sqlite_engine.connect() as connection:
            details = str(check_profiles(connection, conf).details or "")
        return find_candidates(node, sqlite_engine), details

    candidates, details = report_devices("none")
    assert candidates == dict.fromkeys(CARDS, 0)
    for name, (resource_class, trait, *_) in CARDS.items():
        assert f"{name}: " in details
        assert f"{trait or resource_class} (a name of OpenStack Cyborg: set [conductor]" in details

    # The devices are the same: only the option has changed.
    candidates, details = report_devices("17")
    assert all(candidates.values()), candidates
    assert details == ""

    candidates, _ = report_devices("none")
    assert candidates == dict.fromkeys(CARDS, 0)
