# SPDX-License-Identifier: Apache-2.0
"""Service process of the conductor: start, wait for database and broker, stop in seconds."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg

from cyborg import tracing
from cyborg.clients import nova as nova_client
from cyborg.clients import placement as placement_client
from cyborg.conductor.binding.limits import LimitSource, make_source
from cyborg.conductor.common.calls import IdempotentEndpoint
from cyborg.conductor.common.sweeps import LoopWatch
from cyborg.conductor.common.work_lease import process_owner
from cyborg.conductor.manager import make_handlers
from cyborg.conductor.metrics import make_server as make_metrics_server
from cyborg.conductor.wiring import Conductor, build_conductor
from cyborg.core import hosts
from cyborg.core.errors import Unavailable
from cyborg.core.log import get_logger
from cyborg.core.upgrade import SCHEMA
from cyborg.db.custody import write as custody_keys
from cyborg.db.engine import Reader, make_detector, make_engine, wait_until_ready
from cyborg.db.errors import FAILURES
from cyborg.db.schema import REVISION
from cyborg.db.timeouts import PROBE_INTERVAL, StallDetector
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.client import check_pins, make_agent_client, make_conductor_client
from cyborg.rpc.contract import CONDUCTOR
from cyborg.rpc.notifications import NotificationListener, Notifier, make_listener, make_notifier
from cyborg.rpc.publishing import FAULTS
from cyborg.rpc.server import Server, count_threads, make_server
from cyborg.rpc.transport import Transport, make_transport
from cyborg.telemetry.server import RETRY_INTERVAL, MetricsServer
from cyborg.threads.failures import Backoff, RateLimitedLogger
from cyborg.threads.periodic import PeriodicTask

LOG = get_logger(__name__)

BINARY = hosts.CONDUCTOR
# Seconds between two attempts to reach the broker at the start.
MAX_RETRY_DELAY = 10.0
# Seconds for the whole of a stop.
STOP_TIMEOUT = 10.0
# Seconds of STOP_TIMEOUT that are reserved for closing connections.
CONNECTION_CLOSE_TIME = 2.0
# Seconds of STOP_TIMEOUT for a running heartbeat. A heartbeat over a broker that is away takes up
# to [rpc] timeout.
HEARTBEAT_JOIN_TIMEOUT = 0.5


class ConductorService:
    """Conductor process.

    ``start`` opens the connections that are not passed in, and ``stop`` closes them. Nothing is
    open before ``start``, so that the service can be created before a fork.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        transport: Transport | None = None,
        *,
        engine: sa.Engine | None = None,
        placement: Any = None,
        nova: nova_client.Nova | None = None,
        call_threads: int | None = None,
    ) -> None:
        """``placement`` is a keystoneauth adapter that replaces the configured one.

        ``call_threads`` is the number of calls of the API at the same time, if it is known.
        """
        self._call_threads = call_threads
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
        self._listener: NotificationListener | None = None
        self._limits: LimitSource | None = None
        # All workers that are forked from this process have one epoch: they share a row.
        self._epoch = str(uuid4())
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._ready = threading.Event()
        self._server: Server | None = None
        self._loops: list[PeriodicTask] = []
        self._loop_watch = LoopWatch()
        self._heartbeat: PeriodicTask | None = None
        self._metrics: MetricsServer | None = None
        self._starter: threading.Thread | None = None
        self.conductor: Conductor | None = None

    def open(self) -> None:
        """Create the clients of other services without connecting. Raise Misconfigured."""
        tracing.check_config(self._conf)
        check_pins(self._conf)
        keys = custody_keys.load(self._conf)
        self._limits = make_source(self._conf)
        if self._placement is None:
            self._placement = placement_client.make(self._conf)
        if self._nova is None:
            self._nova = nova_client.make(self._conf)
        if self._engine is None:
            self._engine = make_engine(self._conf)
        self._engine = custody_keys.attach(self._engine, keys)
        if self._transport is None:
            self._transport = make_transport(self._conf)
        if self._notifier is None:
            self._notifier = make_notifier(self._conf)
        if self._listener is None:
            self._listener = make_listener(self._conf)

    def start(self) -> None:
        """Start a thread that waits for database and broker, then serves. Raise Misconfigured."""
        self.open()
        tracing.start(self._conf, BINARY)
        _warn_short_driver_timeout(self._conf)
        self._starter = threading.Thread(target=self._start, name="start", daemon=True)
        self._starter.start()

    def wait_ready(self, seconds: float | None = None) -> bool:
        """Wait until database and broker are reached; return whether they are."""
        return self._ready.wait(seconds)

    def wait(self) -> None:
        """Wait until ``stop`` has completed."""
        self._stopped.wait()

    def stop(self) -> None:
        """Stop taking messages, end running work, close connections. Idempotent.

        Return within STOP_TIMEOUT seconds. Work that does not end in time is abandoned; its state
        is in the database, and another conductor continues it.
        """
        if self._stopping.is_set():
            self._stopped.wait(STOP_TIMEOUT)
            return
        # Before anything is stopped: the starting thread checks it between its steps.
        self._stopping.set()
        self._ready.clear()
        try:
            self._shutdown()
        finally:
            tracing.stop()
            self._stopped.set()
            LOG.info("Conductor has stopped", host=self._conf.host)

    def _shutdown(self) -> None:
        """Stop everything within STOP_TIMEOUT: what uses connections first."""
        end = time.monotonic() + STOP_TIMEOUT
        if self._starter is not None:
            # It may hang in a call to the database or the broker: the rest needs time, too.
            self._starter.join(STOP_TIMEOUT / 3)
        # All tasks are told to stop before any is waited for.
        for loop in self._loops:
            loop.stop()
        if self._heartbeat is not None:
            # Before the server stops, which may have to answer the heartbeat. If the broker is
            # unavailable, do not wait for the call to time out.
            self._heartbeat.stop()
            self._heartbeat.join(HEARTBEAT_JOIN_TIMEOUT)
        if self.conductor is not None:
            self.conductor.stop()
        # Everything ends in parallel; users of connections end before the connections.
        closing = []
        if (server := self._server) is not None:
            closing += [_close_in_thread("RPC server", server.stop, server.wait)]
        if (listener := self._listener) is not None:
            closing += [_close_in_thread("Nova listener", listener.stop, listener.cleanup)]
        running = [
            loop.name
            for loop in self._loops
            if not loop.join(max(0.0, end - CONNECTION_CLOSE_TIME - time.monotonic()))
        ]
        _close_with_timeout(closing, end - CONNECTION_CLOSE_TIME)
        if self._metrics is not None:
            # After the last calls, which it counts, and before the database, which it reads. The
            # connections get the other half of the reserved time.
            closing = [_close_in_thread("metrics", self._metrics.stop)]
            _close_with_timeout(closing, end - CONNECTION_CLOSE_TIME / 2)
        closing = []
        if self._notifier is not None:
            closing += [_close_in_thread("notifier", self._notifier.cleanup)]
        if self._transport is not None and self._own_transport:
            closing += [_close_in_thread("transport", self._transport.cleanup)]
        if self._engine is not None and self._own_engine:
            closing += [_close_in_thread("database", self._engine.dispose)]
        _close_with_timeout(closing, end)
        if running:
            LOG.warning(
                "Periodic tasks abandoned; other conductors run these tasks: %s",
                ", ".join(running),
            )

    def _start(self) -> None:
        """Wait for the database, start the tasks, then wait for the broker and serve.

        Runs in a thread of its own, and ends early if the conductor is stopped meanwhile.
        """
        engine, transport = self._engine, self._transport
        placement, nova = self._placement, self._nova
        if engine is None or transport is None or placement is None or nova is None:
            raise AssertionError("open() must be called first")
        if self._conf.conductor.metrics_port:
            self._metrics = make_metrics_server(
                self._conf,
                Reader(engine),
                transport.recorder,
                self._loop_watch.overdue,
                self._notification_counts,
            )
            self._start_loops([PeriodicTask("metrics", RETRY_INTERVAL, self._metrics.ensure)])
        if not wait_until_ready(engine, self._stopping, LOG, _requires_upgrade):
            return
        agents = make_agent_client(transport, self._conf)
        stalls = self._detect_stalls()
        uow = UnitOfWork(engine, stalls=stalls)
        conductor = build_conductor(
            self._conf,
            uow,
            agents,
            placement,
            nova,
            notifier=self._notifier,
            limits=self._limits,
            metrics=transport.recorder,
            call_threads=self._call_threads or count_threads(self._conf),
        )
        # The loops run before the broker is reached: publishing and delivery do not need it.
        self.conductor = conductor
        self._start_loops(conductor.tasks)
        self._listen(conductor)
        if self._serve(transport, IdempotentEndpoint(make_handlers(conductor), uow)):
            # Only now: a heartbeat without a server would wait for its whole timeout.
            self._heartbeat = self._heartbeat_loop(transport, conductor)
            self._heartbeat.start()
            self._ready.set()
            LOG.info(
                "Conductor is ready, its leases have the owner %s",
                process_owner(self._conf.host),
                host=self._conf.host,
            )

    def _detect_stalls(self) -> StallDetector | None:
        """Start to watch the database server, if it is one."""
        if not self._own_engine or self._engine is None or self._engine.dialect.name == "sqlite":
            return None
        stalls = make_detector(self._conf)
        self._start_loops([PeriodicTask("database", PROBE_INTERVAL, stalls.run_once)])
        return stalls

    def _notification_counts(self) -> dict[str, int]:
        watcher = None if self.conductor is None else self.conductor.instance_watcher
        return {} if watcher is None else watcher.counts()

    def _listen(self, conductor: Conductor) -> None:
        """Start to receive Nova's notifications if they are enabled."""
        watcher = conductor.instance_watcher
        if self._listener is not None and watcher is not None:
            self._listener.start(watcher.receive, watcher.refuse)
        elif self._listener is not None:
            LOG.warning(
                "[nova] notifications has no effect with send_events = false or [conductor] "
                "orphan_grace = 0"
            )

    def _start_loops(self, loops: Sequence[PeriodicTask]) -> None:
        self._loops += loops
        self._loop_watch.add(loops)
        for loop in loops:
            loop.start()

    def _heartbeat_loop(self, transport: Transport, conductor: Conductor) -> PeriodicTask:
        """Return the loop of the conductor's own heartbeats, sent over the bus like an agent's.

        A heartbeat that fails takes up to ``[rpc] timeout``.
        """
        conf, client = self._conf, make_conductor_client(transport, self._conf)
        versions = {"rpc": CONDUCTOR.version, SCHEMA: REVISION}

        def send() -> dict[str, Any]:
            return client.service_hello(
                BINARY, conf.host, self._epoch, versions, self._loop_watch.status()
            )

        return PeriodicTask(
            "hello",
            conf.conductor.hello_interval,
            lambda: conductor.failure_detector.self_heartbeat(send),
        )

    def _serve(self, transport: Transport, endpoint: IdempotentEndpoint) -> bool:
        """Serve calls once the broker answers; return False if stopped before."""
        topic = f"{self._conf.rpc.topic}.{CONDUCTOR.name}"
        server = make_server(transport, self._conf, topic, self._conf.host, endpoint)
        rate_limited_log = RateLimitedLogger(logger=LOG)
        backoff = Backoff(initial=0.5, maximum=MAX_RETRY_DELAY)
        while not self._stopping.is_set():
            try:
                server.start()
            except Unavailable as exc:
                error = exc.message
            except Exception as exc:  # noqa: BLE001  broker drivers raise their own errors
                error = f"{type(exc).__name__}: {exc}"
            else:
                self._server = server
                rate_limited_log.recovered("The message broker")
                return True
            rate_limited_log.warn(f"Waiting for the message broker: {error}; retrying")
            self._stopping.wait(backoff.next_delay())
        return False


