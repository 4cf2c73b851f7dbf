# SPDX-License-Identifier: Apache-2.0
"""Drivers in processes of their own, each a backend like any other.

One that lies, hangs, floods, dies or speaks no JSON fails its own discoveries, and its backend says
why. Nothing that it sends is kept before all of it was read and checked.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from oslo_config import cfg
from oslo_log import log

from cyborg.agent import outside_client, outside_folder
from cyborg.agent.outside_server import HelloServer
from cyborg.core import outside, outside_hardware
from cyborg.core.device import Ability, Device
from cyborg.core.errors import DriverFailed, Invalid, Misconfigured, Unavailable
from cyborg.core.health import Measurement
from cyborg.core.job import Item
from cyborg.core.outside import Hello
from cyborg.drivers.base import Driver

LOG = log.getLogger(__name__)

T = TypeVar("T")
HELLO_PAUSE = 1.0  # seconds between two hellos of one driver
HELLOS = 5  # that it may say without a pause


class OutsideDriver(Driver):
    """Asks the driver process that has said hello under this backend's name."""

    name = "outside"
    version = "1.0"

    def __init__(
        self, backend: str, folder: str, owner: int, seconds: float, work_seconds: float
    ) -> None:
        """``seconds`` are for one call; ``work_seconds`` for preparing, releasing, programming."""
        super().__init__(backend, {})
        self._path = outside.endpoint(folder, backend)
        self._agent = outside.endpoint(folder, outside.AGENT)
        self._users = frozenset({0, owner})
        self._seconds = seconds
        self._work_seconds = work_seconds
        self._hello: Hello | None = None

    @property
    def abilities(self) -> frozenset[Ability]:
        """What the last hello named."""
        return frozenset() if self._hello is None else self._hello.abilities

    def take(self, hello: Hello) -> bool:
        """Know from now on what the driver says it can; tell whether that is new."""
        before, self._hello = self._hello, hello
        return hello != before

    def discover(self) -> Sequence[Device]:
        """Have the driver look, and return what it sees. Raises DriverFailed and TimedOut."""
        hello = self._known()
        self._read("POST", "/discovery", outside.discovery)

        def load(body: Any) -> tuple[Device, ...]:
            return outside_hardware.load(body, self.backend, hello.type)

        return self._read("GET", "/hardware", load)

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        """Return what the driver says of these devices. Raises DriverFailed and TimedOut."""
        told = self._read("GET", "/health", outside.health)
        return {d.address: told[d.address] for d in devices if d.address in told}

    def prepare(self, item: Item, instance: str | None) -> None:
        """Have the driver prepare a handle. Raises DriverFailed and TimedOut."""
        self._work("/prepare", {"item": item.to_dict(), "instance": instance})

    def release(self, item: Item) -> None:
        """Have the driver release a handle. Raises DriverFailed and TimedOut.

        Before its hello nobody knows whether there is something to release: that is a failure, and
        tried again.
        """
        if Ability.PREPARES in self._known().abilities:
            self._work("/release", {"item": item.to_dict()})

    def program(self, item: Item, image: str) -> None:
        """Have the driver load an image. Raises DriverFailed and TimedOut."""
        self._work("/program", {"item": item.to_dict(), "image": image})

    def _known(self) -> Hello:
        if self._hello is None:
            raise DriverFailed(f"no driver has said hello for {self.backend} at {self._agent}")
        return self._hello

    def _work(self, target: str, body: Any) -> None:
        self._known()
        self._call("POST", target, body, self._work_seconds)

    def _read(self, method: str, target: str, read: Callable[[Any], T]) -> T:
        answer = self._call(method, target, None, self._seconds)
        try:
            return read(answer)
        except Invalid as bad:
            raise DriverFailed(
                f"the driver's answer to {method} {target} is wrong: {bad.message}"
            ) from bad

    def _call(self, method: str, target: str, body: Any, seconds: float) -> Any:
        return outside_client.call(
            self._path, method, target, body, seconds=seconds, users=self._users
        )


class Outside:
    """The agent's side: its socket, and the drivers that may speak to it."""

    def __init__(
        self,
        folder: str,
        drivers: Mapping[str, OutsideDriver],
        owner: int,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``interval`` is what drivers are told to say hello in, in seconds."""
        self.drivers = drivers
        self._folder = folder
        self._owner = owner
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}  # until when a driver's hellos are paid for
        self._wake: Callable[[str], None] = lambda _: None
        self._server: HelloServer | None = None

    def start(self, wake: Callable[[str], None]) -> None:
        """Listen; ``wake`` gets the backend that is to discover. Raises Misconfigured."""
        self._wake = wake
        path = outside.endpoint(self._folder, outside.AGENT)
        self._server = HelloServer(path, self._owner, self.hello, clock=self._clock)
        self._server.start()
        LOG.info("Drivers of their own process: %s, at %s", ", ".join(self.drivers) or "none", path)

    def stop(self) -> None:
        """Listen no more. Twice is fine."""
        if self._server is not None:
            self._server.stop()

    def hello(self, body: Any) -> dict[str, Any]:
        """Take a hello. Raises Invalid, and Unavailable for one that comes too soon."""
        hello = outside.hello(body, self._folder)
        driver = self.drivers.get(hello.name)
        if driver is None:
            raise Invalid(
                f"no driver may be called {hello.name}: [agent] socket_drivers names "
                f"{', '.join(self.drivers) or 'none'}"
            )
        now = self._clock()
        with self._lock:
            paid = max(now, self._heard.get(hello.name, now)) + HELLO_PAUSE
            if paid > now + HELLOS * HELLO_PAUSE:
                raise Unavailable(
                    f"{hello.name} says hello more often than every {HELLO_PAUSE:g} s: wait"
                )
            self._heard[hello.name] = paid
            new = driver.take(hello)
        LOG.log(
            log.INFO if new else log.DEBUG,
            "Driver %s says hello: %s, %s",
            hello.name,
            hello.type,
            ", ".join(sorted(hello.abilities)) or "it finds devices and no more",
        )
        self._wake(hello.name)
        return {"status": "READY", "interval": self._interval}


def load(conf: cfg.ConfigOpts, taken: Sequence[str] = ()) -> Outside | None:
    """Return what is configured, None if that is nothing; ``taken`` are the other backends.

    Raises Misconfigured.
    """
    ours, drivers = conf.agent, {}
    folder, names = ours.socket_dir or "", ours.socket_drivers
    if not folder and not names:
        return None
    if not folder:
        raise _wrong(names[0], "nothing, as long as [agent] socket_dir is empty")
    owner = outside_folder.owner(folder)
    for name in names:
        if not outside.is_name(name):
            raise _wrong(name, "up to 40 of a-z, 0-9, _ and -, and not agent")
        if name in taken or name in drivers:
            raise _wrong(name, "a name that no other backend has")
        drivers[name] = OutsideDriver(
            name, folder, owner, ours.socket_timeout, ours.socket_work_timeout
        )
    return Outside(folder, drivers, owner, ours.discovery_interval)


def _wrong(name: str, expected: str) -> Misconfigured:
    return Misconfigured(
        f"[agent] socket_drivers: found {name!r}; expected {expected}",
        option="agent.socket_drivers",
        found=name,
    )
