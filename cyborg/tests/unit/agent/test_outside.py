# SPDX-License-Identifier: Apache-2.0
"""A backend whose driver is another process, played here: what it does well, and what badly."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborg.agent.backend import Backend
from cyborg.agent.outside import HELLOS, Outside, OutsideDriver
from cyborg.core.device import Ability, Health
from cyborg.core.errors import DriverFailed, Invalid, Unavailable
from cyborg.core.health import WELL, Measurement
from cyborg.core.job import Item
from cyborg.core.outside import Hello
from cyborg.core.report import BackendState, BackendStatus
from cyborg.fixtures.drivers import LONG, Told
from cyborg.fixtures.outside import ADDRESS, Peer, Reply, folder, hardware, hello, http

ITEM = Item("crypto", ADDRESS, ADDRESS, ADDRESS)
ALL = Hello("crypto", "CRYPTO", frozenset(Ability))


@pytest.fixture
def place() -> Iterator[Path]:
    with folder() as path:
        yield path


@pytest.fixture
def peer(place: Path) -> Iterator[Peer]:
    with Peer(place) as it:
        yield it


def driver(place: Path, said: Hello | None = ALL, seconds: float = LONG) -> OutsideDriver:
    made = OutsideDriver("crypto", str(place), place.stat().st_uid, seconds, seconds)
    if said is not None:
        made.take(said)
    return made


def test_a_discovery_is_two_calls(place: Path, peer: Peer) -> None:
    (card,) = driver(place).discover()
    assert (card.address, card.backend) == (ADDRESS, "crypto")
    assert peer.heard == [("/discovery", None), ("/hardware", None)]


def test_its_health(place: Path, peer: Peer) -> None:
    peer.replies["/health"] = http(
        {"health": {ADDRESS: {"health": "unhealthy", "reason": "hot"}, "other": {"health": "ok"}}}
    )
    its = driver(place)
    assert its.measure(its.discover()) == {ADDRESS: Measurement(Health.UNHEALTHY, "hot")}
    peer.replies["/health"] = http({"health": {ADDRESS: {"health": "ok"}}})
    assert its.measure(its.discover()) == {ADDRESS: WELL}


def test_its_work(place: Path, peer: Peer) -> None:
    for target in ("/prepare", "/release", "/program"):
        peer.replies[target] = http({"status": "DONE"})
    its = driver(place)
    its.prepare(ITEM, "i1")
    its.release(ITEM)
    its.program(ITEM, "image1")
    item = ITEM.to_dict()
    assert peer.heard == [
        ("/prepare", {"item": item, "instance": "i1"}),
        ("/release", {"item": item}),
        ("/program", {"item": item, "image": "image1"}),
    ]


def test_what_it_refuses_fails_with_its_words(place: Path, peer: Peer) -> None:
    peer.replies["/prepare"] = http({"error": "the card is full"}, 409)
    with pytest.raises(DriverFailed, match=r"answers 409 to POST /prepare: .*the card is full"):
        driver(place).prepare(ITEM, "i1")


def test_before_its_hello_nothing_is_known(place: Path, peer: Peer) -> None:
    its = driver(place, None)
    assert its.abilities == frozenset()
    for act in (its.discover, lambda: its.release(ITEM)):
        with pytest.raises(DriverFailed, match=r"no driver has said hello for crypto at .*agent"):
            act()
    assert peer.heard == []


def test_who_prepares_nothing_has_nothing_to_release(place: Path, peer: Peer) -> None:
    driver(place, Hello("crypto", "CRYPTO")).release(ITEM)
    assert peer.heard == []


def endless(link: object) -> None:
    """Send more than fits, with no length told."""
    link.sendall(b"HTTP/1.1 200 X\r\n\r\n")  # type: ignore[attr-defined]
    for _ in range(64):
        link.sendall(b" " * 65536)  # type: ignore[attr-defined]


def heads(link: object) -> None:
    """Send heads that never end."""
    for _ in range(100_000):
        link.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)  # type: ignore[attr-defined]


LIES: dict[str, tuple[str, str | Reply, str]] = {
    "bad JSON": (
        "/hardware",
        b"HTTP/1.1 200 X\r\n\r\n{",
        "GET /hardware is wrong: the body is not",
    ),
    "deep JSON": ("/hardware", http(b"[" * 100_000), "the body is not JSON"),
    "no HTTP": ("/hardware", b"hello\r\n\r\n", "BadStatusLine"),
    "nothing": ("/discovery", b"", "RemoteDisconnected"),
    "half an answer": ("/hardware", http({"hardware": []})[:-3], "it ends 3 bytes early"),
    "an error": ("/hardware", http(b"oh\x00no", 500), "answers 500 to GET /hardware: oh no"),
    "another status": ("/discovery", http({"status": "DONE", "discovery_id": "1"}), "'DONE'"),
    "no hardware": ("/hardware", http({}), "the answer is malformed"),
    "a lie": ("/hardware", http({"hardware": [hardware("here")]}), "'here' is not a PCI address"),
    "the same card twice": ("/hardware", http({"hardware": [hardware()] * 2}), "has the address"),
    "depth 7": (
        "/hardware",
        http(
            {
                "hardware": [
                    hardware(
                        acc_specs={
                            "acc_capability": {"a": {"b": {"c": {"d": {"e": {"f": {"g": 1}}}}}}}
                        }
                    )
                ]
            }
        ),
        "a/b/c/d/e/f is deeper than 6 levels",
    ),
    "20 KiB": (
        "/hardware",
        http({"hardware": [hardware(acc_specs={"acc_capability": {"a": "x" * 20480}})]}),
        r"it has 20488 bytes, at most 16384",
    ),
    "a key of blanks": (
        "/hardware",
        http({"hardware": [hardware(acc_specs={"acc_capability": {"  ": 1}})]}),
        "has no letter or digit",
    ),
    "a long answer": ("/hardware", http(b" " * 1_048_577), r"longer than 1048576 bytes \(1 MiB\)"),
    "an endless answer": ("/hardware", endless, r"longer than 1048576 bytes \(1 MiB\)"),
    "endless heads": ("/hardware", heads, r"longer than 1048576 bytes \(1 MiB\)"),
    "no answer": ("/hardware", "hang", r"has not answered GET /hardware within 0.5 s"),
    "a byte at a time": ("/discovery", "drip", r"has not answered POST /discovery within 0.5 s"),
    "bad health": ("/health", http({"health": 7}), "health: the driver's answer to GET /health is"),
}


@pytest.mark.parametrize(("target", "reply", "message"), LIES.values(), ids=LIES)
def test_misbehaviour_is_an_error_of_its_backend(
    place: Path, peer: Peer, target: str, reply: str | Reply, message: str
) -> None:
    """The devices stay as they were, and all is well again when the driver is."""
    peer.replies["/health"] = http({"health": {ADDRESS: {"health": "ok"}}})
    backend = Backend(driver(place, seconds=0.5), LONG, LONG)
    backend.start()
    assert looked(backend).error is None
    before, good = backend.view.devices, dict(peer.replies)
    peer.replies[target] = getattr(peer, reply) if isinstance(reply, str) else reply
    state = looked(backend)
    assert state.status is (BackendStatus.READY if target == "/health" else BackendStatus.ERROR)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(state.error)
    assert backend.view.devices == before
    peer.replies.update(good)
    peer.gone.set()  # what hangs goes on
    peer.stop()
    assert "cannot be asked POST /discovery" in (looked(backend).error or "")
    assert backend.view.devices == before
    Path(peer.path).unlink()
    with Peer(place) as again:
        again.replies.update(good)
        assert looked(backend).error is None
    backend.stop()
    assert backend.join(LONG)
    assert len(before) == 1


def looked(backend: Backend) -> BackendState:
    done = Told()
    backend.rediscover(done)
    state: BackendState = done.wait_for(1)[-1][0]
    return state


def test_a_file_that_is_no_socket(place: Path) -> None:
    (place / "crypto.sock").symlink_to("/dev/null")
    with pytest.raises(DriverFailed, match="it is no socket"):
        driver(place).discover()


def test_another_user_s_socket(place: Path, peer: Peer) -> None:
    made = OutsideDriver("crypto", str(place), 0, LONG, LONG)
    made.take(ALL)
    made._users = frozenset({4_000_000})
    with pytest.raises(DriverFailed, match=r"it is user \d+'s, who may not be a driver"):
        made.discover()
    assert peer.heard == []


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_hellos(place: Path) -> None:
    clock, woken = Clock(), Told()
    its = driver(place, None)
    ours = Outside(str(place), {"crypto": its}, 0, 60.0, clock)
    ours._wake = woken
    assert ours.hello(hello(abilities=["health"])) == {"status": "READY", "interval": 60.0}
    assert its.abilities == {Ability.MEASURES}
    with pytest.raises(Invalid, match=r"no driver may be called gpu: .* names crypto$"):
        ours.hello(hello("gpu"))
    for _ in range(HELLOS - 1):
        ours.hello(hello())
    with pytest.raises(Unavailable, match="more often than every 1 s"):
        ours.hello(hello(abilities=["program"]))
    assert its.abilities == frozenset(), "a hello that is refused changes nothing"
    clock.now += 1
    ours.hello(hello())
    assert woken.calls == [("crypto",)] * (HELLOS + 1)
