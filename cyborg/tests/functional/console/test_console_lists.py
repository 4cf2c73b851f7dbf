# SPDX-License-Identifier: Apache-2.0
"""Lists, capacity, profiles and outages in the web console, and stored texts with markup."""

import csv
import io
import json
import re
from typing import Any

import pytest

from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.functional.console.browser import NARROW, OpenWindow, expect
from cyborg.tests.functional.console.service import (
    BROKEN_HOST,
    BROKEN_QAT,
    HOSTILE_NAME,
    LOST_HOST,
    ConsoleService,
)

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.requires("chromium")]

# The fields with texts that users, operators, drivers or other services wrote.
TEXTS = re.compile(
    r"name|description|error|model|vendor|serial|.*reason|remedy|tags|explanation|advice|object|"
    r"remarks|job_errors|hostname|host|backend|driver|version|layout|user_id|address|help|subject"
)
DICTS = ("topology", "config_data", "attach_handle_info", "details", "groups")
MAX_ROW = 120  # pixels of a device on a phone


def add_markup(value: Any, *, hostile: bool = False) -> Any:
    """Return a response of the API with markup in every stored text."""
    if isinstance(value, dict):
        found = {
            key: add_markup(item, hostile=key in DICTS or TEXTS.fullmatch(key) is not None)
            for key, item in value.items()
        }
        if "vendor_board_info" in found:
            found["vendor_board_info"] = json.dumps({"not_offered": HOSTILE_NAME})
        return found
    if isinstance(value, list):
        return [add_markup(item, hostile=hostile) for item in value]
    return f"{value}{HOSTILE_NAME}" if hostile and isinstance(value, str) else value


def test_markup_in_every_stored_text_is_shown_as_text(
    window: OpenWindow, service: ConsoleService
) -> None:
    shown = window()
    page = shown.page
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))

    def answer(route: Any) -> None:
        response = route.fetch()
        body = response.json() if response.ok else {}
        # The page needs the uuids of what it opens.
        route.fulfill(response=response, json=add_markup(body))

    page.route("**/v2/**", answer)
    lists = ("hosts", "devices", "contexts", "attachments", "profiles", "drivers", "jobs", "audits")
    device = service.cloud.device(BROKEN_HOST, BROKEN_QAT)["uuid"]
    paths = ["", "cloud", "requests", *lists, f"devices/{device}", f"hosts/{BROKEN_HOST}"]
    paths += ["drivers/nvme", "profiles/for-host"]
    collections = {
        "contexts": ("device_contexts", "device_contexts"),
        "attachments": ("attachments", "attachments"),
        "jobs": ("jobs", "jobs"),
        "requests": ("accelerator_requests", "arqs"),
    }
    for path, (collection, key) in collections.items():
        found = service.cloud.call("GET", f"{collection}?limit=1")[key]
        paths.append(f"{path}/{found[0]['uuid']}")
    for path in paths:
        shown.open(path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.get_by_text("Loading…")).to_have_count(0)
        if path not in ("audits", ""):
            expect(page.get_by_text("alert(1)").first).to_be_attached()
        assert page.locator("img[src=x]").count() == 0, path
        assert "This page failed" not in page.inner_text("main"), path
    assert (dialogs, shown.errors) == ([], [])


def test_list_is_counted_filtered_in_the_address_and_exported(
    window: OpenWindow, service: ConsoleService
) -> None:
    shown = window()
    page = shown.page
    shown.open("devices?hostname=compute-1&deliverable=true", "Devices")
    assert page.get_by_label("Host").input_value() == "compute-1"
    everything = page.locator(".list-head .count")
    expect(everything).to_have_text(re.compile(r"^\d+ devices$"))
    page.get_by_label("Backend").fill("nvme")
    page.get_by_role("button", name="Filter").click()
    expect(page).to_have_url(re.compile("hostname=compute-1.*deliverable=true.*backend=nvme"))
    query = "hostname=compute-1&deliverable=true&backend=nvme"
    number = len(service.cloud.call("GET", f"devices?{query}")["devices"])
    expect(everything).to_have_text(re.compile(rf"^{number} devices?$"))
    found = {}
    for name in ("CSV", "JSON"):
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        found[name] = download.value.path().read_text()
        assert download.value.suggested_filename == f"devices.{name.lower()}"
    exported = json.loads(found["JSON"])
    assert [row["backend"] for row in exported] == ["nvme"] * number
    lines = list(csv.DictReader(io.StringIO(found["CSV"])))
    assert [line["uuid"] for line in lines] == [row["uuid"] for row in exported]
    shown.check()


def test_exported_text_is_no_formula_of_a_spreadsheet(
    window: OpenWindow, service: ConsoleService
) -> None:
    formula = '=cmd|" /C calc"!A0'
    context = {"resources": {"VGPU": 1}, "name": formula}
    service.cloud.call("POST", "device_contexts", json=context)
    shown = window()
    shown.open("contexts", "Device contexts")
    with shown.page.expect_download() as download:
        shown.page.get_by_role("button", name="CSV").click()
    text = download.value.path().read_bytes().decode()
    names = [row["name"] for row in csv.DictReader(io.StringIO(text, newline=""))]
    assert f"'{formula}" in names


