# SPDX-License-Identifier: Apache-2.0
"""Database, broker and Placement behind a proxy: half-open, frozen, or reset within an answer.

Each fault lasts ``CYBORG_TEST_PROXY_SECONDS``, 6 by default and 30 in the full form; a half-open
broker at least 30 s, because its heartbeat needs that time to detect it.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families

from cyborg.tests.fixtures.bus.proxy import Fault, Proxy, proxy
from cyborg.tests.fixtures.bus.tcp_relay import replace_address
from cyborg.tests.fixtures.clouds.cloud import Cloud, run_cloud
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine.processes import free_port, wait_until
from cyborg.tests.fixtures.machine.tiers import sample

SECONDS = float(os.environ.get("CYBORG_TEST_PROXY_SECONDS", "6"))
HEARTBEAT_SECONDS = 30.0
GET_SECONDS = 6.0
HEALTH_SECONDS = 5.0
DISABLE_SECONDS = 10.0
# Seconds more for a machine that runs other tests at the same time; 0: the limits are exact.
SLACK = float(os.environ.get("CYBORG_TEST_PROXY_SLACK", "2"))
# A limit grows by this multiple of the longest answer of Placement, asked directly from before the
# fault until the recovery: a detection and a recovery are several such steps one after the other,
# and each is as slow as the machine.
LOAD_FACTOR = 10.0 if SLACK else 0.0
# Seconds of two RPC timeouts: on a busy machine a dead connection to the broker may be detected
# only after the end of the fault, and the call that was sent on it is repeated. The API and the
# conductor have connections of their own.
LOST_CALLS = 20.0 if SLACK else 0.0

FAULTS = (Fault.HALF_OPEN, Fault.FROZEN, Fault.RESET)
PORTS = {"mysql": 3306, "postgresql": 5432}
TRACEBACK = "Traceback (most recent call last)"
_HEADERS = {"OpenStack-API-Version": "accelerator latest"}

pytestmark = [pytest.mark.services, pytest.mark.timeout(1200)]


class Prober:
    """Poll one URL in a separate thread, as a client or a load balancer does."""

    def __init__(self, url: str, pause: float, profile: str | None = None) -> None:
        """With ``profile``, create this device profile again and again, instead of reading."""
        self._url = url
        self._pause = pause
        self._method = "GET" if profile is None else "POST"
        self._body: Any = profile and [{"name": profile, "groups": [{"resources:FPGA": "1"}]}]
        self._stopped = threading.Event()
        self.answers: list[tuple[float, float, int | None]] = []  # start, seconds, status
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def healthy_for(self, seconds: float) -> bool:
        """Return whether all answers of the last seconds were 200."""
        since = time.monotonic() - seconds
        statuses = [status for began, _, status in list(self.answers) if began >= since]
        return len(statuses) > 1 and set(statuses) == {200}

    def stop(self) -> None:
        """Stop after the request in progress."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._pause):
            began = time.monotonic()
            try:
                status: int | None = requests.request(
                    self._method, self._url, json=self._body, headers=_HEADERS, timeout=20
                ).status_code
            except requests.RequestException:
                status = None
            self.answers.append((began, time.monotonic() - began, status))


