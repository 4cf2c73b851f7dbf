# SPDX-License-Identifier: Apache-2.0
"""The web console in Chromium, against a service of replayed hosts.

The pictures of the documentation are made here: see ``browser.SCREENSHOTS``.
"""

import re

import pytest

from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.functional.console.browser import (
    NARROW,
    WIDE,
    OpenWindow,
    expect,
    open_device_as,
    sign_in,
)
from cyborg.tests.functional.console.service import (
    AUDITOR,
    BROKEN_HOST,
    BROKEN_QAT,
    DRIVE,
    GPU,
    HOSTILE_NAME,
    LOST_HOST,
    QAT,
    ConsoleService,
)

pytestmark = [pytest.mark.slow, pytest.mark.requires("chromium")]


def test_console_on_standalone_shows_the_cloud_to_a_keyboard_and_a_screen_reader(
    window: OpenWindow,
) -> None:
    shown = window()
    shown.open("", "Overview")
    page = shown.page
    card = page.get_by_role("region", name="Capacity and use")
    expect(card.get_by_role("listitem").filter(has_text="VGPU")).to_contain_text(
        "3 of 16 in use, 13 free"
    )
    # One device is disabled, another one is unhealthy.
    expect(card.get_by_role("img", name="CUSTOM_CRYPTO")).to_have_accessible_name(
        "CUSTOM_CRYPTO: 2 draining or cordoned, 2 free"
    )
    expect(page.get_by_role("link", name="Hosts 4")).to_contain_text("3 up · 0 late · 1 down")
    alarms = page.get_by_role("region", name="Alarms")
    expect(alarms).to_contain_text(f"{BROKEN_HOST}: {BROKEN_QAT} is unhealthy")
    expect(alarms).to_contain_text(f"{LOST_HOST}: cyborg-agent is down")
    expect(page.get_by_role("region", name="Jobs under way")).to_contain_text(BROKEN_HOST)
    shown.check()
    shown.shoot("overview")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    # Nothing but this origin is contacted, and nothing is stored.
    assert {url.split("/")[2] for url in shown.requests} == {page.url.split("/")[2]}
    assert shown.read_storage() == ["", {}, {}]


PAGES = {
    "cloud": "Cloud",
    "hosts": "Hosts",
    "hosts/compute-1": "compute-1",
    "devices": "Devices",
    "devices?type=GPU&hostname=compute-1": "Devices",
    "requests": "Requests",
    "contexts": "Device contexts",
    "attachments": "Attachments",
    "profiles": "Device profiles",
    "profiles/CUSTOM_NVME": "CUSTOM_NVME",
    "drivers": "Drivers",
    "drivers/nvme": "Driver nvme",
    "jobs": "Jobs",
    "audits": "Audits",
    "no-such-page": "Page not found",
    "jobs/..": "Page not found",
    "drivers/..": "Page not found",
}
COLORS = "(({backgroundColor, color}) => [backgroundColor, color])(getComputedStyle(document.body))"
# Pages of one object, and the collections that have an object.
OBJECTS = {"contexts": "device_contexts", "attachments": "attachments", "jobs": "jobs"}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("width", "scheme"),
    [pytest.param(WIDE, "light", marks=pytest.mark.long), (NARROW, "dark")],
)
def test_each_page_is_accessible_and_fits(
    window: OpenWindow, service: ConsoleService, width: int, scheme: str
) -> None:
    shown = window(width=width, scheme=scheme)
    pages: dict[str, str | None] = dict(PAGES)
    for path, collection in OBJECTS.items():
        rows = service.cloud.call("GET", f"{collection}?limit=1")[collection]
        pages[f"{path}/{rows[0]['uuid']}"] = None
    for path, heading in pages.items():
        shown.open(path, heading)
        expect(shown.page.get_by_text("Loading…")).to_have_count(0)
        shown.check()
        title = shown.page.get_by_role("heading", level=1).inner_text()
        expect(shown.page).to_have_title(f"{title} · Cyborg")
        expect(shown.page.get_by_role("alert")).to_have_count(0)


