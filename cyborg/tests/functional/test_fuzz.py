# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests made from the OpenAPI document that the API serves.

Half of them are what the document allows, half break it on purpose. Whatever comes, the answer is
one that the document names, soon, and shows nothing of the inside. Names are those of real objects
now and then, so that not everything ends at a 404.
"""

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
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

from cyborg.fixtures.processes import until
from cyborg.fixtures.stack import HOST, running

LEAST = 2000
PATIENCE = 20.0  # seconds for one answer
LATEST = "accelerator latest"
VERSIONS = (None, LATEST, LATEST, LATEST, "accelerator 2.0", "accelerator 2.3", "accelerator 9.9")
SOME = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    # A request changes the world, so that the same one again may find another: nothing shrinks.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# Nothing of a stand-alone service dies in the outbox, its one card must stay, and its jobs have
# ended before anybody can cancel them.
BEYOND = {"outbox.delete", "outbox.retry", "hardware.release", "jobs.cancel"}
OFTEN = st.sampled_from([True, True, True, False])
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
INSIDE = re.compile(
    r"Traceback|\bline \d+, in |File \"|\.py\b|site-packages|/usr/|/home/|/tmp/|/var/|sqlite|"
    r"sqlalchemy|pymysql|psycopg|oslo[._]|SELECT .*FROM|INSERT INTO|UPDATE .* SET|DELETE FROM",
    re.IGNORECASE,
)


class World:
    """The objects there are, by the part of the path that names them; made anew when all went."""

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
        """Make one request that is well and return its JSON."""
        url = f"{self.endpoint}/v2/{path}"
        answer = self._session.request(method, url, json=body, timeout=PATIENCE)
        assert answer.ok, answer.text
        return answer.json() if answer.content else None

    def refresh(self, *, bound: bool) -> None:
        """Have profiles with and without requests, an attribute, a look; one request may be bound.

        A card of which something is bound takes no image.
        """
        for arq in self.ask("GET", "accelerator_requests")["arqs"]:
            self.ask("DELETE", f"accelerator_requests?arqs={arq['uuid']}")
        for note in self.ask("GET", "attributes")["attributes"]:
            self.ask("DELETE", f"attributes/{note['uuid']}")
        names = [f"fuzz-{uuid4().hex}" for _ in range(3)]
        groups = [{"resources:FPGA": "1", "trait:CUSTOM_FAKE_DEVICE": "required"}]
        for name in names:
            self.ask("POST", "device_profiles", {"name": name, "groups": groups})
        (card,) = self.ask("GET", "deployables")["deployables"]
        self.ask("POST", f"devices/{card['device_id']}/enable")
        wish = {"device_profile_name": names[0]}
        first, *arqs = [
            self.ask("POST", "accelerator_requests", wish)["arqs"][0]["uuid"] for _ in range(4)
        ]
        note = {"deployable_id": card["uuid"], "key": "k", "value": "v"}
        self.names = {
            "accelerator_requests": [first, *arqs],
            "attributes": [self.ask("POST", "attributes", note)["uuid"]],
            "deployables": [card["uuid"]],
            "device_profiles": names,
            "devices": [card["device_id"]],
            "discoveries": [self.ask("POST", "discoveries", {})["uuid"]],
            "outbox": [str(uuid4())],
        }
        instance = str(uuid4())
        values = {
            "/hostname": HOST,
            "/device_rp_uuid": card["rp_uuid"],
            "/instance_uuid": str(uuid4()),
        }
        patch = [{"op": "add", "path": path, "value": value} for path, value in values.items()]
        if bound:
            # An image that is being loaded keeps the card closed for a moment.
            until("the card is open", lambda: self._bind(first, patch), PATIENCE)
        audits = self.ask("GET", "audits")["audits"] or [self.ask("POST", "audits", {})]
        until("the second driver is there", self._installed, PATIENCE)
        held = self.ask("GET", "accelerators")["accelerators"]
        self.names |= {
            "accelerators": [row["uuid"] for row in held if row["arq_uuid"] or not bound][:1],
            "audits": [audits[0]["uuid"]],
            # Not the one that manages the card, of which something must be there to be bound.
            "drivers": ["generic"],
            "jobs": [job["uuid"] for job in self.ask("GET", "jobs?limit=1")["jobs"]],
        }
        patch[2] = patch[2] | {"value": instance}
        program = {"path": "/program", "op": "replace", "value": [{"image_uuid": instance}]}
        self.bodies = {
            ("POST", "/accelerator_requests"): wish,
            ("PATCH", "/accelerator_requests"): {arqs[0]: patch},
            ("PATCH", "/accelerator_requests/{uuid}"): {arqs[1]: patch},
            ("PATCH", "/accelerators/{uuid}"): {"name": "mine", "tags": ["a"]},
            ("POST", "/attributes"): note | {"key": "other"},
            ("PATCH", "/deployables/{uuid}/program"): [program],
            ("PATCH", "/deployables/{uuid}/program/{again}"): [program],
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

    def _installed(self) -> bool:
        """Have a driver that manages nothing; a change of it may be under way."""
        places = self.ask("GET", "drivers/generic")["hosts"]
        if any(place["wish"] == "enabled" and place["applied"] for place in places):
            return True
        self._session.post(f"{self.endpoint}/v2/drivers", json={"driver": "generic"})
        return False

    def _bind(self, arq: str, patch: Any) -> bool:
        url = f"{self.endpoint}/v2/accelerator_requests"
        return self._session.patch(url, json={arq: patch}, timeout=PATIENCE).status_code == 202

    def settle(self, case: Case, data: st.DataObject) -> None:
        """Put real names into a request here and there, and sometimes a whole body that is well."""
        known = st.sampled_from(self.names.get(case.path.split("/")[1], [str(uuid4())]))
        for name in case.path_parameters or {}:
            if data.draw(OFTEN):
                case.path_parameters[name] = data.draw(known)
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
    """Return JSON in which one piece is another."""
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
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A service of its own: what is fuzzed is closed, deleted and bound."""
    with running(tmp_path_factory.mktemp("fuzz")) as stack:
        made = World(stack.endpoint)
        yield made
        made.close()


