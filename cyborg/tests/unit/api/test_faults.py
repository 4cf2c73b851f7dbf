# SPDX-License-Identifier: Apache-2.0
"""What clients are told of failures, and what they are not."""

import logging

import pytest
from webob import exc

from cyborg.api import faults
from cyborg.core import errors
from cyborg.fixtures import rows
from cyborg.fixtures.api import ApiBed, fault

SECRET = "mysql://root:secret@db/cyborg at /usr/lib/x.py"
PROFILE = [{"name": "p1", "groups": [{"resources:FPGA": "1"}]}]


def test_every_kind_has_a_status() -> None:
    assert set(faults.STATUSES) == set(errors.KINDS.values())
    for kind, status in faults.STATUSES.items():
        assert faults.status_of(kind("x")) == status
    assert faults.status_of(ZeroDivisionError()) == 500
    assert faults.status_of(exc.HTTPNotFound()) == 404


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.CyborgError(SECRET), 500),
        (errors.DriverFailed(SECRET), 500),
        (errors.Unavailable(SECRET), 503),
        (errors.TimedOut(SECRET), 504),
        (ZeroDivisionError(SECRET), 500),
        (KeyError(SECRET), 500),
    ],
)
def test_a_fault_of_ours_shows_nothing_but_the_request(
    api: ApiBed, caplog: pytest.LogCaptureFixture, error: Exception, status: int
) -> None:
    api.line.away = error
    with caplog.at_level(logging.WARNING):
        answer = api.call("POST", "/v2/device_profiles", PROFILE)
    assert answer.status_int == status
    assert answer.headers["X-Openstack-Request-Id"] in fault(answer)
    assert "secret" not in answer.text
    assert "/usr" not in answer.text
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.Invalid("groups: wrong"), 400),
        (errors.Forbidden("no"), 403),
        (errors.NotFound("none"), 404),
        (errors.NoHandle("none is free"), 409),
        (errors.Unresolved("ask again"), 423),
    ],
)
def test_a_mistake_is_told_in_full(api: ApiBed, error: errors.CyborgError, status: int) -> None:
    api.line.away = error
    answer = api.call("POST", "/v2/device_profiles", PROFILE)
    assert answer.status_int == status
    assert fault(answer) == error.message


def test_reads_go_on_while_the_conductor_is_away(api: ApiBed) -> None:
    rows.card(api.engine)
    api.line.away = errors.Unavailable("away")
    assert len(api.get("/v2/devices")["devices"]) == 1
    assert api.line.calls == []


def test_a_database_that_is_away(api: ApiBed) -> None:
    api.engine.dispose()
    from cyborg.db import schema

    schema.metadata.drop_all(api.engine)
    answer = api.call("GET", "/v2/devices")
    assert answer.status_int == 503
    assert "dbsync" not in answer.text
