# SPDX-License-Identifier: Apache-2.0
"""The agent as a service: backends, what changes them, reporter and server, wired together."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

from oslo_config import cfg
from oslo_log import log

from cyborg.agent import outside
from cyborg.agent.backend import Backend
from cyborg.agent.backends import Builder
from cyborg.agent.catalogue import Catalogue
from cyborg.agent.checkpoint import BOOT_ID, Checkpoint
from cyborg.agent.convergence import Converger
from cyborg.agent.endpoint import Agent
from cyborg.agent.fleet import Fleet
from cyborg.agent.held import HeldFile
from cyborg.agent.identity import Names
from cyborg.agent.jobs import Jobs
from cyborg.agent.reporter import LONGEST_PAUSE, Conductor, Reporter
from cyborg.agent.watch import Watch
from cyborg.core.errors import Unavailable
from cyborg.drivers.base import Driver
from cyborg.rpc.server import Server, make_server
from cyborg.rpc.transport import Transport

LOG = log.getLogger(__name__)

PATIENCE = 5.0  # seconds that a stop waits for what is in progress


class AgentService:
    """One agent, in a process of its own or beside others. The transport is its owner's."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        conductor_client: Conductor,
        transport: Transport,
        sysfs_root: str | Path = "/sys",
        boot_id: str | Path = BOOT_ID,
    ) -> None:
        """``boot_id`` is the file that tells one boot of the host from another."""
        self._conf = conf
        self._conductor = conductor_client
        self._transport = transport
        self._sysfs_root = sysfs_root
        self._boot_id = boot_id
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._ready = threading.Event()
        self._server: Server | None = None
        self._serving: threading.Thread | None = None
        self._catalogue: Catalogue | None = None
        self._fleet = Fleet()
        self._converger: Converger | None = None
        self._reporter: Reporter | None = None
        self._jobs: Jobs | None = None
        self._watch: Watch | None = None
        self._outside: outside.Outside | None = None

    def start(self) -> None:
        """Begin, and return at once; a broker or a conductor that is away is waited for.

        Raises Misconfigured, and then nothing was begun.
        """
        conf = self._conf
        topic = f"{conf.rpc.topic}.agent"
        catalogue = self._catalogue = Catalogue(conf.agent.discovery_timeout)
        builder = Builder(conf, catalogue, self._sysfs_root)
        names = Names(conf)
        state = Path(conf.state_path, "agent")
        held = HeldFile(state / f"backends-{conf.host}.json", self._boot_id)
        anew = set(held.backends) if held.booted else set()
        drivers = builder.restore(held.backends)
        self._outside = outside.load(conf, builder.configured)
        own = {} if self._outside is None else self._outside.drivers
        fleet = self._fleet = Fleet(builder.configured, list(own))
        reporter = self._reporter = Reporter(
            conf.host,
            f"{topic}.{conf.host}",
            self._conductor,
            fleet,
            identity=names.identity,
            drivers=lambda: catalogue.entries,
        )
        for driver in [*drivers, *own.values()]:
            # What an operator had set up the boot undid.
            fleet.put(self._backend(driver, set_up=driver.backend in anew))
        checkpoint = Checkpoint(state / f"jobs-{conf.host}.json", self._boot_id)
        jobs = self._jobs = Jobs(
            fleet,
            checkpoint,
            conf.agent.jobs_at_once,
            reporter.job_done,
            retired=lambda name: builder.retired(held.backends.get(name)),
        )
        converger = self._converger = reporter.wishes = Converger(
            conf.host,
            reporter.epoch,
            self._conductor,
            fleet,
            held,
            builder,
            lambda driver: self._backend(driver, set_up=True),
            reporter.applied,
            self._changed,
        )
        asked = partial(converger.nudge, again=True)
        endpoint = Agent(conf.host, fleet, reporter.discovered, jobs, asked)
        self._server = make_server(self._transport, conf, topic, conf.host, endpoint)
        if self._outside is not None:
            self._outside.start(self._heard)
        # The kernel tells of this host alone, and not of a sysfs that stands elsewhere.
        if conf.agent.watch and Path(self._sysfs_root) == Path("/sys"):
            self._watch = Watch(fleet)
            # Before they discover, so that nothing happens between the two.
            self._watch.start()
        for backend in fleet:
            backend.start()
        reporter.start()
        converger.start()
        self._serving = threading.Thread(target=self._serve, name="agent-server", daemon=True)
        self._serving.start()
        LOG.info("Agent of %s: backends %s", conf.host, ", ".join(b.name for b in fleet) or "none")

    def rediscover(self) -> None:
        """Look again now for drivers that are installed, and have all backends do so."""
        if self._catalogue is not None:
            self._catalogue.scan()
        for backend in self._fleet:
            backend.rediscover()

    def wait_ready(self, seconds: float | None = None) -> bool:
        """Wait until the agent can be called; tell whether it can."""
        return self._ready.wait(seconds)

    def wait(self) -> None:
        """Wait until ``stop`` has done its work."""
        self._stopped.wait()

    def stop(self) -> None:
        """End what is in progress, or leave it behind if it does not end. Twice is fine."""
        if self._stopping.is_set():
            self._stopped.wait(2 * PATIENCE)
            return
        self._stopping.set()
        if self._outside is not None:
            self._outside.stop()
        # First of all what makes others begin.
        all_ = (self._converger, self._watch, self._jobs, self._reporter)
        begun: list[Any] = [one for one in all_ if one is not None]
        for loop in begun:
            loop.stop()
        # None comes any more.
        for backend in self._fleet:
            backend.stop()
        closing = threading.Thread(target=self._close, name="agent-closing", daemon=True)
        closing.start()
        for loop in begun:
            loop.join(PATIENCE)
        closing.join(PATIENCE)
        if self._jobs is not None and (left := self._jobs.acting()):
            LOG.warning("Jobs still in progress, left behind: %s", ", ".join(left))
        if stuck := [b.name for b in self._fleet if not b.join(0.0)]:
            LOG.warning("Discovery still in progress, left behind: %s", ", ".join(stuck))
        self._stopped.set()
        LOG.info("The agent of %s has stopped", self._conf.host)

    def _backend(self, driver: Driver, *, set_up: bool = False) -> Backend:
        ours = self._conf.agent
        return Backend(
            driver,
            ours.discovery_interval,
            ours.discovery_timeout,
            self._wake,
            health_interval=ours.health_interval,
            health_quiet=ours.health_quiet,
            set_up=set_up,
        )

    def _wake(self) -> None:
        if self._reporter is not None:
            self._reporter.wake()

    def _changed(self) -> None:
        """Have what goes by the fleet see that it changed."""
        if self._watch is not None:
            self._watch.refresh()
        self._wake()

    def _heard(self, name: str) -> None:
        backend = self._fleet.get(name)
        if backend is not None:
            backend.rediscover()

    def _serve(self) -> None:
        pause = 0.5
        while not self._stopping.is_set() and self._server is not None:
            try:
                self._server.start()
            except Unavailable as away:
                # The reporter meets the same broker and says so once a minute.
                LOG.debug("Cannot be called yet: %s", away.message)
            except Exception:
                LOG.exception("The agent's server cannot start")
            else:
                self._ready.set()
                return
            self._stopping.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _close(self) -> None:
        if self._serving is not None:
            self._serving.join(PATIENCE)
        if self._server is not None:
            self._server.stop()
            self._server.wait()
