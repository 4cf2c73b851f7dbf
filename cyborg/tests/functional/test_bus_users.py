# SPDX-License-Identifier: Apache-2.0
"""The users and permissions of the broker from the documentation page on security.

The commands of the page run with a separate virtual host and separate users.
"""

import re
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
from cyborg.rpc.client import make_agent_client
from cyborg.rpc.contract import CONTRACTS
from cyborg.tests.fixtures.bus.broker import Bus, open_bus
from cyborg.tests.fixtures.bus.malformed import MalformedMessage, wrapped
from cyborg.tests.fixtures.machine import prerequisites
from cyborg.tests.fixtures.machine.processes import wait_until

PAGE = Path(cyborg.__file__).parents[1] / "doc/source/admin/security.rst"
HOST = "compute-1"
USERS = ("cyborg-conductor", "cyborg-api", "cyborg-compute-1")
PASSWORD = "secret"

pytestmark = [pytest.mark.services, pytest.mark.matrix]


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
    """A virtual host with the users of the page, under unique names."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.tag = uuid.uuid4().hex[:8]
        self.vhost = f"cyborg-{self.tag}"

    def user(self, name: str) -> str:
        """Return the unique name for a user of the page."""
        return f"{name}-{self.tag}"

    def make(self) -> None:
        """Run the page's commands."""
        for verb, *words in commands():
            arguments = [self.user(word) if word in USERS else word for word in words]
            if verb == "add_vhost":
                arguments = [self.vhost]
            elif verb == "add_user":
                arguments[1] = PASSWORD
            else:
                arguments[arguments.index("-p") + 1] = self.vhost
            ctl(verb, *arguments)

    def drop(self) -> None:
        """Delete the virtual host and the users."""
        ctl("delete_vhost", self.vhost)
        for name in USERS:
            ctl("delete_user", self.user(name))

    @contextmanager
    def bus(self, name: str, **rpc: Any) -> Iterator[Bus]:
        """Yield the bus of one user."""
        location = self.url.rpartition("@")[2].partition("/")[0]
        url = f"rabbit://{self.user(name)}:{PASSWORD}@{location}/{self.vhost}"
        # The topic is that of the page; this virtual host has no other user of it.
        with open_bus(url, rpc={"topic": "cyborg", "timeout": 5.0, **rpc}) as new_bus:
            yield new_bus


class EchoEndpoint:
    """An endpoint that answers every method with its name."""

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
    """Yield the broker of this machine; skip if this user cannot administer it."""
    if "@127.0.0.1:" not in rabbit_url:
        pytest.skip("rabbitmqctl administers the broker of this machine, and another one is used")
    prerequisites.require("rabbitmqctl")
    try:
        ctl("list_vhosts")
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("rabbitmqctl may not administer this broker, which root may")
    rabbit = Broker(rabbit_url)
    try:
        rabbit.make()
        yield rabbit
    finally:
        rabbit.drop()


def test_broker_permissions_are_sufficient_and_minimal(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    trusted = [broker.user("cyborg-conductor")]
    conductor_side, agent_side = EchoEndpoint("conductor"), EchoEndpoint("agent")
    with ExitStack() as stack:
        conductor = stack.enter_context(broker.bus("cyborg-conductor"))
        api = stack.enter_context(broker.bus("cyborg-api"))
        agent = stack.enter_context(broker.bus(USERS[2], allowed_users=trusted))
        stack.enter_context(conductor.serving("conductor", conductor_side, "conductor-1"))
        stack.enter_context(agent.serving("agent", agent_side, HOST))

        assert api.conductor().arq_create("p", None) == {"heard": "arq_create"}
        assert agent.conductor().get_desired_backends(HOST, "e") == {
            "heard": "get_desired_backends"
        }
        orders = make_agent_client(conductor.transport, conductor.conf)
        assert orders.hardware(HOST) == {"heard": "hardware"}

        for other in (api, agent):
            with pytest.raises(Unavailable, match="cannot be called"):
                make_agent_client(other.transport, other.conf).hardware(HOST)
        assert agent_side.heard == ["hardware"]

        # Bypass the topics by the default exchange, without a user id or with the own one.
        for user in (None, broker.user(USERS[2])):
            publish_call(broker, f"cyborg.agent.{HOST}", user)
        wait_until(
            "both were refused", lambda: caplog.text.count("is not one of [rpc] allowed_users") == 2
        )
        assert agent_side.heard == ["hardware"]
        with pytest.raises(amqp.PreconditionFailed, match="user_id"):
            publish_call(broker, f"cyborg.agent.{HOST}", trusted[0])

        for queue in ("cyborg.agent.compute-2", "cyborg.conductor", "nova.compute"):
            with pytest.raises(amqp.AccessRefused):
                listen(broker, queue)


def publish_call(broker: Broker, queue: str, user: str | None) -> None:
    """Publish a call to an agent's queue as another agent's user, with the user id ``user``."""
    order = {"method": "sync_backends", "args": {"generation": 1}, "version": "1.0"}
    properties = {"content_type": "application/json", "content_encoding": "utf-8"}
    properties |= {"user_id": user} if user else {}
    with open_channel(broker) as channel:
        message = amqp.Message(MalformedMessage("order", wrapped(order)).body, **properties)
        channel.basic_publish_confirm(message, routing_key=queue)


def listen(broker: Broker, queue: str) -> None:
    """Listen to a queue as an agent's user."""
    with open_channel(broker) as channel:
        channel.basic_consume(queue, callback=print)


@contextmanager
def open_channel(broker: Broker) -> Iterator[amqp.Channel]:
    """Yield a channel of the agent's user."""
    connection = amqp.Connection(
        broker.url.rpartition("@")[2].partition("/")[0],
        userid=broker.user(USERS[2]),
        password=PASSWORD,
        virtual_host=broker.vhost,
    )
    with connection:
        connection.connect()
        yield connection.channel()
