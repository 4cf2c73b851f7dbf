# SPDX-License-Identifier: Apache-2.0
"""The preview of a layout: what it changes in the offers of the device sets of its host."""

from dataclasses import replace
from typing import Any

import pytest

from cyborg.core.inventory.device import Layout
from cyborg.core.inventory.device_set import ANOTHER_LAYOUT, SetKind
from cyborg.db import schema
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.host import SetHost, gpu_address
from cyborg.tests.fixtures.device_sets.saved import make_set_host

__all__ = ["node", "placement_adapter"]

LAYOUTS = (Layout("whole", {"PGPU": 1}), Layout("2xvgpu", {"VGPU": 2}))
GPU = "01"
LEFT = f"device {gpu_address(GPU)} leaves it with the layout 2xvgpu"


def make_host(api: ApiEnv, node: Node, **source: Any) -> SetHost:
    """Return a host with sets of kind FABRIC, a GPU of which can be divided."""
    host = make_set_host(api.engine, node, **source)
    host.gpus[GPU] = replace(host.gpus[GPU], layouts=LAYOUTS, layout="whole")
    host.report()
    return host


def path_of(api: ApiEnv, unit: str = GPU) -> str:
    """Return the path of the layouts of a GPU."""
    (device,) = rows.read(api.engine, schema.devices, address=gpu_address(unit))
    return f"/v2/devices/{device['uuid']}/layout"


def changes(api: ApiEnv, layout: str) -> dict[str, tuple[str, str, str | None]]:
    """Return the offers before and after, and the reason, by the address of the set."""
    found = api.get(f"{path_of(api)}?preview={layout}")["preview"]["device_sets"]
    return {row["address"]: (row["before"], row["after"], row["reason"]) for row in found}


def sets_with(host: SetHost, unit: str) -> set[str]:
    """Return the addresses of the sets that have a GPU."""
    return {f"hgx:{name}" for name, units in host.family.items() if unit in units}


def test_preview_of_a_divided_gpu_names_the_sets_that_are_closed_and_offered(
    api: ApiEnv, node: Node
) -> None:
    host = make_host(api, node)
    found = changes(api, "2xvgpu")
    closed = {name: change for name, change in found.items() if change[1] == "withheld"}
    assert closed.keys() == sets_with(host, GPU)
    assert {change[2] for change in closed.values()} == {LEFT}
    assert [name for name, change in closed.items() if change[0] == "offered"] == ["hgx:0"]
    offered = found.keys() - closed.keys()
    assert {found[name] for name in offered} == {("withheld", "offered", None)}
    units = sorted(u for name in offered for u in host.family[name.removeprefix("hgx:")])
    assert units == sorted(host.gpus.keys() - {GPU})
    # The present layout changes nothing, and neither does a preview.
    assert changes(api, "whole") == {}
    assert host.offered() == {"0": 8}


def test_preview_is_what_the_report_of_the_layout_brings(api: ApiEnv, node: Node) -> None:
    host = make_host(api, node, wanted={"1": 1, "2": 1}, kind=SetKind.NVLINK)
    before, found = host.offered().keys(), changes(api, "2xvgpu")
    host.withhold(GPU, f"device {gpu_address(GPU)} is divided into 2: {ANOTHER_LAYOUT}")
    host.publish()
    divided = host.offered().keys()
    assert {f"hgx:{name}" for name in divided - before} == {
        name for name, change in found.items() if change[1] == "offered"
    }
    assert {f"hgx:{name}" for name in before - divided} == {
        name for name, change in found.items() if change[0] == "offered"
    }
    host.gpus[GPU] = replace(host.gpus[GPU], layouts=LAYOUTS, layout="2xvgpu")
    host.report()
    offered = {name for name, change in changes(api, "whole").items() if change[1] == "offered"}
    assert offered
    assert offered <= sets_with(host, GPU) | {f"hgx:{name}" for name in before}


@pytest.mark.parametrize("version", ["2.5", "2.6"])
def test_preview_needs_a_layout_of_the_device_and_version_2_6(
    api: ApiEnv, node: Node, version: str
) -> None:
    make_host(api, node)
    usual = api.get(path_of(api), version)
    assert ("preview" in usual) == (version == "2.6")
    assert usual.get("preview") is None
    headers = {"OpenStack-API-Version": f"accelerator {version}"}
    for name, texts in (("9", ["expected one of whole, 2xvgpu"]), ("", []), ("whole", [])):
        answer = api.call("GET", f"{path_of(api)}?preview={name}", headers=headers)
        is_known = name == "whole" and version == "2.6"
        assert answer.status_int == (200 if is_known else 400), answer.text
        assert version == "2.5" or all(text in answer.text for text in texts)
    # A device without layouts.
    other = api.call("GET", f"{path_of(api, '02')}?preview=whole", headers=headers)
    assert other.status_int == 400


def test_preview_of_a_device_in_no_set_reads_no_sets(api: ApiEnv) -> None:
    layout = LAYOUTS[0].to_dict()
    rows.insert_card(api.engine, address=gpu_address(GPU), layouts=[layout], layout="whole")
    path = path_of(api)
    with count_statements(api.engine) as usual:
        api.get(path)
    with count_statements(api.engine) as counted:
        preview = api.get(f"{path}?preview=whole")["preview"]
    assert preview == {"layout": "whole", "device_sets": []}
    assert len(counted) == len(usual) + 1