class Env:
    """A cloud with one host whose database, broker and Placement are behind proxies."""

    def __init__(self, running: Cloud, proxies: dict[str, Proxy], metrics_port: int) -> None:
        self.cloud = running
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        self.proxies = proxies
        self.figures: list[dict[str, Any]] = []
        self.device = wait_until("the card is there", self._device)["uuid"]
        self.provider = wait_until("the card is in Placement", self._provider)
        wait_until("the card is open", lambda: not self.closed())

    def call(self, method: str, path: str) -> requests.Response | None:
        """Call the API and return the response, None if it does not answer."""
        url = f"{self.cloud.endpoint}/v2{path}"
        try:
            return requests.request(method, url, headers=_HEADERS, timeout=60)
        except requests.RequestException:
            return None

    def closed(self) -> bool:
        """Return whether the card is reserved in full, read directly from Placement."""
        path = f"/resource_providers/{self.provider}/inventories"
        body = requests.get(f"{self._direct}{path}", headers=_TOKEN, timeout=20).json()
        return all(
            inventory["reserved"] == inventory["total"]
            for inventory in body["inventories"].values()
        )

    def overdue_loops(self) -> dict[str, float] | None:
        """Return the conductor's loops that are overdue; None if its metrics are not there.

        A loop is overdue after a minute, so each fault shows in the values of later ones.
        """
        text = requests.get(self._metrics, timeout=20).text
        values = {
            sample.labels["loop"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.endswith("process_loop_overdue_seconds")
        }
        return {name: value for name, value in values.items() if value} if values else None

    def set_status(self, verb: str, refused: list[str] | None = None) -> float:
        """Disable or enable the card; return the seconds until Placement is updated.

        ``refused`` gets the answers that are not OK, with the time of the first of equal answers.
        """
        began = time.monotonic()

        def accepted() -> bool:
            answer = self.call("POST", f"/devices/{self.device}/{verb}")
            if answer is None or not answer.ok:
                text = "no answer" if answer is None else f"{answer.status_code} {answer.reason}"
                if refused is not None and not (refused and refused[-1].endswith(text)):
                    refused.append(f"{time.monotonic() - began:.1f} s: {text}")
                return False
            return True

        wait_until(f"{verb} is accepted", accepted)
        wait_until(f"{verb} is in Placement", lambda: self.closed() is (verb == "disable"))
        return time.monotonic() - began

    def inject_fault(self, name: str, fault: Fault) -> dict[str, Any]:
        """Inject a fault into one service for some time; return the observations of clients."""
        seconds = SECONDS
        if (name, fault) == ("broker", Fault.HALF_OPEN):
            seconds = max(seconds, HEARTBEAT_SECONDS)
        health = Prober(f"{self.cloud.endpoint}/healthcheck", 0.25)
        reads = [Prober(f"{self.cloud.endpoint}/v2/devices", 0.25) for _ in range(2)]
        writes = Prober(f"{self.cloud.endpoint}/v2/device_profiles", 0.25, "written")
        # No fault reaches this one: it measures how slow the machine is.
        control = Prober(self._direct, 0.25)
        time.sleep(2.0)
        began = time.monotonic()
        self.proxies[name].begin(fault)
        if name == "placement":
            # A client may be within a request when the fault ends.
            time.sleep(seconds - 1.0)
            self.call("POST", f"/devices/{self.device}/disable")
            time.sleep(1.0)
        else:
            time.sleep(seconds)
        self.proxies[name].end()
        ended = time.monotonic()
        refused: list[str] = []
        disabled = self.set_status("disable", refused)
        wait_until("the API is healthy for two seconds", lambda: health.healthy_for(2.0))
        for prober in (health, *reads, writes, control):
            prober.stop()
        assert {status for _, _, status in control.answers} == {200}
        longest_control = max(duration for _, duration, _ in control.answers)
        answers = [answer for prober in reads for answer in prober.answers]
        figures = {
            "neighbour": name,
            "fault": str(fault),
            "seconds": seconds,
            "slack": round(SLACK + LOAD_FACTOR * longest_control, 2),
            "get_longest": round(max(duration for _, duration, _ in answers), 2),
            "get_statuses": sorted({status for _, _, status in answers}, key=str),
            "write_longest": round(max(duration for _, duration, _ in writes.answers), 2),
            "write_statuses": sorted({status for _, _, status in writes.answers}, key=str),
            "sick_after": _unhealthy_after(health.answers, began),
            "well_after": _healthy_after(health.answers, ended),
            "disable_after": round(disabled, 2),
            "refused": refused,
        }
        self.set_status("enable")
        wait_until("every service is up", self._all_up)
        self.figures.append(figures)
        print(f"\n{json.dumps(figures)}")  # noqa: T201
        return figures

    def tracebacks(self) -> dict[str, str]:
        """Return what follows the first traceback in the log of each daemon."""
        logs = {name: one.log.read_text(errors="replace") for name, one in self._logged()}
        return {
            name: log[log.index(TRACEBACK) - 500 :][:6000]
            for name, log in logs.items()
            if TRACEBACK in log
        }

    def _logged(self) -> Iterator[tuple[str, Any]]:
        yield from (item for item in self.cloud.daemons.items() if item[1].log.exists())

    @property
    def _direct(self) -> str:
        return f"http://127.0.0.1:{self.cloud.placement_port}"

    def _device(self) -> Any:
        answer = self.call("GET", "/devices")
        return answer and answer.ok and answer.json()["devices"] and answer.json()["devices"][0]

    def _provider(self) -> Any:
        body = requests.get(
            f"{self._direct}/resource_providers?resources=FPGA:1", headers=_TOKEN, timeout=20
        ).json()["resource_providers"]
        return body and body[0]["uuid"]

    def _all_up(self) -> bool:
        answer = self.call("GET", "/services?kind=daemon")
        if answer is None or not answer.ok:
            return False
        services = answer.json()["services"]
        return {service["state"] for service in services} == {"up"}


_TOKEN = {"X-Auth-Token": "admin", "OpenStack-API-Version": "placement 1.39"}


def _unhealthy_after(answers: list[Any], began: float) -> float | None:
    """Return the time of the first unhealthy answer, in seconds after the start of the fault."""
    durations = [
        at + duration - began
        for at, duration, status in answers
        if status != 200 and began <= at + duration
    ]
    return round(min(durations), 2) if durations else None


def _healthy_after(answers: list[Any], ended: float) -> float:
    """Return the time of the last unhealthy answer, in seconds after the end of the fault."""
    durations: list[float] = [
        at + duration - ended for at, duration, status in answers if status != 200
    ]
    return round(max([0.0, *durations]), 2)


@pytest.fixture(scope="module", params=sample(PORTS, "mysql"))
def env(
    request: pytest.FixtureRequest, rabbit_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Env]:
    """Run a cloud behind proxies, one for all tests of a kind of database."""
    folder = tmp_path_factory.mktemp("cloud")
    with ExitStack() as stack:
        url = sa.make_url(stack.enter_context(fresh_database(request.param, folder)))
        proxies = {
            "database": stack.enter_context(proxy(url.port or PORTS[request.param])),
            "broker": stack.enter_context(proxy(urlsplit(rabbit_url).port or 5672)),
        }
        wire = replace_address(rabbit_url, proxies["broker"].port)
        through = url.set(host="127.0.0.1", port=proxies["database"].port)
        database = through.render_as_string(hide_password=False)
        metrics_port = free_port()
        cloud = Cloud(
            folder,
            database,
            wire,
            ("compute-1",),
            conductors=("conductor-1",),
            options={"conductor": {"metrics_port": metrics_port}},
        )
        proxies["placement"] = stack.enter_context(proxy(cloud.placement_port))
        cloud.set_placement_port(proxies["placement"].port)
        stack.enter_context(run_cloud(cloud))
        yield Env(cloud, proxies, metrics_port)


@pytest.mark.parametrize("fault", sample(FAULTS, Fault.HALF_OPEN, mark=pytest.mark.long))
def test_database_fault_is_detected_and_recovery_is_seen(env: Env, fault: Fault) -> None:
    observed = env.inject_fault("database", fault)
    assert set(observed["get_statuses"]) <= {200, 503}, observed
    assert observed["get_longest"] < GET_SECONDS + observed["slack"], observed
    # Within the same time as a read, also in the conductor; a commit may be without an answer.
    assert set(observed["write_statuses"]) <= {201, 409, 503, 504}, observed
    assert observed["write_longest"] < GET_SECONDS + observed["slack"], observed
    assert observed["sick_after"] is not None, observed
    assert observed["sick_after"] < HEALTH_SECONDS + observed["slack"], observed
    _check_return(env, observed)


# The kind of database does not matter for the other services.
@pytest.mark.matrix
@pytest.mark.parametrize("env", ["mysql"], indirect=True)
@pytest.mark.parametrize("fault", sample(FAULTS, Fault.RESET, mark=pytest.mark.long))
@pytest.mark.parametrize("name", ["broker", "placement"])
def test_reads_continue_while_another_service_fails(env: Env, name: str, fault: Fault) -> None:
    observed = env.inject_fault(name, fault)
    assert observed["get_statuses"] == [200], observed
    assert observed["get_longest"] < GET_SECONDS + observed["slack"], observed
    assert observed["sick_after"] is None, observed
    _check_return(env, observed)


def _check_return(env: Env, observations: dict[str, Any]) -> None:
    slack = observations["slack"]
    assert observations["well_after"] < HEALTH_SECONDS + slack, observations
    assert observations["disable_after"] < DISABLE_SECONDS + LOST_CALLS + slack, observations
    assert env.overdue_loops() == {}
    assert [daemon for daemon, process in env.cloud.daemons.items() if not process.alive()] == []
    assert env.tracebacks() == {}, "an outage is no bug"
