# SPDX-License-Identifier: Apache-2.0
"""Devices that the agent attaches to guests, in the web console: since when, or why not."""

from datetime import datetime
from typing import Any

import pytest
from oslo_utils import timeutils

from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.functional.console.browser import NARROW, WIDE, OpenWindow, expect
from cyborg.tests.functional.console.service import ConsoleService

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.requires("chromium")]

HOST, INSTANCE = "compute-4", "0d6b2c57-3f4e-4c55-8a39-7c1e1f0f8f11"
ERROR = "cannot attach 0000:1b:00.4: No more available PCI slots"
NOTHING = "\N{EN DASH}"


@pytest.fixture(scope="module")
def arqs(service: ConsoleService) -> dict[str, str]:
    """Return three requests for vGPUs of a server, and one whose device Nova attaches."""
    engine = service.cloud.engine
    rows.insert_agent(engine, HOST)
    rows.insert_card(engine, HOST, "0000:1b:00.0", handles=4, resource_class="VGPU")
    profile = rows.insert_profile(engine, "vgpus", [{"resources:VGPU": "4"}])
    facts: dict[str, dict[str, Any]] = {
        "attached": {"attached_at": timeutils.utcnow()},
        "missing": {"attach_error": ERROR, "attach_failed_at": timeutils.utcnow()},
        "waiting": {},
        "nova": {},
    }
    found = {}
    (part,) = rows.read(engine, schema.deployables, host=HOST)
    handles = rows.read(engine, schema.attach_handles, deployable_id=part["id"])
    for slot, (handle, (name, values)) in enumerate(zip(handles, facts.items(), strict=True)):
        values |= {"state": "Bound", "hostname": HOST, "instance_uuid": INSTANCE}
        found[name] = rows.insert_arq(engine, profile, instance_slot=slot, **values)
        (arq,) = rows.read(engine, schema.arqs, uuid=found[name])
        type_ = "PCI" if name == "nova" else "VFIO"
        rows.update(engine, schema.attach_handles, handle["id"], arq_id=arq["id"], type=type_)
    return found


# What the column says of each request.
TEXTS = {
    "attached": "attached",
    "missing": ERROR,
    "waiting": "at the next start",
    "nova": NOTHING,
}


def test_host_page_and_list_show_which_guest_lacks_its_device(
    window: OpenWindow, arqs: dict[str, str]
) -> None:
    shown = window()
    page = shown.page
    for path, heading, region in (
        (f"hosts/{HOST}", HOST, page.get_by_role("region", name="Who holds what")),
        (f"requests?instance={INSTANCE}", "Requests", page),
    ):
        shown.open(path, heading)
        header = region.get_by_role("columnheader")
        expect(header.filter(has_text="In guest")).to_be_visible()
        column = header.all_inner_texts().index("In guest")
        for name, text in TEXTS.items():
            row = region.get_by_role("row").filter(
                has=page.locator(f'a[href="#/requests/{arqs[name]}"]')
            )
            expect(row.get_by_role("cell").nth(column)).to_contain_text(text)
        shown.check()


def test_overview_has_an_alarm_that_leads_to_the_requests(
    window: OpenWindow, arqs: dict[str, str]
) -> None:
    shown = window()
    page = shown.page
    shown.open("", "Overview")
    alarms = page.get_by_role("region", name="Alarms")
    alarms.get_by_role("link", name="1 device missing in a running guest").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Requests")
    expect(page.get_by_label("Missing in guest")).to_have_value("true")
    listed = page.get_by_role("table", name="Accelerator requests").get_by_role("row")
    expect(listed).to_have_count(2)  # with the header
    expect(listed.nth(1)).to_contain_text(ERROR)
    expect(listed.nth(1).locator(f'a[href="#/requests/{arqs["missing"]}"]')).to_have_count(1)
    shown.check()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [pytest.param(WIDE, "dark", marks=pytest.mark.long), (NARROW, "light")],
)
def test_request_page_shows_the_guest(
    window: OpenWindow, arqs: dict[str, str], width: int, scheme: str
) -> None:
    shown = window(width=width, scheme=scheme)
    page = shown.page
    note = page.get_by_text("The running guest lacks the device")
    for name, uuid in arqs.items():
        shown.open(f"requests/{uuid}", f"Request {uuid[:8]}")
        fact = page.locator("dl.facts > div", has=page.get_by_text("In guest", exact=True))
        expect(fact).to_contain_text(TEXTS[name])
        expect(note).to_have_count(1 if name == "missing" else 0)
        line = page.get_by_role("list", name="Time line of the request")
        attached = line.get_by_role("listitem").filter(has_text="attached to the guest")
        expect(attached).to_have_count(1 if name == "attached" else 0)
        shown.check()


def test_attachment_page_has_the_requests_of_the_attachment(
    window: OpenWindow, service: ConsoleService, arqs: dict[str, str]
) -> None:
    engine = service.cloud.engine
    (arq,) = rows.read(engine, schema.arqs, uuid=arqs["missing"])
    now: datetime = timeutils.utcnow()
    uuid = "5f5e3c3e-0f5d-4b06-9a1a-0a6d0d2f1b77"
    attachment = rows.insert(
        engine,
        schema.attachments,
        uuid=uuid,
        project_id="project-1",
        instance_uuid=INSTANCE,
        hostname=HOST,
        device_profile_name="vgpus",
        mode="live",
        reboot=False,
        state="attached",
        deadline=now,
        created_at=now,
    )
    rows.update(engine, schema.arqs, arq["id"], attachment_id=attachment)
    shown = window()
    shown.open(f"attachments/{uuid}", f"Attachment {uuid[:8]}")
    card = shown.page.get_by_role("region", name="Requests", exact=True)
    # A header, and one request of four of the server.
    expect(card.get_by_role("row")).to_have_count(2)
    expect(card).to_contain_text(ERROR)
    shown.check()
