# SPDX-License-Identifier: Apache-2.0
"""The stop of the stand-alone service has a timeout."""

import threading
from pathlib import Path

import pytest

from cyborg.standalone import stack
from cyborg.standalone.stack import StandaloneStack
from cyborg.tests.fixtures.machine.options import make_conf


def test_stop_with_hanging_component_returns_after_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stack, "STOP_TIMEOUT", 0.2)
    gate, finished = threading.Event(), threading.Event()
    service = StandaloneStack(make_conf(), tmp_path)
    service._undo.callback(finished.set)
    service._undo.callback(gate.wait, 60)
    service.stop()
    assert not finished.is_set(), "the component is not waited for"
    assert "Timed out stopping the stand-alone service after 0.2 s" in caplog.text
    gate.set()
    assert finished.wait(120), "the rest is stopped then"
