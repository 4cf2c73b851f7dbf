# SPDX-License-Identifier: Apache-2.0
"""API, conductor, agent and Placement in one process, with files in one directory.

The components are those of a distributed installation and communicate in the same way: by RPC in
the wire format, and through Placement's REST API.
"""

import contextlib
import fcntl
import os
import stat
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oslo_config import cfg

from cyborg import tracing
from cyborg.agent.service import AgentService
from cyborg.api import faults, health
from cyborg.api.app import make_app
from cyborg.api.middleware import HostCheck
from cyborg.conductor.service import ConductorService
from cyborg.core import errors, log
from cyborg.db import migrate
from cyborg.db.clock import INTERVAL
from cyborg.db.engine import Reader, make_engine
from cyborg.rpc.client import make_conductor_client
from cyborg.rpc.contract import ConductorAPI
from cyborg.rpc.transport import make_transport, register_options
from cyborg.standalone import http, placement
from cyborg.threads.periodic import PeriodicTask

LOG = log.get_logger(__name__)

DATABASE = "cyborg.db"
PLACEMENT_DATABASE = "placement.db"
LOCK = "lock"
START_TIMEOUT = 120.0  # seconds for a component to start; a busy machine needs more than 30
STOP_TIMEOUT = 20.0  # seconds for stop()
FINAL_CALL_TIMEOUT = 0.2  # seconds for the agent's call in flight at a stop
# If no driver is enabled, so that the service has at least one device.
DEFAULT_DRIVERS = ["fake"]


@dataclass(eq=False)
class StandaloneStack:
    """All components of the service. ``start()`` returns when the API serves requests.

    ``conf`` must have the options of Cyborg registered; some are overridden. ``state`` is the
    directory of the files; it is created if missing, and only one service can use it. ``report``
    is called with a line for each step of the start.

    Create the stack; the drivers of its agent read ``sysfs_root``.
    """

    conf: cfg.ConfigOpts
    state: Path
    report: Callable[[str], object] = lambda line: None
    sysfs_root: str | Path = "/sys"

    def __post_init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self._api: http.HttpServer
        self._placement_http: http.HttpServer
        self.conductor: ConductorAPI
        self.reader: Reader
        self.placement: Any

    @property
    def endpoint(self) -> str:
        """Return the URL of the API's root."""
        return self._api.url

    @property
    def placement_endpoint(self) -> str:
        """Return the URL of Placement's root; its token is ``admin``."""
        return self._placement_http.url

    def start(self) -> None:
        """Start all components. If one fails, stop the others and raise its error."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all components in reverse order. Can be called twice.

        Return after at most STOP_TIMEOUT seconds; a hanging component ends with the process.
        """
        # In a thread, because a component may hang, and the stop must end all the same.
        stopping = threading.Thread(target=self._undo.close, name="stopping", daemon=True)
        stopping.start()
        stopping.join(STOP_TIMEOUT)
        if stopping.is_alive():
            LOG.warning("Timed out stopping the stand-alone service after %g s", STOP_TIMEOUT)

    def _start(self) -> None:
        """Start each component, and register how it is stopped, for ``stop`` in reverse order."""
        conf = self.conf
        self._api = self._listen("port")
        self._placement_http = self._listen("placement_port")
        make_private(self.state)
        self._undo.enter_context(_sole_owner(self.state))
        self._override()

        tracing.start(conf, "cyborg-standalone")
        self._undo.callback(tracing.stop)

        self.report("database: migrating")
        engine = make_engine(conf)
        self._undo.callback(engine.dispose)
        for run in (migrate.upgrade, migrate.contract):
            run(engine, is_alone=True)

        self.report("Placement: starting")
        app = placement.make_app(f"sqlite:///{self.state / PLACEMENT_DATABASE}")
        self._undo.callback(app.close)
        self.placement = placement.make_adapter(app, raise_exc=False)
        ensure_compute_node(self.placement, conf.host)
        self._undo.callback(self._placement_http.stop)
        # The token is public, so requests of web pages are rejected as by the API.
        self._placement_http.start(faults.FaultMiddleware(HostCheck(app, conf.api.server_names)))

        self.report("conductor: starting")
        transport = make_transport(conf)
        self._undo.callback(transport.cleanup)
        self.reader = Reader(conf)
        self._undo.callback(self.reader.close)
        # One clock for the reads of the API and for the deadlines of its calls.
        clock = self.reader.clock
        self._run(PeriodicTask("clock", INTERVAL, clock.measure))
        self.conductor = make_conductor_client(transport, conf, clock.earliest_at)
        agent = AgentService(conf, self.conductor, transport, self.sysfs_root)
        shutdown = _AgentShutdown(agent)
        # Undone in reverse order: the agent begins to stop before the conductor, which answers its
        # last call, and is awaited after it.
        self._undo.callback(shutdown.join)
        conductor = ConductorService(
            conf,
            engine=engine,
            transport=transport,
            placement=self.placement,
            call_threads=conf.standalone.threads,
        )
        self._run(conductor)
        # Otherwise the agent's first call is lost, and the agent waits for its full timeout.
        if not conductor.wait_ready(START_TIMEOUT):
            raise errors.Unavailable(f"the conductor is not ready after {START_TIMEOUT:g} s")

        self.report(f"agent: starting, backends {', '.join(_backends(conf))}")
        self._undo.callback(shutdown.start)
        agent.start()

        api = make_app(conf, self.conductor, self.reader, transport.recorder)
        self._run(health.Heartbeat(conf, self.conductor, str(uuid.uuid4()), api.health))
        self._undo.callback(self._api.stop)
        self._api.start(api, conf.standalone.threads)

    def _override(self) -> None:
        """Override the options that one process with files in one directory requires."""
        conf = self.conf
        conf.set_override("auth_strategy", "noauth")
        names = [*conf.api.server_names, conf.standalone.listen]
        conf.set_override("server_names", names, group="api")
        # Only a default: the file of a user may disable it.
        conf.set_default("console", True, group="api")
        conf.set_override("state_path", str(self.state))
        # One process: its metrics need no files.
        conf.set_override("metrics_directory", "", group="conductor")
        register_options(conf)
        conf.set_override("transport_url", "kombu+memory:////")
        # The in-memory broker is shared in the process: stacks need separate topics.
        conf.set_override("topic", f"standalone-{uuid.uuid4().hex}", group="rpc")
        conf.set_override("connection", f"sqlite:///{self.state / DATABASE}", group="database")
        # Without Nova nobody takes the events, which would become dead letters.
        if not conf.nova.endpoint_override:
            conf.set_override("send_events", False, group="nova")
        if not _backends(conf):
            conf.set_override("enabled_drivers", DEFAULT_DRIVERS, group="agent")

    def _listen(self, option: str) -> http.HttpServer:
        section = self.conf.standalone
        server = http.HttpServer(section.listen, section[option], option)
        # Registered before the start, to release the port in any case; stop() can be called twice.
        self._undo.callback(server.stop)
        return server

    def _run(self, service: Any) -> None:
        self._undo.callback(service.stop)
        service.start()


