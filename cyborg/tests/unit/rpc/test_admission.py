# SPDX-License-Identifier: Apache-2.0
"""Concurrent reports: a limited number is recorded, the others are refused unparsed."""

import threading
from typing import Any

import pytest

from cyborg.core.errors import Unavailable
from cyborg.rpc.server import ReportAdmission
from cyborg.tests.fixtures.bus.broker import open_bus

MEMORY = "kombu+memory:////"


def test_admission_limits_reports_per_host_and_in_total() -> None:
    admission = ReportAdmission(2)
    first, second, third = ({"host": name} for name in ("one", "two", "three"))
    with admission.admitted(first):
        with pytest.raises(Unavailable, match="host 'one'"), admission.admitted(first):
            pass
        too_many = pytest.raises(Unavailable, match="2 reports")
        with admission.admitted(second), too_many, admission.admitted(third):
            pass
        with admission.admitted(third):
            pass
    with pytest.raises(ZeroDivisionError), admission.admitted(first):
        raise ZeroDivisionError
    with admission.admitted(first):
        pass


@pytest.mark.parametrize("report", [None, [], {}, {"host": 1}, {"host": ["x"]}, "x"])
def test_admission_of_malformed_reports_succeeds(report: Any) -> None:
    with ReportAdmission(1).admitted(report):
        pass


class Recorder:
    """Stub of a conductor, whose reports wait until ``proceed`` is set."""

    def __init__(self) -> None:
        self.started, self.proceed = threading.Semaphore(0), threading.Event()
        self.hosts: list[str] = []

    def report(self, ctxt: Any, report: dict[str, Any]) -> dict[str, Any]:
        self.hosts.append(report["host"])
        self.started.release()
        assert self.proceed.wait(120)
        return {"accepted": True}

    def __getattr__(self, name: str) -> Any:
        return lambda ctxt, **arguments: {}


@pytest.mark.slow
def test_report_over_the_limit_is_refused_and_accepted_later() -> None:
    recorder, answers = Recorder(), []
    opened = open_bus(MEMORY, conductor={"max_concurrent_reports": 2})
    with opened as bus, bus.serving("conductor", recorder):
        client = bus.conductor()

        def send(host: str) -> None:
            answers.append(client.report({"host": host}))

        threads = [threading.Thread(target=send, args=(f"h{n}",)) for n in range(2)]
        for thread in threads:
            thread.start()
        assert all(recorder.started.acquire(timeout=30) for _ in threads)
        for host in ("h0", "h2"):
            with pytest.raises(Unavailable, match="being recorded"):
                client.report({"host": host})
        # Other calls do not wait for reports.
        assert client.hello("h0", "e", None, "READY", [], None, None) == {}
        recorder.proceed.set()
        for thread in threads:
            thread.join(120)
        send("h2")
    assert answers == [{"accepted": True}] * 3
    assert sorted(recorder.hosts) == ["h0", "h1", "h2"]
