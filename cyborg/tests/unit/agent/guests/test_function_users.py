# SPDX-License-Identifier: Apache-2.0
"""Functions of guests: reads, questions to the conductor, restarts, and their failures."""

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.guests import function_users
from cyborg.agent.guests import reassertion as factory
from cyborg.agent.guests.function_users import (
    FIRST_RETRY,
    MAX_AGE,
    RECHECK,
    UNREAD,
    FunctionUsers,
    RecordFile,
)
from cyborg.core.errors import CyborgError, TimedOut, Unavailable
from cyborg.core.inventory.functions import Guest, GuestRecord
from cyborg.drivers.host_use.domains import DomainFacts
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import wait_until

SERVER, OTHER = "5f0d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e", "9a1d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e"
A, B = "0000:01:00.0", "0000:02:00.0"


class Host:
    """A host with guests, the conductor that answers it, and a clock; ``users`` is what is tested.

    ``owners`` has the answers by address; those that are missing are None.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "guests-h.json"
        self.guests: list[Guest] = []
        self.owners: dict[str, str] = {}
        self.guest_error: CyborgError | None = None
        self.conductor_error: CyborgError | None = None
        self.questions: list[list[str]] = []
        self.answer: Any = None
        self.discoveries = 0
        self.now = 0.0
        self.reads = 0
        self.on_question: Callable[[], object] = lambda: None
        self.restart()

    def restart(self, **more: Any) -> None:
        """Start the agent again."""
        self.users = FunctionUsers(
            "h",
            self,  # type: ignore[arg-type]
            self._read_guests,
            RecordFile(self.path),
            self._rediscover,
            clock=lambda: self.now,
            **more,
        )

    def find_function_owners(self, host: str, functions: list[dict[str, str]]) -> Any:
        """Answer as a conductor."""
        assert host == "h"
        if self.conductor_error is not None:
            raise self.conductor_error
        self.questions.append([f["address"] for f in functions])
        self.on_question()
        if self.answer is not None:
            return self.answer
        return {"owners": [self.owners.get(f["address"]) for f in functions]}

    def discover(self) -> dict[str, str]:
        """Return the withheld functions at a discovery a minute later."""
        self.now += 60.0
        return dict(self.users.read().users)

    def _read_guests(self) -> list[Guest]:
        self.reads += 1
        if self.guest_error is not None:
            raise self.guest_error
        return list(self.guests)

    def _rediscover(self) -> None:
        self.discoveries += 1


def guest(*functions: str, uuid: str = SERVER) -> Guest:
    return Guest(uuid, "guest1", frozenset(functions))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_guest_without_an_arq_has_its_function_until_it_ends(host: Host) -> None:
    assert (host.discover(), host.questions) == ({}, [])
    host.guests = [guest(A)]
    for _ in range(4):
        assert host.discover() == {A: "guest1"}
    assert host.questions == [[A]]
    host.now += RECHECK
    assert host.discover() == {A: "guest1"}
    assert host.questions == [[A]] * 2
    host.guests = []
    assert host.discover() == {}
    assert json.loads(host.path.read_text())["data"] == {}


def test_server_from_its_bind_to_its_end(host: Host) -> None:
    # Bound before its guest is defined: libvirt shows nothing.
    host.owners = {A: "instance"}
    assert host.discover() == {}
    host.guests = [guest(A)]
    assert host.discover() == {}
    host.restart()
    host.conductor_error = Unavailable("no conductor")
    assert host.discover() == {}
    host.conductor_error = None
    # Detached while it is stopped: its definition keeps the device until the next start.
    host.owners = {}
    assert host.discover() == {}
    host.guests = [guest()]
    assert host.discover() == {}
    assert host.questions == [[A]]


def test_server_that_runs_on_without_its_arq_is_found_within_minutes(host: Host) -> None:
    host.owners = {A: "instance"}
    host.guests = [Guest(SERVER, "guest1", frozenset({A}), frozenset({A}))]
    for _ in range(5):
        assert host.discover() == {}
    assert host.questions == [[A]]
    host.owners = {}
    assert host.discover() == {A: "guest1"}
    host.guests = [guest(A)]
    assert host.discover() == {}
    assert host.questions == [[A]] * 2


def test_backends_share_one_read(host: Host) -> None:
    host.guests, host.owners = [guest(A)], {A: "other"}
    for _ in range(3):
        assert dict(host.users.read().users) == {}
        host.now += MAX_AGE / 3
    assert (host.reads, host.questions) == (1, [[A]])
    assert dict(host.users.read().users) == {}
    assert (host.reads, host.questions) == (2, [[A]] * 2)


def test_check_before_host_work_finds_a_guest_that_runs_on_without_its_arq(host: Host) -> None:
    host.owners = {A: "instance"}
    host.guests = [Guest(SERVER, "guest1", frozenset({A}), frozenset({A}))]
    assert host.discover() == {}
    host.owners = {}
    assert dict(host.users.read().users) == {}
    assert dict(host.users.read(fresh=True).users) == {A: "guest1"}
    assert host.questions == [[A]] * 2
    # The discovery after it has the same facts.
    assert dict(host.users.read().users) == {A: "guest1"}
    host.guests = []
    assert dict(host.users.read(fresh=True).users) == {}


def test_host_work_waits_for_the_conductor_while_a_guest_runs(host: Host) -> None:
    host.owners = {A: "instance"}
    host.guests = [Guest(SERVER, "guest1", frozenset({A, B}), frozenset({A}))]
    assert host.discover() == {B: "guest1"}
    host.conductor_error = Unavailable("no conductor listens")
    assert dict(host.users.read(fresh=True).users) == {A: "guest1", B: "guest1"}
    assert dict(host.users.read().users) == {B: "guest1"}
    host.conductor_error = None
    assert dict(host.users.read(fresh=True).users) == {B: "guest1"}


def test_guest_that_ends_with_its_arq_before_the_answer_is_not_withheld(host: Host) -> None:
    host.guests = [guest(A)]
    host.on_question = host.guests.clear
    assert host.discover() == {}
    assert not host.path.exists() or json.loads(host.path.read_text())["data"] == {}


def test_new_function_is_not_withheld_without_a_second_look_at_its_guest(host: Host) -> None:
    def fail() -> None:
        host.guest_error = Unavailable("libvirt has stopped")

    host.guests, host.on_question = [guest(A)], fail
    assert host.discover() == {}
    host.guest_error, host.on_question = None, lambda: None
    assert host.users.run_once() == FIRST_RETRY
    host.now += FIRST_RETRY
    assert (host.users.run_once(), host.discoveries) == (None, 1)
    assert dict(host.users.read().users) == {A: "guest1"}


def test_many_functions_are_asked_for_in_several_calls(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{function_users.__name__}.guest_functions.MAX_FUNCTIONS", 2)
    many = [f"0000:01:00.{n}" for n in range(3)]
    host.guests = [guest(*many)]
    assert host.discover() == dict.fromkeys(many, "guest1")
    assert host.questions == [many[:2], many[2:]]


def test_conductor_that_is_away_is_asked_again_and_then_all_discover(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.guests, host.conductor_error = [guest(A)], Unavailable("no conductor listens")
    assert host.discover() == {}
    assert host.users.run_once() == FIRST_RETRY
    host.now += 2.0
    assert host.users.run_once() == 2 * FIRST_RETRY
    assert caplog.text.count("Cannot ask the conductor for the owners of 1 devices") == 1
    assert "retrying: no conductor listens" in caplog.text
    host.conductor_error = None
    host.now += 4.0
    caplog.set_level(logging.INFO)
    assert (host.users.run_once(), host.discoveries) == (None, 1)
    assert dict(host.users.read().users) == {A: "guest1"}
    assert "Asking for the owners of devices of guests recovered" in caplog.text
    # Nothing to ask: a wake-up changes nothing.
    assert (host.users.run_once(), host.discoveries) == (None, 1)
    # The next failure is retried soon again.
    host.guests.append(guest(B, uuid=OTHER))
    host.conductor_error = Unavailable("no conductor listens")
    assert host.discover() == {A: "guest1"}
    assert host.users.run_once() == FIRST_RETRY


def test_owner_that_another_discovery_learns_makes_all_discover(host: Host) -> None:
    host.guests, host.conductor_error = [guest(A)], Unavailable("no conductor listens")
    assert host.discover() == {}
    host.conductor_error = None
    assert host.discover() == {A: "guest1"}
    assert (host.users.run_once(), host.discoveries) == (None, 1)


def test_thread_starts_with_the_first_unknown_owner(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_users, "FIRST_RETRY", 0.01)
    host.restart()
    host.guests, host.conductor_error = [guest(A)], Unavailable("no conductor listens")
    host.users.start()
    assert host.discover() == {}
    host.conductor_error = None
    host.now += 60.0
    wait_until("all backends discover", lambda: host.discoveries)
    host.users.stop()
    assert host.users.join(30.0)


def test_restarted_agent_withholds_what_it_knows_without_a_conductor(host: Host) -> None:
    host.guests = [guest(A)]
    assert host.discover() == {A: "guest1"}
    host.restart()
    host.conductor_error = TimedOut("no answer")
    host.guests = [guest(A), guest(B, uuid=OTHER)]
    assert host.discover() == {A: "guest1"}


def test_guests_that_cannot_be_read_keep_their_functions(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.guests = [guest(A)]
    assert host.discover() == {A: "guest1"}
    assert host.users.read().remarks == ()
    host.guest_error = Unavailable("libvirt does not answer")
    # Nothing is asked, and nothing is decided.
    host.owners = {A: "other"}
    host.now += RECHECK
    assert host.discover() == {A: "guest1"}
    assert host.questions == [[A]]
    assert host.users.read().remarks == (UNREAD,)
    host.restart()
    caplog.clear()
    for _ in range(3):
        assert host.discover() == {A: "guest1"}
    assert caplog.text.count("Cannot read the guests of this host") == 1
    assert "libvirt does not answer; set [libvirt] read_domains = false" in caplog.text
    assert host.users.run_once() == FIRST_RETRY
    host.guest_error, host.guests = None, []
    caplog.set_level(logging.INFO)
    # The thread reads again, and each backend discovers.
    host.now += FIRST_RETRY
    assert (host.users.run_once(), host.discoveries) == (None, 1)
    assert host.users.read() == DomainFacts()
    assert "The guests of this host can be read again" in caplog.text


def test_host_without_libvirt_has_no_functions_of_guests(host: Host) -> None:
    host.guest_error = Unavailable("no libvirt")
    assert host.discover() == {}
    assert host.questions == []
    assert not host.path.exists()


@pytest.mark.parametrize(
    "answer", [None, [], {}, {"owners": []}, {"owners": ["nobody"]}, {"owners": None}], ids=str
)
def test_malformed_answer_leaves_the_owner_unknown(
    host: Host, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    host.guests, host.answer = [guest(A)], answer if answer is not None else 1
    assert host.discover() == {}
    assert "malformed answer: " in caplog.text


def test_conductor_that_hangs_does_not_stop_a_discovery(host: Host) -> None:
    answer = threading.Event()
    host.restart(max_seconds=0.05)
    host.guests = [guest(A)]

    def find(host: str, functions: Any) -> Any:
        assert answer.wait(30.0)
        return {"owners": [None]}

    host.find_function_owners = find  # type: ignore[method-assign]
    assert host.discover() == {}
    assert host.discover() == {}
    answer.set()
    wait_until("the owner is known", lambda: host.discover() == {A: "guest1"})


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"u": {}}', '{"u": {"name": "n", "owned": {}, "foreign": []}}', "\xff"]
)
def test_damaged_file_is_moved_away(tmp_path: Path, content: str) -> None:
    path = tmp_path / "guests.json"
    path.write_text(content, encoding="latin-1")
    assert RecordFile(path).records == {}
    assert (tmp_path / "guests.json.broken").exists()


def test_file_that_cannot_be_written_is_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").write_text("")  # a file in the place of the folder
    path = tmp_path / "folder/guests.json"
    records = {SERVER: GuestRecord("guest1", frozenset({A}), frozenset({B}))}
    file = RecordFile(tmp_path / "absent.json")
    file._file.path = path
    for _ in range(2):
        file.store(records)
    assert caplog.text.count("a restart loses its changes") == 1
    (tmp_path / "folder").unlink()
    file.store(records)
    assert RecordFile(path).records == records


@pytest.mark.requires("libvirt_python")
def test_option_disables_the_reader(host: Host, connection: Any) -> None:
    unused: Any = None
    enabled = make_conf(libvirt={"connection_uri": "test:///default"})
    users = factory.make_function_users(enabled, unused, host.path, lambda: None)
    assert users is not None
    assert dict(users.read().users) == {}
    disabled = make_conf(libvirt={"read_domains": False})
    assert factory.make_function_users(disabled, unused, host.path, lambda: None) is None
