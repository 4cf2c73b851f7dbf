# SPDX-License-Identifier: Apache-2.0
"""The conformance kit over drivers in processes of their own: the one in C, and ones that lie."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import Misconfigured, TimedOut
from cyborg.fixtures import conformance_bed, outside
from cyborg.fixtures.conformance_command import main
from cyborg.fixtures.driver_conformance import Outcome, Result, judge_outside

SICK = (Outcome.BROKEN, Outcome.UNTOLD)
MEASURED = {"health": {outside.ADDRESS: {"health": "ok", "reason": None}}}


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for the threads of bad drivers."""
    monkeypatch.setattr(conformance_bed, "GRACE", 0.02)


@pytest.fixture
def place() -> Iterator[Path]:
    with outside.folder() as place:
        yield place


def told(results: list[Result], *outcomes: Outcome) -> dict[str, str]:
    """Return the rules with these outcomes, and why."""
    return {r.rule.name: r.why for r in results if r.outcome in outcomes}


def greet(place: Path, **more: Any) -> None:
    """Say a driver's hello as soon as somebody listens."""

    def say() -> None:
        for _ in range(200):
            try:
                assert outside.say(place, outside.request(outside.hello(**more)))[0] == 200
                return
            except (FileNotFoundError, ConnectionRefusedError):
                threading.Event().wait(0.05)

    threading.Thread(target=say, daemon=True).start()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is here")
def test_the_driver_in_c_keeps_every_rule(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([outside.build(tmp_path), place, "crypto"]) as process:
        try:
            assert main(["--socket", str(place / "crypto.sock"), "--work"]) == 0
            out = capsys.readouterr().out.splitlines()
        finally:
            process.terminate()
    outcomes = {line.split()[0]: line.split()[1] for line in out[:-1]}
    assert {"BROKEN", "untold"} & set(outcomes.values()) == set()
    tried = ("discovers", "measures_in_time", "prepares_twice", "releases_the_gone")
    assert {outcomes[rule] for rule in tried} == {"held"}
    assert outcomes["imports_the_ground_alone"] == "left"


@pytest.mark.parametrize(
    ("target", "reply", "rule"),
    [
        ("/discovery", outside.http({"status": "DONE", "discovery_id": "1"}), "discovers"),
        ("/hardware", outside.http(b"not JSON"), "discovers"),
        ("/hardware", outside.http({"hardware": [{"address": "0000:5a:00.0"}]}), "discovers"),
        ("/hardware", lambda peer: peer.hang, "discovers_in_time"),
        ("/health", outside.http({"health": "well"}), "measures_in_time"),
        ("/health", lambda peer: peer.drip, "measures_in_time"),
        ("/prepare", outside.http({"error": "no air"}, 500), "prepares_twice"),
        ("/release", outside.http({"error": "who?"}, 404), "releases_the_gone"),
    ],
)
def test_a_bad_process_is_caught(place: Path, target: str, reply: Any, rule: str) -> None:
    with outside.Peer(place) as peer:
        well = {"/health": MEASURED, "/prepare": {}, "/release": {}}
        peer.replies |= {path: outside.http(body) for path, body in well.items()}
        peer.replies[target] = reply(peer) if callable(reply) else reply
        greet(place, abilities=["prepare", "release", "health"])
        limit = 0.3 if callable(reply) else 10.0
        work = target in ("/prepare", "/release")
        found = told(judge_outside(str(place), "crypto", limit=limit, work=work), *SICK)
    assert rule in found
    assert found[rule]


def test_another_card_each_time(place: Path) -> None:
    numbers = iter(range(1, 1000))

    def another(link: Any) -> None:
        address = f"0000:{next(numbers) % 256:02x}:00.0"
        link.sendall(outside.http({"hardware": [outside.hardware(address)]}))

    with outside.Peer(place) as peer:
        peer.replies["/hardware"] = another
        greet(place)
        broken = told(judge_outside(str(place), "crypto"), Outcome.BROKEN)
    assert {"answers_are_stable", "objects_agree"} <= set(broken)


def test_nobody_says_hello(place: Path) -> None:
    with pytest.raises(TimedOut, match="no driver has said hello for crypto at "):
        judge_outside(str(place), "crypto", patience=0.05)
    assert list(place.iterdir()) == []


def test_what_cannot_begin(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place.chmod(0o777)
    with pytest.raises(Misconfigured, match="mode 0700 or 0750"):
        judge_outside(str(place), "crypto")
    assert main(["--socket", str(place / "crypto")]) == 2
    assert main(["--socket", str(place / "agent.sock")]) == 2
    err = capsys.readouterr().err
    assert "--socket: found " in err
    assert "expected <folder>/<name>.sock" in err
