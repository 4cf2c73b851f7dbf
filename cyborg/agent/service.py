# SPDX-License-Identifier: Apache-2.0
"""Agent service; it creates and connects backends, reconciler, jobs, reporter and server."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from oslo_config import cfg

from cyborg import tracing
from cyborg.agent.backends.backend import Backend
from cyborg.agent.backends.catalogue import DriverCatalogue
from cyborg.agent.backends.device_sets import MemberDevices
from cyborg.agent.backends.factory import DriverFactory, open_replay
from cyborg.agent.backends.inventory import BackendRegistry
from cyborg.agent.backends.partition_check import PartitionCheck, make_check
from cyborg.agent.backends.uevents import UeventWatcher
from cyborg.agent.desired.reconciler import BackendFile, BackendReconciler
from cyborg.agent.endpoint import AgentEndpoint
from cyborg.agent.external import driver as external
from cyborg.agent.guests import function_users, reassertion
from cyborg.agent.images.store import ClosableImageStore, make_image_store
from cyborg.agent.jobs.checkpoint import BOOT_ID, Checkpoint, read_boot_id
from cyborg.agent.jobs.queue import JobQueue
from cyborg.agent.report import heartbeat, host_identity
from cyborg.core import errors, hosts, log
from cyborg.core.drivers.registry import DriverEntry, driver_uuid
from cyborg.drivers.base import Driver
from cyborg.drivers.host_use.domains import read_nothing
from cyborg.drivers.replay.host import ReplayedHost
from cyborg.drivers.sysfs import LOCAL_ROOT
from cyborg.rpc.contract import ConductorAPI
from cyborg.rpc.server import Server, make_server
from cyborg.rpc.transport import Transport
from cyborg.threads.failures import Backoff

LOG = log.get_logger(__name__)

STOP_TIMEOUT = 5.0  # seconds that a stop waits for work in progress


def _report_job(
    reporter: heartbeat.Reporter,
    guests: reassertion.LiveGuests | None,
    job: str,
    state: str,
    error: str | None,
) -> None:
    """Queue the outcome of a job; a guest may wait for the device that the job has prepared."""
    reporter.add_job_outcome(job, state, error)
    if guests is not None:
        guests.reasserter.notice_job()


class AgentService:
    """One agent; a process can run several agents. The caller closes the transport."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        conductor_client: ConductorAPI,
        transport: Transport,
        sysfs_root: str | Path = "/sys",
        boot_id: str | Path = BOOT_ID,
    ) -> None:
        """``boot_id`` is the path of the file with the boot id of the host."""
        self._conf = conf
        self._conductor = conductor_client
        self._transport = transport
        self._sysfs_root = sysfs_root
        self._boot_id = boot_id
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._ready = threading.Event()
        self._catalogue: DriverCatalogue | None = None
        self._registry = BackendRegistry()
        self._members = MemberDevices(lambda: self._registry)
        self._threads: list[Any] = []
        """Threads in the order of their stop: first those that start work in others."""
        self._closers: list[Callable[[], object]] = []
        """Functions that close what the threads use, in their order: the last ones may hang."""
        self._jobs: JobQueue | None = None
        self._function_users: function_users.FunctionUsers | None = None
        self._partition_check: PartitionCheck | None = None
        self._uevent_watcher: UeventWatcher | None = None
        self._wake: Callable[[], None] = lambda: None  # a heartbeat
        self.replayed: ReplayedHost | None = None
        """The host that this agent replays, if any."""

    def start(self) -> None:
        """Start all threads and return; they retry while broker or conductor are unreachable.

        Raise Misconfigured; in this case no thread is running. After any other error some may run:
        ``stop`` stops them.
        """
        conf = self._conf
        topic = f"{conf.rpc.topic}.agent"
        tracing.check_config(conf)
        catalogue = self._catalogue = DriverCatalogue(conf.agent.discovery_timeout)
        state_dir = Path(conf.state_path, "agent")
        self.replayed = open_replay(conf)
        images = make_image_store(conf)
        self._closers.append(images.close)
        if self.replayed is not None:
            # An agent of the same name that manages this machine has other backends and jobs.
            state_dir = state_dir / "replay"
        factory = self._make_factory(catalogue, images, state_dir)
        identity_provider = host_identity.HostIdentityProvider(conf)
        state_file = BackendFile(state_dir / f"backends-{conf.host}.json", self._boot_id)
        needs_setup = set(state_file.backends) if state_file.rebooted_since_setup else set()
        drivers = factory.load_all(state_file.backends)
        external_host = external.load(conf, factory.own_names)
        external_drivers = {} if external_host is None else external_host.drivers
        registry = self._registry = BackendRegistry(factory.own_names, list(external_drivers))
        intervals = heartbeat.IntervalFile(state_dir / f"heartbeat-{conf.host}.json")
        reporter = heartbeat.Reporter(
            conf.host,
            f"{topic}.{conf.host}",
            self._conductor,
            registry,
            identity=identity_provider.identity,
            drivers=lambda: factory.entries,
            boot_id=read_boot_id(self._boot_id),
            schedule=heartbeat.HeartbeatSchedule(intervals.interval),
            record_interval=intervals.record,
        )
        self._wake = reporter.wake
        guests = reassertion.make_guests(conf, reporter.epoch, self._conductor, registry)
        reporter.live_attach = guests is not None
        for driver in [*drivers, *external_drivers.values()]:
            # A reboot has undone the setup of the backends of the API.
            registry.replace(self._make_backend(driver, needs_setup=driver.backend in needs_setup))
        checkpoint = Checkpoint(state_dir / f"jobs-{conf.host}.json", self._boot_id)
        jobs = self._jobs = JobQueue(
            registry,
            checkpoint,
            conf.agent.max_concurrent_jobs,
            partial(_report_job, reporter, guests),
            removed_driver=lambda name: factory.removed_driver(name, state_file.backends.get(name)),
            count_undelivered=reporter.count_undelivered,
            guests=None if guests is None else guests.devices,
        )
        reconciler = reporter.desired_state = BackendReconciler(
            conf.host,
            reporter.epoch,
            self._conductor,
            registry,
            state_file,
            factory,
            lambda driver: self._make_backend(driver, needs_setup=True),
            reporter.add_backend_outcomes,
            self._on_backends_changed,
        )
        endpoint = AgentEndpoint(
            conf.host,
            registry,
            reporter.add_discovery_outcome,
            jobs,
            partial(reconciler.request, repeat=True),
            reporter.count_undelivered,
            lambda key: self._find_driver(factory, key),
            *([] if guests is None else [guests.devices.count_free_ports]),
        )
        server = make_server(self._transport, conf, topic, conf.host, endpoint)
        watcher = self._uevent_watcher = self._make_uevent_watcher(registry)
        reasserter = None if guests is None else guests.reasserter
        threads = (reasserter, self._function_users, reconciler, watcher, jobs, reporter)
        # Before the first of them starts: after a failure ``stop`` stops those that have started.
        self._threads = [thread for thread in threads if thread is not None]
        if external_host is not None:
            self._closers.append(external_host.stop)
            external_host.start(self._on_hello)
        if watcher is not None:
            # Before the first discovery, so that no change between the two is missed.
            watcher.start()
        tracing.start(conf, hosts.AGENT)
        self._start_backends()
        reporter.start()
        reconciler.start()
        if guests is not None:
            self._closers.append(guests.hypervisor.close)
            guests.reasserter.start()
        self._start_checks(reporter)
        # Last: a call that arrives must find all backends and jobs.
        self._start_server(server)
        LOG.info(
            "Agent is starting with backends %s",
            ", ".join(b.name for b in registry) or "none",
            host=conf.host,
        )

    def rediscover(self) -> None:
        """Scan for installed drivers and rediscover all backends."""
        if self._catalogue is not None:
            self._catalogue.scan()
        self._rediscover_all()

    def wait_ready(self, seconds: float | None = None) -> bool:
        """Wait until the RPC server has started; return whether it has."""
        return self._ready.wait(seconds)

    def wait(self) -> None:
        """Wait until ``stop`` has finished."""
        self._stopped.wait()

    def stop(self) -> None:
        """Stop all threads. Wait at most STOP_TIMEOUT seconds for their end. Idempotent."""
        if self._stopping.is_set():
            self._stopped.wait(2 * STOP_TIMEOUT)
            return
        self._stopping.set()
        end = time.monotonic() + STOP_TIMEOUT
        for thread in self._threads:
            thread.stop()
        # No backend is added after this.
        for backend in self._registry:
            backend.stop()
        # In a thread: the broker, libvirt or a driver may not answer.
        closing = threading.Thread(target=self._close, name="agent-closing", daemon=True)
        closing.start()
        # One deadline for all: what each takes at most would add up to a minute.
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        closing.join(max(0.0, end - time.monotonic()))
        if self._jobs is not None and (left := self._jobs.running()):
            LOG.warning(
                "Abandoned %d jobs in progress: the conductor will request them again after the "
                "restart",
                len(left),
                job=left,
            )
        if stuck := [b.name for b in self._registry if not b.join(0.0)]:
            LOG.warning("Abandoned %d discoveries still in progress", len(stuck), backend=stuck)
        if self.replayed is not None:
            self.replayed.close()
        tracing.stop()
        self._stopped.set()
        LOG.info("Agent has stopped", host=self._conf.host)

    def _find_driver(self, factory: DriverFactory, key: str) -> DriverEntry | None:
        """Scan for installed drivers; return the entry of a name or uuid, or None."""
        previous = factory.entries
        factory.rescan()
        entries = factory.entries
        if entries != previous:
            self._wake()  # report the changed drivers to the conductor
        return next((e for e in entries if key in (e.name, driver_uuid(e.name))), None)

    def _make_backend(self, driver: Driver, *, needs_setup: bool = False) -> Backend:
        """Return the backend of a driver, with the intervals of the configuration."""
        options = self._conf.agent
        return Backend(
            driver,
            options.discovery_interval,
            options.discovery_timeout,
            self._on_snapshot,
            health_interval=options.health_interval,
            recovery_window=options.health_recovery_time,
            needs_setup=needs_setup,
            cordon_after=options.cordon_after,
            # A replayed host has no guests: it shows what the host would offer.
            live_attach=self._conf.libvirt.live_attach or self.replayed is not None,
        )

    def _on_backends_changed(self) -> None:
        """Notify the uevent watcher, the sources and the reporter of a change of the backends."""
        if self._uevent_watcher is not None:
            self._uevent_watcher.refresh()
        self._on_snapshot()

    def _on_snapshot(self) -> None:
        """Notify the sources, the check of partitions and the reporter of a new snapshot."""
        self._members.refresh()
        if self._partition_check is not None:
            self._partition_check.wake()
        self._wake()

    def _make_factory(
        self, catalogue: DriverCatalogue, images: ClosableImageStore, state_dir: Path
    ) -> DriverFactory:
        """Return the factory of the drivers of this host, or of the host that is replayed.

        Also set the sysfs root and the boot id of a replayed host, and the reader of the functions
        that guests of this host have.
        """
        conf = self._conf
        if self.replayed is not None:
            self._sysfs_root, self._boot_id = self.replayed.sysfs_root, self.replayed.boot_id
            return DriverFactory(
                conf,
                catalogue,
                self._sysfs_root,
                images,
                create=self.replayed.create_driver,
                state_dir=state_dir,
                read_devices=self._members.read,
                fabric=self.replayed.fabric,
            )
        # Only this host itself has guests.
        if Path(self._sysfs_root) == LOCAL_ROOT:
            path = state_dir / f"guests-{conf.host}.json"
            self._function_users = reassertion.make_function_users(
                conf, self._conductor, path, self._rediscover_all
            )
        users = self._function_users
        read_domains = read_nothing if users is None else users.read
        return DriverFactory(
            conf,
            catalogue,
            self._sysfs_root,
            images,
            read_domains=read_domains,
            read_devices=self._members.read,
        )

    def _make_uevent_watcher(self, registry: BackendRegistry) -> UeventWatcher | None:
        if not self._conf.agent.watch_uevents:
            return None
        if self.replayed is not None:
            replayed = self.replayed
            has_events = bool(replayed.capture.uevents)
            return UeventWatcher(registry, replayed.uevents.open) if has_events else None
        # uevents are only about the sysfs of this host, not about a sysfs_root elsewhere.
        return UeventWatcher(registry) if Path(self._sysfs_root) == LOCAL_ROOT else None

    def _start_backends(self) -> None:
        for backend in self._registry:
            backend.start()
        # A source of device sets without members on this host would wait for a change of them.
        self._members.refresh()

    def _start_checks(self, reporter: heartbeat.Reporter) -> None:
        """Start the threads that ask a conductor about functions of guests and partitions."""
        if self._function_users is not None:
            self._function_users.start()
        check = make_check(self._conf.host, reporter.epoch, self._conductor, self._registry)
        if check is not None:
            reporter.on_requested_report = check.ask_again
            self._partition_check = check
            self._threads.insert(0, check)
            check.start()

    def _rediscover_all(self) -> None:
        for backend in self._registry:
            backend.rediscover()

    def _on_hello(self, name: str) -> None:
        backend = self._registry.get(name)
        if backend is not None:
            backend.rediscover()

    def _start_server(self, server: Server) -> None:
        """Start the server in a thread, which retries while the broker does not answer."""
        thread = threading.Thread(
            target=self._retry_start, args=(server,), name="agent-server", daemon=True
        )
        # Closed after the others: a broker that does not answer must not delay the end of
        # downloads.
        self._closers += [partial(self._join_server_thread, thread), server.stop, server.wait]
        thread.start()

    @staticmethod
    def _join_server_thread(thread: threading.Thread) -> None:
        # A thread that could not be started cannot be joined.
        if thread.ident is not None:
            thread.join(STOP_TIMEOUT)

    def _retry_start(self, server: Server) -> None:
        """Start the RPC server once the broker answers, or until the agent stops."""
        backoff = Backoff(heartbeat.INITIAL_PAUSE, heartbeat.MAX_PAUSE)
        while not self._stopping.is_set():
            try:
                server.start()
            except errors.Unavailable as exc:
                # The reporter uses the same broker and logs the failure at a limited rate.
                LOG.debug("RPC server cannot start yet: %s", exc.message)
            except Exception:
                LOG.exception("Unexpected error while starting the RPC server")
            else:
                self._ready.set()
                return
            self._stopping.wait(backoff.next_delay())

    def _close(self) -> None:
        for close in self._closers:
            close()
