# SPDX-License-Identifier: Apache-2.0
"""JSON logs: each line of each service is one object, with the fields that the page lists."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.core.log import MAX_LENGTH, MAX_VALUES
from cyborg.tests.fixtures.clouds.cloud import Cloud
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine.processes import BIN, ini, wait_until

HOST = "compute-1"
TOKEN = "a-secret-token-of-a-client"
KEYS = frozenset(
    {"message", "asctime", "name", "msg", "levelname", "traceback", "hostname", "context", "extra"}
)
OPTIONS: dict[str, dict[str, Any]] = {
    # Debugging logs the tracebacks of drivers, and every library.
    "DEFAULT": {"use_json": "true", "debug": "true"},
    "fake": {"prepare": "fail"},
}
Lines = dict[str, list[dict[str, Any]]]


def start_api(cloud: Cloud) -> None:
    """Start the API by its own command, whose web server logs as well."""
    config = cloud.config("api", host="controller")
    with config.open("a", encoding="utf-8") as file:
        file.write(ini({"api": {"port": cloud.port, "workers": 1}}))
    cloud.add("api", [BIN / "cyborg-api", "--config-file", config])
    wait_until("the API answers", lambda: _answers(f"{cloud.endpoint}/healthcheck"))


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.RequestException:
        return False


def fail_bind(cloud: Cloud) -> tuple[str, str, str]:
    """Bind an ARQ whose host cannot prepare its device; return ARQ, instance and request id."""

    def call(method: str, path: str, body: Any = None) -> requests.Response:
        headers = {"X-Auth-Token": TOKEN}
        url = f"{cloud.endpoint}/v2{path}"
        return requests.request(method, url, json=body, headers=headers, timeout=60)

    def provider() -> str | None:
        rows = call("GET", "/deployables").json()["deployables"]
        return str(rows[0]["rp_uuid"]) if rows else None

    device_rp = wait_until("the card is reported", provider)
    group = {"resources:FPGA": "1", "trait:CUSTOM_FAKE_DEVICE": "required"}
    assert call("POST", "/device_profiles", [{"name": "p", "groups": [group]}]).ok
    (arq,) = call("POST", "/accelerator_requests", {"device_profile_name": "p"}).json()["arqs"]
    instance = str(uuid.uuid4())
    values = {"hostname": HOST, "device_rp_uuid": device_rp, "instance_uuid": instance}
    patch = [{"op": "add", "path": f"/{name}", "value": value} for name, value in values.items()]
    answer = call("PATCH", "/accelerator_requests", {arq["uuid"]: patch})
    assert answer.status_code == 202, answer.text

    def failed() -> bool:
        shown = call("GET", f"/accelerator_requests/{arq['uuid']}").json()
        return bool(shown["state"] == "BindFailed")

    wait_until("the bind has failed", failed)
    return arq["uuid"], instance, answer.headers["X-Openstack-Request-Id"]


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, rabbit_url: str
) -> Iterator[tuple[Lines, tuple[str, str, str]]]:
    """Yield the parsed lines of all services, and the identifiers of a failed bind."""
    folder = tmp_path_factory.mktemp("json")
    with fresh_database("mysql", folder) as database:
        cloud = Cloud(
            folder, database, rabbit_url, (HOST,), conductors=("conductor-1",), options=OPTIONS
        )
        try:
            cloud.prepare()
            cloud.agent(HOST)
            cloud.conductor("conductor-1")
            start_api(cloud)
            identifiers = fail_bind(cloud)
        except BaseException:
            print(cloud.logs())  # noqa: T201
            raise
        finally:
            cloud.stop()
        names = ("api", "conductor-1", f"agent-{HOST}")
        yield {name: parse(cloud.daemons[name].log) for name in names}, identifiers


def parse(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a log; a line that is no object is an error."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except ValueError:
            raise AssertionError(f"{path.name}, line {number} is not JSON: {text[:200]}") from None
    return lines


@pytest.mark.services
def test_each_line_of_each_service_is_one_object(recorded: tuple[Lines, Any]) -> None:
    for name, lines in recorded[0].items():
        assert len(lines) > 10, name
        for line in lines:
            assert line.keys() >= KEYS, (name, line)
        loggers = {line["name"].partition(".")[0] for line in lines}
        assert "cyborg" in loggers
        if name == "api":
            assert "gunicorn" in loggers, "the lines of the web server have the same format"


@pytest.mark.services
def test_extra_has_the_fields_of_a_failed_bind(
    recorded: tuple[Lines, tuple[str, str, str]],
) -> None:
    lines, (arq, instance, request_id) = recorded
    # The release that follows may meet an agent that stops, which is another warning.
    (failed,) = (line for line in lines["conductor-1"] if line["msg"] == "Job (%s) failed: %s")
    assert failed["name"] == "cyborg.conductor.jobs.dispatcher"
    assert failed["levelname"] == "WARNING"
    assert (failed["extra"]["host"], failed["extra"]["instance"]) == (HOST, instance)
    job = failed["extra"]["job"]
    (access,) = (line for line in lines["api"] if line["extra"].get("method") == "PATCH")
    assert access["extra"]["route"] == "/v2/accelerator_requests"
    assert (access["extra"]["status"], access["context"]["request_id"]) == (202, request_id)
    arqs = [line["extra"]["arq"] for line in lines["conductor-1"] if "arq" in line["extra"]]
    assert arq in {
        uuid for value in arqs for uuid in (value if isinstance(value, list) else [value])
    }
    devices = [line for line in lines[f"agent-{HOST}"] if line["extra"].get("job") == job]
    assert any("device" in line["extra"] for line in devices)


@pytest.mark.services
def test_traceback_is_a_field_of_its_line(recorded: tuple[Lines, Any]) -> None:
    item_failed = [
        line for line in recorded[0][f"agent-{HOST}"] if line["message"] == "Job item failed"
    ]
    (line,) = item_failed
    assert line["traceback"].startswith("Traceback (most recent call last):\n")
    assert "DriverFailed" in line["traceback"].splitlines()[-1]


@pytest.mark.services
def test_fields_are_bounded_and_have_no_secret(
    recorded: tuple[Lines, Any], rabbit_url: str
) -> None:
    password = rabbit_url.partition("://")[2].partition("@")[0].partition(":")[2]
    for lines in recorded[0].values():
        for line in lines:
            for value in line["extra"].values():
                items = value if isinstance(value, list) else [value]
                assert len(items) <= MAX_VALUES
                assert all(len(str(item)) <= MAX_LENGTH for item in items)
            assert TOKEN not in json.dumps(line)
            if len(password) > 6:  # a short one, such as "guest", is part of other words
                assert password not in json.dumps(line)