class Tally:
    """How many requests there were, what they were answered, and how long the slowest took."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.by_operation: dict[str, Counter[int]] = {}
        self.slowest = 0.0

    def note(self, operation: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self.statuses[status] += 1
        self.by_operation.setdefault(operation, Counter())[status] += 1
        self.slowest = max(self.slowest, seconds)

    def told(self) -> str:
        """Return it in a line."""
        statuses = ", ".join(f"{n} x {status}" for status, n in sorted(self.statuses.items()))
        return f"{self.statuses.total()} requests, slowest {self.slowest:.2f} s: {statuses}"


def check(case: Case, answer: Any, told: set[int]) -> None:
    """Hold an answer against the document and against what nobody may see."""
    case.validate_response(answer, checks=[not_a_server_error])
    assert answer.status_code in told, answer.text
    shown = answer.content.decode()
    assert not INSIDE.search(shown), shown
    if answer.status_code >= 400:
        inner = json.loads(answer.json()["error_message"])
        assert inner["faultcode"] == "Client"
        assert inner["faultstring"]
    if case.headers.get("OpenStack-API-Version") == LATEST:
        # What the document shows is the newest microversion.
        case.validate_response(answer, checks=[content_type_conformance])
        if answer.status_code != 405:
            case.validate_response(answer, checks=[response_schema_conformance])


def requests_of(operation: Any, mode: GenerationMode, ask: Callable[..., None]) -> None:
    """Call ``ask`` with cases of one operation, the same in every run."""

    @SOME
    @given(operation.as_strategy(generation_mode=mode), st.data())
    def run(case: Case, data: st.DataObject) -> None:
        ask(case, data)

    run()


@pytest.mark.timeout(600)
def test_whatever_the_document_allows_or_forbids(
    world: World,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    record_property: Any,
) -> None:
    document = requests.get(f"{world.endpoint}/v2/openapi.json", timeout=PATIENCE).json()
    schema = schemathesis.openapi.from_dict(document)
    tally = Tally()
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == sum(map(len, document["paths"].values()))
    with requests.Session() as session:
        for operation in operations:
            described = document["paths"][operation.path][operation.method]
            told = {int(status) for status in described["responses"]}
            # A name with a slash in it is another path.
            told |= {404, 405} if "{" in operation.path else set()

            def ask(
                case: Case,
                data: st.DataObject,
                told: set[int] = told,
                name: str = described["operationId"],
            ) -> None:
                world.settle(case, data)
                begun = time.monotonic()
                answer = case.call(world.endpoint + "/v2", session=session, timeout=PATIENCE)
                tally.note(name, answer.status_code, time.monotonic() - begun)
                check(case, answer, told)

            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                world.refresh(bound="program" not in operation.path)
                requests_of(operation, mode, ask)
    record_property("told", tally.told())
    with capsys.disabled():
        print(f"\n{tally.told()}")  # noqa: T201
    assert tally.statuses.total() >= LEAST
    # What a client does wrong is no error of the service: nobody can fill its log with tracebacks.
    # Other tests leave threads of the messaging driver behind, which look for a broker for ever;
    # the stand-alone service has none to look for.
    ours = [record for record in caplog.records if not record.name.startswith("oslo.messaging._d")]
    assert [record for record in ours if record.levelno >= logging.ERROR] == []
    # It went deep, not only to the doormat: every operation was once done.
    never = [name for name, seen in tally.by_operation.items() if not any(s < 400 for s in seen)]
    assert set(never) <= BEYOND, tally.by_operation