def _close_in_thread(name: str, *steps: Callable[[], object]) -> threading.Thread:
    """Start to close an object in a thread, since it may hang if a remote service is down."""

    def attempt() -> None:
        for step in steps:
            try:
                step()
            except (*FAULTS, *FAILURES) as exc:
                error = f"{type(exc).__name__}: {exc}"
                LOG.warning("Failed to close %s, continuing to stop: %s", name, error)
            except Exception:
                LOG.exception("Unexpected error while closing %s", name)

    thread = threading.Thread(target=attempt, name=name, daemon=True)
    thread.start()
    return thread


def _close_with_timeout(threads: Sequence[threading.Thread], end: float) -> None:
    """Wait for threads until ``end`` of the monotonic clock, then abandon them."""
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    for thread in threads:
        if thread.is_alive():
            LOG.warning("Connection of %s did not close in time and is abandoned", thread.name)


def _requires_upgrade(engine: sa.Engine) -> bool:
    # Alembic takes memory and time, and few conductors start with a database of another revision.
    from cyborg.db import migrate

    return migrate.requires_upgrade(engine)


def _warn_short_driver_timeout(conf: cfg.ConfigOpts) -> None:
    """Warn if driver_timeout is too short for agents configured like this host."""
    needed = 2 * conf.agent.discovery_timeout + conf.conductor.hello_interval
    if conf.conductor.driver_timeout < needed:
        LOG.warning(
            "[conductor] driver_timeout is %g s, but an agent may need %g s to change a backend "
            "(twice [agent] discovery_timeout, plus hello_interval): a slow change would be rolled "
            "back. Increase driver_timeout",
            conf.conductor.driver_timeout,
            needed,
        )
