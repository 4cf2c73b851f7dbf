# SPDX-License-Identifier: Apache-2.0
"""Environment of the rules: it calls a driver, and records the time and effects of the calls.

A Python audit hook receives every opened file, started process and connected socket. It does not
receive the actions of C libraries, so the kit cannot detect them.

It also has the registry of the rules; the import of a module with rules adds its rules.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cyborg.core.inventory.device import Ability, Device
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Driver, VolatileMemory

# Any uuid: the agent passes that of the server, and no driver may expect a certain one.
INSTANCE = "5f0f0c86-1d5c-4c4b-9c3a-0d8f6f7a2f11"
THREAD_EXIT_TIMEOUT = 1.0  # seconds that a thread may need to exit after a call
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READS = frozenset({"open", "os.listdir", "os.scandir"})
_STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"}
_CHANGES = {
    *("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr"),
}
_CONNECTS = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"}
# Without effect on the host; find_library of the standard library runs ldconfig.
_HARMLESS = ("/dev/null", "/proc/self/", "/proc/thread-self/", "/sbin/ldconfig")
_DESCRIPTORS = "/proc/self/fd"  # without /proc the rule finds no leak
_COMPILED = "__pycache__"  # the interpreter writes there when it imports a module


class RuleViolated(AssertionError):
    """A driver violates a rule; the message describes the violation."""


class RuleBlocked(AssertionError):
    """A rule cannot be checked because another rule is violated."""


@dataclass(frozen=True, slots=True)
class DriverUnderTest:
    """A driver and the parameters of its test.

    The class ``driver`` is called as by the agent: with the name of a backend, the options and the
    root of sysfs. ``limit`` is the timeout of each call in seconds. The driver may write or connect
    to paths that begin with one of ``allow``, such as the socket of the vendor's daemon. If
    ``work`` is True, the rules prepare and release a handle of this host. If ``image`` is the
    uuid of an image, the rules also program this image. Otherwise the rules do not change the host.
    ``entry_point`` is the required name of the driver. With ``external`` the driver is a separate
    process, and its class is a proxy.
    """

    driver: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    sysfs_root: str | Path = "/sys"
    limit: float = 10.0
    allow: tuple[str, ...] = ()
    work: bool = False
    image: str | None = None
    entry_point: str | None = None
    external: bool = False


@dataclass(slots=True)
class CallResult:
    """Result of a call. If ``timed_out`` is true, the call may still be running.

    ``descriptors`` is the number of open file descriptors of the process after a discovery, and 0
    after another call or without ``/proc``.
    """

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0
    timed_out: bool = False
    effects: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    leaked_threads: list[str] = field(default_factory=list)
    descriptors: int = 0

    @property
    def failure(self) -> str | None:
        """Return why the call failed, as the end of a sentence; None if it succeeded."""
        if self.timed_out:
            return f"has not returned after {self.seconds:.1f} s"
        return None if self.error is None else f"raised {type(self.error).__name__}: {self.error}"


class _EffectRecorder:
    """Recorder of the effects of a call and of threads that start in it; one call at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._existing_threads: frozenset[int | None] = frozenset()
        self._call: CallResult | None = None
        self._installed = False

    @contextmanager
    def record(self, call: CallResult) -> Iterator[None]:
        """Store the effects in ``call``."""
        with self._lock:
            if not self._installed:
                # An audit hook cannot be removed, so it is installed once and only if needed.
                sys.addaudithook(self._on_event)
                self._installed = True
            self._existing_threads = frozenset(t.ident for t in threading.enumerate())
            self._call = call
            try:
                yield
            finally:
                self._call = None

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        """Classify an audit event.

        The arguments of ``open`` are path, mode and flags, those of a socket begin with the socket.
        """
        # Threads that existed before are those of the test, or of another call that hangs.
        call = self._call
        if call is None or threading.get_ident() in self._existing_threads:
            return
        if event in _READS and isinstance(args[0], str | bytes | os.PathLike):
            path = os.path.abspath(os.fsdecode(args[0]))
            call.reads.append(path)
            if event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
                call.effects.append(f"opened {path} for writing")
        elif event in _STARTS:
            call.effects.append(f"started a process ({event}: {_shown(args)})")
        elif event in _CHANGES:
            call.effects.append(f"{event.removeprefix('os.')} of {_shown(args)}")
        elif event in _CONNECTS:
            call.effects.append(f"{event.removeprefix('socket.')} to {_shown(args[1:])}")


