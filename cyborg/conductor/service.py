# SPDX-License-Identifier: Apache-2.0
"""The conductor as a service: wired together, waiting for its neighbours, stopped in seconds."""

import threading
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log

from cyborg.clients import nova as nova_client
from cyborg.clients import placement as placement_client
from cyborg.conductor import metrics
from cyborg.conductor.endpoint import Conductor
from cyborg.conductor.periodic import Complaints, Loop
from cyborg.core.errors import Unavailable
from cyborg.db.engine import make_engine, wait_until_ready
from cyborg.db.reader import Reader
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.agent import AgentClient
from cyborg.rpc.conductor import ConductorClient
from cyborg.rpc.contract import CONDUCTOR
from cyborg.rpc.notifier import Notifier, make_notifier
from cyborg.rpc.server import Server, make_server
from cyborg.rpc.transport import Transport, make_transport

LOG = log.getLogger(__name__)

BINARY = "cyborg-conductor"
LONGEST_PAUSE = 10.0  # seconds between two tries to reach a neighbour at the start
PATIENCE = 5.0  # seconds that a stop waits for each thing that is still at work
LAST_WORD = 0.5  # ... for a hello of ours that is under way, which nothing depends on


class ConductorService:
    """One conductor. What is not handed in is opened by ``start`` and closed by ``stop``.

    Nothing is open before ``start``, so that the service may be built before a fork.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        transport: Transport | None = None,
        *,
        engine: sa.Engine | None = None,
        placement: Any = None,
        nova: nova_client.Nova | None = None,
    ) -> None:
        """``placement`` is a keystoneauth adapter, for one that no configuration leads to."""
        self._conf = conf
        self._own_engine = engine is None
        self._own_transport = transport is None
        self._engine = engine
        self._transport = transport
        self._placement = placement and placement_client.Placement(
            placement, conf.placement.request_timeout
        )
        self._nova = nova
        self._notifier: Notifier | None = None
        # One life for all the workers that are forked from here: they share a row.
        self._epoch = str(uuid4())
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._ready = threading.Event()
        self._server: Server | None = None
        self._loops: list[Loop] = []
        self._hello: Loop | None = None
        self._metrics: metrics.MetricsServer | None = None
        self._starter: threading.Thread | None = None
        self.conductor: Conductor | None = None

    def open(self) -> None:
        """Build what leads to each neighbour; nothing is connected yet. Raises Misconfigured."""
        if self._placement is None:
            self._placement = placement_client.make(self._conf)
        if self._nova is None:
            self._nova = nova_client.make(self._conf)
        if self._engine is None:
            self._engine = make_engine(self._conf)
        if self._transport is None:
            self._transport = make_transport(self._conf)
        if self._notifier is None:
            self._notifier = make_notifier(self._conf)

    def start(self) -> None:
        """Begin, and return at once; what is away is waited for in the background.

        Raises Misconfigured.
        """
        self.open()
        _warn(self._conf)
        self._starter = threading.Thread(target=self._start, name="start", daemon=True)
        self._starter.start()

    def wait_ready(self, seconds: float | None = None) -> bool:
        """Wait until database and broker have been reached; tell whether they were."""
        return self._ready.wait(seconds)

    def wait(self) -> None:
        """Wait until ``stop`` has done its work."""
        self._stopped.wait()

    def stop(self) -> None:
        """Take no more orders, end what is in progress, close what was opened. Twice is fine.

        What does not end in time is left: everything it has promised stands in the database.
        """
        if self._stopping.is_set():
            self._stopped.wait()
            return
        self._stopping.set()
        self._ready.clear()
        try:
            self._end()
        finally:
            self._stopped.set()
            LOG.info("The conductor has stopped")

    def _end(self) -> None:
        if self._starter is not None:
            self._starter.join(PATIENCE)
        for loop in self._loops:
            loop.stop()
        if self._hello is not None:
            # While we still answer. With the broker away it is left behind: it ends in time.
            self._hello.stop()
            self._hello.join(LAST_WORD)
        if self.conductor is not None:
            self.conductor.publisher.stop()
            self.conductor.discoveries.stop()
            self.conductor.jobs.stop()
            self.conductor.reconciler.stop()
            self.conductor.audits.stop()
            self.conductor.rollouts.stop()
            for delivery in self.conductor.deliveries:
                delivery.stop()
        if (server := self._server) is not None:
            _in_time("RPC server", server.stop)
            _in_time("last calls", server.wait)
        for loop in self._loops:
            loop.join(PATIENCE)
        if self._metrics is not None:
            _in_time("metrics", self._metrics.stop)
        if self._notifier is not None:
            _in_time("notifier", self._notifier.cleanup)
        if self._transport is not None and self._own_transport:
            _in_time("transport", self._transport.cleanup)
        if self._engine is not None and self._own_engine:
            self._engine.dispose()

    def _start(self) -> None:
        engine, transport = self._engine, self._transport
        placement, nova = self._placement, self._nova
        if engine is None or transport is None or placement is None or nova is None:
            raise AssertionError("open() comes first")
        if self._conf.conductor.metrics_port:
            self._metrics = metrics.MetricsServer(self._conf, Reader(engine))
            self._run([Loop("metrics", metrics.RETRY, self._metrics.ensure)])
        if not wait_until_ready(engine, self._stopping, LOG):
            return
        agents = AgentClient(transport, self._conf)
        conductor = Conductor(
            self._conf, UnitOfWork(engine), agents, placement, nova, self._notifier
        )
        # Published and delivered is also while the broker is away.
        self.conductor = conductor
        self._run(conductor.loops)
        if self._serve(transport, conductor):
            # Not before: a call that nobody listens for is missed for the whole of its timeout.
            self._hello = self._say_hello(transport, conductor)
            self._hello.start()
            self._ready.set()
            LOG.info("The conductor of %s is ready", self._conf.host)

    def _run(self, loops: Sequence[Loop]) -> None:
        self._loops += loops
        for loop in loops:
            loop.start()

    def _say_hello(self, transport: Transport, conductor: Conductor) -> Loop:
        """Return the loop of our own hello, which goes by the bus as an agent's does.

        It takes as long as it takes: a call that fails is bounded by ``[rpc] timeout``.
        """
        conf, client = self._conf, ConductorClient(transport, self._conf)
        versions = {"rpc": CONDUCTOR.version}

        def say() -> dict[str, Any]:
            return client.service_hello(BINARY, conf.host, self._epoch, versions)

        return Loop("hello", conf.conductor.hello_interval, lambda: conductor.watch.hello(say))

    def _serve(self, transport: Transport, conductor: Conductor) -> bool:
        """Answer on the bus, as soon as the broker does; tell whether it did before the stop."""
        topic = f"{self._conf.rpc.topic}.{CONDUCTOR.name}"
        server = make_server(transport, self._conf, topic, self._conf.host, conductor)
        complaints = Complaints()
        pause = 0.5
        while not self._stopping.is_set():
            try:
                server.start()
            except Unavailable as bad:
                complaints.wrong(f"Waiting for the message broker: {bad.message}")
            except Exception as bad:  # noqa: BLE001  the drivers of brokers raise their own
                complaints.wrong(f"Waiting for the message broker: {type(bad).__name__}: {bad}")
            else:
                self._server = server
                complaints.right("The message broker")
                return True
            self._stopping.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return False


def _in_time(what: str, work: Callable[[], object]) -> None:
    """Do something that may hang when a neighbour is away, and go on without it then."""

    def attempt() -> None:
        try:
            work()
        except Exception:
            LOG.exception("Closing the %s failed", what)

    thread = threading.Thread(target=attempt, name=f"close {what}", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        LOG.warning("The %s does not close in %g s and is left behind", what, PATIENCE)


def _warn(conf: cfg.ConfigOpts) -> None:
    """Say so when agents may be given up that are only slow, as far as this host's file tells."""
    needed = 2 * conf.agent.discovery_timeout + conf.conductor.hello_interval
    if conf.conductor.driver_timeout < needed:
        LOG.warning(
            "[conductor] driver_timeout is %g s, and an agent may need %g s to change a backend: "
            "twice [agent] discovery_timeout, and a hello_interval. A change that is only slow "
            "would be taken back",
            conf.conductor.driver_timeout,
            needed,
        )
