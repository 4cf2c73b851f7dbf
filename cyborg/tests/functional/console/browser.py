# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium for the tests of the console, and what each page of it must satisfy."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyborg.tests.fixtures.machine.prerequisites import chromium_program
from cyborg.tests.functional.console.service import PASSWORD

# Playwright is imported late: without it, the tests are skipped with a reason.
if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SCREENSHOTS = "CYBORG_TEST_SCREENSHOTS"
WIDE, NARROW = 1280, 360  # pixels
TIMEOUT = 20_000  # milliseconds; a machine that also runs other tests is slow


@contextlib.contextmanager
def open_browser() -> Iterator["Browser"]:
    """Run Chromium until the end of the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_program(), args=list(OPTIONS), timeout=60_000
        )
        try:
            yield browser
        finally:
            browser.close()


def expect(subject: "Locator | Page") -> Any:
    """Return the assertions on a page or a part of it, which wait until they hold."""
    from playwright import sync_api

    sync_api.expect.set_options(timeout=TIMEOUT)
    return sync_api.expect(subject)


class Window:
    """A page of the console, which records everything that went wrong in it."""

    def __init__(self, context: "BrowserContext", url: str) -> None:
        self.page: Page = context.new_page()
        self.page.set_default_timeout(TIMEOUT)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._url = f"{url}/ui/"
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._record_message)
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _record_message(self, message: Any) -> None:
        # The browser logs an error for each response such as 401.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def open(self, path: str = "", heading: str | None = None) -> None:
        """Open a page of the console, and wait for its heading."""
        self.page.goto(f"{self._url}#/{path}")
        if heading is not None:
            self.page.get_by_role("heading", level=1, name=heading).wait_for()

    def press_and_confirm(self, button: str) -> None:
        """Press a button, and the button of the same name in the dialog that it opens."""
        self.page.get_by_role("button", name=button).click()
        self.page.get_by_role("dialog").get_by_role("button", name=button).click()

    def check(self) -> None:
        """Fail if the page violates a rule of accessibility, the policy, or its width."""
        from axe_playwright_python.sync_playwright import Axe

        violations = Axe().run(self.page).response["violations"]
        problems = [*self.errors, *map(_describe, violations)]
        if self.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            problems.append("the page is wider than the window")
        assert not problems, "\n".join(problems)

    def read_storage(self) -> Any:
        """Return everything that the page has stored in the browser: cookies and two storages."""
        return self.page.evaluate("[document.cookie, {...localStorage}, {...sessionStorage}]")

    def shoot(self, name: str) -> None:
        """Write a picture into the folder of the environment variable, if it is set."""
        folder = os.environ.get(SCREENSHOTS)
        if folder:
            # No hover and no focus ring of the last action.
            self.page.mouse.move(0, 0)
            self.page.screenshot(path=Path(folder, f"{name}.png"), animations="disabled")


def sign_in(window: Window, user: str, password: str = PASSWORD) -> None:
    """Sign in with a password."""
    window.open()
    page = window.page
    page.get_by_label("User", exact=True).fill(user)
    page.get_by_label("Password").fill(password)
    page.get_by_label("Project", exact=True).fill("project-1")
    page.get_by_role("button", name="Sign in").click()


def open_device_as(window: Window, user: str, address: str) -> None:
    """Sign in, and open the page of a device by its link in the list."""
    sign_in(window, user)
    page = window.page
    page.get_by_role("link", name="Devices").click()
    page.get_by_role("link", name=address).first.click()
    expect(page.get_by_role("region", name="Facts")).to_contain_text("compute-")


# A function that opens a window of the console, with a URL, a size and a colour scheme.
OpenWindow = Callable[..., Window]


def _describe(violation: Mapping[str, Any]) -> str:
    places = [node["html"][:200] for node in violation["nodes"]]
    return f"{violation['id']}: {violation['help']}: {places[:3]}"
