# SPDX-License-Identifier: Apache-2.0
"""A backend with an external driver, played by the test, with good and bad responses."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborg.agent.backends.backend import Backend
from cyborg.agent.external.driver import HELLO_BURST, ExternalDriver, ExternalDriverHost
from cyborg.core.errors import DriverFailed, Invalid, Unavailable
from cyborg.core.external import Hello
from cyborg.core.inventory.device import Ability, Health
from cyborg.core.inventory.device_state import HEALTHY, Measurement
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.core.jobs.job import WorkItem
from cyborg.tests.fixtures.hosts.external_drivers import (
    ADDRESS,
    ExternalDriverDouble,
    Reply,
    hardware,
    hello_body,
    http_response,
    socket_folder,
)
from cyborg.tests.fixtures.hosts.scripted_driver import LONG, CallRecorder

ITEM = WorkItem("crypto", ADDRESS, ADDRESS, ADDRESS)
ALL = Hello("crypto", "CRYPTO", frozenset(Ability))


@pytest.fixture
def place() -> Iterator[Path]:
    with socket_folder() as path:
        yield path


@pytest.fixture
def peer(place: Path) -> Iterator[ExternalDriverDouble]:
    with ExternalDriverDouble(place) as double:
        yield double


def driver(place: Path, hello: Hello | None = ALL, seconds: float = LONG) -> ExternalDriver:
    proxy = ExternalDriver("crypto", str(place), place.stat().st_uid, seconds, seconds)
    if hello is not None:
        proxy.register(hello)
    return proxy


def test_discover_calls_discovery_then_hardware(place: Path, peer: ExternalDriverDouble) -> None:
    (card,) = driver(place).discover()
    assert (card.address, card.backend) == (ADDRESS, "crypto")
    assert peer.requests == [("/discovery", None), ("/hardware", None)]


def test_measure_returns_health(place: Path, peer: ExternalDriverDouble) -> None:
    peer.replies["/health"] = http_response(
        {"health": {ADDRESS: {"health": "unhealthy", "reason": "hot"}, "other": {"health": "ok"}}}
    )
    proxy = driver(place)
    assert proxy.measure(proxy.discover()) == {ADDRESS: Measurement(Health.UNHEALTHY, "hot")}
    peer.replies["/health"] = http_response({"health": {ADDRESS: {"health": "ok"}}})
    assert proxy.measure(proxy.discover()) == {ADDRESS: HEALTHY}


def test_prepare_release_program_call_driver(place: Path, peer: ExternalDriverDouble) -> None:
    for target in ("/prepare", "/release", "/program"):
        peer.replies[target] = http_response({"status": "DONE"})
    proxy = driver(place)
    proxy.prepare(ITEM, "i1")
    proxy.release(ITEM)
    proxy.program(ITEM, "image1")
    item = ITEM.to_dict()
    assert peer.requests == [
        ("/prepare", {"item": item, "instance": "i1"}),
        ("/release", {"item": item}),
        ("/program", {"item": item, "image": "image1"}),
    ]


def test_prepare_refused_raises_error_of_driver(place: Path, peer: ExternalDriverDouble) -> None:
    peer.replies["/prepare"] = http_response({"error": "the card is full"}, 409)
    with pytest.raises(DriverFailed, match=r"returned 409 for POST /prepare: .*the card is full"):
        driver(place).prepare(ITEM, "i1")


def test_driver_before_hello_fails(place: Path, peer: ExternalDriverDouble) -> None:
    proxy = driver(place, None)
    assert proxy.abilities == frozenset()
    for act in (proxy.discover, lambda: proxy.release(ITEM)):
        with pytest.raises(DriverFailed, match=r"no driver for crypto has registered at .*agent"):
            act()
    assert peer.requests == []


def test_release_without_prepare_ability_makes_no_call(
    place: Path, peer: ExternalDriverDouble
) -> None:
    driver(place, Hello("crypto", "CRYPTO")).release(ITEM)
    assert peer.requests == []


def endless(link: object) -> None:
    """Send more than the limit, without a length."""
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
        "GET /hardware: the body is not",
    ),
    "deep JSON": ("/hardware", http_response(b"[" * 100_000), "the body is not JSON"),
    "no HTTP": ("/hardware", b"hello\r\n\r\n", "BadStatusLine"),
    "nothing": ("/discovery", b"", "RemoteDisconnected"),
    "half an answer": (
        "/hardware",
        http_response({"hardware": []})[:-3],
        "the body ends 3 bytes too early",
    ),
    "an error": (
        "/hardware",
        http_response(b"oh\x00no", 500),
        "returned 500 for GET /hardware: oh no",
    ),
    "another status": (
        "/discovery",
        http_response({"status": "DONE", "discovery_id": "1"}),
        "'DONE'",
    ),
    "no hardware": ("/hardware", http_response({}), "the answer is malformed"),
    "a lie": (
        "/hardware",
        http_response({"hardware": [hardware("here")]}),
        "'here' is not a PCI address",
    ),
    "the same card twice": (
        "/hardware",
        http_response({"hardware": [hardware()] * 2}),
        "duplicate address",
    ),
    "depth 7": (
        "/hardware",
        http_response(
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
        http_response({"hardware": [hardware(acc_specs={"acc_capability": {"a": "x" * 20480}})]}),
        r"it has 20488 bytes, at most 16384",
    ),
    "a key of blanks": (
        "/hardware",
        http_response({"hardware": [hardware(acc_specs={"acc_capability": {"  ": 1}})]}),
        "has no letter or digit",
    ),
    "a long answer": (
        "/hardware",
        http_response(b" " * 1_048_577),
        r"longer than 1048576 bytes \(1 MiB\)",
    ),
    "an endless answer": ("/hardware", endless, r"longer than 1048576 bytes \(1 MiB\)"),
    # Newer releases of Python have a limit of their own.
    "endless heads": (
        "/hardware",
        heads,
        r"longer than 1048576 bytes \(1 MiB\)|got more than 100 interim responses",
    ),
    "no answer": ("/hardware", "hang", r"did not answer GET /hardware within 0.5 s"),
    "a byte at a time": ("/discovery", "drip", r"did not answer POST /discovery within 0.5 s"),
    "bad health": (
        "/health",
        http_response({"health": 7}),
        "health: invalid response of the driver to GET /health",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "reply", "message"), LIES.values(), ids=LIES)
def test_discovery_misbehaving_driver_sets_error(
    place: Path, peer: ExternalDriverDouble, target: str, reply: str | Reply, message: str
) -> None:
    """The devices are kept, and the backend recovers with the driver."""
    peer.replies["/health"] = http_response({"health": {ADDRESS: {"health": "ok"}}})
    # A megabyte takes more than half a second on a busy machine.
    seconds = 0.5 if "did not answer" in message else LONG
    backend = Backend(driver(place, seconds=seconds), LONG, LONG)
    backend.start()
    assert rediscover(backend).error is None
    before, valid_replies = backend.snapshot.devices, dict(peer.replies)
    peer.replies[target] = getattr(peer, reply) if isinstance(reply, str) else reply
    state = rediscover(backend)
    assert state.status is (BackendStatus.READY if target == "/health" else BackendStatus.ERROR)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(state.error)
    assert backend.snapshot.devices == before
    peer.replies.update(valid_replies)
    peer.stopped.set()  # what hangs goes on
    peer.stop()
    assert "cannot call POST /discovery" in (rediscover(backend).error or "")
    assert backend.snapshot.devices == before
    Path(peer.path).unlink()
    with ExternalDriverDouble(place) as restarted:
        restarted.replies.update(valid_replies)
        assert rediscover(backend).error is None
    backend.stop()
    assert backend.join(LONG)
    assert len(before) == 1


def rediscover(backend: Backend) -> BackendState:
    done = CallRecorder()
    backend.rediscover(done)
    state: BackendState = done.wait_for(1)[-1][0]
    return state


def test_call_regular_file_raises_driver_failed(place: Path) -> None:
    (place / "crypto.sock").symlink_to("/dev/null")
    with pytest.raises(DriverFailed, match="not a socket"):
        driver(place).discover()


def test_call_socket_of_other_user_raises_driver_failed(
    place: Path, peer: ExternalDriverDouble
) -> None:
    proxy = ExternalDriver("crypto", str(place), 0, LONG, LONG)
    proxy.register(ALL)
    proxy._users = frozenset({4_000_000})
    with pytest.raises(DriverFailed, match=r"user \d+ is not allowed to run a driver"):
        proxy.discover()
    assert peer.requests == []


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_handle_hello_registers_and_limits_rate(place: Path) -> None:
    clock, woken = Clock(), CallRecorder()
    proxy = driver(place, None)
    driver_host = ExternalDriverHost(str(place), {"crypto": proxy}, 0, 60.0, clock)
    driver_host._wake = woken
    assert driver_host.handle_hello(hello_body(abilities=["health"])) == {
        "status": "READY",
        "interval": 60.0,
    }
    assert proxy.abilities == {Ability.MEASURES}
    with pytest.raises(Invalid, match=r"driver gpu is not allowed: .* has crypto$"):
        driver_host.handle_hello(hello_body("gpu"))
    for _ in range(HELLO_BURST - 1):
        driver_host.handle_hello(hello_body())
    with pytest.raises(Unavailable, match="more often than every 1 s"):
        driver_host.handle_hello(hello_body(abilities=["program"]))
    assert proxy.abilities == frozenset(), "a hello that is refused changes nothing"
    clock.now += 1
    driver_host.handle_hello(hello_body())
    assert woken.calls == [("crypto",)] * (HELLO_BURST + 1)
