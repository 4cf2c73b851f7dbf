# SPDX-License-Identifier: Apache-2.0
"""Commands that start a job: requests, output and exit status."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from webob import Request, Response

from cyborg.cli import app, jobs
from cyborg.cli.common import progress
from cyborg.cli.common.base import MAX_PARTS
from cyborg.cli.jobs import job_progress
from cyborg.tests.unit.cli.common.test_progress import Clock
from cyborg.tests.unit.cli.common.test_rest import serving

JOB = "a0000000-0000-4000-8000-00000000000a"
STARTED = {"uuid": JOB, "kind": "update", "state": "pending", "links": []}


def job(state: str, *steps: tuple[str, str, str | None], error: str | None = None) -> Any:
    """Return a job as the service shows it; a step is (host, state, error)."""
    return {
        **STARTED,
        **{"state": state, "subject": "generic", "host": None, "error": error, "attempts": 1},
        **{"created_at": None, "updated_at": None},
        "progress": Counter(step for _, step, _ in steps),
        "steps": [
            {"host": host, "backend": "gen0", "state": step, "error": reason}
            for host, step, reason in steps
        ],
    }


class Service:
    """A service that starts a job for each request and then shows its states in sequence."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.page_size = 1000
        self.requests: list[tuple[str, str, Any]] = []
        self.reads: list[str] = []

    def __call__(self, request: Request) -> Response:
        if request.method == "GET":
            self.reads.append(request.path_qs.removeprefix("/v2"))
            state = self.states[0]
            if isinstance(state, int):
                del self.states[0]
                return Response(json={"error_message": "away"}, status=state)
            steps = state.get("steps", [])
            if "uuid" in request.params:
                # A row in the list is followed by the object, unless the job has many steps.
                if len(steps) > MAX_PARTS:
                    del self.states[0]
                row = {key: value for key, value in state.items() if key != "steps"}
                return Response(json={"jobs": [row]})
            start = int(str(request.params.get("marker", 0)))
            end = start + self.page_size
            page = {**state, "steps": steps[start:end]} if steps else dict(state)
            if end < len(steps):
                page["steps_links"] = [{"rel": "next", "href": f"http://api/?marker={end}"}]
            else:
                del self.states[0]
            return Response(json=page)
        body = request.json if request.body else None
        self.requests.append((request.method, request.path_qs.removeprefix("/v2"), body))
        return Response(json=STARTED, status=202)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(progress, "time", Clock())
    return Service()


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def cyborg(service: Service, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    with serving(service) as url:

        def run(*arguments: str, code: int = 0) -> tuple[str, str]:
            status = app.main(["--os-auth-type", "none", "--os-endpoint", url, *arguments])
            output = capsys.readouterr()
            assert status == code, output
            assert "Traceback" not in output.err
            return output.out, output.err

        yield run


def test_wait_reads_many_steps_once_at_the_end(service: Service, cyborg: Run) -> None:
    hosts = [f"h{number}" for number in range(MAX_PARTS)]
    open_ = job("pending", *((host, "waiting", None) for host in hosts), ("z", "done", None))
    ended = job("failed", *((host, "done", None) for host in hosts), ("z", "failed", "no bus"))
    service.states = [open_, open_, ended, ended]
    _, err = cyborg("install-driver", "generic", "--wait", code=1)
    assert "z (gen0) failed: no bus" in err
    assert service.reads == [*[f"/jobs?uuid={JOB}"] * 3, f"/jobs/{JOB}"]


@pytest.mark.parametrize(
    ("line", "request_"),
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
        (
            "hardware-adopt a 0000:01:00.0 --backend x --force",
            (
                "POST",
                "/hardware",
                {"host": "a", "address": "0000:01:00.0", "backend": "x", "force": True},
            ),
        ),
        (f"hardware-release {JOB}", ("DELETE", f"/hardware/{JOB}", None)),
    ],
)
def test_job_commands_send_request_and_show_job(
    service: Service, cyborg: Run, line: str, request_: tuple[str, str, Any]
) -> None:
    out, _ = cyborg(*line.split(), "-f", "json")
    assert json.loads(out) == {"UUID": JOB, "Kind": "update", "State": "pending"}
    assert JOB in cyborg(*line.split())[0]
    assert service.requests == [request_] * 2


def program(state: str, activity: Any) -> Any:
    return {**job(state), "kind": "program", "host": "compute-1", "activity": activity}


def test_job_show_and_list_show_the_activity(service: Service, cyborg: Run) -> None:
    fetch = {"step": "fetch image 4d5b0d6a", "done": 4, "total": 10}
    service.states = [program("pending", fetch), {"jobs": [program("pending", fetch)]}]
    assert "40 % fetch image 4d5b0d6a" in cyborg("job-show", JOB)[0]
    assert "40 % fetch" in cyborg("job-list")[0]
    service.states = [program("pending", fetch), job("done")]
    assert json.loads(cyborg("job-show", JOB, "-f", "json")[0])["Activity"] == fetch
    assert json.loads(cyborg("job-show", JOB, "-f", "json")[0])["Activity"] is None