@pytest.mark.matrix
def test_topology_shows_place_state_and_owner_of_each_device(window: OpenWindow) -> None:
    shown = window(height=1100)
    shown.open("hosts/compute-1", "compute-1")
    page = shown.page
    numa = page.get_by_role("group", name="NUMA node 0", exact=True)
    gpu = numa.get_by_role("link", name=f"GPU {GPU}")
    expect(gpu).to_have_accessible_name(re.compile("; 2 of 4 in use"))
    assert numa.get_by_text("PCIe root").count() > 1
    qat = re.compile(f"{QAT}.*: maintaining; 0 of 1 in use$")
    expect(page.get_by_role("link", name=qat)).to_be_visible()
    owners = page.get_by_role("region", name="Who holds what")
    expect(owners.get_by_role("row")).to_have_count(4)
    shown.shoot("topology")
    gpu.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1, name=GPU)).to_be_focused()
    log = page.get_by_role("list", name="Custody log")
    expect(log.get_by_role("listitem").filter(has_text="claimed")).to_have_count(2)
    log.get_by_role("link").first.click()
    expect(page.get_by_role("list", name="Time line of the request")).to_contain_text("claimed")
    shown.check()


@pytest.mark.matrix
def test_topology_shows_nothing_as_unused_that_it_cannot_read(window: OpenWindow) -> None:
    shown = window()
    shown.page.route("**/v2/accelerators?**", lambda route: route.abort())
    shown.open("hosts/compute-1", "compute-1")
    expect(shown.page.get_by_role("link", name="; handles unknown").first).to_be_visible()


@pytest.mark.matrix
def test_device_that_is_not_offered_shows_why(window: OpenWindow, service: ConsoleService) -> None:
    info = {"not_offered": "vda holds the root file system"}
    values = {**rows.DEVICE_VALUES, "vendor_board_info": info, "deliverable": False}
    device = rows.insert(
        service.cloud.engine, schema.devices, host=LOST_HOST, address="0000:00:02.0", **values
    )
    (row,) = rows.read(service.cloud.engine, schema.devices, id=device)
    shown = window()
    shown.open(f"hosts/{LOST_HOST}", LOST_HOST)
    link = shown.page.get_by_role("link", name="0000:00:02.0")
    expect(link).to_have_accessible_name(re.compile(": not offered; no handles$"))
    shown.check()
    shown.open(f"devices/{row['uuid']}", "0000:00:02.0")
    state = shown.page.get_by_role("region", name="State")
    expect(state).to_contain_text(f"It is not offered: {info['not_offered']}")
    expect(state).not_to_contain_text("can be allocated")
    shown.check()


@pytest.mark.matrix
def test_failing_card_shows_why(window: OpenWindow, service: ConsoleService) -> None:
    device = service.cloud.device(BROKEN_HOST, BROKEN_QAT)["uuid"]
    shown = window(height=1150)
    shown.open(f"devices/{device}", BROKEN_QAT)
    state = shown.page.get_by_role("region", name="State")
    expect(state).to_contain_text("Its driver measured a fault.")
    expect(state).to_contain_text("qat/state is down")
    expect(state).to_contain_text("Connection timed out")
    log = shown.page.get_by_role("list", name="Custody log")
    expect(log).to_contain_text("partition failed")
    shown.check()
    shown.shoot("failing-card")
    drive = service.cloud.device(BROKEN_HOST, DRIVE)["uuid"]
    shown.open(f"devices/{drive}", DRIVE)
    accelerators = shown.page.get_by_role("region", name="Accelerators")
    expect(accelerators).to_contain_text("could not be erased: Input/output error")
    expect(log).to_contain_text("cleaning failed")


@pytest.mark.matrix
def test_device_is_disabled_and_enabled_with_confirmation_and_announcement(
    window: OpenWindow, service: ConsoleService
) -> None:
    device = service.cloud.device("compute-2", QAT)["uuid"]
    shown = window()
    shown.open(f"devices/{device}", QAT)
    page = shown.page
    button = page.get_by_role("button", name="Disable")
    button.click()
    dialog = page.get_by_role("dialog", name=f"Disable {QAT}?")
    expect(dialog).to_be_visible()
    shown.check()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(button).to_be_focused()
    assert service.cloud.device("compute-2", QAT)["status"] == "enabled"
    button.click()
    dialog.get_by_role("button", name="Disable").click()
    announced = page.locator("#announcements")
    expect(announced).to_contain_text(f"Device {QAT}: maintaining")
    shown.press_and_confirm("Enable")
    expect(announced).to_contain_text(f"Device {QAT}: ready")
    assert service.cloud.device("compute-2", QAT)["status"] == "enabled"


