# SPDX-License-Identifier: Apache-2.0
"""API, conductor, agent and Placement in one process, on files of one directory.

The parts are those of a real installation and meet only where they meet there: on the bus, whose
messages still go through the wire format, and through Placement's REST API.
"""

import contextlib
import fcntl
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oslo_config import cfg

from cyborg.agent.service import AgentService
from cyborg.api.app import make_app
from cyborg.api.heartbeat import Heartbeat
from cyborg.conductor.service import ConductorService
from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.db import migrate
from cyborg.db.engine import make_engine
from cyborg.db.reader import Reader
from cyborg.rpc.conductor import ConductorClient
from cyborg.rpc.transport import make_transport, register_options
from cyborg.standalone import placement
from cyborg.standalone.http import HttpServer

DATABASE = "cyborg.db"
PLACEMENT_DATABASE = "placement.db"
LOCK = "lock"
PATIENCE = 30.0  # seconds for a part to start
LAST_WORD = 0.2  # seconds for a call of the agent that is in flight when all stops
# With nothing enabled there would be nothing to see.
DEFAULT_DRIVERS = ["fake"]


def _silent(_: str) -> None:
    """Say nothing."""


class StandaloneStack:
    """The whole service. ``start()`` returns when it answers; ``stop()`` leaves nothing behind.

    ``conf`` has our options registered and is changed where the stand-alone service has no choice.
    Its files lie in ``state``, made if need be; two services cannot share one. ``say`` gets a line
    for each step of the start.
    """

    def __init__(
        self, conf: cfg.ConfigOpts, state: Path, say: Callable[[str], None] = _silent
    ) -> None:
        self._conf = conf
        self._state = state
        self._say = say
        self._undo = contextlib.ExitStack()
        self._api: HttpServer
        self._placement_http: HttpServer
        self.conductor: ConductorClient
        self.reader: Reader
        self.placement: Any

    @property
    def endpoint(self) -> str:
        """Return the URL of the API's root."""
        return self._api.url

    @property
    def placement_endpoint(self) -> str:
        """Return the URL of Placement's root; it takes the token ``admin``."""
        return self._placement_http.url

    def start(self) -> None:
        """Start everything. Raises Misconfigured; whatever was started is stopped again then."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop everything, in the order opposite to the start's. Twice is fine."""
        self._undo.close()

    def _start(self) -> None:
        conf = self._conf
        self._api = self._listen("port")
        self._placement_http = self._listen("placement_port")
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._undo.enter_context(_sole_owner(self._state))
        self._override()

        self._say("database: migrating")
        engine = make_engine(conf)
        self._undo.callback(engine.dispose)
        migrate.upgrade(engine)

        self._say("Placement: starting")
        app = placement.make_app(f"sqlite:///{self._state / PLACEMENT_DATABASE}")
        self._undo.callback(app.close)
        self.placement = placement.make_adapter(app, raise_exc=False)
        ensure_compute_node(self.placement, conf.host)
        self._undo.callback(self._placement_http.stop)
        self._placement_http.start(app)

        self._say("conductor: starting")
        transport = make_transport(conf)
        self._undo.callback(transport.cleanup)
        self.conductor = ConductorClient(transport, conf)
        agent = AgentService(conf, self.conductor, transport)
        leaving = _Leaving(agent)
        self._undo.callback(leaving.end)
        conductor = ConductorService(
            conf, engine=engine, transport=transport, placement=self.placement
        )
        self._run(conductor)
        # A call that nobody listens for yet is lost, and missed for the whole of its timeout.
        if not conductor.wait_ready(PATIENCE):
            raise Unavailable(f"the conductor is not ready after {PATIENCE:g} s")

        self._say(f"agent: starting, backends {', '.join(_backends(conf))}")
        self._undo.callback(leaving.begin)
        agent.start()

        self.reader = Reader(conf)
        self._undo.callback(self.reader.close)
        api = make_app(conf, self.conductor, self.reader)
        self._run(Heartbeat(conf, self.conductor, str(uuid.uuid4()), api.health))
        self._undo.callback(self._api.stop)
        self._api.start(api, conf.standalone.threads)

    def _override(self) -> None:
        conf = self._conf
        conf.set_override("auth_strategy", "noauth")
        conf.set_override("state_path", str(self._state))
        register_options(conf)
        conf.set_override("transport_url", "kombu+memory:////")
        # The in-process broker is the process's: another stack must not hear this one's calls.
        conf.set_override("topic", f"standalone-{uuid.uuid4().hex}", group="rpc")
        conf.set_override("connection", f"sqlite:///{self._state / DATABASE}", group="database")
        conf.set_override("notify", False, group="nova")
        if not _backends(conf):
            conf.set_override("enabled_drivers", DEFAULT_DRIVERS, group="agent")

    def _listen(self, option: str) -> HttpServer:
        ours = self._conf.standalone
        server = HttpServer(ours.listen, ours[option], option)
        # Whether it is ever started or not; a second stop does nothing.
        self._undo.callback(server.stop)
        return server

    def _run(self, service: Any) -> None:
        self._undo.callback(service.stop)
        service.start()


class _Leaving:
    """Ends the agent while the conductor ends, since each waits a second for its idle threads."""

    def __init__(self, agent: AgentService) -> None:
        self._thread = threading.Thread(target=agent.stop, name="agent-leaving")

    def begin(self) -> None:
        """Let the agent say its last word while the conductor still listens."""
        self._thread.start()
        self._thread.join(LAST_WORD)

    def end(self) -> None:
        """Wait for it."""
        if self._thread.ident is not None:
            self._thread.join()


def ensure_compute_node(client: Any, host: str) -> None:
    """Make the provider that nova-compute would have made, below which devices are published."""
    found = client.get("/resource_providers", params={"name": host}).json()["resource_providers"]
    if not found:
        client.post("/resource_providers", json={"name": host}, raise_exc=True)


def _backends(conf: cfg.ConfigOpts) -> list[str]:
    return [*conf.agent.enabled_backends, *conf.agent.enabled_drivers]


@contextlib.contextmanager
def _sole_owner(state: Path) -> Any:
    """Keep a second service out of this directory. The kernel frees the lock of a killed one."""
    with (state / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as taken:
            raise Misconfigured(f"another cyborg-standalone runs on {state}") from taken
        yield
