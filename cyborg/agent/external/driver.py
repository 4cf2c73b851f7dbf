# SPDX-License-Identifier: Apache-2.0
"""External (out-of-process) drivers; each is one backend of the host.

If a driver sends invalid data, hangs, sends too much or exits, only its own discoveries fail, and
the state of its backend has the error. A response is used only after it was read and validated as a
whole. The HTTP calls over the unix socket of a driver have limits on time and size.
"""

import http.client
import io
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from oslo_config import cfg

from cyborg.agent.external import server
from cyborg.agent.external.server import RegistrationServer, peer_credentials
from cyborg.core import external, log
from cyborg.core.errors import DriverFailed, Invalid, Misconfigured, TimedOut, Unavailable
from cyborg.core.external import Hello
from cyborg.core.inventory import device, device_state
from cyborg.core.jobs.job import WorkItem
from cyborg.core.text import sanitize
from cyborg.drivers.base import Driver

LOG = log.get_logger(__name__)

MAX_RESPONSE = 1024 * 1024  # bytes of a body
_MAX_HEADER = 64 * 1024
_MAX_TEXT = 300  # characters of a driver's error that are shown


def call(
    path: str,
    method: str,
    target: str,
    body: Any = None,
    *,
    seconds: float,
    users: Collection[int],
    clock: Callable[[], float] = time.monotonic,
) -> Any:
    """Call an external driver; return the JSON body of its response.

    Raise TimedOut after ``seconds``. Raise DriverFailed if the driver cannot be reached, returns an
    error or an invalid response, or if its uid is not one of ``users``.
    """
    request = f"{method} {target}"
    end = clock() + seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            _connect(connection, path, users)
            reader = _DeadlineReader(connection, end, clock)
            return external.decode(_exchange(reader, method, target, body))
    except TimeoutError as exc:
        raise TimedOut(f"the driver did not answer {request} within {seconds:g} s") from exc
    except Invalid as exc:
        raise DriverFailed(f"invalid response of the driver to {request}: {exc.message}") from exc
    except (OSError, http.client.HTTPException, ValueError) as exc:
        text = sanitize(f"{type(exc).__name__}: {exc}"[:_MAX_TEXT])
        raise DriverFailed(f"cannot call {request} of the driver at {path}: {text}") from exc


def _connect(connection: socket.socket, path: str, users: Collection[int]) -> None:
    # lstat: a link could lead to the socket of another service, such as that of libvirt.
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError("not a socket")
    connection.connect(path)
    # The mode of the folder may have been changed since the start. The kernel vouches for the uid
    # of the peer, which no process can forge.
    if (user := peer_credentials(connection).uid) not in users:
        raise OSError(f"user {user} is not allowed to run a driver")


def _exchange(reader: "_DeadlineReader", method: str, target: str, body: Any) -> bytes:
    """Send a request and return the body of its response."""
    data = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Accept: application/json\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    reader.set_timeout()
    reader.connection.sendall(head.encode("ascii") + data)
    # Not the connection, whose timeout is for one read: a driver that sends a byte each second
    # would never exceed it.
    sock: Any = reader
    with http.client.HTTPResponse(sock, method=method) as response:
        response.begin()
        content = response.read(MAX_RESPONSE + 1)
        if len(content) > MAX_RESPONSE:
            raise Invalid(f"response longer than {MAX_RESPONSE} bytes (1 MiB)")
        # http.client returns what it has got if the peer closes early; half a list would delete
        # devices.
        if response.length:
            raise Invalid(f"the body ends {response.length} bytes too early")
        if not 200 <= response.status < 300:
            text = sanitize(content[: 4 * _MAX_TEXT].decode(errors="replace"))[:_MAX_TEXT]
            raise DriverFailed(
                f"the driver returned {response.status} for {method} {target}: "
                f"{text or 'no reason'}"
            )
    return content


