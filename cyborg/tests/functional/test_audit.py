# SPDX-License-Identifier: Apache-2.0
"""``cyborg audit`` on the whole service: what it shows, what it repairs, how it ends."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cyborg.cli import app
from cyborg.conductor import audits
from cyborg.core import names
from cyborg.db.read import providers
from cyborg.fixtures.processes import until
from cyborg.fixtures.stack import HOST, running
from cyborg.standalone.stack import StandaloneStack

CARD = names.provider_uuid(HOST, "0000:0c:00.0")
Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneStack]:
    """A stack of its own, for what is broken here."""
    folder: Path = tmp_path_factory.mktemp("audit")
    with running(folder, devices=2) as it:
        yield it


@pytest.fixture
def cyborg(
    stack: StandaloneStack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    # The conductor runs in this process; what is on its way here takes no seconds.
    monkeypatch.setattr(audits, "PAUSE", 0.2)

    def run(*words: str, code: int) -> tuple[str, str]:
        way = ["--os-auth-type", "none", "--os-endpoint", stack.endpoint]
        assert app.main([*way, "audit", *words]) == code, capsys.readouterr()
        shown = capsys.readouterr()
        return shown.out, shown.err

    return run


def test_all_is_well(cyborg: Run) -> None:
    out, err = cyborg("-f", "json", code=0)
    assert json.loads(out) == []
    assert "without Nova" in err
    assert cyborg("--host", HOST, "-f", "json", code=0)[0] == out


def test_found_and_repaired(stack: StandaloneStack, cyborg: Run) -> None:
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

    until("the provider is back", back)
    until("that is recorded", lambda: stale(stack) == [])


def stale(stack: StandaloneStack) -> list[str]:
    """Return the names of the providers that are not published yet."""
    with stack.reader.connect() as connection:
        return [row["name"] for row in providers.find(connection, stale=True)]


def test_an_allocation_that_nobody_holds(stack: StandaloneStack, cyborg: Run) -> None:
    consumer = "5d1f1c5e-8a36-4d1c-9a40-0e6d8f3f6f5b"
    body = {
        "allocations": {CARD: {"resources": {"FPGA": 1}}},
        "project_id": "p",
        "user_id": "u",
        "consumer_generation": None,
        "consumer_type": "INSTANCE",
    }
    assert stack.placement.put(f"/allocations/{consumer}", json=body).status_code == 204
    out, _ = cyborg("--repair", "-f", "json", code=1)
    (row,) = json.loads(out)
    assert (row["Kind"], row["Repaired"]) == ("allocation_unused", "no")
    assert consumer in row["Explanation"]
    # Nobody's allocation was touched.
    kept = stack.placement.get(f"/allocations/{consumer}").json()["allocations"]
    assert list(kept) == [CARD]
    assert stack.placement.delete(f"/allocations/{consumer}").status_code == 204
    cyborg(code=0)


def test_a_refusal_ends_with_2(cyborg: Run) -> None:
    _, err = cyborg("--host", "none-such", code=2)
    assert "none-such" in err
    assert "Traceback" not in err


def test_a_variable_that_was_not_set_is_not_all_hosts(cyborg: Run) -> None:
    _, err = cyborg("--host", "", "--repair", code=2)
    assert "host" in err


def test_whatever_fails_ends_with_2(cyborg: Run) -> None:
    # 1 would say that the sides disagree.
    _, err = cyborg("-c", "None-such", code=2)
    assert "None-such" in err


def test_nobody_waits_for_ever(cyborg: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits.Audits, "_make", lambda self, held: False)
    _, err = cyborg("--within", "0.001", code=2)
    assert "is at host 0 of 1 after 0.001 s" in err
