# SPDX-License-Identifier: Apache-2.0
"""``cyborg audit`` on the whole service: output, repairs and exit status."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from cyborg.cli import app
from cyborg.conductor.audit import runner
from cyborg.core import naming
from cyborg.db import schema
from cyborg.standalone.stack import StandaloneStack
from cyborg.tests.fixtures.clouds.standalone import HOST, running
from cyborg.tests.fixtures.databases.placement import make_allocation
from cyborg.tests.fixtures.machine.processes import wait_until

CARD = naming.provider_uuid(HOST, "0000:0c:00.0")
Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneStack]:
    """Yield a separate stack, which the tests damage."""
    folder: Path = tmp_path_factory.mktemp("audit")
    with running(folder, devices=2) as new_stack:
        yield new_stack


@pytest.fixture
def cyborg(
    stack: StandaloneStack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    # The conductor runs in this process, and changes in progress complete within milliseconds.
    monkeypatch.setattr(runner, "RECHECK_DELAY", 0.2)

    def run(*words: str, code: int) -> tuple[str, str]:
        connection = ["--os-auth-type", "none", "--os-endpoint", stack.endpoint]
        assert app.main([*connection, "audit", *words]) == code, capsys.readouterr()
        output = capsys.readouterr()
        return output.out, output.err

    return run


def test_audit_of_consistent_service_reports_no_finding(cyborg: Run) -> None:
    out, err = cyborg("-f", "json", code=0)
    assert json.loads(out) == []
    assert "Nova is not configured" in err
    assert cyborg("--host", HOST, "-f", "json", code=0)[0] == out


def test_audit_finds_and_repairs_missing_provider(stack: StandaloneStack, cyborg: Run) -> None:
    assert stack.placement.delete(f"/resource_providers/{CARD}").status_code == 204
    out, _ = cyborg("-f", "json", code=1)
    (row,) = json.loads(out)
    assert (row["Host"], row["Kind"], row["Object"], row["Repaired"]) == (
        HOST,
        "provider_missing",
        f"provider {HOST}_0000:0c:00.0",
        "by --repair",
    )
    assert row["Explanation"] == "database: published; Placement: no such provider"
    assert row["Advice"].startswith("The publisher repairs it")
    out, _ = cyborg("--repair", code=1)
    assert "yes: publish" in " ".join(out.split())

    def back() -> bool:
        answer = stack.placement.get(f"/resource_providers/{CARD}/inventories")
        return bool(answer.json().get("inventories"))

    wait_until("the provider is back", back)
    wait_until("that is recorded", lambda: stale(stack) == [])


def stale(stack: StandaloneStack) -> list[str]:
    """Return the names of the providers that are not published yet."""
    with stack.reader.connect() as connection:
        table = schema.providers
        is_stale = table.c.published_revision < table.c.revision
        return list(connection.scalars(sa.select(table.c.name).where(is_stale)))


@pytest.mark.matrix
def test_audit_reports_allocation_without_owner(stack: StandaloneStack, cyborg: Run) -> None:
    consumer = "5d1f1c5e-8a36-4d1c-9a40-0e6d8f3f6f5b"
    body = make_allocation(CARD, "FPGA")
    assert stack.placement.put(f"/allocations/{consumer}", json=body).status_code == 204
    out, _ = cyborg("--repair", "-f", "json", code=1)
    (row,) = json.loads(out)
    assert (row["Kind"], row["Repaired"]) == ("allocation_unused", "no")
    assert consumer in row["Explanation"]
    # No allocation was changed.
    allocations = stack.placement.get(f"/allocations/{consumer}").json()["allocations"]
    assert list(allocations) == [CARD]
    assert stack.placement.delete(f"/allocations/{consumer}").status_code == 204
    cyborg(code=0)


def test_audit_of_unknown_host_exits_with_2(cyborg: Run) -> None:
    _, err = cyborg("--host", "none-such", code=2)
    assert "none-such" in err
    assert "Traceback" not in err


def test_audit_with_empty_host_does_not_audit_all_hosts(cyborg: Run) -> None:
    _, err = cyborg("--host", "", "--repair", code=2)
    assert "host" in err


def test_audit_failure_exits_with_2(cyborg: Run) -> None:
    # Exit status 1 would mean differences.
    _, err = cyborg("-c", "None-such", code=2)
    assert "None-such" in err


def test_audit_wait_has_a_timeout(cyborg: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.AuditRunner, "_run", lambda self, lease: False)
    _, err = cyborg("--within", "0.001", code=2)
    assert "has completed 0 of 1 hosts after 0.001 s" in err