class _DeadlineReader(io.RawIOBase):
    """Reader of a socket with a deadline and a limit on the size of a response."""

    def __init__(self, connection: socket.socket, end: float, clock: Callable[[], float]) -> None:
        self.connection = connection
        self._end = end
        self._clock = clock
        self._bytes_left = MAX_RESPONSE + _MAX_HEADER

    def set_timeout(self) -> None:
        """Give the next operation what is left of the time. Raise TimeoutError if nothing is."""
        # The timeout of a socket is for one operation: it is set again before each.
        if (left := self._end - self._clock()) <= 0:
            raise TimeoutError
        self.connection.settimeout(left)

    def makefile(self, _: str) -> io.BufferedReader:
        """Return a buffered reader, as http.client expects it from a socket."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read available bytes. Raise TimeoutError, and Invalid beyond the limit."""
        self.set_timeout()
        count = self.connection.recv_into(buffer)
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise Invalid(f"response longer than {MAX_RESPONSE} bytes (1 MiB), headers included")
        return count


T = TypeVar("T")
HELLO_INTERVAL = 1.0  # seconds between hellos of one driver
HELLO_BURST = 5  # hellos allowed without a pause


class ExternalDriver(Driver):
    """Proxy of the driver process that registered under this backend's name."""

    # Conductors store this name and compare it, so that another one would be another driver.
    name = "outside"
    version = "1.0"

    def __init__(
        self, backend: str, folder: str, owner: int, seconds: float, work_seconds: float
    ) -> None:
        """``owner`` is the uid of the owner of ``folder``, the folder of the drivers' sockets.

        ``seconds`` limits a call; ``work_seconds`` limits prepare, release and program.
        """
        super().__init__(backend, {})
        self._path = external.socket_path(folder, backend)
        self._agent = external.socket_path(folder, external.AGENT_SOCKET)
        # Root may do it anyway, and a driver that needs privileges runs as root.
        self._users = frozenset({0, owner})
        self._seconds = seconds
        self._work_seconds = work_seconds
        self._hello: Hello | None = None

    @property
    def abilities(self) -> frozenset[device.Ability]:
        """Return the abilities in the last hello."""
        return frozenset() if self._hello is None else self._hello.abilities

    def register(self, hello: Hello) -> bool:
        """Store the hello of the driver; return whether it differs from the previous hello."""
        previous, self._hello = self._hello, hello
        return hello != previous

    def discover(self) -> Sequence[device.Device]:
        """Return the devices that the driver discovers. Raise DriverFailed and TimedOut."""
        hello = self._registered_hello()
        # Two calls: a driver may answer from a cache that only its discovery refreshes.
        self._read("POST", "/discovery", external.parse_discovery)
        load = partial(external.load_devices, backend=self.backend, kind=hello.type)
        return self._read("GET", "/hardware", load)

    def measure(self, devices: Sequence[device.Device]) -> Mapping[str, device_state.Measurement]:
        """Return the health of these devices. Raise DriverFailed and TimedOut."""
        measured = self._read("GET", "/health", external.parse_health)
        # Devices that appeared since the discovery are left out: they have no row that could be
        # unhealthy.
        return {d.address: measured[d.address] for d in devices if d.address in measured}

    def prepare(self, item: WorkItem, instance: str | None) -> None:
        """Prepare a handle. Raise DriverFailed and TimedOut."""
        self._call_work("/prepare", {"item": item.to_dict(), "instance": instance})

    def release(self, item: WorkItem) -> None:
        """Release a handle. Raise DriverFailed and TimedOut.

        Raise DriverFailed also before the driver has registered, because it is unknown whether it
        must release anything. The conductor then retries.
        """
        if device.Ability.PREPARES in self._registered_hello().abilities:
            self._call_work("/release", {"item": item.to_dict()})

    def program(self, item: WorkItem, image: str) -> None:
        """Program an image. Raise DriverFailed and TimedOut."""
        self._call_work("/program", {"item": item.to_dict(), "image": image})

    def _registered_hello(self) -> Hello:
        if self._hello is None:
            raise DriverFailed(f"no driver for {self.backend} has registered at {self._agent}")
        return self._hello

    def _call_work(self, target: str, body: Any) -> None:
        self._registered_hello()
        self._call("POST", target, body, self._work_seconds)

    def _read(self, method: str, target: str, parse: Callable[[Any], T]) -> T:
        answer = self._call(method, target, body=None, seconds=self._seconds)
        try:
            return parse(answer)
        except Invalid as exc:
            raise DriverFailed(
                f"invalid response of the driver to {method} {target}: {exc.message}"
            ) from exc

    def _call(self, method: str, target: str, body: Any, seconds: float) -> Any:
        return call(self._path, method, target, body, seconds=seconds, users=self._users)