@pytest.mark.matrix
def test_maintenance_window_is_begun_and_ended(window: OpenWindow, service: ConsoleService) -> None:
    device = service.cloud.device("compute-2", GPU)["uuid"]
    shown = window()
    shown.open(f"devices/{device}", GPU)
    page = shown.page
    page.get_by_role("button", name="Maintenance").click()
    page.get_by_label("Duration").select_option("8 hours")
    shown.check()
    page.get_by_role("dialog").get_by_role("button", name="Begin").click()
    expect(page.get_by_role("region", name="State")).to_contain_text("Maintenance began")
    shown.press_and_confirm("End maintenance")
    expect(page.get_by_role("region", name="State")).not_to_contain_text("Maintenance began")
    assert service.cloud.device("compute-2", GPU)["maintenance"] is None


@pytest.mark.matrix
def test_name_with_markup_is_shown_as_text(window: OpenWindow) -> None:
    shown = window()
    dialogs: list[str] = []
    shown.page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    shown.open("contexts", "Device contexts")
    expect(shown.page.get_by_text(HOSTILE_NAME)).to_be_visible()
    shown.page.get_by_role("table").get_by_role("link").first.click()
    expect(shown.page.get_by_role("heading", level=1)).to_have_text(HOSTILE_NAME)
    assert (dialogs, shown.errors) == ([], [])


