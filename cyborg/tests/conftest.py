# SPDX-License-Identifier: Apache-2.0
"""What every test may use."""

import gc
from collections.abc import Iterator

import pytest

from cyborg.testing.fake_nova import FakeNova, serve_nova

pytest_plugins = [
    "cyborg.tests.fixtures.machine.folders",
    "cyborg.tests.fixtures.machine.guard",
    "cyborg.tests.fixtures.machine.prerequisites",
    "cyborg.tests.fixtures.machine.tiers",
    "cyborg.tests.fixtures.runs.record",
    "cyborg.tests.fixtures.runs.scheduler",
    "cyborg.tests.fixtures.runs.workers",
    "cyborg.tests.fixtures.databases.unclosed",
    "cyborg.tests.fixtures.databases.databases",
    "cyborg.tests.fixtures.databases.hanging_database",
    "cyborg.tests.fixtures.bus.broker",
    "cyborg.tests.fixtures.clouds.standalone",
    "cyborg.tests.fixtures.clouds.keystone_cloud",
]

# The default threshold runs the collector all the time: a tenth of the CPU time of the tests.
gc.set_threshold(100_000, 50, 50)


def pytest_collection_finish() -> None:
    """Exclude the modules and tests from garbage collection: they exist until the end."""
    gc.freeze()


@pytest.fixture
def fake_nova() -> Iterator[FakeNova]:
    """Serve a fake Nova on a loopback port."""
    with serve_nova(FakeNova()) as nova:
        yield nova
