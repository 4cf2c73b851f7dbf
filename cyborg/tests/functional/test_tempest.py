# SPDX-License-Identifier: Apache-2.0
"""cyborg-tempest-plugin against a cloud with a keystone; ``tools/tempest`` runs this alone."""

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cyborg.fixtures import tempest
from cyborg.fixtures.keystone_cloud import KeystoneCloud

DEVIATION = next(name for name in tempest.DEVIATIONS if name.endswith("is_null"))
EMPTY = '{"faultstring": "name must be a non-empty string"}'
WAYS = {"by an administrator": False, "by the least role": True}


@pytest.mark.services
@pytest.mark.parametrize("way", WAYS)
def test_plugin(
    keystone_cloud: KeystoneCloud, tmp_path: Path, record_property: Any, way: str
) -> None:
    before = len(keystone_cloud.answers())
    results = tempest.run(keystone_cloud, tmp_path, personas=WAYS[way])
    record_property("told", f"tempest, called {way}: {tempest.count(results)}")
    record_property("table", tempest.table(results))
    bad = tempest.wrong(results)
    assert not bad, "\n".join(f"{result.test}\n{result.why}" for result in bad)
    if WAYS[way]:
        assert "skipped" not in {result.outcome for result in results}
    answers = keystone_cloud.answers()[before:]
    assert answers
    assert [answer for answer in answers if answer.status >= 500] == []


@pytest.mark.parametrize(
    ("status", "said", "outcome"),
    [
        ("fail", f"BadRequest: x\nDetails: {EMPTY}", "deviates"),
        ("fail", 'BadRequest: x\nDetails: {"faultstring": "groups must be a list"}', "failed"),
        ("fail", f"Conflict: x\nDetails: {EMPTY}", "failed"),
        ("success", "", "passed"),
    ],
)
def test_a_deviation_is_one_only_as_it_must_be(status: str, said: str, outcome: str) -> None:
    (result,) = tempest.read(_stream(DEVIATION, status, f"tempest.lib.exceptions.{said}"))
    assert (result.test, result.outcome) == (DEVIATION, outcome)
    named = {wrong.test for wrong in tempest.wrong([result])}
    assert (DEVIATION in named) == (outcome != "deviates")
    # The two others were not seen.
    assert named >= set(tempest.DEVIATIONS) - {DEVIATION}


def test_a_failure_is_wrong_and_so_is_a_skip_that_nobody_expects() -> None:
    for status, why in (("fail", "boom"), ("skip", "no device")):
        (result,) = tempest.read(_stream(f"{tempest.TESTS}x", status, why))
        assert result in tempest.wrong([result])
    roles = "SRBAC tests require cyborg_policy.enforce_new_defaults = True"
    (result,) = tempest.read(_stream(f"{tempest.TESTS}x", "skip", roles))
    assert result not in tempest.wrong([result])


def _stream(test: str, status: str, said: str) -> bytes:
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
        file_bytes=said.encode(),
        mime_type="text/plain; charset=utf8",
        eof=True,
    )
    return out.getvalue()