@pytest.mark.matrix
def test_hidden_page_does_not_poll(window: OpenWindow) -> None:
    shown = window()
    page = shown.page
    page.clock.install()
    shown.open("", "Overview")
    page.get_by_role("region", name="Capacity and use").wait_for()
    hide = """hidden => {
        Object.defineProperty(document, "hidden", {get: () => hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    # An answer that arrives while the page is hidden does not show it as live.
    page.route("**/v2/**", lambda route: None)
    with page.expect_request("**/v2/**"):
        page.clock.fast_forward("00:30")
    page.evaluate(hide, True)
    with page.expect_response("**/v2/**"):
        page.unroute("**/v2/**")
    page.wait_for_timeout(300)
    before = len(shown.requests)
    page.clock.fast_forward("10:00")
    page.wait_for_timeout(300)
    assert len(shown.requests) == before
    expect(page.locator(".live")).to_have_text("Paused")
    with page.expect_request("**/v2/**"):
        page.evaluate(hide, False)
    expect(page.locator(".live")).to_have_text("Live")
    with page.expect_request("**/v2/**"):
        page.clock.fast_forward("00:30")


@pytest.mark.matrix
def test_audit_is_started_and_shows_its_findings(window: OpenWindow) -> None:
    shown = window()
    shown.open("audits", "Audits")
    page = shown.page
    page.get_by_role("button", name="Start an audit").click()
    page.get_by_label("Host, or empty for all hosts").fill("compute-1")
    page.get_by_role("dialog").get_by_role("button", name="Start").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Audit of compute-1")
    expect(page.get_by_role("region", name="Progress").get_by_text("done")).to_be_visible()
    expect(page.get_by_role("region", name="Findings")).not_to_contain_text("None so far")
    shown.check()


@pytest.mark.matrix
def test_pages_update_themselves_and_survive_an_api_that_is_away(
    window: OpenWindow, service: ConsoleService
) -> None:
    shown = window(width=NARROW, height=740)
    shown.open("", "Overview")
    page = shown.page
    live = page.locator(".live")
    expect(live).to_have_text("Live")
    card = page.get_by_role("region", name="Capacity and use")
    row = card.get_by_role("listitem").filter(has_text="CUSTOM_CRYPTO")
    expect(row).to_contain_text("0 of 4 in use")
    shown.shoot("narrow")
    page.route("**/v2/**", lambda route: route.abort())
    expect(live).to_have_text("Reconnecting")
    expect(page.get_by_text("The last values are shown.").first).to_be_visible()
    expect(row).to_contain_text("0 of 4 in use")
    page.unroute("**/v2/**")
    server = service.cloud.bind("compute-2", QAT, "CUSTOM_CRYPTO")
    try:
        expect(row).to_contain_text("1 of 4 in use")
        expect(live).to_have_text("Live")
    finally:
        service.cloud.release(server)
    assert shown.errors == []


@pytest.mark.matrix
def test_menu_of_a_narrow_window_opens_and_closes(window: OpenWindow) -> None:
    shown = window(width=NARROW, height=740)
    shown.open("", "Overview")
    page = shown.page
    navigation = page.get_by_role("navigation", name="Main")
    expect(navigation).to_have_count(0)
    menu = page.get_by_role("button", name="Menu")
    menu.focus()
    page.keyboard.press("Enter")
    assert menu.get_attribute("aria-expanded") == "true"
    shown.check()
    navigation.get_by_role("link", name="Drivers").click()
    expect(page.get_by_role("heading", level=1, name="Drivers")).to_be_focused()
    expect(navigation).to_have_count(0)


@pytest.mark.matrix
def test_theme_follows_the_system_and_the_switch(window: OpenWindow) -> None:
    shown = window(scheme="dark", height=1000)
    shown.open("hosts/compute-1", "compute-1")
    page, switch = shown.page, shown.page.get_by_label("Theme")
    expect(page.get_by_role("group", name="NUMA node 0", exact=True)).to_be_visible()
    shown.shoot("dark")
    light = ["rgb(244, 246, 247)", "rgb(23, 33, 43)"]
    dark = ["rgb(15, 21, 24)", "rgb(227, 234, 237)"]
    assert page.evaluate(COLORS) == dark
    page.emulate_media(color_scheme="light")
    assert page.evaluate(COLORS) == light
    switch.select_option("dark")
    assert page.evaluate(COLORS) == dark
    page.emulate_media(color_scheme="dark")
    switch.select_option("light")
    assert page.evaluate(COLORS) == light
    page.reload()
    assert page.evaluate(COLORS) == light
    assert shown.read_storage() == ["", {"cyborg-console-theme": "light"}, {}]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "user", ["admin", pytest.param("member", marks=pytest.mark.long), "reader"]
)
def test_user_of_keystone_sees_what_the_role_may_do(
    window: OpenWindow, service: ConsoleService, user: str
) -> None:
    shown = window(service.keystone_url)
    sign_in(shown, user)
    page = shown.page
    page.get_by_role("heading", level=1, name="Overview").wait_for()
    is_admin = user == "admin"
    names = page.get_by_role("navigation", name="Main").get_by_role("link").all_inner_texts()
    assert ("Hosts" in names, "Drivers" in names) == (is_admin, is_admin)
    assert {"Overview", "Requests", "Contexts", "Attachments", "Profiles"} <= set(names)
    expect(page.get_by_role("region", name="Project project-1")).to_contain_text("used")
    for region, visible in (("Capacity and use", is_admin), ("Latest requests", not is_admin)):
        expect(page.get_by_role("region", name=region)).to_have_count(int(visible))
    shown.check()
    page.get_by_role("link", name="Profiles").click()
    page.get_by_role("link", name="CUSTOM_NVME").click()
    expect(page.get_by_role("region", name="Reasons by group")).to_contain_text("fits")
    expect(page.get_by_role("region", name="Providers")).to_have_count(int(is_admin))
    shown.check()
    page.evaluate("location.hash = '#/devices'")
    heading = "Devices" if is_admin else "Page not found"
    expect(page.get_by_role("heading", level=1)).to_have_text(heading)
    # The token is in memory only, and gone after a reload.
    assert shown.read_storage() == ["", {}, {}]
    assert not [url for url in shown.requests if "token-" in url]
    page.reload()
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()


@pytest.mark.matrix
def test_user_whom_the_policy_lets_only_read_devices_has_no_buttons(
    window: OpenWindow, service: ConsoleService
) -> None:
    shown = window(service.keystone_url)
    open_device_as(shown, AUDITOR, GPU)
    page = shown.page
    expect(page.get_by_role("main").get_by_role("button")).to_have_count(0)
    expect(page.get_by_role("region", name="Life cycle and custody")).to_have_count(0)
    shown.check()


@pytest.mark.matrix
def test_sign_in_tells_why_it_failed_and_a_lost_token_signs_out(
    window: OpenWindow, service: ConsoleService
) -> None:
    shown = window(service.keystone_url)
    sign_in(shown, "reader", "wrong")
    page = shown.page
    expect(page.get_by_role("alert")).to_contain_text("does not accept")
    shown.check()
    page.get_by_role("button", name="Use a token instead").click()
    page.get_by_label("Token").fill("made-up")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not valid")
    token = service.keystone.issue_token(["reader"])
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", level=1, name="Overview")).to_be_visible()
    service.keystone.revoke_token(token)
    # The middleware of keystone may know the token from its cache; sign out by hand then.
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_text("You have signed out.")).to_be_visible()
    page.get_by_role("button", name="Use a token instead").click()
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    shown.check()
