# SPDX-License-Identifier: Apache-2.0
"""The service, the browser and the windows of the tests of the web console."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cyborg.db.totals import cache as count_cache
from cyborg.tests.functional.console.browser import WIDE, OpenWindow, Window, open_browser
from cyborg.tests.functional.console.service import ConsoleService, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleService]:
    """Yield the service for the tests of this module, which counts at each request.

    Counts are used for a hundred times the seconds that counting took: on a machine that also runs
    other tests, a page would show a change after the time-out of a test.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count_cache, "SHARE", 0)
        with serve(tmp_path_factory.mktemp("console")) as running:
            yield running


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """Yield the browser for the tests of this module."""
    with open_browser() as running:
        yield running


@pytest.fixture
def window(browser: "Browser", service: ConsoleService) -> Iterator[OpenWindow]:
    """Yield a function that opens a window of the console."""
    contexts = []

    def open_window(
        url: str | None = None, width: int = WIDE, height: int = 800, scheme: str = "light"
    ) -> Window:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        contexts.append(context)
        return Window(context, url or service.url)

    yield open_window
    for context in contexts:
        context.close()