_RECORDER = _EffectRecorder()


def _wait_for_exit(existing: set[threading.Thread]) -> list[threading.Thread]:
    """Wait until all threads except ``existing`` have ended; return those that have not in time."""
    end = time.monotonic() + THREAD_EXIT_TIMEOUT
    pause = threading.Event()
    # Not join(), which refuses a thread that another thread is about to start.
    while threads := [t for t in threading.enumerate() if t not in existing]:
        if time.monotonic() >= end:
            break
        pause.wait(0.005)
    return threads


class Environment:
    """Calls of a driver under test. The discoveries of the first object are cached.

    A host has many functions, and a discovery is the longest call, so the rules for ``discover``
    share these discoveries. All objects of the driver share one memory, as they do after a restart
    of the agent.
    """

    def __init__(self, subject: DriverUnderTest) -> None:
        self.subject = subject
        # One for all objects, as the agent keeps it over restarts.
        self._memory = VolatileMemory()
        self._first: Driver | None = None
        self._discoveries: list[CallResult] = []

    def call(self, act: Callable[[], Any]) -> CallResult:
        """Call a function in a new thread, as the agent does, and record its effects."""
        call, done = CallResult(), threading.Event()

        def run() -> None:
            try:
                call.value = act()
            except BaseException as exc:  # noqa: BLE001 a driver may raise anything
                call.error = exc
            done.set()

        # A thread of its own for each call: one that hangs is left behind, and does not block.
        existing = set(threading.enumerate())
        with _RECORDER.record(call):
            started_at = time.monotonic()
            thread = threading.Thread(target=run, name="conformance", daemon=True)
            thread.start()
            call.timed_out = not done.wait(self.subject.limit)
            call.seconds = time.monotonic() - started_at
        if not call.timed_out:
            thread.join()
            call.leaked_threads = sorted(t.name for t in _wait_for_exit(existing))
        # Not in the hook: it is one for the process, and each environment permits other paths.
        call.effects = [e for e in call.effects if not self._harmless(e)]
        return call

    def create(
        self,
        backend: str = "conformance",
        options: Mapping[str, Any] | None = None,
        sysfs_root: str | Path | None = None,
    ) -> Driver:
        """Return a new driver object. Raise RuleBlocked if the constructor fails."""
        call = self.try_create(backend, options, sysfs_root)
        if call.failure is not None:
            raise RuleBlocked(f"cannot create an object: {call.failure}")
        driver: Driver = call.value
        driver.memory = self._memory
        return driver

    def try_create(
        self,
        backend: str = "conformance",
        options: Mapping[str, Any] | None = None,
        sysfs_root: str | Path | None = None,
    ) -> CallResult:
        """Create a driver object, by default with the options and the sysfs of the test."""
        root = self.subject.sysfs_root if sysfs_root is None else sysfs_root
        chosen = dict(self.subject.options if options is None else options)
        return self.call(lambda: self.subject.driver(backend, chosen, root))

    @cached_property
    def undiscovered(self) -> Driver:
        """An object that never discovers, for questions about abilities. Raise RuleBlocked."""
        return self.create()

    def discovery(self, index: int) -> tuple[Driver, CallResult]:
        """Return the first object and the result of its discovery number ``index``, from 0.

        Make the discoveries up to this one unless they were made. Raise RuleBlocked if the object
        cannot be created.
        """
        if self._first is None:
            self._first = self.create()
        # One after another with one object: a rule may compare the second with the third.
        while len(self._discoveries) <= index:
            call = self.call(self._first.discover)
            call.descriptors = _count_descriptors()
            self._discoveries.append(call)
        return self._first, self._discoveries[index]

    def discovered_devices(self) -> tuple[Any, list[Device]]:
        """Return the first object and its devices. Raise RuleBlocked if the discovery failed."""
        # Any: the rules call methods of abilities, which the class Driver does not have.
        driver, call = self.discovery(0)
        return driver, require_devices(call)

    def rediscover(self, driver: Driver) -> list[Device]:
        """Return the devices of another discovery. Raise RuleBlocked if it fails."""
        return require_devices(self.call(driver.discover))

    def first_item(self, name: str | None = None) -> WorkItem:
        """Return a work item for the first handle that is discovered. Raise RuleBlocked.

        ``name`` replaces the address of the handle: "" is the whole deployable.
        """
        for device in self.discovered_devices()[1]:
            for deployable in device.deployables:
                for handle in deployable.handles:
                    address = handle.address if name is None else name
                    return WorkItem(
                        backend="conformance",
                        device=device.address,
                        deployable=deployable.address,
                        handle=address,
                    )
        raise RuleBlocked("no handle is discovered on this host")

    def create_discovered(self) -> Any:
        """Return a new object after its first discovery, as the agent always discovers first."""
        driver = self.create()
        self.rediscover(driver)
        return driver

    def must_succeed(self, name: str, act: Callable[[], Any]) -> Any:
        """Call a function and return its value. Raise RuleViolated if the call fails.

        ``name`` describes the call in the error.
        """
        call = self.call(act)
        if call.failure is not None:
            raise RuleViolated(f"{name}: {call.failure}")
        return call.value

    def _harmless(self, effect: str) -> bool:
        return _COMPILED in effect or any(
            f" {path}" in effect or f"'{path}" in effect
            for path in (*_HARMLESS, *self.subject.allow)
        )


