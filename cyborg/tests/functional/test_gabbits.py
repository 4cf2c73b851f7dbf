# SPDX-License-Identifier: Apache-2.0
"""The REST contract, as gabbi scripts that run on the whole service with a real Placement."""

import unittest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from gabbi import handlers, suitemaker

from cyborg.tests.fixtures.machine.tiers import sample

SCRIPTS = Path(__file__).parent / "gabbits"


NAMES = sorted(path.stem for path in SCRIPTS.glob("*.yaml"))
# Scripts that wait for work of the agent, which tests of the API and of rollouts prove too.
SLOW = {"drivers", "explanations"}


@pytest.mark.parametrize("name", sample(NAMES, *(name for name in NAMES if name not in SLOW)))
def test_gabbi_file_passes(
    standalone_stack: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    devices = standalone_stack.placement.get("/resource_providers?name=compute-1_0000:0c:00.0")
    (provider,) = devices.json()["resource_providers"]
    monkeypatch.setenv("PROVIDER", provider["uuid"])
    script = yaml.safe_load((SCRIPTS / f"{name}.yaml").read_text())
    # Each test of a script has a client, which would read all authorities of the system first.
    script.setdefault("defaults", {})["cert_validate"] = False
    location = urlsplit(standalone_stack.endpoint)
    suite = suitemaker.test_suite_from_dict(
        unittest.defaultTestLoader,
        name,
        script,
        str(SCRIPTS),
        location.hostname,
        location.port,
        None,
        None,
        handlers=[handler() for handler in handlers.RESPONSE_HANDLERS],
    )
    # Gabbi gives each test a client of its own and leaves its connection open.
    clients = [case.http.client for case in suite]
    result = unittest.TestResult()
    suite.run(result)
    for client in clients:
        client.close()
    wrong = [f"{case}\n{text}" for case, text in [*result.failures, *result.errors]]
    assert not wrong, "\n".join(wrong)
    assert result.testsRun == len(script["tests"])
    assert not result.skipped