def test_job_show_reads_all_pages_of_the_steps_in_a_state(service: Service, cyborg: Run) -> None:
    service.states = [job("failed", ("a", "failed", "no bus"), ("b", "failed", "no bus"))]
    service.page_size = 1
    out, _ = cyborg("job-show", JOB, "--step-state", "failed")
    assert "a (gen0) failed: no bus" in out
    assert "b (gen0) failed: no bus" in out
    assert service.reads == [f"/jobs/{JOB}?step_state=failed", f"/jobs/{JOB}?marker=1"]


@pytest.mark.parametrize("hosts", [2, MAX_PARTS])
def test_wait_finds_a_failure_on_the_last_page(service: Service, cyborg: Run, hosts: int) -> None:
    ended = job("done", *((f"h{n}", "done", None) for n in range(hosts)), ("z", "failed", "gone"))
    service.states = [ended, ended]
    service.page_size = hosts
    _, err = cyborg("install-driver", "generic", "--wait", code=1)
    assert "z (gen0) failed: gone" in err
    assert service.reads[-2:] == [f"/jobs/{JOB}", f"/jobs/{JOB}?marker={hosts}"]


def test_job_progress_of_host_work_is_its_activity() -> None:
    fetch = {"step": "fetch image", "done": 4, "total": 10}
    shown = job_progress(program("pending", fetch))
    assert (shown.done, shown.total, shown.lines) == (4, 10, ["fetch image"])
    assert shown.pending == f"job {JOB} is pending: 40 % fetch image"
    assert job_progress(program("done", None)).pending is None


def test_job_cancel_sends_one_request_per_job(service: Service, cyborg: Run) -> None:
    assert cyborg("job-cancel", JOB, "b") == ("", "")
    assert service.requests == [("DELETE", f"/jobs/{JOB}", None), ("DELETE", "/jobs/b", None)]


def test_update_driver_config_and_unset_conflict(service: Service, cyborg: Run) -> None:
    _, err = cyborg("update-driver", "g", "--config", "n=1", "--unset", "n", code=1)
    assert "option n: use either --config or --unset, not both" in err
    assert service.requests == []


def test_wait_prints_each_host_and_tolerates_failures(service: Service, cyborg: Run) -> None:
    service.states = [
        job("pending", ("a", "in_progress", None), ("b", "waiting", None)),
        503,
        504,
        job("pending", ("a", "done", None), ("b", "in_progress", None)),
        job("done", ("a", "done", None), ("b", "pending_agent", None)),
    ]
    out, err = cyborg("update-driver", "g", "--reload", "--wait", "-f", "json")
    printed_job = json.loads(out)
    assert (printed_job["State"], [s["state"] for s in printed_job["Steps"]]) == (
        "done",
        ["done", "pending_agent"],
    )
    expected = (
        "a (gen0) in_progress",
        "a (gen0) done",
        "b (gen0) in_progress",
        "b (gen0) pending_agent",
    )
    assert [err.count(line) for line in expected] == [1] * 4
    assert "waiting" not in err
    assert "1 backends are pending until their agents reconnect" in err


def test_wait_failed_job_prints_hosts_and_errors(service: Service, cyborg: Run) -> None:
    service.states = [
        job(
            "failed",
            *(("a", "done", None), ("b", "rolled_back", "no /sys\nat all"), ("c", "failed", None)),
            *(("d", "skipped", None), ("e", "skipped", None)),
            error="1 done, 2 went wrong",
        )
    ]
    out, err = cyborg("update-driver", "g", "--reload", "--wait", code=1)
    assert "b (gen0) rolled_back: no /sys" in out
    assert (
        f"job {JOB} (update generic) failed: "
        "b (gen0) rolled_back: no /sys at all; c (gen0) failed; 2 skipped\n" in err
    )


def test_describe_failure_limits_hosts() -> None:
    text = jobs.describe_failure(job("failed", *((f"h{n}", "failed", "no") for n in range(1000))))
    assert "h19 (gen0) failed: no; 980 more" in text
    assert len(text) < 1000
    assert jobs.describe_failure(job("cancelled")).endswith("cancelled: no reason given")


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("update-driver g", 1, "nothing to change"),
        ("update-driver g --enable --disable", 2, "not allowed with"),
        ("install-driver g --config a", 2, "is not of the form NAME=VALUE"),
        ("install-driver", 2, "driver_id"),
        ("uninstall-driver ..", 1, "is not a valid name of an object"),
        ("hardware-adopt a b", 2, "--backend"),
        (
            "update-driver g --reload --wait --within 0",
            1,
            "0 of 1 backends have finished after 0 s",
        ),
    ],
)
def test_wrong_usage_prints_error(
    service: Service, cyborg: Run, capsys: Any, line: str, code: int, message: str
) -> None:
    service.states = [job("pending", ("a", "waiting", None))] * 2
    try:
        _, err = cyborg(*line.split(), code=code)
    except SystemExit as misused:
        assert misused.code == code
        err = capsys.readouterr().err
    assert message in err
