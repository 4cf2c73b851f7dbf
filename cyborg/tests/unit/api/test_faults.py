# SPDX-License-Identifier: Apache-2.0
"""Error responses: what clients see of failures, and what they do not see."""

import logging

import pytest
from webob import exc

from cyborg.api import faults
from cyborg.core import errors
from cyborg.tests.fixtures.clouds.api import ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

UUID = "02c950a2-e263-4eeb-bf72-b1d2b6e2065c"
SECRET = "mysql://root:secret@db/cyborg at /usr/lib/x.py"
PROFILE = [{"name": "p1", "groups": [{"resources:FPGA": "1"}]}]


def test_statuses_cover_all_error_kinds() -> None:
    assert set(faults.STATUSES) == set(errors.KINDS.values())
    for kind, status in faults.STATUSES.items():
        assert faults.http_status(kind("x")) == status
    assert faults.http_status(ZeroDivisionError()) == 500
    assert faults.http_status(exc.HTTPNotFound()) == 404


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.CyborgError(SECRET), 500),
        (errors.DriverFailed(SECRET), 500),
        (ZeroDivisionError(SECRET), 500),
        (KeyError(SECRET), 500),
    ],
)
def test_server_error_shows_request_id_only(
    api: ApiEnv, caplog: pytest.LogCaptureFixture, error: Exception, status: int
) -> None:
    api.conductor.error = error
    with caplog.at_level(logging.WARNING):
        answer = api.call("POST", "/v2/device_profiles", PROFILE)
    assert answer.status_int == status
    assert answer.headers["X-Openstack-Request-Id"] in error_message(answer)
    assert "secret" not in answer.text
    assert "/usr" not in answer.text
    assert "secret" in caplog.text
    # The service that raised an error of ours has logged its traceback.
    has_traceback = not isinstance(error, errors.CyborgError)
    assert any(record.exc_info for record in caplog.records) is has_traceback


@pytest.mark.parametrize(("error", "status"), [(errors.Unavailable, 503), (errors.TimedOut, 504)])
def test_administrator_is_told_which_component_is_unavailable(
    api: ApiEnv, error: type[errors.CyborgError], status: int
) -> None:
    api.conductor.error = error("Placement at http://placement does not answer")
    answer = api.call("POST", "/v2/device_profiles", PROFILE)
    assert answer.status_int == status
    assert ": Placement at http://placement does not answer (request" in error_message(answer)
    assert answer.headers["X-Openstack-Request-Id"] in error_message(answer)
    for_member = faults.client_message(error("Placement is away"), status, "req-1")
    assert "Placement" not in for_member
    assert "(request req-1)" in for_member


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.Invalid("groups: wrong"), 400),
        (errors.Forbidden("no"), 403),
        (errors.NotFound("none"), 404),
        (errors.NoHandle("none is free"), 409),
        (errors.Unresolved("not resolved yet"), 423),
    ],
)
def test_client_error_has_full_message(api: ApiEnv, error: errors.CyborgError, status: int) -> None:
    api.conductor.error = error
    answer = api.call("POST", "/v2/device_profiles", PROFILE)
    assert answer.status_int == status
    assert error_message(answer) == error.message


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/v2/devices/{UUID}", {"device": UUID}),
        (f"/jobs/{UUID}", {"job": UUID}),
        (f"/v2/accelerator_requests/{UUID}", {"arq": UUID}),
        (f"/v2/accelerators/{UUID}", {"accelerator": UUID}),
        (f"/v2/attachments/{UUID}", {"attachment": UUID}),
        (f"/v2/device_contexts/{UUID}", {"device_context": UUID}),
        (f"/v2/nothing/{UUID}", {}),
        ("/v2/devices/x", {}),
    ],
)
def test_failure_is_logged_with_the_object_of_its_path(
    api: ApiEnv, caplog: pytest.LogCaptureFixture, path: str, expected: dict[str, str]
) -> None:
    with caplog.at_level(logging.INFO, "cyborg.api.faults"):
        assert api.call("GET", path).status_int >= 400
    (record,) = (r for r in caplog.records if r.name == "cyborg.api.faults")
    assert record.extra == expected  # type: ignore[attr-defined]


def test_reads_work_without_conductor(api: ApiEnv) -> None:
    rows.insert_card(api.engine)
    api.conductor.error = errors.Unavailable("unavailable")
    assert len(api.get("/v2/devices")["devices"]) == 1
    assert api.conductor.calls == []


def test_database_without_tables_is_503(api: ApiEnv) -> None:
    api.engine.dispose()
    from cyborg.db import schema

    schema.metadata.drop_all(api.engine)
    answer = api.call("GET", "/v2/devices")
    assert answer.status_int == 503
    assert "dbsync" in answer.text, "this caller is an administrator"


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", f"devices/{UUID}", f"no device {UUID}; GET /v2/devices lists the known ones"),
        ("GET", "arqs", "unknown path /v2/arqs; /v2/openapi.json has the known ones"),
        (
            "POST",
            f"devices/{UUID}/enable",
            f"no device {UUID}; GET /v2/devices lists the known ones",
        ),
        (
            "GET",
            "accelerator_requests/gzip",
            "uuid: 'gzip' is not a uuid but a name, give its uuid; GET /v2/accelerator_requests "
            "lists the known ones",
        ),
        (
            "GET",
            "device_contexts/0000:3b:00.0",
            "uuid: '0000:3b:00.0' is not a uuid but the address of a device, give its "
            "uuid; GET /v2/device_contexts lists the known ones",
        ),
    ],
)
def test_wrong_object_in_a_path_is_named_with_its_list(
    api: ApiEnv, method: str, path: str, expected: str
) -> None:
    newest = {"OpenStack-API-Version": "accelerator latest"}
    answer = api.call(method, f"/v2/{path}", headers=newest)
    assert error_message(answer) == expected


@pytest.mark.parametrize("path", ["devices?hostname", "services?host", "jobs?host"])
def test_list_of_an_unknown_host_is_an_error_since_2_6(api: ApiEnv, path: str) -> None:
    path = f"/v2/{path}=compute-11"
    for host in ("compute-1", "compute-2", "rack-7"):
        rows.insert_card(api.engine, host, handles=1)
    older, newest = (
        api.call("GET", path, headers={"OpenStack-API-Version": f"accelerator {version}"})
        for version in ("2.5", "latest")
    )
    assert older.status_int == 200
    assert newest.status_int == 404
    assert error_message(newest).startswith("unknown host 'compute-11'; known are compute-1,")
    api.get(path.replace("-11", "-1"))


def test_empty_list_of_a_known_host_reads_no_other_hosts(api: ApiEnv) -> None:
    """Views ask for such lists every few seconds."""
    rows.insert_card(api.engine, "compute-1", handles=1)
    newest = {"OpenStack-API-Version": "accelerator latest"}
    with count_statements(api.engine) as count:
        answer = api.call("GET", "/v2/jobs?host=compute-1", headers=newest)
    assert answer.json == {"jobs": []}
    assert not [s for s in count.statements if "devices" in s and "WHERE" not in s]