def test_host_that_is_down_shows_nothing_as_ready(
    window: OpenWindow, service: ConsoleService
) -> None:
    (agent,) = rows.read(service.cloud.engine, schema.services, host=LOST_HOST)
    rows.insert(
        service.cloud.engine,
        schema.backends,
        service_id=agent["id"],
        name="lost",
        driver="nvme",
        status="READY",
    )
    shown = window()
    page = shown.page
    shown.open("hosts?state=down", "Hosts")
    row = page.get_by_role("row").filter(has_text=LOST_HOST)
    expect(row).to_contain_text("unknown")
    expect(row).not_to_contain_text("ready")
    shown.open(f"hosts/{LOST_HOST}", LOST_HOST)
    for card in ("Agent", "Backends"):
        region = page.get_by_role("region", name=card, exact=True)
        expect(region).to_contain_text("unknown")
        expect(region).not_to_contain_text("ready")
    shown.check()


def test_cloud_page_shows_use_and_fragmented_capacity(window: OpenWindow) -> None:
    shown = window()
    shown.open("cloud", "Cloud")
    capacity = shown.page.get_by_role("region", name="Capacity", exact=True)
    # Two of four and one of four vGPUs of two devices are in use, ten of a third one are free.
    row = capacity.get_by_role("row").filter(has_text="VGPU")
    expect(row.get_by_role("cell")).to_have_text([*["VGPU", ""], *["16", "3", "13", "5", "4", "2"]])
    cell = shown.page.get_by_role("group", name="Use of each class on each host")
    expect(cell.get_by_role("row").filter(has_text="compute-1")).to_contain_text("2/8")
    shown.check()


def test_undeliverable_devices_are_an_alarm_and_a_use_of_their_own(
    window: OpenWindow, service: ConsoleService
) -> None:
    undeliverable: dict[str, Any] = {"deliverable": False, "undeliverable_reason": "no IOMMU"}
    rows.insert_card(
        service.cloud.engine,
        "compute-1",
        "0000:99:00.0",
        resource_class="CUSTOM_X",
        **undeliverable,
    )
    shown = window()
    page = shown.page
    shown.open("", "Overview")
    card = page.get_by_role("region", name="Capacity and use")
    bar = card.get_by_role("img", name="CUSTOM_X")
    expect(bar).to_have_accessible_name("CUSTOM_X: 16 undeliverable")
    alarms = page.get_by_role("region", name="Alarms")
    alarms.get_by_role("link", name="1 device cannot be attached to an instance").click()
    expect(page.locator(".list-head .count")).to_have_text("1 device")
    expect(page.get_by_role("table")).to_contain_text("0000:99:00.0")


def test_device_takes_few_lines_on_a_phone(window: OpenWindow) -> None:
    shown = window(width=NARROW)
    shown.open("devices", "Devices")
    shown.page.get_by_role("table").wait_for()
    heights = shown.page.evaluate(
        "[...document.querySelectorAll('tbody tr')].map(r => r.offsetHeight)"
    )
    assert heights
    assert max(heights) <= MAX_ROW


def test_profile_is_created_shown_whole_and_deleted(window: OpenWindow) -> None:
    shown = window()
    page = shown.page
    shown.open("profiles", "Device profiles")
    page.get_by_role("button", name="Create a profile").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("two-groups")
    groups = dialog.get_by_label("Groups")
    groups.fill("resources:VGPU")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog.get_by_role("alert")).to_contain_text('has no "="')
    groups.fill("resources:VGPU=1\ntrait:CUSTOM_A=required\n\nresources:CUSTOM_NVME=2")
    shown.check()
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("two-groups")
    profile = page.get_by_role("region", name="Profile", exact=True)
    expect(profile.get_by_label("Keys of group 0")).to_contain_text("trait:CUSTOM_A")
    expect(profile.get_by_label("Keys of group 1")).to_contain_text("resources:CUSTOM_NVME")
    shown.check()
    shown.press_and_confirm("Delete")
    expect(page.get_by_role("heading", level=1)).to_have_text("Device profiles")
    expect(page.get_by_role("table")).not_to_contain_text("two-groups")


@pytest.mark.parametrize(
    ("health", "text"),
    [
        ({"database": "unavailable", "conductor": "ok", "reason": "no route"}, "The database"),
        ({"database": "ok", "conductor": "unavailable", "reason": ""}, "No conductor answers"),
        (None, "does not answer its health check"),
    ],
)
def test_outage_names_the_component(
    window: OpenWindow, health: dict[str, str] | None, text: str
) -> None:
    shown = window()
    page = shown.page
    shown.open("", "Overview")
    page.route("**/v2/**", lambda route: route.fulfill(status=503, body="{}"))
    if health is None:
        page.route("**/healthcheck", lambda route: route.abort())
    else:
        status = 503 if health["database"] == "unavailable" else 200
        page.route("**/healthcheck", lambda route: route.fulfill(status=status, json=health))
    expect(page.get_by_role("status").filter(has_text="Outage.")).to_contain_text(text)
    shown.check()
    page.unroute("**/v2/**")
    expect(page.get_by_text("Outage.")).to_have_count(0)
