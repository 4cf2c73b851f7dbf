# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests generated from the OpenAPI document of the API.

Half of them are valid, half are invalid. Every answer must be documented, fast, and show no
internals. Some names are those of real objects, so that not every request ends with 404.

A part of the requests is written by hand and sent to gunicorn: null bodies, malformed chunks, and
bodies that end early or arrive slowly.
"""

import json
import logging
import os
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from cyborg.api import controller as resource
from cyborg.api import routes
from cyborg.tests.fixtures.clouds.standalone import HOST, running
from cyborg.tests.fixtures.clouds.web_servers import Server, gunicorn, serving
from cyborg.tests.fixtures.machine.processes import wait_until

pytestmark = pytest.mark.matrix
AnyCase = Case[Any]
REQUESTS = int(os.environ.get("CYBORG_TEST_FUZZ_REQUESTS", "1000"))
ENOUGH = 1000  # With fewer requests, not every operation has to succeed.
MORE = 60  # further valid requests to an operation that has not succeeded
RAW = REQUESTS // 5  # written by hand
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
PATIENCE = 120.0  # seconds for one answer
LATEST = "accelerator latest"
VERSIONS = (None, LATEST, LATEST, LATEST, "accelerator 2.0", "accelerator 2.3", "accelerator 9.9")
SOME = settings(
    deadline=None,
    derandomize=True,
    database=None,
    # Requests change the state of the service, so shrinking would not be reproducible.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# A standalone service has no dead letters, its only card must stay and has no layouts, and its jobs
# end before they can be cancelled. It has no Nova.
BEYOND = {
    *("outbox.delete", "outbox.retry", "hardware.release", "jobs.cancel", "services.delete"),
    *("devices.set_layout", "devices.maintain", "devices.end_maintenance"),
    *("hosts.forget_host", "device_contexts.bind"),
    *(f"attachments.{name}" for name in ("create", "get", "delete", "delete_of_instance")),
}
OFTEN = st.sampled_from([True, True, True, False])
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(-1e9, 1e9), st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
INSIDE = re.compile(
    r"Traceback|\bline \d+, in |File \"|\.py\b|site-packages|/usr/|/home/|/tmp/|/var/|sqlite|"
    r"sqlalchemy|pymysql|psycopg|oslo[._]|SELECT .*FROM|INSERT INTO|UPDATE .* SET|DELETE FROM",
    re.IGNORECASE,
)


class ApiObjects:
    """The existing objects by their path segment; they are recreated when all are deleted."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.names: dict[str, list[str]] = {}
        self.bodies: dict[tuple[str, str], Any] = {}
        self.queries: dict[str, str] = {}
        self._session = requests.Session()
        self._session.headers["OpenStack-API-Version"] = LATEST

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON of a request that succeeds; a context may expire before it is deleted."""
        url = f"{self.endpoint}/v2/{path}"
        answer = self._session.request(method, url, json=body, timeout=PATIENCE)
        assert answer.ok or (method, answer.status_code) == ("DELETE", 404), answer.text
        return answer.json() if answer.content else None

    def refresh(self, *, bound: bool) -> None:
        """Create profiles with and without ARQs, an attribute, a discovery; one ARQ may be bound.

        A card with a bound handle accepts no image.
        """
        for arq in self.ask("GET", "accelerator_requests")["arqs"]:
            self.ask("DELETE", f"accelerator_requests?arqs={arq['uuid']}")
        for note in self.ask("GET", "attributes")["attributes"]:
            self.ask("DELETE", f"attributes/{note['uuid']}")
        for context in self.ask("GET", "device_contexts?state=unbound")["device_contexts"]:
            self.ask("DELETE", f"device_contexts/{context['uuid']}")
        names = [f"fuzz-{uuid4().hex}" for _ in range(3)]
        groups = [{"resources:FPGA": "1", "trait:CUSTOM_FAKE_DEVICE": "required"}]
        for name in names:
            self.ask("POST", "device_profiles", {"name": name, "groups": groups})
        (card,) = self.ask("GET", "deployables")["deployables"]
        self.ask("POST", f"devices/{card['device_id']}/enable")
        request = {"device_profile_name": names[0]}
        first, *arqs = [
            self.ask("POST", "accelerator_requests", request)["arqs"][0]["uuid"] for _ in range(4)
        ]
        context = {"resources": {"FPGA": 1}, "requires": ["FAKE_DEVICE"], "config_data": {"k": "v"}}
        note = {"deployable_id": card["uuid"], "key": "k", "value": "v"}
        self.names = {
            "accelerator_requests": [first, *arqs],
            "attributes": [self.ask("POST", "attributes", note)["uuid"]],
            "deployables": [card["uuid"]],
            "device_contexts": [self.ask("POST", "device_contexts", context)["uuid"]],
            "device_profiles": names,
            "devices": [card["device_id"]],
            "discoveries": [self.ask("POST", "discoveries", {})["uuid"]],
            "outbox": [str(uuid4())],
        }
        instance = str(uuid4())
        values = {"/hostname": HOST, "/device_rp_uuid": card["rp_uuid"]}
        values["/instance_uuid"] = str(uuid4())
        patch = [{"op": "add", "path": path, "value": value} for path, value in values.items()]
        if bound:
            # An image that is being loaded keeps the card closed for a moment.
            wait_until("the card is open", lambda: self._bind(first, patch), PATIENCE)
        audits = self.ask("GET", "audits")["audits"] or [self.ask("POST", "audits", {})]
        wait_until("the second driver is there", self._installed, PATIENCE)
        accelerators = self.ask("GET", "accelerators")["accelerators"]
        owned = [row["uuid"] for row in accelerators if row["arq_uuid"] or not bound]
        self.names |= {
            "accelerators": owned[:1],
            "audits": [audits[0]["uuid"]],
            "drivers": ["generic"],  # not the backend of the card, which is needed for binds
            "jobs": [job["uuid"] for job in self.ask("GET", "jobs?limit=1")["jobs"]],
        }
        patch[2] = patch[2] | {"value": instance}
        program = {"path": "/program", "op": "replace", "value": [{"image_uuid": instance}]}
        lease = {"hostname": HOST, "mappings": {"0": [card["rp_uuid"]]}, "lease_seconds": 1}
        self.bodies = {
            ("POST", "/accelerator_requests"): request,
            ("PATCH", "/accelerator_requests"): {arqs[0]: patch},
            ("PATCH", "/accelerator_requests/{uuid}"): {arqs[1]: patch},
            ("PATCH", "/accelerators/{uuid}"): {"name": "mine", "tags": ["a"]},
            ("POST", "/attachments"): {"instance_uuid": instance, "device_profile": names[0]},
            ("POST", "/attributes"): note | {"key": "other"},
            ("PATCH", "/deployables/{uuid}/program"): [program],
            ("PATCH", "/deployables/{uuid}/program/{suffix}"): [program],
            ("POST", "/device_contexts"): context,
            ("PATCH", "/device_contexts/{uuid}"): {"name": "n", "config_data": {"k": "w"}},
            ("POST", "/device_contexts/{uuid}/bind"): {"hostname": HOST, "instance_uuid": instance},
            ("POST", "/device_contexts/{uuid}/pre_bind"): lease,
            ("POST", "/device_profiles"): [{"name": f"{names[0]}-more", "groups": groups}],
            ("POST", "/discoveries"): {"host": HOST, "driver": "fake"},
            ("POST", "/drivers"): {"driver": "generic", "hosts": [HOST], "config": {}},
            ("PATCH", "/drivers/{key}"): {"hosts": [HOST], "reload": True},
            ("POST", "/hardware"): {"host": HOST, "address": "0000:00:00.0", "backend": "generic"},
        }
        self.queries = {
            "arqs": ",".join(arqs[1:]),
            "deployable_id": card["uuid"],
            "instance": instance,
            "marker": names[0],
            "sort_key": "uuid",
            "value": names[1],
        }

    def find_list(self, path: str) -> str | None:
        """Return the address of a list of all objects or of one object; None for other paths."""
        collection, *rest = path.removeprefix("/").split("/")
        if not rest:
            return collection
        if len(rest) == 1 or collection not in self.names:
            return None
        return "/".join([collection, self.names[collection][0], *rest[1:]])

    def patch(self, path: str) -> bool:
        """Send a valid change of the card or of a driver; return whether it was accepted."""
        names = {"uuid": self.names["deployables"][0], "key": self.names["drivers"][0]}
        url = f"{self.endpoint}/v2{path.format(**names)}"
        return self._session.patch(url, json=self.bodies["PATCH", path], timeout=PATIENCE).ok

    def _installed(self) -> bool:
        """Install a driver that manages no device; a change of it may be in progress."""
        places = self.ask("GET", "drivers/generic")["hosts"]
        if any(place["desired_status"] == "enabled" and place["applied"] for place in places):
            return True
        self._session.post(f"{self.endpoint}/v2/drivers", json={"driver": "generic"})
        return False

    def _bind(self, arq: str, patch: Any) -> bool:
        url = f"{self.endpoint}/v2/accelerator_requests"
        return self._session.patch(url, json={arq: patch}, timeout=PATIENCE).status_code == 202

    def insert_real_names(self, case: AnyCase, data: st.DataObject) -> None:
        """Insert real names into a request at random, and sometimes a valid body."""
        real_names = st.sampled_from(self.names.get(case.path.split("/")[1], [str(uuid4())]))
        for name in case.path_parameters or {}:
            if data.draw(OFTEN):
                case.path_parameters[name] = data.draw(real_names)
        for name in case.query or {}:
            if name in self.queries and data.draw(OFTEN):
                case.query[name] = self.queries[name]
        case.headers.pop("OpenStack-API-Version", None)
        if version := data.draw(st.sampled_from(VERSIONS)):
            case.headers["OpenStack-API-Version"] = version
        body = self.bodies.get((case.method, case.path))
        if body is not None and data.draw(st.booleans()):
            case.body = body if data.draw(st.booleans()) else spoilt(body, data)
            case.media_type = "application/json"
            if case.path == "/accelerator_requests/{uuid}" and isinstance(body, dict):
                case.path_parameters["uuid"] = next(iter(body))


def spoilt(value: Any, data: st.DataObject) -> Any:
    """Return JSON with one corrupted part."""
    if not value or not isinstance(value, list | dict) or not data.draw(OFTEN):
        return data.draw(ANYTHING)
    if isinstance(value, list):
        place = data.draw(st.integers(0, len(value) - 1))
        return [spoilt(v, data) if n == place else v for n, v in enumerate(value)]
    key = data.draw(st.sampled_from(sorted(value)))
    if data.draw(st.integers(0, 5)) == 0:
        return {name: item for name, item in value.items() if name != key}
    return value | {key: spoilt(value[key], data)}


@pytest.fixture(scope="module")
def api_objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiObjects]:
    """Yield a separate service, whose objects the requests change."""
    with running(tmp_path_factory.mktemp("fuzz")) as stack:
        objects = ApiObjects(stack.endpoint)
        yield objects
        objects.close()


class Statistics:
    """The number of requests by answer, and the time of the slowest."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.by_operation: dict[str, Counter[int]] = {}
        self.slowest = 0.0
        self.changes = 0  # accepted requests that may have changed an object

    def note(self, operation: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self.statuses[status] += 1
        self.by_operation.setdefault(operation, Counter())[status] += 1
        self.slowest = max(self.slowest, seconds)

    def has_succeeded(self, operation: str) -> bool:
        """Return whether an answer of an operation was a success."""
        return any(status < 400 for status in self.by_operation.get(operation, ()))

    def summarize(self) -> str:
        """Return the statistics as one line."""
        statuses = ", ".join(f"{n} x {status}" for status, n in sorted(self.statuses.items()))
        return f"{self.statuses.total()} requests, slowest {self.slowest:.2f} s: {statuses}"


def check(case: AnyCase, answer: Any, documented: set[int]) -> None:
    """Check an answer against the document, and for internals."""
    case.validate_response(answer, checks=[not_a_server_error])
    assert answer.status_code in documented, answer.text
    text = answer.content.decode()
    assert not INSIDE.search(text), text
    if answer.status_code >= 400:
        inner = json.loads(answer.json()["error_message"])
        assert inner["faultcode"] == "Client"
        assert inner["faultstring"]
    if case.headers.get("OpenStack-API-Version") == LATEST:
        # The document describes the newest microversion.
        case.validate_response(answer, checks=[content_type_conformance])
        if answer.status_code != 405:
            case.validate_response(answer, checks=[response_schema_conformance])


def requests_of(operation: Any, mode: GenerationMode, count: int, ask: Callable[..., None]) -> None:
    """Call ``ask`` with cases of one operation, the same in every run."""

    @settings(SOME, max_examples=count)
    @given(operation.as_strategy(generation_mode=mode), st.data())
    def run(case: AnyCase, data: st.DataObject) -> None:
        ask(case, data)

    run()


@pytest.mark.timeout(1800 + REQUESTS // 5)
def test_random_openapi_requests_get_no_500(
    api_objects: ApiObjects,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    record_property: Any,
) -> None:
    document = requests.get(f"{api_objects.endpoint}/v2/openapi.json", timeout=PATIENCE).json()
    schema = schemathesis.openapi.from_dict(document)
    tally = Statistics()
    results: Iterator[Any] = schema.get_all_operations()
    operations = [result.ok() for result in results]
    assert len(operations) == sum(map(len, document["paths"].values()))
    # Some strategies have fewer values than that.
    count = 1 + (REQUESTS - RAW) * 11 // 10 // (len(operations) * len(MODES))
    state: bool | None = None  # of the last refresh: bound or not
    with requests.Session() as session:
        for operation in operations:
            described = document["paths"][operation.path][operation.method]
            documented = {int(status) for status in described["responses"]}
            # A name with a slash in it is another path.
            documented |= {404, 405} if "{" in operation.path else set()

            def ask(
                case: AnyCase,
                data: st.DataObject,
                documented: set[int] = documented,
                name: str = described["operationId"],
            ) -> None:
                api_objects.insert_real_names(case, data)
                begun = time.monotonic()
                answer = case.call(api_objects.endpoint + "/v2", session=session, timeout=PATIENCE)
                tally.note(name, answer.status_code, time.monotonic() - begun)
                tally.changes += case.method != "GET" and answer.status_code < 400
                check(case, answer, documented)

            if operation.method == "get" and state is None:
                api_objects.refresh(bound=(state := True))
            if operation.method == "get" and (path := api_objects.find_list(operation.path)):
                # Each list has many parameters, and by chance one of them is always wrong.
                begun = time.monotonic()
                api_objects.ask("GET", path)
                tally.note(described["operationId"], 200, time.monotonic() - begun)
            if "program" in operation.path or described["operationId"] == "drivers.update":
                # On a busy machine, all valid requests may find an earlier change in progress.
                begun = time.monotonic()
                api_objects.refresh(bound=False)
                state = None
                path = operation.path.removesuffix("/{suffix}")
                wait_until("it is accepted", partial(api_objects.patch, path), PATIENCE)
                tally.note(described["operationId"], 202, time.monotonic() - begun)
            bound = "program" not in operation.path
            for mode in MODES:
                if state != bound:
                    api_objects.refresh(bound=bound)
                before = tally.changes
                requests_of(operation, mode, count, ask)
                # Reads and rejected requests leave the objects as they are.
                state = bound if tally.changes == before else None
            name = described["operationId"]
            if REQUESTS >= ENOUGH and name not in BEYOND and not tally.has_succeeded(name):
                # Each new operation lowers the number of requests to each one.
                api_objects.refresh(bound=bound)
                state = None
                requests_of(operation, GenerationMode.POSITIVE, MORE, ask)
    record_property("summary", tally.summarize())
    with capsys.disabled():
        print(f"\n{tally.summarize()}")  # noqa: T201
    assert tally.statuses.total() >= REQUESTS - RAW
    # A client error is not an error of the service: clients cannot fill the log with tracebacks.
    # Other tests leave threads of the messaging driver that search for a broker without end; the
    # standalone service has no broker.
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record for record in errors if not record.name.startswith("oslo.messaging._d")] == []
    unsuccessful = {name for name in tally.by_operation if not tally.has_succeeded(name)}
    assert REQUESTS < ENOUGH or unsuccessful <= BEYOND, tally.by_operation


# None of them is valid for any operation.
BAD_JSON = (
    *(b"null", b"[null]", b"[[null]]", b'{"?":null}', b"0", b"true", b'"null"', b"[]", b"1e999"),
    *(b"[" * 5000, b'{"a":' * 500 + b"null" + b"}" * 500, b"NaN", b'"\\ud800"', b"\xff"),
    b"9" * 5000,
)
BAD_CHUNKS = (
    *(b"zz\r\n{}\r\n0\r\n\r\n", b"2\r\n{}XX0\r\n\r\n", b"-1\r\n\r\n", b"\r\n\r\n"),
    b"0x2\r\n{}\r\n",
    *(b"2;a=\rb\r\n{}\r\n", b"f" * 40 + b"\r\n{}", b"2\n{}\n0\n\n", b"5\r\n{}\r\n0\r\n\r\nXXXX"),
    *(b"2\r\n{}\r\n0\r\nbad trailer\r\n\r\n", b"2" * 70_000, b" 2\r\n{}\r\n"),
)
# The share of each kind of raw requests in per cent.
SHARES = {
    **{"json": 30, "chunked json": 20, "chunk": 30, "length": 6, "early end": 8},
    **{"slow": 3, "slow chunk": 3},
}
PAUSE = 0.3  # seconds between two bytes of a slow body


class RawMaker:
    """Factory of raw requests: lists of pieces, with a pause before all but the first."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        table = routes.build_routes(resource.ApiContext.__new__(resource.ApiContext))
        self._routes = [
            (method, path)
            for path, methods in table.items()
            for method, controller in methods.items()
            if controller.operation.body is not None
        ]

    def make(self, kind: str | None = None) -> tuple[str, list[bytes]]:
        """Return a kind, by default a random one, and the pieces."""
        kind = self._chance.choices([*SHARES], [*SHARES.values()])[0] if kind is None else kind
        method, path = self._chance.choice(self._routes)
        path = re.sub(r"\*", lambda _: str(uuid4()), path)
        head = (
            f"{method} /v2/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"OpenStack-API-Version: {LATEST}\r\nContent-Type: application/json\r\n"
        ).encode()
        body = self._chance.choice(BAD_JSON)
        length = b"Content-Length: %d\r\n\r\n"
        chunked = b"Transfer-Encoding: chunked\r\n\r\n"
        match kind:
            case "json":
                return kind, [head + length % len(body) + body]
            case "chunked json":
                return kind, [head + chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)]
            case "chunk":
                return kind, [head + chunked + self._chance.choice(BAD_CHUNKS)]
            case "length":
                value = self._chance.choice(
                    [b"-1", b"1e3", b"9" * 30, b"2, 3", b"x", b"0" * 25 + b"9"]
                )
                return kind, [head + b"Content-Length: " + value + b"\r\n\r\n{}"]
            case "early end":
                return kind, [head + length % (len(body) + 9) + body]
            case "slow":
                return kind, [head + length % 1000, *[b" "] * 50]
            case _:
                return kind, [head + chunked, *[b"1\r\n \r\n"] * 50]


def converse(server: Server, kind: str, pieces: list[bytes]) -> tuple[int, float]:
    """Send the pieces; return the status of the answer and the seconds it took."""
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        try:
            for number, piece in enumerate(pieces):
                connection.sendall(piece)
                if number:
                    time.sleep(PAUSE)
            if not kind.startswith("slow"):
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            # The answer was already sent.
            assert kind != "json"
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            assert answer, kind
    status = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
    assert status, (kind, pieces[0], answer)
    assert not INSIDE.search(answer.decode(errors="replace")), answer
    return int(status[1]), time.monotonic() - begin


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(gunicorn, tmp_path_factory.mktemp("raw"), {"body_timeout": 1}) as web_server:
        yield web_server


@pytest.mark.timeout(900 + REQUESTS // 5)
def test_null_malformed_and_slow_bodies_get_a_4xx(
    server: Server, capsys: pytest.CaptureFixture[str], record_property: Any
) -> None:
    maker = RawMaker(seed=10)
    tally = Statistics()
    with ThreadPoolExecutor(8) as pool:
        # At least one of each kind.
        malformed_requests = [maker.make(kind) for kind in SHARES]
        malformed_requests += [maker.make() for _ in range(RAW - len(SHARES))]
        answers = pool.map(lambda one: (one[0], *converse(server, *one)), malformed_requests)
        for kind, status, seconds in answers:
            tally.note(kind, status, seconds)
    record_property("summary", tally.summarize())
    with capsys.disabled():
        print(f"\n{tally.summarize()}: {tally.by_operation}")  # noqa: T201
    assert tally.statuses.total() == RAW
    assert [status for status in tally.statuses if not 400 <= status < 500] == []
    assert [set(tally.by_operation[kind]) for kind in ("slow", "slow chunk")] == [{408}, {408}]
    assert tally.slowest < PATIENCE
    assert "Traceback" not in (log := server.log.read_text(errors="replace"))
    assert " ERROR " not in log