class _AgentShutdown:
    """Stops the agent in parallel with the conductor, since each waits 1 s for idle threads."""

    def __init__(self, agent: AgentService) -> None:
        self._thread = threading.Thread(target=agent.stop, name="agent-shutdown", daemon=True)

    def start(self) -> None:
        """Begin to stop the agent; wait up to FINAL_CALL_TIMEOUT seconds for its last RPC call.

        The conductor must still run, because it answers that call.
        """
        self._thread.start()
        self._thread.join(FINAL_CALL_TIMEOUT)

    def join(self) -> None:
        """Wait until the agent has stopped."""
        if self._thread.ident is not None:
            self._thread.join()


def ensure_compute_node(client: Any, host: str) -> None:
    """Create the compute node provider, which nova-compute would create, if it is missing."""
    providers = client.get("/resource_providers", params={"name": host}).json()[
        "resource_providers"
    ]
    if not providers:
        client.post("/resource_providers", json={"name": host}, raise_exc=True)


def _backends(conf: cfg.ConfigOpts) -> list[str]:
    return [*conf.agent.enabled_backends, *conf.agent.enabled_drivers]


def make_private(state: Path) -> None:
    """Create the state directory and its database files, accessible by their owner only.

    Group and other permissions of an existing directory and its files are removed. SQLite creates
    its journal files with the permissions of the database. Raise Misconfigured if the directory
    has other files and is accessible by other users, or cannot be created.
    """
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A shared directory such as /tmp or /var/lib must not become unusable for others.
        mode, names = state.stat().st_mode, os.listdir(state)
        # An empty directory, or one that this service has used before, can be made private.
        has_database = any(name.startswith((DATABASE, PLACEMENT_DATABASE)) for name in names)
        has_other_files = bool(names) and not has_database
        is_accessible = bool(mode & (stat.S_IRWXG | stat.S_IRWXO))
        is_sticky = bool(mode & stat.S_ISVTX)  # as /tmp
        if is_sticky or (has_other_files and is_accessible):
            raise errors.Misconfigured(
                f"{state} is shared with other users: set --state-dir to a separate directory"
            )
        state.chmod(0o700)
        for name in (DATABASE, PLACEMENT_DATABASE, LOCK):
            # An existing file is not opened: close() would drop the locks of this process on it.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(state / name, os.O_CREAT | os.O_EXCL, 0o600))
            for path in {state / name, *state.glob(f"{name}-*")}:
                if not path.is_symlink():
                    path.chmod(0o600)
    except OSError as exc:
        raise errors.Misconfigured(f"{exc.filename or state}: {exc.strerror}") from exc


@contextlib.contextmanager
def _sole_owner(state: Path) -> Any:
    """Lock the directory against a second service. The kernel releases the lock at process end."""
    with (state / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise errors.Misconfigured(f"another cyborg-standalone uses {state}") from exc
        yield
