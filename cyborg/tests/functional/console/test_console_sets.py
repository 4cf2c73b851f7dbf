# SPDX-License-Identifier: Apache-2.0
"""Device sets in the web console: those of a host with an HGX baseboard, and those of a device."""

import re
from dataclasses import replace

import pytest

from cyborg.core.inventory.device import Layout
from cyborg.core.inventory.device_set import SetKind
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node
from cyborg.tests.fixtures.device_sets.families import H100_FOUR
from cyborg.tests.fixtures.device_sets.host import SetHost, gpu_address
from cyborg.tests.functional.console.browser import NARROW, WIDE, OpenWindow, expect
from cyborg.tests.functional.console.service import ConsoleService

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.requires("chromium")]

INSTANCE = "6f1c9c0e-5d5b-4c53-9d2f-1f4f6d3a7b10"
NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
MAX_DEVICES = 200  # of the page of a host
LETTERS = {"offered": "O", "allocated": "A", "withheld": TIMES}


@pytest.fixture(scope="module")
def host(service: ConsoleService) -> SetHost:
    """Return a host whose pair of GPUs has an owner."""
    node = Node(service.cloud.stack.placement)
    wanted = {"4": 1, "2": 1, "1": 2}
    host = SetHost(service.cloud.engine, node, kind=SetKind.PCIE, wanted=wanted)
    _link(host)
    pair = next(name for name, size in host.offered().items() if size == 2)
    host.bind(pair, instance=INSTANCE, project_id="project-1")
    host.publish()
    return host


def _link(host: SetHost) -> None:
    """Report NVLinks of GPU 01 to 02 and to a GPU that the host does not have, and of the sets."""
    facts = {"nvlink_peers": "0000:02:00.0,0000:99:00.0", "nvlink_links": "4,2"}
    facts["nvlink_mbps"] = "26562"
    host.gpus["01"] = replace(host.gpus["01"], topology=facts)
    # The driver of the other end is not loaded.
    host.gpus["05"] = replace(host.gpus["05"], topology={"nvlink_peers": "0000:06:00.0"})
    links = {"nvlinks": "16", "max_nvlinks": "18", "nvlink_mbps": "25000"}
    whole, *others = host.source.deployables
    whole = replace(whole, attributes=links)
    host.source = replace(host.source, deployables=(whole, *others))
    host.report()


def test_host_page_has_a_row_for_each_set_and_a_cell_for_each_member(
    window: OpenWindow, host: SetHost
) -> None:
    shown = window()
    page = shown.page
    shown.open(f"hosts/{host.node.name}", host.node.name)
    card = page.get_by_role("region", name="Device sets", exact=True)
    gpus = [gpu_address(unit) for unit in sorted(host.gpus)]
    columns = ["Set", *(gpu.removeprefix("0000:") for gpu in gpus)]
    columns += ["NVLinks", "Offer", "Instance", "Project", "Reason"]
    expect(card.get_by_role("columnheader")).to_have_text(columns)
    for name, offer in host.offers().items():
        row = card.get_by_role("row").filter(
            has=page.get_by_role("rowheader", name=f"hgx:{name}", exact=True)
        )
        letters = [
            LETTERS[offer] if unit in host.family[name] else "" for unit in sorted(host.gpus)
        ]
        owner = ["6f1c9c0e-5d5…", "project-1"] if offer == "allocated" else [NOTHING] * 2
        links = f"16 of 18 {TIMES} 25 GB/s" if name == "0" else NOTHING
        texts = [*letters, links, offer, *owner]
        cells = row.get_by_role("cell")
        for number, text in enumerate(texts):
            expect(cells.nth(number)).to_have_text(text)
        # The reason is text and not only a tooltip.
        reason = "^(device|overlaps|is split)" if offer == "withheld" else f"^{NOTHING}$"
        expect(cells.last).to_have_text(re.compile(reason))
    shown.check()
    # Below the header, which stays at the top.
    card.evaluate("card => scrollTo(0, card.getBoundingClientRect().top + scrollY - 60)")
    shown.shoot("device-sets")


def test_host_page_has_the_nvlinks_of_each_pair_of_gpus(window: OpenWindow, host: SetHost) -> None:
    shown = window()
    page = shown.page
    shown.open(f"hosts/{host.node.name}", host.node.name)
    card = page.get_by_role("region", name="NVLinks", exact=True)
    names = ["01:00.0", "02:00.0", "05:00.0", "06:00.0", "99:00.0 absent"]
    expect(card.get_by_role("columnheader")).to_have_text(["GPU", *names])
    pairs = {(0, 1): f"4 {TIMES} 26.562 GB/s", (0, 4): f"2 {TIMES} 26.562 GB/s", (2, 3): "linked"}
    # A link is one of both ends.
    pairs |= {(column, row): text for (row, column), text in pairs.items()}
    for number in range(len(names)):
        texts = [pairs.get((number, column), NOTHING) for column in range(len(names))]
        texts[number] = ""
        expect(card.get_by_role("row").nth(number + 1).get_by_role("cell")).to_have_text(texts)
    shown.check()


