# SPDX-License-Identifier: Apache-2.0
"""The broker's users and permissions that the page on security tells operators to make.

Its commands are run as they stand there, on a virtual host and users of the test's own.
"""

import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import amqp
import pytest

import cyborg
from cyborg.core.errors import Unavailable
from cyborg.fixtures.broker import Bus, open_bus
from cyborg.fixtures.malformed import Bad, wrapped
from cyborg.fixtures.processes import until
from cyborg.rpc.agent import AgentClient
from cyborg.rpc.contract import CONTRACTS

PAGE = Path(cyborg.__file__).parents[1] / "doc" / "source" / "admin" / "security.rst"
HOST = "compute-1"
USERS = ("cyborg-conductor", "cyborg-api", "cyborg-compute-1")
PASSWORD = "secret"

pytestmark = pytest.mark.services


def ctl(*words: str) -> None:
    """Run rabbitmqctl."""
    subprocess.run(["rabbitmqctl", "-q", *words], check=True, capture_output=True, timeout=60)


def commands() -> list[list[str]]:
    """Return the words of the page's commands, without the program's name."""
    text = PAGE.read_text().replace("\\\n     ", "")
    return [
        [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]
        for line in re.findall(r"^   # rabbitmqctl (.*)$", text, re.MULTILINE)
    ]


class Broker:
    """A virtual host with the page's users, under names that nobody else has."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.tag = uuid.uuid4().hex[:8]
        self.vhost = f"cyborg-{self.tag}"

    def user(self, name: str) -> str:
        """Return the name that a user of the page has here."""
        return f"{name}-{self.tag}"

    def make(self) -> None:
        """Run the page's commands."""
        for verb, *words in commands():
            mine = [self.user(word) if word in USERS else word for word in words]
            if verb == "add_vhost":
                mine = [self.vhost]
            elif verb == "add_user":
                mine[1] = PASSWORD
            else:
                mine[mine.index("-p") + 1] = self.vhost
            ctl(verb, *mine)

    def drop(self) -> None:
        """Take all of it away again."""
        ctl("delete_vhost", self.vhost)
        for name in USERS:
            ctl("delete_user", self.user(name))

    @contextmanager
    def bus(self, name: str, **rpc: Any) -> Iterator[Bus]:
        """Give the bus as one of the users has it."""
        where = self.url.rpartition("@")[2].partition("/")[0]
        url = f"rabbit://{self.user(name)}:{PASSWORD}@{where}/{self.vhost}"
        # The topic is the page's: on this virtual host nobody else has it.
        with open_bus(url, rpc={"topic": "cyborg", "timeout": 5.0, **rpc}) as it:
            yield it


class Everything:
    """Answers every method of a contract with its name."""

    def __init__(self, contract: str) -> None:
        self._methods = CONTRACTS[contract].methods
        self.heard: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in self._methods:
            raise AttributeError(name)

        def answer(ctxt: Any, **_: Any) -> dict[str, str]:
            self.heard.append(name)
            return {"heard": name}

        return answer


@pytest.fixture(scope="module")
def broker(rabbit_url: str) -> Iterator[Broker]:
    """The broker of this machine, if we may administer it."""
    if shutil.which("rabbitmqctl") is None or "@127.0.0.1:" not in rabbit_url:
        pytest.skip("no rabbitmqctl for this broker is here")
    try:
        ctl("list_vhosts")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("rabbitmqctl may not administer this broker")
    made = Broker(rabbit_url)
    try:
        made.make()
        yield made
    finally:
        made.drop()


def test_they_suffice_and_allow_no_more(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    trusted = [broker.user("cyborg-conductor")]
    conductor_side, agent_side = Everything("conductor"), Everything("agent")
    with ExitStack() as stack:
        conductor = stack.enter_context(broker.bus("cyborg-conductor"))
        api = stack.enter_context(broker.bus("cyborg-api"))
        agent = stack.enter_context(broker.bus(USERS[2], callers=trusted))
        stack.enter_context(conductor.serving("conductor", conductor_side, "conductor-1"))
        stack.enter_context(agent.serving("agent", agent_side, HOST))

        assert api.conductor().arq_create("p", None) == {"heard": "arq_create"}
        assert agent.conductor().backends_wanted(HOST, "e") == {"heard": "backends_wanted"}
        orders = AgentClient(conductor.transport, conductor.conf)
        assert orders.hardware(HOST) == {"heard": "hardware"}

        for other in (api, agent):
            with pytest.raises(Unavailable, match="cannot be reached"):
                AgentClient(other.transport, other.conf).hardware(HOST)
        assert agent_side.heard == ["hardware"]

        # Past the topics, by the exchange that answers take, and under no name or one's own.
        for user in (None, broker.user(USERS[2])):
            throw(broker, f"cyborg.agent.{HOST}", user)
        until("both were refused", lambda: caplog.text.count("is not one of [rpc] callers") == 2)
        assert agent_side.heard == ["hardware"]
        with pytest.raises(amqp.PreconditionFailed, match="user_id"):
            throw(broker, f"cyborg.agent.{HOST}", trusted[0])

        for queue in ("cyborg.agent.compute-2", "cyborg.conductor", "nova.compute"):
            with pytest.raises(amqp.AccessRefused):
                listen(broker, queue)


def throw(broker: Broker, queue: str, user: str | None) -> None:
    """Put an order onto an agent's queue as an agent's user, who says to be ``user``."""
    order = {"method": "wanted", "args": {"revision": 1}, "version": "1.0"}
    said = {"content_type": "application/json", "content_encoding": "utf-8"}
    said |= {"user_id": user} if user else {}
    with open_channel(broker) as channel:
        message = amqp.Message(Bad("order", wrapped(order)).body, **said)
        channel.basic_publish_confirm(message, routing_key=queue)


def listen(broker: Broker, queue: str) -> None:
    """Listen to a queue as an agent's user."""
    with open_channel(broker) as channel:
        channel.basic_consume(queue, callback=print)


@contextmanager
def open_channel(broker: Broker) -> Iterator[amqp.Channel]:
    """Give a channel as the agent's user has it."""
    connection = amqp.Connection(
        broker.url.rpartition("@")[2].partition("/")[0],
        userid=broker.user(USERS[2]),
        password=PASSWORD,
        virtual_host=broker.vhost,
    )
    with connection:
        connection.connect()
        yield connection.channel()
