# SPDX-License-Identifier: Apache-2.0
"""Five thousand malformed messages to a conductor and an agent that run as in an installation.

Most lie straight on the broker's queues, a fifth come by the agent's socket for drivers. Nobody
dies, nothing is left behind, and each is logged once with its sender.
"""

import json
import os
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from cyborg.core.errors import CyborgError
from cyborg.fixtures import outside
from cyborg.fixtures.broker import Bus, open_bus
from cyborg.fixtures.cloud import Cloud, cloud
from cyborg.fixtures.databases import fresh_database
from cyborg.fixtures.malformed import Bad, Maker
from cyborg.fixtures.processes import Daemon, until
from cyborg.fixtures.raw_bus import RawBus, raw_bus
from cyborg.rpc.agent import AgentClient

pytestmark = pytest.mark.services

HOST = "compute-1"
TO_CONDUCTOR, TO_AGENT, TO_SOCKET = 2700, 1300, 1000
ROUND = 400  # messages between two good calls
PATIENCE = 60.0
POOL = 8  # threads of a daemon that answer, and connections to the broker that they answer by
# What a process may have more at the end than in the middle: its pools fill when they are needed,
# and each connection has a thread of its own. What leaks with one message in a hundred is more.
MORE_MEMORY, MORE_THREADS, MORE_FILES = 64 * 2**20, 2 * POOL + 2, POOL + 4
SAID = re.compile(r"message (fuzz-\d+-\w)\b")
SOCKET_SAID = re.compile(r"Driver process (\d+) is refused")


@dataclass(frozen=True)
class Size:
    """What a daemon and its children take: bytes, threads, open files."""

    memory: int
    threads: int
    files: int


class World:
    """The daemons, the broker beneath them, and a well-mannered client."""

    def __init__(self, stack: Cloud, raw: RawBus, bus: Bus, socket_path: str) -> None:
        self.stack, self.raw, self.bus, self.socket_path = stack, raw, bus, socket_path
        self.conductor = stack.daemons["conductor-1"]
        self.agent = stack.daemons[f"agent-{HOST}"]
        self.queues = {
            self.conductor.name: f"{bus.conf.rpc.topic}.conductor",
            self.agent.name: f"{bus.conf.rpc.topic}.agent.{HOST}",
        }

    def answers(self) -> None:
        """See that both answer a good call, at once."""
        begun = time.monotonic()
        said = self.bus.conductor().service_hello("cyborg-api", "fuzz", str(uuid4()), None)
        assert said["interval"] == 0.5
        assert AgentClient(self.bus.transport, self.bus.conf).hardware(HOST)["hardware"]
        assert time.monotonic() - begun < 10

    def empty(self) -> bool:
        """Tell whether nothing lies in a queue."""
        return not any(self.raw.waiting(queue) for queue in self.queues.values())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[World]:
    """A conductor and an agent with a socket for drivers, each a process."""
    folder = tmp_path_factory.mktemp("bus-fuzz")
    topic = f"test-{uuid4().hex[:12]}"
    options = {
        "rpc": {"topic": topic},
        "DEFAULT": {"executor_thread_pool_size": POOL},
        "oslo_messaging_rabbit": {"amqp_auto_delete": "true", "rpc_conn_pool_size": POOL + 1},
        "agent": {"enabled_drivers": "fake", "socket_drivers": "crypto"},
    }
    with (
        outside.folder() as place,
        fresh_database("mysql", folder) as url,
        cloud(
            folder,
            url,
            rabbit_url,
            (HOST,),
            conductors=("conductor-1",),
            options={**options, "agent": {**options["agent"], "socket_dir": place}},
        ) as stack,
        raw_bus() as raw,
        open_bus(rabbit_url, rpc={"topic": topic}) as bus,
    ):
        made = World(stack, raw, bus, str(place / "agent.sock"))
        until("both answer", lambda: _answers(made))
        yield made


def _answers(world: World) -> bool:
    try:
        world.answers()
    except CyborgError:
        return False
    return True


def size(daemon: Daemon) -> Size:
    """Return what a daemon and its children take now."""
    memory = threads = files = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getsid(int(entry.name)) != daemon.pid:
                continue
            status = (entry / "status").read_text()
            files += len(list((entry / "fd").iterdir()))
        except (ProcessLookupError, FileNotFoundError):
            continue
        its = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        memory += int(its["VmRSS"].split()[0]) * 1024
        threads += int(its["Threads"])
    return Size(memory, threads, files)


def throw(world: World, daemon: Daemon, count: int, chance: random.Random) -> dict[str, Bad]:
    """Throw messages at one daemon and wait for its answers; return them by their ids."""
    contract = "conductor" if daemon is world.conductor else "agent"
    maker = Maker(contract, world.raw.reply, chance)
    sent: dict[str, Bad] = {}
    for _ in range(count):
        number = f"fuzz-{chance.randrange(10**12)}-{contract[0]}"
        sent[number] = maker.make(number)
        user = chance.choice(["guest", None])
        world.raw.send(world.queues[daemon.name], sent[number], number, user)
    asked = {number for number, bad in sent.items() if bad.asks}

    def all_came() -> bool:
        world.raw.collect(0.1)
        return asked <= world.raw.answers.keys()

    until(f"{daemon.name} answered", all_came, PATIENCE)
    return sent


