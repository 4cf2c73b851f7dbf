# SPDX-License-Identifier: Apache-2.0
"""Rollouts, jobs and device contexts in the web console, in Chromium."""

import functools

import pytest

from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.functional.console.browser import OpenWindow, expect
from cyborg.tests.functional.console.service import HOSTILE_NAME, ConsoleService

pytestmark = [pytest.mark.slow, pytest.mark.requires("chromium")]


@pytest.mark.matrix
def test_rollout_is_started_and_followed(window: OpenWindow) -> None:
    shown = window()
    shown.open("drivers/nvme", "Driver nvme")
    page = shown.page
    shown.press_and_confirm("Reload")
    rollouts = page.get_by_role("region", name="Rollouts")
    rollouts.get_by_role("link", name="update").click()
    steps = page.get_by_role("region", name="Steps")
    expect(steps).to_contain_text("compute-1")
    shown.shoot("rollout")
    shown.check()
    progress = page.get_by_role("region", name="Progress")
    expect(progress.get_by_text("2 of 2")).to_be_visible()
    expect(progress.get_by_text("done", exact=True).first).to_be_visible()
    expect(steps.get_by_role("cell", name="done")).to_have_count(2)
    state = steps.get_by_label("State")
    state.focus()
    state.select_option("failed")
    expect(steps).to_contain_text("None.")
    expect(state).to_be_focused()
    expect(page.locator("#announcements")).to_contain_text("Job update: done")
    page.reload()
    expect(page.locator("#announcements")).to_contain_text("Job update: done")


@pytest.mark.matrix
def test_driver_is_uninstalled_and_installed_on_one_host(
    window: OpenWindow, service: ConsoleService
) -> None:
    shown = window()
    shown.open("drivers/nic", "Driver nic")
    page = shown.page
    rollouts = page.get_by_role("region", name="Rollouts")

    def has_nics(count: int) -> bool:
        backends = [device["backend"] for device in service.cloud.devices("compute-2")]
        return backends.count("nic") == count

    assert has_nics(2)
    for change, kind, expected in (("Uninstall", "uninstall", 0), ("Install", "install", 2)):
        page.get_by_role("button", name=change, exact=True).click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Hosts, separated by spaces").fill("compute-2")
        shown.check()
        dialog.get_by_role("button", name=change).click()
        link = page.get_by_role("link", name=kind, exact=True)
        row = rollouts.get_by_role("row").filter(has=link)
        expect(row).to_contain_text("1 of 1")
        expect(row).to_contain_text("done")
        wait_until("the devices follow", functools.partial(has_nics, expected))


@pytest.mark.matrix
def test_steps_of_many_hosts_have_pages_and_keep_the_focus(
    window: OpenWindow, service: ConsoleService
) -> None:
    engine = service.cloud.engine
    job = rows.insert(
        engine, schema.jobs, kind="update", host="", subject="nvme", state="failed", arguments={}
    )
    for number in range(60):
        state = "failed" if number in (7, 55) else "done"
        values = {"host": f"node-{number:02}", "backend": "nvme", "state": state}
        rows.insert(engine, schema.job_steps, job_id=job, **values)
    (row,) = rows.read(engine, schema.jobs, id=job)
    shown = window()
    # In upper case: the service shows it in lower case.
    shown.open(f"jobs/{row['uuid'].upper()}", "Update nvme")
    page, steps = shown.page, shown.page.get_by_role("region", name="Steps")
    expect(steps).to_contain_text("60 steps")
    expect(steps.get_by_role("link")).to_have_count(50)
    following = steps.get_by_role("button", name="Next page")
    following.focus()
    page.keyboard.press("Enter")
    expect(steps.get_by_role("link", name="node-50")).to_be_visible()
    expect(steps.get_by_role("link")).to_have_count(10)
    expect(following).to_be_focused()
    shown.check()
    page.get_by_role("region", name="Progress").get_by_role("link", name="failed 2").click()
    expect(steps).to_contain_text("2 of 60 steps")
    expect(steps.get_by_role("link")).to_have_text(["node-07", "node-55"])
    shown.open(f"jobs/{row['uuid']}?step_state=late")
    expect(steps.get_by_role("link")).to_have_count(50)
    assert shown.errors == []


@pytest.mark.matrix
def test_context_shows_its_requests(window: OpenWindow, service: ConsoleService) -> None:
    (context,) = (
        each
        for each in service.cloud.call("GET", "device_contexts")["device_contexts"]
        if each["name"] == HOSTILE_NAME
    )
    body = {"device_profile_name": context["hidden_profile"]}
    (arq,) = service.cloud.call("POST", "accelerator_requests", json=body)["arqs"]
    shown = window()
    shown.open(f"contexts/{context['uuid']}", HOSTILE_NAME)
    shown.page.get_by_role("region", name="Requests").get_by_role("link").first.click()
    expect(shown.page.get_by_role("heading", level=1)).to_contain_text(arq["uuid"][:8])
    shown.check()
