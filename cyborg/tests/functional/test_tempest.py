# SPDX-License-Identifier: Apache-2.0
"""Tests of tempest against a cloud with keystone; ``tools/tempest`` runs only these.

They are those of cyborg-tempest-plugin and of the plugin of this package.
"""

import io
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from oslo_utils import timeutils

from cyborg.db import schema
from cyborg.tests.fixtures.clouds import tempest
from cyborg.tests.fixtures.clouds.keystone_cloud import KeystoneCloud
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of
from cyborg.tests.fixtures.databases.placement import Node
from cyborg.tests.fixtures.device_sets.host import SetHost
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample

DEVIATION = next(name for name in tempest.DEVIATIONS if name.endswith("is_null"))
EMPTY = '{"faultstring": "name must be a non-empty string"}'
WAYS = {"by an administrator": False, "by the least role": True}

# The results of tempest are parsed by libraries that it installs.
pytestmark = pytest.mark.requires("tempest")


@pytest.fixture
def set_host(keystone_cloud: KeystoneCloud) -> Iterator[SetHost]:
    """Yield a host with device sets, and remove it at the end: others use the cloud too."""
    node = Node(keystone_cloud.placement)
    with engine_of(keystone_cloud.database) as engine:
        yield SetHost(engine, node)
        (agent,) = rows.read(engine, schema.services, host=node.name)
        rows.update(engine, schema.services, agent["id"], down_since=timeutils.utcnow())
    answer = keystone_cloud.call("admin", "DELETE", f"/v2/hosts/{node.name}")
    assert answer.status_code == 200, answer.text
    wait_until("the host has no devices in Placement", lambda: not node.children())
    assert node.client.delete(f"/resource_providers/{node.uuid}").status_code == 204


@pytest.mark.services
@pytest.mark.parametrize("auth", sample(WAYS, "by an administrator"))
def test_tempest_plugin_passes(
    keystone_cloud: KeystoneCloud, tmp_path: Path, record_property: Any, auth: str
) -> None:
    before = len(keystone_cloud.answers())
    results = tempest.run(keystone_cloud, tmp_path, personas=WAYS[auth])
    record_property("summary", f"tempest, called {auth}: {tempest.summarize(results)}")
    record_property("table", tempest.format_results(results))
    unexpected = tempest.unexpected(results)
    assert not unexpected, "\n".join(f"{result.test}\n{result.reason}" for result in unexpected)
    if WAYS[auth]:
        assert "skipped" not in {result.outcome for result in results}
    answers = keystone_cloud.answers()[before:]
    assert answers
    assert [answer for answer in answers if answer.status >= 500] == []


@pytest.mark.services
def test_plugin_of_this_package_passes(
    keystone_cloud: KeystoneCloud, set_host: SetHost, tmp_path: Path, record_property: Any
) -> None:
    before = len(keystone_cloud.answers())
    results = tempest.run(keystone_cloud, tmp_path, prefix=tempest.EXTENSIONS)
    table = tempest.format_results(results)
    record_property("summary", f"tempest, extensions: {tempest.summarize(results)}")
    record_property("table", table)
    assert {result.outcome for result in results} == {"passed"}, table
    answers = keystone_cloud.answers()[before:]
    assert [answer for answer in answers if answer.status >= 500] == []


@pytest.mark.parametrize(
    ("status", "message", "outcome"),
    [
        ("fail", f"BadRequest: x\nDetails: {EMPTY}", "deviates"),
        ("fail", 'BadRequest: x\nDetails: {"faultstring": "groups must be a list"}', "failed"),
        ("fail", f"Conflict: x\nDetails: {EMPTY}", "failed"),
        ("success", "", "passed"),
    ],
)
def test_known_deviation_requires_its_status_and_message(
    status: str, message: str, outcome: str
) -> None:
    (result,) = tempest.read(_stream(DEVIATION, status, f"tempest.lib.exceptions.{message}"))
    assert (result.test, result.outcome) == (DEVIATION, outcome)
    unexpected_tests = {wrong.test for wrong in tempest.unexpected([result])}
    assert (DEVIATION in unexpected_tests) == (outcome != "deviates")
    # The two others did not occur.
    assert unexpected_tests >= set(tempest.DEVIATIONS) - {DEVIATION}


def test_failure_and_unexpected_skip_are_unexpected() -> None:
    for status, reason in (("fail", "boom"), ("skip", "no device")):
        (result,) = tempest.read(_stream(f"{tempest.TESTS}x", status, reason))
        assert result in tempest.unexpected([result])
    roles = "SRBAC tests require cyborg_policy.enforce_new_defaults = True"
    (result,) = tempest.read(_stream(f"{tempest.TESTS}x", "skip", roles))
    assert result not in tempest.unexpected([result])


def _stream(test: str, status: str, text: str) -> bytes:
    import subunit

    out = io.BytesIO()
    stream = subunit.StreamResultToBytes(out)
    now = datetime.now(UTC)
    stream.status(test_id=test, test_status="exists")
    stream.status(test_id=test, test_status="inprogress", timestamp=now)
    stream.status(
        test_id=test,
        test_status=status,
        timestamp=now,
        file_name="reason" if status == "skip" else "traceback",
        file_bytes=text.encode(),
        mime_type="text/plain; charset=utf8",
        eof=True,
    )
    return out.getvalue()


def write_packet(stream: io.BytesIO, test: str) -> None:
    """Write the result of a test."""
    from subunit.v2 import StreamResultToBytes

    StreamResultToBytes(stream).status(test_id=test, test_status="success")


def test_text_between_packets_is_an_error() -> None:
    stream = io.BytesIO()
    write_packet(stream, "first")
    assert [result.test for result in tempest.read(stream.getvalue())] == ["first"]
    stream.write(b"Traceback\n")
    write_packet(stream, "second")
    with pytest.raises(AssertionError, match="Traceback"):
        tempest.read(stream.getvalue())
