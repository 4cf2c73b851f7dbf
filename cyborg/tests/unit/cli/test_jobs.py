# SPDX-License-Identifier: Apache-2.0
"""Commands that have something done by a job: what they send, show and end with."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from webob import Request, Response

from cyborg.cli import app, jobs, waiting
from cyborg.tests.unit.cli.test_rest import serving
from cyborg.tests.unit.cli.test_waiting import Clock

JOB = "a0000000-0000-4000-8000-00000000000a"
BEGUN = {"uuid": JOB, "kind": "update", "state": "pending", "links": []}


def job(state: str, *steps: tuple[str, str, str | None], error: str | None = None) -> Any:
    """Return a job as the service shows it; a step is host, state, error."""
    return {
        **BEGUN,
        **{"state": state, "subject": "generic", "host": None, "error": error, "attempts": 1},
        **{"progress": {}, "created_at": None, "updated_at": None},
        "steps": [
            {"host": host, "backend": "gen0", "state": step, "error": why}
            for host, step, why in steps
        ],
    }


class Service:
    """Begins a job at whatever is asked, then shows it: one state after another."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.asked: list[tuple[str, str, Any]] = []

    def __call__(self, request: Request) -> Response:
        if request.method == "GET":
            shown = self.states.pop(0)
            if isinstance(shown, int):
                return Response(json={"error_message": "away"}, status=shown)
            return Response(json=shown)
        body = request.json if request.body else None
        self.asked.append((request.method, request.path_qs.removeprefix("/v2"), body))
        return Response(json=BEGUN, status=202)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(waiting, "time", Clock())
    return Service()


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def cyborg(service: Service, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    with serving(service) as url:

        def run(*words: str, code: int = 0) -> tuple[str, str]:
            status = app.main(["--os-auth-type", "none", "--os-endpoint", url, *words])
            shown = capsys.readouterr()
            assert status == code, shown
            assert "Traceback" not in shown.err
            return shown.out, shown.err

        yield run


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("install-driver generic", ("POST", "/drivers", {"driver": "generic"})),
        (
            "install-driver g --host a --host b --backend x --config r=1 --config n=2 --config r=3",
            (
                "POST",
                "/drivers",
                {
                    **{"driver": "g", "hosts": ["a", "b"], "backend": "x"},
                    "config": {"r": ["1", "3"], "n": "2"},
                },
            ),
        ),
        ("uninstall-driver g", ("DELETE", "/drivers/g", None)),
        (
            "uninstall-driver g --host a&b --host c --backend x --drain --force",
            ("DELETE", "/drivers/g?host=a%26b&host=c&backend=x&drain=true&force=true", None),
        ),
        ("update-driver g --reload", ("PATCH", "/drivers/g", {"reload": True})),
        (
            "update-driver g --config n=1 --disable --host a --backend x",
            (
                "PATCH",
                "/drivers/g",
                {"config": {"n": "1"}, "status": "disabled", "hosts": ["a"], "backend": "x"},
            ),
        ),
        (
            "update-driver g --unset a --config n=1 --unset b",
            ("PATCH", "/drivers/g", {"config": {"n": "1", "a": None, "b": None}}),
        ),
        ("update-driver g --enable", ("PATCH", "/drivers/g", {"status": "enabled"})),
        (
            "hardware-adopt a 0000:01:00.0 --backend x",
            ("POST", "/hardware", {"host": "a", "address": "0000:01:00.0", "backend": "x"}),
        ),
        (f"hardware-release {JOB}", ("DELETE", f"/hardware/{JOB}", None)),
    ],
)
def test_what_is_sent_and_the_job_is_named(
    service: Service, cyborg: Run, line: str, asked: tuple[str, str, Any]
) -> None:
    out, _ = cyborg(*line.split(), "-f", "json")
    assert json.loads(out) == {"UUID": JOB, "Kind": "update", "State": "pending"}
    assert JOB in cyborg(*line.split())[0]
    assert service.asked == [asked] * 2


def test_jobs_are_cancelled_one_after_another(service: Service, cyborg: Run) -> None:
    assert cyborg("job-cancel", JOB, "b") == ("", "")
    assert service.asked == [("DELETE", f"/jobs/{JOB}", None), ("DELETE", "/jobs/b", None)]


def test_an_option_is_set_or_unset(service: Service, cyborg: Run) -> None:
    _, err = cyborg("update-driver", "g", "--config", "n=1", "--unset", "n", code=1)
    assert "n: --config or --unset, not both" in err
    assert service.asked == []


def test_waiting_tells_each_host_and_survives_a_silence(service: Service, cyborg: Run) -> None:
    service.states = [
        job("pending", ("a", "rolling", None), ("b", "waiting", None)),
        503,
        504,
        job("pending", ("a", "done", None), ("b", "rolling", None)),
        job("done", ("a", "done", None), ("b", "away", None)),
    ]
    out, err = cyborg("update-driver", "g", "--reload", "--wait", "-f", "json")
    shown = json.loads(out)
    assert (shown["State"], [s["state"] for s in shown["Steps"]]) == ("done", ["done", "away"])
    told = ("a (gen0) rolling", "a (gen0) done", "b (gen0) rolling", "b (gen0) away")
    assert [err.count(line) for line in told] == [1] * 4
    assert "waiting" not in err
    assert "1 backends come to it when their agents return" in err


def test_a_job_that_fails_says_where_and_why(service: Service, cyborg: Run) -> None:
    service.states = [
        job(
            "failed",
            *(("a", "done", None), ("b", "rolled_back", "no /sys\nat all"), ("c", "failed", None)),
            *(("d", "untouched", None), ("e", "untouched", None)),
            error="1 done, 2 went wrong",
        )
    ]
    out, err = cyborg("update-driver", "g", "--reload", "--wait", code=1)
    assert "b (gen0) rolled_back: no /sys" in out
    assert (
        f"job {JOB} (update generic) failed: "
        "b (gen0) rolled_back: no /sys at all; c (gen0) failed; 2 untouched\n" in err
    )


def test_a_message_names_only_so_many_hosts() -> None:
    told = jobs.trouble(job("failed", *((f"h{n}", "failed", "no") for n in range(1000))))
    assert "h19 (gen0) failed: no; 980 more" in told
    assert len(told) < 1000
    assert jobs.trouble(job("cancelled")).endswith("cancelled: unsaid")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("update-driver g", 1, "say what to change"),
        ("update-driver g --enable --disable", 2, "not allowed with"),
        ("install-driver g --config a", 2, "is not NAME=VALUE"),
        ("install-driver", 2, "driver_id"),
        ("uninstall-driver ..", 1, "names no object"),
        ("hardware-adopt a b", 2, "--backend"),
        ("update-driver g --reload --wait --within 0", 1, "0 of 1 backends are through after 0 s"),
    ],
)
def test_misuse(
    service: Service, cyborg: Run, capsys: Any, line: str, code: int, said: str
) -> None:
    service.states = [job("pending", ("a", "waiting", None))] * 2
    try:
        _, err = cyborg(*line.split(), code=code)
    except SystemExit as misused:
        assert misused.code == code
        err = capsys.readouterr().err
    assert said in err
