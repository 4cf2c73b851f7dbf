# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests generated from the OpenAPI document of the API.

Half of them are valid, half are invalid. Every answer must be documented, fast, and show no
internals. Some names are those of real objects, so that not every request ends with 404.
``test_fuzz_bodies.py`` sends the requests that this document cannot describe.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from cyborg.tests.fixtures.clouds.standalone import running
from cyborg.tests.fixtures.fuzz.answers import (
    INTERNALS,
    LATEST,
    PATIENCE,
    RAW,
    REQUESTS,
    Statistics,
)
from cyborg.tests.fixtures.fuzz.api_objects import AnyCase, ApiObjects
from cyborg.tests.fixtures.machine.processes import wait_until

pytestmark = pytest.mark.matrix
ENOUGH = 1000  # With fewer requests, not every operation has to succeed.
MORE = 60  # further valid requests to an operation that has not succeeded
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
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


@pytest.fixture(scope="module")
def api_objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiObjects]:
    """Yield a separate service, whose objects the requests change."""
    with running(tmp_path_factory.mktemp("fuzz")) as stack:
        objects = ApiObjects(stack.endpoint)
        yield objects
        objects.close()


def check(case: AnyCase, answer: Any, documented: set[int]) -> None:
    """Check an answer against the document, and for internals."""
    case.validate_response(answer, checks=[not_a_server_error])
    assert answer.status_code in documented, answer.text
    text = answer.content.decode()
    assert not INTERNALS.search(text), text
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