def test_nvlinks_have_the_gpus_beyond_the_devices_of_the_picture(
    window: OpenWindow, service: ConsoleService
) -> None:
    """The host has more cards than its page shows, which were reported before the GPUs."""
    node = Node(service.cloud.stack.placement)
    for number in range(MAX_DEVICES):
        address = f"0000:{number:02x}:1f.0"
        rows.insert_card(service.cloud.engine, node.name, address, handles=0)
    for number, peer in ((1, 2), (2, 1)):
        name = f"f000:0{number}:00.0"
        topology = {"nvlink_peers": f"f000:0{peer}:00.0", "nvlink_links": "4"}
        rows.insert_card(
            service.cloud.engine, node.name, name, handles=0, type="GPU", topology=topology
        )
    shown = window()
    shown.open(f"hosts/{node.name}", node.name)
    expect(shown.page.get_by_text(f"The first {MAX_DEVICES} devices are shown.")).to_be_visible()
    card = shown.page.get_by_role("region", name="NVLinks", exact=True)
    names = ["GPU", "f000:01:00.0", "f000:02:00.0"]
    expect(card.get_by_role("columnheader")).to_have_text(names)
    expect(card.get_by_role("link")).to_have_count(4)
    expect(card.get_by_role("row").nth(1).get_by_role("cell")).to_have_text(["", "4 links"])


def test_layout_dialog_names_the_sets_that_are_closed_and_offered(
    window: OpenWindow, service: ConsoleService
) -> None:
    layouts = (Layout("whole", {"PGPU": 1}), Layout("2xvgpu", {"VGPU": 2}))
    host = SetHost(service.cloud.engine, Node(service.cloud.stack.placement), H100_FOUR)
    host.gpus["01"] = replace(host.gpus["01"], layouts=layouts, layout="whole")
    host.report()
    (device,) = rows.read(
        host.engine, schema.devices, host=host.node.name, address=gpu_address("01")
    )
    shown = window()
    page = shown.page
    shown.open(f"devices/{device['uuid']}", gpu_address("01"))
    page.get_by_role("button", name="Change layout").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Layout").select_option("2xvgpu")
    table = dialog.get_by_role("table", name="Device sets that would be closed or offered")
    closed = table.get_by_role("row").filter(has_text="leaves it with the layout 2xvgpu")
    expect(closed).to_have_count(sum("01" in units for units in H100_FOUR.values()))
    first = ["hgx:1", "4", "offered", "withheld", re.compile("^device 0000:01:00.0 leaves it")]
    expect(table.get_by_role("row").nth(1).get_by_role("cell")).to_have_text(first)
    offered = table.get_by_role("row").filter(has_text="withheldoffered")
    expect(offered).to_have_count(2)
    shown.check()
    dialog.get_by_label("Layout").select_option("whole")
    expect(dialog).to_contain_text("would offer the same as now")
    expect(table).to_have_count(0)


@pytest.mark.parametrize(
    ("width", "scheme"),
    [pytest.param(WIDE, "dark", marks=pytest.mark.long), (NARROW, "light")],
)
def test_device_sets_are_accessible_and_fit(
    window: OpenWindow, host: SetHost, width: int, scheme: str
) -> None:
    shown = window(width=width, scheme=scheme)
    shown.open(f"hosts/{host.node.name}", host.node.name)
    shown.page.get_by_role("region", name="Device sets", exact=True).wait_for()
    shown.check()


def test_device_page_has_the_sets_of_the_device(window: OpenWindow, host: SetHost) -> None:
    shown = window()
    page = shown.page
    host.report(without=["08"])
    (device,) = rows.read(host.engine, schema.devices, address=gpu_address("07"))
    shown.open(f"devices/{device['uuid']}", gpu_address("07"))
    card = page.get_by_role("region", name="Device sets", exact=True)
    names = sorted(f"hgx:{name}" for name, units in host.family.items() if "07" in units)
    expect(card.get_by_role("rowheader")).to_have_count(len(names))
    assert sorted(card.get_by_role("rowheader").all_inner_texts()) == names
    expect(card.get_by_role("columnheader").filter(has_text="absent")).to_have_count(1)
    shown.check()


def test_host_without_device_sets_has_no_card(window: OpenWindow) -> None:
    shown = window()
    shown.open("hosts/compute-1", "compute-1")
    expect(shown.page.get_by_role("region", name="Agent", exact=True)).to_be_visible()
    expect(shown.page.get_by_text("Loading…")).to_have_count(0)
    expect(shown.page.get_by_role("region", name="Device sets")).to_have_count(0)
