# SPDX-License-Identifier: Apache-2.0
"""``cyborg topology``: requests, tree and picture."""

import argparse
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from cyborg.cli import app
from cyborg.cli.common.rest import CommandError
from cyborg.cli.views import inventory, svg
from cyborg.cli.views.inventory import DeployableView, DeviceView, Handle, HostView, TopologyView
from cyborg.cli.views.text import ASCII, UNICODE, Canvas, Glyphs
from cyborg.cli.views.topology import build_tree, parse_max_hosts, write_picture
from cyborg.tests.fixtures.cli.cloud import UUIDS, ViewService, device_set
from cyborg.tests.unit.cli.common.test_rest import rest, serving

Run = Callable[..., tuple[str, str]]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def service() -> ViewService:
    return ViewService()


@pytest.fixture
def cyborg(service: ViewService, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    with serving(service) as url:

        def run(*arguments: str, code: int = 0) -> tuple[str, str]:
            status = app.main(["--os-auth-type", "none", "--os-endpoint", url, *arguments])
            output = capsys.readouterr()
            assert status == code, output
            return output.out, output.err

        yield run


def fetch(service: ViewService, host: str | None = None, max_hosts: int = 10) -> TopologyView:
    with serving(service) as url:
        return inventory.fetch_topology(rest(url), host, max_hosts)


@pytest.mark.parametrize("num_hosts", [0, 3, 40])
def test_topology_makes_two_requests_and_three_for_each_shown_host(num_hosts: int) -> None:
    service = ViewService(num_hosts)
    found = fetch(service, max_hosts=5)
    shown = min(num_hosts, 5)
    assert len(service.requests) == 2 + 3 * shown
    assert [host.name for host in found.hosts] == service.hosts[:5]
    # The summary has 15 hosts.
    assert found.num_more == 15 - shown


def test_topology_of_one_host_makes_four_requests() -> None:
    service = ViewService(40)
    found = fetch(service, host="compute-7")
    assert [host.name for host in found.hosts] == ["compute-7"]
    assert (len(service.requests), found.num_more) == (4, 0)


def test_topology_of_an_unknown_host_fails(cyborg: Run) -> None:
    _, err = cyborg("topology", "--host", "compute-99", code=1)
    # The client also prints warnings of other threads, such as those of the service.
    assert err.endswith("no agent has reported the host compute-99\n")


def test_topology_prints_owners_health_and_numa_nodes(cyborg: Run) -> None:
    out, _ = cyborg("topology", "--host", "compute-1")
    assert out.splitlines() == [
        "compute-1 up",
        "├─ NUMA node 0",
        "│  └─ 0000:3b:00.0 GPU A100 <PCIe> & 80GB ready",
        "│     └─ PGPU: 5 free, 1 bound, 1 preparing, 1 error",
        f"│        ├─ 0000:3b:00.0 bound vpn: instance {UUIDS[2]} of project b7d2",
        f"│        ├─ 0000:3b:00.1 preparing request {UUIDS[1]} of project b7d2",
        "│        └─ 0000:3b:00.2 error: the reset failed",
        "├─ NUMA node 1",
        "│  └─ 0000:3c:00.0 GPU A100 <PCIe> & 80GB, unhealthy: temperature of 97 °C",
        "└─ NUMA node unknown",
        "   └─ 0000:3d:00.0 GPU A100 <PCIe> & 80GB ready",
        "      └─ PGPU: 8 free",
    ]


def test_topology_shows_device_sets_and_who_has_them(cyborg: Run, service: ViewService) -> None:
    owner = {"instance_uuid": UUIDS[2], "project_id": "b7d2"}
    service.device_sets = [
        device_set(0, 4, "withheld"),
        device_set(1, 2, "allocated", **owner),
        device_set(2, 2, "offered"),
        device_set(3, 4, "withheld"),
        device_set(4, 1, "withheld"),
    ]
    lines = cyborg("topology", "--host", "compute-1")[0].splitlines()
    assert lines[2] == (
        "│  └─ 0000:3b:00.0 GPU A100 <PCIe> & 80GB ready, in hgx:1 allocated, in hgx:2 offered"
    )
    allocated, offered, withheld = lines[-3:]
    assert allocated.startswith(f"      ├─ hgx:1 allocated instance {UUIDS[2]} of project b7d2: ")
    assert offered == "      ├─ hgx:2 offered: 0000:3b:00.0, 0000:3c:00.0"
    assert withheld == "      └─ withheld: 1 of 1, 2 of 4"
    assert len(json.loads(cyborg("topology", "-f", "json")[0])["hosts"][0]["device_sets"]) == 5


def test_topology_without_permission_for_device_sets_shows_devices(
    cyborg: Run, service: ViewService
) -> None:
    service.device_sets = None
    assert "GPU A100" in cyborg("topology")[0]


def test_picture_shows_device_sets() -> None:
    service = ViewService(1)
    service.device_sets = [device_set(1, 2, "offered"), device_set(0, 4, "withheld")]
    texts = [each.text for each in draw(fetch(service)).iter(f"{SVG}text")]
    assert {"in hgx:1, offered", "hgx:1 offered, 2 devices", "sets withheld: 1"} <= set(texts)


@pytest.mark.parametrize("width", [20, 59, 60, 200])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_tree_fits_the_width_and_the_characters(width: int, glyphs: Glyphs) -> None:
    lines = build_tree(fetch(ViewService()), Canvas(width, glyphs))
    assert max(line.cell_len for line in lines) <= width
    text = "\n".join(line.plain for line in lines)
    assert text.isascii() is (glyphs is ASCII)
    assert lines[-1].plain.startswith("13 more hosts")


def test_topology_as_json_has_the_answers_of_the_service(cyborg: Run, service: ViewService) -> None:
    document = json.loads(cyborg("topology", "-f", "json")[0])
    assert [host["host"] for host in document["hosts"]] == service.hosts
    assert document["more_hosts"] == 13
    assert len(document["hosts"][0]["devices"]) == 3


def test_topology_without_permission_names_the_fault(cyborg: Run, service: ViewService) -> None:
    service.failure = 403
    out, err = cyborg("topology", code=1)
    assert out == ""
    assert err.endswith("the database is away (HTTP 403)\n")


@pytest.mark.parametrize("text", ["0", "101", "-1", "x", "9" * 30])
def test_max_hosts_out_of_range_is_rejected(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number from 1 to 100"):
        parse_max_hosts(text)


def draw(topology: TopologyView) -> ET.Element:
    content = svg.draw_svg(topology)
    assert content.startswith(b"<?xml")
    return ET.fromstring(content)


def test_picture_is_valid_and_needs_no_other_file(cyborg: Run, tmp_path: Path) -> None:
    file = tmp_path / "hosts.svg"
    assert cyborg("topology", "--svg", str(file))[0] == ""
    text = file.read_text()
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    for word in ("href", "url(", "@import", "<script", "<image"):
        assert word not in text
    assert text.count("http") == 1  # the name of the namespace
    titles = [each.text or "" for each in root.iter(f"{SVG}title")]
    assert any(f"vpn: instance {UUIDS[2]} of project b7d2" in title for title in titles)
    assert any("A100 <PCIe> & 80GB" in title for title in titles)


def test_picture_keeps_everything_inside_its_frame() -> None:
    root = draw(fetch(ViewService(9)))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    rectangles = [each.attrib for each in root.iter(f"{SVG}rect")]
    for each in rectangles:
        assert float(each["x"]) + float(each["width"]) <= width
        assert float(each["y"]) + float(each["height"]) <= height
        assert float(each["height"]) > 0
    for text in root.iter(f"{SVG}text"):
        assert float(text.attrib["y"]) < height
        assert len(text.text or "") < 80


def count_cells(root: ET.Element, use: str) -> int:
    # The legend has one.
    return sum(each.attrib.get("class") == use for each in root.iter(f"{SVG}rect")) - 1


def test_picture_has_a_square_for_each_handle() -> None:
    root = draw(fetch(ViewService(1)))
    uses = ("owned", "free", "error", "dirty", "draining")
    assert [count_cells(root, use) for use in uses] == [2, 13, 1, 0, 0]


def one_device(handles: list[Handle]) -> TopologyView:
    deployable = DeployableView(UUIDS[0], "CUSTOM_\x1b]0;\ufffe" + "X" * 300, handles)
    name = "加速器" * 50 + "<&>\"'\x00\x0b"
    card = DeviceView("0000:3b:00.0", name, "NIC", "yes", "ok", False, None, [deployable])
    return TopologyView([HostView("h" * 255, "late", {None: [card]}, True)], 7)


def test_picture_of_many_handles_has_a_bar_and_few_owners() -> None:
    owned = [Handle(f"{n}", "bound", f"instance {n}", None) for n in range(100)]
    root = draw(one_device([*owned, *(Handle(f"{n}", "free", "", None) for n in range(300))]))
    assert (count_cells(root, "owned"), count_cells(root, "free")) == (1, 1)
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert "96 more owned handles" in texts
    assert "7 more hosts are not shown" in texts
    assert "more devices and handles than shown" in texts


def test_picture_distinguishes_cordoned_from_free() -> None:
    states = ["free", "free", "cordoned", "draining"]
    root = draw(one_device([Handle(f"{n}", s, "", None) for n, s in enumerate(states)]))
    uses = ("free", "cordoned", "draining", "owned")
    assert [count_cells(root, use) for use in uses] == [2, 1, 1, 0]


def test_picture_of_no_hosts_is_valid() -> None:
    assert draw(TopologyView([])).find(f"{SVG}desc").text == "no hosts"  # type: ignore[union-attr]


def test_write_picture_replaces_a_file_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.svg"
    write_picture(file, b"first")
    assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0o077 & ~_umask() & 0o066
    link = tmp_path / "link.svg"
    link.symlink_to(file)
    write_picture(link, b"second")
    assert link.is_symlink()
    assert file.read_bytes() == b"second"

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CommandError, match="No space left"):
        write_picture(file, b"third")
    assert file.read_bytes() == b"second"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.svg", "link.svg"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def special(kind: str, folder: Path) -> Path:
    """Return a path that cannot be replaced."""
    if kind == "fifo":
        os.mkfifo(folder / kind)
    return {"folder": folder, "device": Path("/dev/null")}.get(kind, folder / kind)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("folder", "is not a regular file"),
        ("device", "is not a regular file"),
        ("fifo", "is not a regular file"),
        ("absent/a.svg", "No such file or directory"),
    ],
)
def test_write_picture_refuses_what_it_cannot_replace(
    tmp_path: Path, kind: str, error: str
) -> None:
    path = special(kind, tmp_path)
    with pytest.raises(CommandError, match=error):
        write_picture(path, b"x")