@dataclass(eq=False)
class ExternalDriverHost:
    """The agent's socket and the drivers that may register there.

    A driver is asked to send a hello every ``interval`` seconds.
    """

    folder: str
    drivers: Mapping[str, ExternalDriver]
    owner: int
    interval: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        # Times of the clock, by driver, up to which its hellos have used the permitted rate.
        self._used_until: dict[str, float] = {}
        self._wake: Callable[[str], None] = lambda _: None
        self._server: RegistrationServer | None = None

    def start(self, wake: Callable[[str], None]) -> None:
        """Start to listen; call ``wake`` if a backend must discover. Raise Misconfigured."""
        self._wake = wake
        path = external.socket_path(self.folder, external.AGENT_SOCKET)
        self._server = RegistrationServer(path, self.owner, self.handle_hello, clock=self.clock)
        self._server.start()
        LOG.info("Waiting for external drivers %s at %s", ", ".join(self.drivers) or "none", path)

    def stop(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.stop()

    def handle_hello(self, body: Any) -> dict[str, Any]:
        """Register a driver and return the answer to its hello.

        Raise Invalid, and Unavailable if hellos are too frequent.
        """
        hello = external.parse_hello(body, self.folder)
        driver = self.drivers.get(hello.name)
        if driver is None:
            raise Invalid(
                f"driver {hello.name} is not allowed: [agent] external_drivers has "
                f"{', '.join(self.drivers) or 'none'}"
            )
        now = self.clock()
        with self._lock:
            # A driver that restarts in a loop would make its backend discover without a pause. Each
            # hello takes an interval of time, up to HELLO_BURST intervals in advance.
            used_until = max(now, self._used_until.get(hello.name, now)) + HELLO_INTERVAL
            if used_until > now + HELLO_BURST * HELLO_INTERVAL:
                raise Unavailable(
                    f"{hello.name} sends hellos more often than every {HELLO_INTERVAL:g} s: wait"
                )
            self._used_until[hello.name] = used_until
            changed = driver.register(hello)
        LOG.log(
            logging.INFO if changed else logging.DEBUG,
            "External driver registered: %s, %s",
            hello.type,
            ", ".join(sorted(hello.abilities)) or "discovery only",
            driver=hello.name,
        )
        self._wake(hello.name)
        return {"status": "READY", "interval": self.interval}


def load(conf: cfg.ConfigOpts, reserved: Sequence[str] = ()) -> ExternalDriverHost | None:
    """Return the configured external drivers, None if there are none.

    ``reserved`` has the names of the other backends, which no external driver may have. Raise
    Misconfigured.
    """
    options = conf.agent
    drivers: dict[str, ExternalDriver] = {}
    folder, names = options.external_driver_dir or "", options.external_drivers
    if not folder and not names:
        return None
    if not folder:
        raise _misconfigured(names[0], "nothing, because [agent] external_driver_dir is empty")
    # Before any driver may connect: who owns the folder decides who may be a driver.
    owner = server.owner_uid(folder)
    for name in names:
        if not external.is_driver_name(name):
            raise _misconfigured(
                name, "a name of up to 40 characters a-z, 0-9, _ and -, other than agent"
            )
        if name in reserved or name in drivers:
            raise _misconfigured(name, "a name that no other backend has")
        drivers[name] = ExternalDriver(
            name,
            folder,
            owner,
            options.external_driver_timeout,
            options.external_driver_work_timeout,
        )
    return ExternalDriverHost(folder, drivers, owner, options.discovery_interval)


def _misconfigured(name: str, expected: str) -> Misconfigured:
    return Misconfigured(
        f"[agent] external_drivers: found {name!r}; expected {expected}",
        option="agent.external_drivers",
        found=name,
    )
