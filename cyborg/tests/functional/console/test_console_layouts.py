# SPDX-License-Identifier: Apache-2.0
"""Layouts of devices in the web console: what a change gives and takes, and its job."""

import pytest

from cyborg.tests.functional.console.browser import (
    NARROW,
    WIDE,
    OpenWindow,
    Window,
    expect,
    open_device_as,
)
from cyborg.tests.functional.console.service import (
    AUDITOR,
    BROKEN_HOST,
    BROKEN_QAT,
    ConsoleService,
)

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.requires("chromium")]

HOST, NIC, OTHER_NIC = "compute-2", "0000:c1:00.0", "0000:e1:00.0"
CHANGE = "Change layout"


def open_device(shown: Window, service: ConsoleService, host: str, address: str) -> str:
    """Open the page of a device; return its uuid."""
    uuid = service.cloud.device(host, address)["uuid"]
    shown.open(f"devices/{uuid}", address)
    return str(uuid)


def choose(shown: Window, layout: str) -> None:
    """Open the dialog of the layout, and choose one."""
    shown.page.get_by_role("button", name=CHANGE).click()
    shown.page.get_by_role("dialog").get_by_label("Layout").select_option(layout)


def confirm(shown: Window) -> None:
    """Press the button of the dialog that changes the layout."""
    shown.page.get_by_role("dialog").get_by_role("button", name=CHANGE).click()


def test_layout_is_changed_after_what_is_lost_and_gained_is_shown(
    window: OpenWindow, service: ConsoleService
) -> None:
    shown = window()
    page = shown.page
    uuid = open_device(shown, service, HOST, NIC)
    card = page.get_by_role("region", name="Layouts", exact=True)
    rows = card.get_by_role("row")
    expect(rows.nth(1)).to_have_text("vfs-4CUSTOM_NIC 4CUSTOM_SRIOV_VFS_4current")
    choose(shown, "vfs-4")
    dialog = page.get_by_role("dialog", name=f"Change the layout of {NIC}")
    expect(dialog).to_contain_text("would offer the same as now")
    dialog.get_by_label("Layout").select_option("vfs-2")
    cells = dialog.get_by_role("cell")
    expect(cells).to_have_text(["CUSTOM_NIC", "4", "2", "\N{MINUS SIGN}2"])
    expect(dialog).to_contain_text("Traits lostCUSTOM_SRIOV_VFS_4")
    expect(dialog).to_contain_text("Traits gainedCUSTOM_SRIOV_VFS_2")
    shown.check()
    shown.shoot("layout")
    page.keyboard.press("Escape")
    assert service.cloud.device(HOST, NIC)["desired_layout"] is None
    choose(shown, "vfs-2")
    confirm(shown)
    expect(page.get_by_role("heading", level=1)).to_have_text("Partition")
    progress = page.get_by_role("region", name="Progress")
    expect(progress).to_contain_text("done")
    expect(page.locator("#announcements")).to_contain_text("Job partition: done")
    shown.check()
    progress.get_by_role("link", name=uuid[:12]).click()
    expect(rows.filter(has_text="vfs-2")).to_contain_text("current")
    assert service.cloud.device(HOST, NIC)["layout"] == "vfs-2"


def test_device_in_use_is_refused_or_drained(window: OpenWindow, service: ConsoleService) -> None:
    server = service.cloud.bind(HOST, OTHER_NIC, "CUSTOM_NIC")
    shown = window()
    page = shown.page
    open_device(shown, service, HOST, OTHER_NIC)
    choose(shown, "vfs-2")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("in use: 1 handle is owned, 0 are being cleaned")
    confirm(shown)
    expect(dialog.get_by_role("alert")).to_contain_text("is in use by 1 request(s)")
    dialog.get_by_label("Cordon the device").check()
    shown.check()
    confirm(shown)
    progress = page.get_by_role("region", name="Progress")
    expect(progress).to_contain_text(server.arq)
    shown.press_and_confirm("Cancel the job")
    expect(progress).to_contain_text("cancelled by an operator")
    assert service.cloud.device(HOST, OTHER_NIC)["layout"] == "vfs-4"
    service.cloud.release(server)


def test_failed_change_shows_its_error(window: OpenWindow, service: ConsoleService) -> None:
    shown = window()
    page = shown.page
    open_device(shown, service, BROKEN_HOST, BROKEN_QAT)
    state = page.get_by_role("region", name="State")
    expect(state).to_contain_text("Connection timed out")
    choose(shown, "sym")
    confirm(shown)
    progress = page.get_by_role("region", name="Progress")
    expect(progress).to_contain_text("failed")
    expect(progress).to_contain_text("Connection timed out")


@pytest.mark.parametrize(
    ("width", "scheme"),
    [pytest.param(WIDE, "dark", marks=pytest.mark.long), (NARROW, "light")],
)
def test_dialog_is_accessible_and_fits(
    window: OpenWindow, service: ConsoleService, width: int, scheme: str
) -> None:
    shown = window(width=width, scheme=scheme)
    open_device(shown, service, "compute-1", NIC)
    choose(shown, "vfs-2")
    expect(shown.page.get_by_role("dialog")).to_contain_text("CUSTOM_SRIOV_VFS_2")
    shown.check()


def test_user_whom_the_policy_lets_only_read_devices_sees_no_layouts(
    window: OpenWindow, service: ConsoleService
) -> None:
    shown = window(service.keystone_url)
    open_device_as(shown, AUDITOR, NIC)
    page = shown.page
    expect(page.get_by_role("button", name=CHANGE)).to_have_count(0)
    expect(page.get_by_role("region", name="Layouts")).to_have_count(0)
