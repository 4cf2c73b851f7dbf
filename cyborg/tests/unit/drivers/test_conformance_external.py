# SPDX-License-Identifier: Apache-2.0
"""The conformance kit with external drivers: the example in C, and bad ones."""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import Misconfigured, TimedOut
from cyborg.testing.conformance import environment
from cyborg.testing.conformance.__main__ import main
from cyborg.testing.conformance.kit import Outcome, Result, run_rules_on_external
from cyborg.tests.fixtures.hosts import external_drivers

FAILURES = (Outcome.FAILED, Outcome.BLOCKED)
MEASURED = {"health": {external_drivers.ADDRESS: {"health": "ok", "reason": None}}}


@pytest.fixture(autouse=True)
def short_thread_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeout for threads of bad drivers."""
    monkeypatch.setattr(environment, "THREAD_EXIT_TIMEOUT", 0.02)


@pytest.fixture
def folder() -> Iterator[Path]:
    with external_drivers.socket_folder() as folder:
        yield folder


def reasons_by_rule(results: list[Result], *outcomes: Outcome) -> dict[str, str]:
    """Return the reasons of the rules with these outcomes, by rule name."""
    return {r.rule.name: r.reason for r in results if r.outcome in outcomes}


def register_soon(folder: Path, **fields: Any) -> None:
    """Send the hello message of a driver as soon as the kit listens."""

    def register() -> None:
        for _ in range(200):
            try:
                assert (
                    external_drivers.send_to_agent(
                        folder, external_drivers.http_request(external_drivers.hello_body(**fields))
                    )[0]
                    == 200
                )
                return
            except (FileNotFoundError, ConnectionRefusedError):
                threading.Event().wait(0.05)

    threading.Thread(target=register, daemon=True).start()


@pytest.mark.requires("compiler")
def test_c_driver_passes_every_rule(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([external_drivers.build_c_driver(tmp_path), folder, "crypto"]) as process:
        try:
            assert main(["--socket", str(folder / "crypto.sock"), "--work"]) == 0
            out = capsys.readouterr().out.splitlines()
        finally:
            process.terminate()
    outcomes = {line.split()[0]: line.split()[1] for line in out[:-1]}
    assert {"FAILED", "blocked"} & set(outcomes.values()) == set()
    rules = (
        "discover_succeeds",
        "measure_is_in_time",
        "prepare_is_idempotent",
        "release_accepts_missing",
    )
    assert {outcomes[rule] for rule in rules} == {"passed"}
    assert outcomes["imports_only_core_and_drivers"] == "skipped"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "reply", "rule"),
    [
        (
            "/discovery",
            external_drivers.http_response({"status": "DONE", "discovery_id": "1"}),
            "discover_succeeds",
        ),
        ("/hardware", external_drivers.http_response(b"not JSON"), "discover_succeeds"),
        (
            "/hardware",
            external_drivers.http_response({"hardware": [{"address": "0000:5a:00.0"}]}),
            "discover_succeeds",
        ),
        ("/hardware", lambda peer: peer.hang, "discover_is_in_time"),
        ("/health", external_drivers.http_response({"health": "replies"}), "measure_is_in_time"),
        ("/health", lambda peer: peer.drip, "measure_is_in_time"),
        (
            "/prepare",
            external_drivers.http_response({"error": "no air"}, 500),
            "prepare_is_idempotent",
        ),
        (
            "/release",
            external_drivers.http_response({"error": "who?"}, 404),
            "release_accepts_missing",
        ),
    ],
)
def test_external_driver_with_bad_response_fails_the_rule(
    folder: Path, target: str, reply: Any, rule: str
) -> None:
    with external_drivers.ExternalDriverDouble(folder) as peer:
        replies = {"/health": MEASURED, "/prepare": {}, "/release": {}}
        peer.replies |= {
            path: external_drivers.http_response(body) for path, body in replies.items()
        }
        peer.replies[target] = reply(peer) if callable(reply) else reply
        register_soon(folder, abilities=["prepare", "release", "health"])
        limit = 0.3 if callable(reply) else 10.0
        work = target in ("/prepare", "/release")
        reasons = reasons_by_rule(
            run_rules_on_external(str(folder), "crypto", limit=limit, work=work), *FAILURES
        )
    assert rule in reasons
    assert reasons[rule]


@pytest.mark.slow
def test_external_driver_with_changing_cards_fails_stability_rules(folder: Path) -> None:
    numbers = iter(range(1, 1000))

    def next_reply(link: Any) -> None:
        address = f"0000:{next(numbers) % 256:02x}:00.0"
        link.sendall(
            external_drivers.http_response({"hardware": [external_drivers.hardware(address)]})
        )

    with external_drivers.ExternalDriverDouble(folder) as peer:
        peer.replies["/hardware"] = next_reply
        register_soon(folder)
        reasons = reasons_by_rule(run_rules_on_external(str(folder), "crypto"), Outcome.FAILED)
    assert {"discovery_is_stable", "discovery_is_reproducible"} <= set(reasons)


@pytest.mark.slow
def test_external_driver_without_hello_times_out(folder: Path) -> None:
    with pytest.raises(TimedOut, match="driver crypto did not register at "):
        run_rules_on_external(str(folder), "crypto", registration_timeout=0.05)
    assert list(folder.iterdir()) == []


def test_external_driver_with_bad_socket_path_is_rejected(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.chmod(0o777)
    with pytest.raises(Misconfigured, match="mode 0700 or 0750"):
        run_rules_on_external(str(folder), "crypto")
    assert main(["--socket", str(folder / "crypto")]) == 2
    assert main(["--socket", str(folder / "agent.sock")]) == 2
    err = capsys.readouterr().err
    assert "--socket: found " in err
    assert "expected <folder>/<name>.sock" in err