def lines(daemon: Daemon) -> list[str]:
    """Return all that a daemon has logged."""
    return daemon.log.read_text(errors="surrogateescape").splitlines()


def rude(path: str, count: int, chance: random.Random) -> int:
    """Throw spoilt requests at the socket for drivers; return how many were not taken."""
    hello = {"status": "READY", "endpoint": path.replace("agent", "crypto"), "type": "CRYPTO"}
    body = json.dumps(hello).encode()
    good = b"POST /hello HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    refused = 0
    for _ in range(count):
        data = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        told = b""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(20)
            link.connect(path)
            try:
                link.sendall(data)
                link.shutdown(socket.SHUT_WR)
                while more := link.recv(4096):
                    told += more
            except ConnectionError:
                pass
        refused += b" 200 " not in told.split(b"\r\n")[0]
    return refused


@pytest.mark.timeout(400)
def test_whatever_lies_on_the_bus(
    world: World, capsys: pytest.CaptureFixture[str], record_property: Any
) -> None:
    seed = int(os.environ.get("CYBORG_TEST_SEED", random.randrange(10**9)))
    chance = random.Random(seed)
    with capsys.disabled():
        print(f"\nseed {seed}: CYBORG_TEST_SEED={seed} does it again")  # noqa: T201
    begun = time.monotonic()
    sent: dict[str, Bad] = {}
    sizes: list[dict[str, Size]] = []
    rounds = (TO_CONDUCTOR + TO_AGENT) // ROUND
    for turn in range(rounds):
        share = TO_CONDUCTOR * ROUND // (TO_CONDUCTOR + TO_AGENT)
        sent |= throw(world, world.conductor, share, chance)
        sent |= throw(world, world.agent, ROUND - share, chance)
        world.answers()
        if turn in (rounds // 2 - 1, rounds - 1):
            until("the queues are empty", world.empty, PATIENCE)
            sizes.append({d.name: size(d) for d in (world.conductor, world.agent)})
    refused = rude(world.socket_path, TO_SOCKET, chance)
    world.answers()
    took = time.monotonic() - begun
    kinds = Counter(bad.kind for bad in sent.values())
    told = f"{len(sent)} messages and {TO_SOCKET} requests in {took:.0f} s: {dict(kinds)}"
    record_property("told", told)
    with capsys.disabled():
        print(f"{told}; {sizes}")  # noqa: T201

    for daemon in (world.conductor, world.agent):
        assert daemon.alive()
        log = lines(daemon)
        odd = [line for line in log if "nobody foresaw" in line or "Traceback" in line]
        assert odd == []
        assert [line for line in log if "forged" in line and line.startswith("2026-01-01")] == []
    assert unforeseen(world, sent) == {}
    assert miscounted(world, sent) == {}
    failures = [answer["failure"] for answer in world.raw.answers.values() if answer["failure"]]
    assert failures, "strangers are answered in oslo.messaging's own way"
    assert [text for text in failures if 'File \\"' in text] == [], "which shows nothing inside"
    said = sum(bool(SOCKET_SAID.search(line)) for line in lines(world.agent))
    assert said == refused, "each request is logged once"
    before, after = sizes
    for name, then in before.items():
        now = after[name]
        assert now.memory < then.memory + MORE_MEMORY, (name, then, now)
        assert now.threads < then.threads + MORE_THREADS, (name, then, now)
        assert now.files < then.files + MORE_FILES, (name, then, now)


def unforeseen(world: World, sent: dict[str, Bad]) -> dict[str, Any]:
    """Return the calls whose answer is none of ours: an internal error, or no envelope."""
    found = {}
    for number, bad in sent.items():
        answer = world.raw.answers.get(number)
        if answer is None or answer["failure"]:
            continue
        error = (answer["result"] or {}).get("error")
        if error is not None and error["code"] == "internal":
            found[number] = (bad, error)
    return found


def miscounted(world: World, sent: dict[str, Bad]) -> dict[str, Any]:
    """Return the messages that were refused and are not in a log once, or were taken and are."""
    text = [line for d in (world.conductor, world.agent) for line in lines(d)]
    logged = Counter(found[1] for line in text if (found := SAID.search(line)))
    wrong = {}
    for number, bad in sent.items():
        answer = world.raw.answers.get(number)
        taken = answer is not None and not answer["failure"] and "ok" in answer["result"]
        if logged[number] != (0 if taken else 1):
            wrong[number] = (bad.kind, bad.body[:400], logged[number], answer)
    return wrong