def _count_descriptors() -> int:
    return len(os.listdir(_DESCRIPTORS)) if os.path.isdir(_DESCRIPTORS) else 0


def require_devices(call: CallResult) -> list[Device]:
    """Return the devices of a discovery. Raise RuleBlocked if it failed or is invalid."""
    if call.failure is not None:
        raise RuleBlocked(f"discover() {call.failure}")
    if not isinstance(call.value, Sequence) or not all(isinstance(d, Device) for d in call.value):
        raise RuleBlocked("discover() does not return a sequence of Device")
    return list(call.value)


# At most two arguments: those that follow are modes and descriptors.
def _shown(args: tuple[Any, ...]) -> str:
    return ", ".join(repr(a) for a in args[:2] if a is not None and a != -1)[:200]


RuleCheck = Callable[[Environment], None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A requirement for drivers.

    ``source`` is the member of ``cyborg.drivers.base`` that defines the requirement. The rule
    applies only to drivers that claim ``ability`` and implement ``protocol``; None means no such
    condition. Rules with ``changes_host`` or ``needs_image`` run only on request. Rules with
    ``needs_class`` inspect a Python class. ``check`` raises RuleViolated. It raises RuleBlocked if
    a violation of another rule prevents the check.
    """

    name: str
    sentence: str
    source: str
    check: RuleCheck
    ability: Ability | None = None
    changes_host: bool = False
    needs_image: bool = False
    protocol: type | None = None
    needs_class: bool = False


# In the order of registration, which is that of the printed table.
RULES: list[Rule] = []


def rule(
    sentence: str,
    source: str,
    ability: Ability | None = None,
    *,
    changes_host: bool = False,
    needs_image: bool = False,
    protocol: type | None = None,
    needs_class: bool = False,
) -> Callable[[RuleCheck], RuleCheck]:
    """Register a function as a rule; the name of the function is the name of the rule."""

    def add(check: RuleCheck) -> RuleCheck:
        registered = Rule(
            name=check.__name__,
            sentence=sentence,
            source=source,
            check=check,
            ability=ability,
            changes_host=changes_host,
            needs_image=needs_image,
            protocol=protocol,
            needs_class=needs_class,
        )
        RULES.append(registered)
        return check

    return add
