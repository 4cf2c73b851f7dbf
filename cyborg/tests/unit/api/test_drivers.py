# SPDX-License-Identifier: Apache-2.0
"""Drivers in the API, and the calls to the conductor that changes of them make."""

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from oslo_utils import timeutils

from cyborg.api.app import make_app
from cyborg.core.drivers.registry import driver_uuid
from cyborg.core.errors import InUse, NotFound
from cyborg.db import schema
from cyborg.db.engine import Reader
from cyborg.rpc.contract import ConductorAPI
from cyborg.tests.fixtures.clouds.api import ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows

LATEST = {"OpenStack-API-Version": "accelerator latest"}
JOB = "a0000000-0000-4000-8000-00000000000a"
PATH = "/v2/drivers"
OLDER = {"OpenStack-API-Version": "accelerator 2.3"}
UUID = "a0000000-0000-4000-8000-00000000000b"


class FakeConductor:
    """A conductor client that records each call with its arguments and returns one job."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        signature = inspect.signature(getattr(ConductorAPI, name))

        def call(*args: Any, **keywords: Any) -> dict[str, str]:
            bound = signature.bind(None, *args, **keywords).arguments
            self.calls.append((name, {key: bound[key] for key in bound if key != "self"}))
            if self.error is not None:
                raise self.error
            return {"uuid": JOB}

        return call


@pytest.fixture
def fake_conductor(api: ApiEnv) -> FakeConductor:
    fake = FakeConductor()
    api.app = make_app(api.conf, fake, Reader(api.engine))
    return fake


def test_driver_with_different_versions_on_two_hosts(api: ApiEnv) -> None:
    for host, version in (("compute-1", "1"), ("compute-2", "2")):
        agent = rows.insert_agent(api.engine, host=host)
        rows.update(api.engine, schema.services, agent, versions={"drivers": {"generic": version}})
        rows.insert(
            api.engine,
            schema.backends,
            service_id=agent,
            name="gen0",
            driver="generic",
            status="FAILED",
            error="no /sys",
        )
    long_ago = timeutils.utcnow() - timedelta(days=1000)
    rows.update(api.engine, schema.services, agent, **rows.heartbeat(long_ago))
    (driver,) = api.get("/v2/drivers")["drivers"]
    assert (driver["name"], driver["version"]) == ("generic", None)
    assert "hosts" not in driver
    assert (driver["num_hosts"], driver["statuses"]) == (2, {"FAILED": 1, "UNKNOWN": 1})
    assert driver["uuid"] == driver_uuid("generic")
    details = api.get("/v2/drivers/generic")
    hosts = [(h["host"], h["version"], h["state"], h["error"]) for h in details["hosts"]]
    assert hosts == [("compute-1", "1", "up", "no /sys"), ("compute-2", "2", "down", "no /sys")]
    (on_host,) = api.get("/v2/drivers?host=compute-2")["drivers"]
    assert (on_host["version"], on_host["hosts"]) == ("2", details["hosts"][1:])
    assert (on_host["num_hosts"], on_host["statuses"]) == (1, {"UNKNOWN": 1})
    more = {"hosts": details["hosts"], "options": [], "effective_options": []}
    assert details == driver | more
    assert api.get(f"/v2/drivers/{driver['uuid']}") == details
    answer = api.call("GET", "/v2/drivers/genric", None, LATEST)
    assert answer.status_int == 404
    assert error_message(answer) == "no agent has a driver 'genric'; did you mean generic?"
    assert "did you" not in error_message(api.call("GET", "/v2/drivers/zzz", None, LATEST))


def test_driver_installed_but_unused(api: ApiEnv) -> None:
    agent = rows.insert_agent(api.engine)
    option: dict[str, Any] = {
        "name": "rule",
        "kind": "multi",
        "default": ["x"],
        "help": "Which devices.",
    }
    option |= {"host_only": True, "secret": False}
    facts = {"version": "1", "type": "GPU", "support": "supported", "abilities": ["measures"]}
    values = {"service_id": agent, "name": "acme", "options": [option], **facts}
    rows.insert(api.engine, schema.drivers, **values)
    (driver,) = api.get(f"{PATH}?type=GPU&host=compute-1")["drivers"]
    assert (driver["num_hosts"], driver["statuses"]) == (1, {"INSTALLED": 1})
    assert {key: driver[key] for key in facts} == facts
    (host,) = driver["hosts"]
    assert (host["backend"], host["status"], host["state"]) == (None, "INSTALLED", "up")
    assert (host["desired_status"], host["applied"]) == (None, None)
    details = {**driver, "options": [option], "effective_options": []}
    assert api.get(f"{PATH}/acme") == details
    assert api.get(f"{PATH}?type=FPGA")["drivers"] == []


def test_driver_shows_effective_options_of_each_backend(api: ApiEnv) -> None:
    settings = [
        {"name": "devices", "value": ["vendor=8086"], "source": "api"},
        {"name": "token", "value": "***", "source": "file"},
        {"name": "count", "value": 1, "source": "default"},
    ]
    remark = "rule 'vendor=8086' matches no device of this host"
    for host in ("compute-1", "compute-2"):
        agent = rows.insert_agent(api.engine, host)
        state = {"name": "gen0", "driver": "generic", "status": "READY"}
        rows.insert(
            api.engine,
            schema.backends,
            **{"service_id": agent, **state, "settings": settings, "remarks": [remark]},
        )
    effective_options = api.get(f"{PATH}/generic")["effective_options"]
    assert effective_options == [
        {"host": "compute-1", "backend": "gen0", "options": settings},
        {"host": "compute-2", "backend": "gen0", "options": settings},
    ]
    on_host = api.get(f"{PATH}/generic?host=compute-2")
    assert (on_host["effective_options"], len(on_host["hosts"])) == (effective_options[1:], 1)
    answer = api.call("GET", f"{PATH}/generic?host=none", None, LATEST)
    assert (answer.status_int, error_message(answer)) == (
        404,
        "host 'none' has no driver 'generic'; omit the host to see the hosts that have it",
    )
    (listed,) = api.get(f"{PATH}?host=compute-1")["drivers"]
    assert [p["remarks"] for p in listed["hosts"]] == [[remark]]
    assert "effective_options" not in listed, "a list stays short"
    assert api.call("GET", f"{PATH}/generic", None, OLDER).status_int == 404


def test_driver_has_pages_of_hosts(api: ApiEnv) -> None:
    api.conf.set_override("max_limit", 2, group="api")
    for number in range(5):
        agent = rows.insert_agent(api.engine, f"compute-{number}")
        for name in ("gen0", "gen1"):
            status = "FAILED" if (number, name) in ((1, "gen1"), (4, "gen0")) else "READY"
            values = {"service_id": agent, "name": name, "driver": "generic", "status": status}
            rows.insert(api.engine, schema.backends, **values, settings=[])
    (listed,) = api.get(PATH)["drivers"]
    assert (listed["num_hosts"], listed["statuses"]) == (5, {"FAILED": 2, "READY": 8})
    entries, url = [], f"{PATH}/generic"
    while url:
        page = api.get(url)
        assert (page["num_hosts"], page["statuses"]) == (5, listed["statuses"])
        assert len({entry["host"] for entry in page["hosts"]}) <= 2
        shown = [(entry["host"], entry["backend"]) for entry in page["hosts"]]
        assert [(e["host"], e["backend"]) for e in page["effective_options"]] == shown
        entries += shown
        links = page.get("hosts_links", [])
        url = links[0]["href"].removeprefix("http://localhost") if links else ""
        assert [link["rel"] for link in links] in ([], ["next"])
    assert entries == [(f"compute-{n}", name) for n in range(5) for name in ("gen0", "gen1")]
    failed = api.get(f"{PATH}/generic?status=FAILED&limit=1")
    assert [(e["host"], e["backend"]) for e in failed["hosts"]] == [("compute-1", "gen1")]
    assert [e["backend"] for e in failed["effective_options"]] == ["gen1"]
    (link,) = failed["hosts_links"]
    assert "status=FAILED" in link["href"]
    assert link["href"].endswith("marker=compute-1")
    last = api.get(link["href"].removeprefix("http://localhost"))
    assert [(e["host"], e["backend"]) for e in last["hosts"]] == [("compute-4", "gen0")]
    assert "hosts_links" not in last
    # The host has the driver, and nothing has this status.
    assert api.get(f"{PATH}/generic?host=compute-0&status=FAILED")["hosts"] == []


CONFIG = {"rule": ["a", "b"], "num_devices": 2, "ratio": 0.5, "quick": True, "root": "/sys"}


@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "call", "arguments"),
    [
        (
            *("POST", PATH, {"driver": "generic"}, "install", "driver_install"),
            {"driver": "generic", "backend": None, "hosts": None, "config": None},
        ),
        (
            *("POST", PATH),
            {"driver": UUID, "backend": "gen0", "hosts": ["b", "a", "b"], "config": CONFIG},
            *("install", "driver_install"),
            {"driver": UUID, "backend": "gen0", "hosts": ["b", "a"], "config": CONFIG},
        ),
        (
            *("PATCH", f"{PATH}/generic", {"config": CONFIG}, "update", "driver_update"),
            {
                **{"driver": "generic", "backend": None, "hosts": None},
                **{"config": CONFIG, "status": None, "reload": False},
            },
        ),
        (
            *("PATCH", f"{PATH}/generic", {"config": {"a": None, "b": 1}}),
            *("update", "driver_update"),
            {
                **{"driver": "generic", "backend": None, "hosts": None},
                **{"config": {"a": None, "b": 1}, "status": None, "reload": False},
            },
        ),
        (
            *("PATCH", f"{PATH}/generic"),
            {"status": "disabled", "reload": True, "hosts": ["a"], "backend": "gen0"},
            *("update", "driver_update"),
            {
                **{"driver": "generic", "backend": "gen0", "hosts": ["a"]},
                **{"config": None, "status": "disabled", "reload": True},
            },
        ),
        (
            *("DELETE", f"{PATH}/generic", None, "uninstall", "driver_uninstall"),
            {
                **{"driver": "generic", "backend": None, "hosts": None},
                **{"drain": False, "force": False},
            },
        ),
        (
            *("DELETE", f"{PATH}/generic?drain=true&force=true&host=a&host=b&backend=gen0", None),
            *("uninstall", "driver_uninstall"),
            {
                **{"driver": "generic", "backend": "gen0", "hosts": ["a", "b"]},
                **{"drain": True, "force": True},
            },
        ),
        (
            *("POST", "/v2/hardware", {"host": "a", "address": "0000:01:00.0", "backend": "gen0"}),
            *("update", "hardware_adopt"),
            {"host": "a", "address": "0000:01:00.0", "backend": "gen0", "force": False},
        ),
        (
            "POST",
            "/v2/hardware",
            {"host": "a", "address": "0000:01:00.0", "backend": "gen0", "force": True},
            *("update", "hardware_adopt"),
            {"host": "a", "address": "0000:01:00.0", "backend": "gen0", "force": True},
        ),
        (
            *("DELETE", f"/v2/hardware/{UUID.upper()}", None, "update", "hardware_release"),
            {"uuid": UUID},
        ),
    ],
)
def test_change_makes_one_call_and_returns_job(
    api: ApiEnv,
    fake_conductor: FakeConductor,
    method: str,
    path: str,
    body: Any,
    kind: str,
    call: str,
    arguments: dict[str, Any],
) -> None:
    answer = api.call(method, path, body, LATEST)
    assert answer.status_int == 202, answer.text
    assert fake_conductor.calls == [(call, arguments)]
    url = f"http://localhost/v2/jobs/{JOB}"
    links = [{"rel": "self", "href": url}]
    assert answer.json == {"uuid": JOB, "kind": kind, "state": "pending", "links": links}
    assert answer.headers["Location"] == url
    # The operation does not exist before 2.4.
    assert api.call(method, path, body).status_int == 404
    for error, status in ((NotFound("no driver x"), 404), (InUse("in use by y"), 409)):
        fake_conductor.error = error
        failed = api.call(method, path, body, LATEST)
        assert (failed.status_int, error_message(failed)) == (status, error.message)


LONG = "h" * 256


@pytest.mark.parametrize(
    ("method", "path", "body", "message"),
    [
        ("POST", PATH, {}, "driver: missing"),
        ("POST", PATH, [], "object"),
        ("POST", PATH, [{"driver": "x"}], "object"),
        ("POST", PATH, {"driver": ""}, "driver"),
        ("POST", PATH, {"driver": 7}, "driver"),
        ("POST", PATH, {"driver": LONG}, "driver"),
        ("POST", PATH, {"driver": "x", "code": "import os"}, "code: unknown field"),
        ("POST", PATH, {"driver": "x", "backend": ""}, "backend"),
        ("POST", PATH, {"driver": "x", "hosts": []}, "omit it for all hosts"),
        ("POST", PATH, {"driver": "x", "hosts": "a"}, "hosts: must be a list"),
        ("POST", PATH, {"driver": "x", "hosts": {"a": 1}}, "hosts: must be a list"),
        ("POST", PATH, {"driver": "x", "hosts": ["a"] * 10_001}, "hosts: must be a list"),
        ("POST", PATH, {"driver": "x", "hosts": [""]}, "hosts"),
        ("POST", PATH, {"driver": "x", "hosts": ["a\0"]}, "hosts"),
        ("POST", PATH, {"driver": "x", "hosts": ["\ud800"]}, "hosts"),
        ("POST", PATH, {"driver": "x", "hosts": [LONG]}, "hosts"),
        ("POST", PATH, {"driver": "x", "hosts": [None]}, "hosts"),
        ("POST", PATH, {"driver": "x", "config": "a=b"}, "config: must be an object"),
        ("POST", PATH, {"driver": "x", "config": [["a", "b"]]}, "config: must be an object"),
        ("POST", PATH, {"driver": "x", "config": {"a": None}}, "config: a: must be text"),
        ("POST", PATH, {"driver": "x", "config": {"a": {"b": 1}}}, "config: a: must be text"),
        ("POST", PATH, {"driver": "x", "config": {"a": [["b"]]}}, "config: a: must be text"),
        ("POST", PATH, b'{"driver": "x", "config": {"a": 1e999}}', "config: a: must be text"),
        ("POST", PATH, {"driver": "x", "config": {"": 1}}, "config"),
        ("POST", PATH, {"driver": "x", "config": {LONG: 1}}, "config"),
        ("POST", PATH, {"driver": "x", "config": {"a": "b\0"}}, "config: a"),
        ("POST", PATH, {"driver": "x", "config": {"a": "b\ud800"}}, "config: a"),
        ("POST", PATH, {"driver": "x", "config": {"a": "b" * 4097}}, "config: a"),
        ("POST", PATH, {"driver": "x", "config": {"a": ["b" * 4000] * 17}}, "at most 65536"),
        ("PATCH", f"{PATH}/x", {}, "nothing to change"),
        ("PATCH", f"{PATH}/x", {"config": {}, "reload": False}, "nothing to change"),
        ("PATCH", f"{PATH}/x", {"config": [None]}, "config: must be an object"),
        ("PATCH", f"{PATH}/x", {"config": {"": None}}, "config"),
        ("PATCH", f"{PATH}/x", {"config": {"a": [None]}}, "config: a: must be text"),
        ("PATCH", f"{PATH}/x", {"config": {f"{n:0>200}": None for n in range(400)}}, "at most"),
        ("PATCH", f"{PATH}/x", {"hosts": ["a"], "backend": "b"}, "nothing to change"),
        ("PATCH", f"{PATH}/x", {"status": None}, "nothing to change"),
        ("PATCH", f"{PATH}/x", {"status": "absent"}, "status"),
        ("PATCH", f"{PATH}/x", {"reload": "yes"}, "reload: must be true or false"),
        ("PATCH", f"{PATH}/x", {"reload": 1}, "reload: must be true or false"),
        ("PATCH", f"{PATH}/x", [], "object"),
        ("PATCH", PATH, {"reload": True}, None),
        ("DELETE", PATH, None, None),
        ("DELETE", f"{PATH}/x?drain=1", None, "drain"),
        ("DELETE", f"{PATH}/x?force=true&force=true", None, "force: duplicate parameter"),
        ("DELETE", f"{PATH}/x?host=", None, "host"),
        ("DELETE", f"{PATH}/x?hosts=a", None, "hosts: unknown parameter"),
        ("DELETE", f"{PATH}/x?backend=a%00", None, "backend"),
        ("GET", f"{PATH}?type=TPU", None, "type"),
        ("GET", f"{PATH}?status=READY", None, "status: unknown parameter"),
        ("POST", "/v2/hardware", {}, "missing"),
        ("POST", "/v2/hardware", {"host": "a", "backend": "b"}, "address: missing"),
        ("POST", "/v2/hardware", {"host": "a", "address": "", "backend": "b"}, "address"),
        ("POST", "/v2/hardware", {"host": "a", "address": "x" * 121, "backend": "b"}, "address"),
        ("POST", "/v2/hardware", [], "object"),
        ("DELETE", "/v2/hardware/0000:01:00.0", None, "is not a uuid"),
    ],
)
def test_invalid_request_is_rejected(
    api: ApiEnv,
    fake_conductor: FakeConductor,
    method: str,
    path: str,
    body: Any,
    message: str | None,
) -> None:
    answer = api.call(method, path, body, LATEST)
    assert answer.status_int == (405 if message is None else 400), answer.text
    assert (message or "is not supported for") in error_message(answer)
    assert fake_conductor.calls == []


def test_impossible_driver_name_is_404(api: ApiEnv, fake_conductor: FakeConductor) -> None:
    for method, body in (("GET", None), ("PATCH", {"reload": True}), ("DELETE", None)):
        assert api.call(method, f"{PATH}/{LONG}", body, LATEST).status_int == 404
    assert fake_conductor.calls == []
