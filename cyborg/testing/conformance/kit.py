# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: it checks that a driver meets the rules of the driver API.

Use it in your tests, with one test for each rule::

    from cyborg.testing.conformance.kit import Check, conformance

    @pytest.mark.parametrize("check", conformance(AcmeDriver, {"count": 3}), ids=str)
    def test_conformance(check: Check) -> None:
        check()

or as a command, which prints a table of the results::

    python -m cyborg.testing.conformance acme -o count=3

For an external driver the kit takes the place of the agent::

    python -m cyborg.testing.conformance --socket /run/cyborg-drivers/crypto.sock

All rules apply to it except those that inspect a Python class. Side effects of its process are not
detected; its vendor must verify that it only reads.

Hosts of captures, and machines that are described by public data, need no hardware: each is a tree
of sysfs in a temporary folder, and the rules that change a host are skipped.
``doc/source/contributor/captures.rst`` describes both kinds of files.

The exit status is 0 if no rule failed or was blocked, 1 if a rule failed or was blocked, and 2 if
the kit could not start. Rules for setup, prepare, release, sanitise, program and partition change
the host and run only on request.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cyborg.agent.external.driver import ExternalDriver, ExternalDriverHost
from cyborg.agent.external.server import owner_uid
from cyborg.core import external as protocol
from cyborg.core.drivers.registry import Option
from cyborg.core.errors import Invalid, Misconfigured, TimedOut
from cyborg.core.external import Hello
from cyborg.core.inventory.device import Ability, Device
from cyborg.drivers.base import ABILITY_INTERFACES, Driver
from cyborg.drivers.replay.recorder import load_capture, options_for_capture, unpack
from cyborg.drivers.sysfs import Sysfs
from cyborg.testing import captures, machine

# Each module registers its rules, in this order.
from cyborg.testing.conformance import class_rules, discovery_rules, environment, work_rules  # noqa: F401

_INTERVAL = 60.0  # seconds between heartbeats that the kit requests


class _Listener(ExternalDriver):
    """External driver that stores its last hello message."""

    hello: Hello | None = None

    def register(self, hello: Hello) -> bool:
        """Store the message and register the driver."""
        self.hello = hello
        return super().register(hello)


@contextmanager
def connect_external(
    folder: str, name: str, limit: float, registration_timeout: float
) -> Iterator[type[Driver]]:
    """Yield a class whose objects call the external driver at ``<folder>/<name>.sock``.

    ``limit`` is the timeout of a call and ``registration_timeout`` the timeout of the driver's
    hello message, in seconds. Raise Misconfigured if an agent would reject the folder, or if an
    agent is using it. Raise TimedOut if the driver does not register.
    """
    # Checked as the agent does: only the owner of the folder and root may run drivers.
    uid = owner_uid(folder)
    # Longer than the limit of the kit, so that a rule can report the timeout.
    seconds = 2 * limit
    listener = _Listener(name, folder, uid, seconds=seconds, work_seconds=seconds)
    registered = threading.Event()
    agent = ExternalDriverHost(folder, {name: listener}, uid, _INTERVAL)
    agent.start(lambda _: registered.set())

    class Process(ExternalDriver):
        """Proxy of the external driver; all objects call the same process."""

        def __init__(
            self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
        ) -> None:
            super().__init__(name, folder, uid, seconds=seconds, work_seconds=seconds)
            self.backend = backend
            # Each object starts with what the driver said when it registered.
            if listener.hello is not None:
                self.register(listener.hello)

    try:
        if not registered.wait(registration_timeout):
            path = protocol.socket_path(folder, protocol.AGENT_SOCKET)
            raise TimedOut(
                f"driver {name} did not register at {path} within {registration_timeout:g} s"
            )
        yield Process
    finally:
        # Also after a failed registration: an agent of this host may need the folder.
        agent.stop()


_FIRST = environment.RULES[0]  # all other rules depend on it


class Outcome(StrEnum):
    """Outcome of a rule."""

    PASSED = "passed"
    FAILED = "FAILED"
    BLOCKED = "blocked"  # another rule failed on which it depends
    SKIPPED = "skipped"  # not applicable to this driver, or not requested


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a rule with the reason."""

    rule: environment.Rule
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """Test of one rule for one driver. Call it to run the test; ``str`` is the rule's name."""

    rule: environment.Rule
    env: environment.Environment

    def __str__(self) -> str:
        return self.rule.name

    def __call__(self) -> Result:
        """Run the test. Raise AssertionError if the rule failed or is blocked."""
        result = self.run()
        if result.outcome in (Outcome.FAILED, Outcome.BLOCKED):
            raise AssertionError(f"{self.rule.sentence} {result.reason}")
        return result

    def run(self) -> Result:
        """Run the test and return its result."""
        try:
            # Any other rule would fail with an AttributeError that explains nothing.
            if self.rule is not _FIRST:
                self._require_driver()
            skip_reason = self._skip_reason()
            if skip_reason is None:
                self.rule.check(self.env)
        except environment.RuleViolated as exc:
            return Result(self.rule, Outcome.FAILED, str(exc))
        except environment.RuleBlocked as exc:
            return Result(self.rule, Outcome.BLOCKED, str(exc))
        if skip_reason is not None:
            return Result(self.rule, Outcome.SKIPPED, skip_reason)
        return Result(self.rule, Outcome.PASSED)

    def _require_driver(self) -> None:
        try:
            _FIRST.check(self.env)
        except environment.RuleViolated as exc:
            raise environment.RuleBlocked(str(exc)) from exc

    def _skip_reason(self) -> str | None:
        """Return why the rule is skipped; None if it must run."""
        rule, subject = self.rule, self.env.subject
        # In this order: the first reason is shown, and the later ones need an object.
        if rule.needs_class and subject.external:
            return "the driver is an external process"
        if rule.protocol is not None and not isinstance(self.env.undiscovered, rule.protocol):
            return f"the driver does not implement {rule.protocol.__name__}"
        if rule.ability is not None and not self._claims(rule.ability):
            return f"the driver does not claim the ability {rule.ability}"
        if rule.changes_host and not subject.work:
            return "it changes this host and runs only with --work"
        if rule.needs_image and subject.image is None:
            return "it runs only with --image"
        return None

    def _claims(self, ability: Ability) -> bool:
        driver = self.env.undiscovered
        # abilities is a property of the driver, which may raise anything.
        try:
            claimed = ability in driver.abilities
        except Exception as exc:
            raise environment.RuleBlocked(f"abilities raised {type(exc).__name__}: {exc}") from exc
        interface = ABILITY_INTERFACES[ability]
        if claimed and not isinstance(driver, interface):
            raise environment.RuleBlocked(
                f"the driver claims {ability} but does not implement {interface.__name__}"
            )
        return claimed


def conformance(
    driver: Any,
    options: Mapping[str, Any] | None = None,
    sysfs_root: str | Path = "/sys",
    *,
    limit: float = 10.0,
    allow: Sequence[str] = (),
    work: bool = False,
    image: str | None = None,
    entry_point: str | None = None,
    external: bool = False,
) -> list[Check]:
    """Return a check for each rule; the checks share the first discovery of the driver.

    ``options`` are parsed options of the backend. ``limit`` is the timeout of each call in seconds.
    The driver may write or connect to paths that begin with one of ``allow``. If ``work`` is True,
    the rules also change this host: they set it up, prepare, release and wipe a handle, partition a
    device and restore it, and program the image with the uuid ``image``. Rules for an ability that
    the driver does not have are skipped. ``entry_point`` is the name under which the driver is
    installed. ``external`` marks the proxy of an external driver.
    """
    env = environment.Environment(
        environment.DriverUnderTest(
            driver=driver,
            options=dict(options or {}),
            sysfs_root=sysfs_root,
            limit=limit,
            allow=tuple(allow),
            work=work,
            image=image,
            entry_point=entry_point,
            external=external,
        )
    )
    return [Check(rule, env) for rule in environment.RULES]


def run_rules(
    driver: Any, options: Mapping[str, Any] | None = None, **parameters: Any
) -> list[Result]:
    """Run all rules and return their results; the parameters are those of ``conformance``."""
    return [check.run() for check in conformance(driver, options, **parameters)]


def run_rules_on_external(
    folder: str,
    name: str,
    *,
    limit: float = 10.0,
    registration_timeout: float = 60.0,
    **parameters: Any,
) -> list[Result]:
    """Run all rules on an external driver after it has registered in the folder.

    ``registration_timeout`` is in seconds; the other parameters are those of ``conformance``. Raise
    Misconfigured for a bad folder, and TimedOut if the driver does not register.
    """
    with connect_external(folder, name, limit, registration_timeout) as driver:
        # A socket is in the folder, so the proxy connects there; its own effects are not those of
        # the driver.
        return run_rules(driver, {}, limit=limit, allow=[folder], external=True, **parameters)


def format_table(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a table of the results."""
    width = max(len(r.rule.name) for r in results)
    for result in results:
        yield f"{result.rule.name:{width}}  {result.outcome:8}  {result.reason}".rstrip()
    yield f"{len(results)} rules: {_counts(results)}"


def _counts(results: Sequence[Result]) -> str:
    counts = [f"{sum(r.outcome is o for r in results)} {o.lower()}" for o in Outcome]
    return ", ".join(counts)


_CAPTURES = (".jsonl", ".jsonl.gz")
_MACHINE = ".json"


@dataclass(frozen=True, slots=True)
class HostResults:
    """Results of a driver on a host: what it discovered first, and the outcome of each rule.

    ``devices`` is empty if the discovery failed. ``seconds`` is the duration of all rules.
    """

    host: str
    devices: Sequence[Device]
    results: Sequence[Result]
    seconds: float

    @property
    def failures(self) -> list[Result]:
        """Return the results of the rules that failed or are blocked."""
        return [r for r in self.results if r.outcome in (Outcome.FAILED, Outcome.BLOCKED)]


def packaged_hosts() -> list[Path]:
    """Return the captures and the machines of this package."""
    found = [captures.FOLDER / f"{name}.jsonl" for name in captures.capture_names()]
    return [*found, *(machine.FOLDER / f"{name}.json" for name in machine.machine_names())]


def find_hosts(paths: Sequence[Path]) -> list[Path]:
    """Return the files of hosts: captures and machines, also those in folders.

    Raise Misconfigured for a path without any.
    """
    found: list[Path] = []
    for path in paths:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        # Other files of a folder are no hosts, such as a README; a file that is named must be one.
        hosts = [p for p in files if p.is_file() and p.name.endswith((*_CAPTURES, _MACHINE))]
        if not hosts:
            names = ", ".join((*_CAPTURES, _MACHINE))
            raise Misconfigured(f"{path}: found no capture and no machine; expected {names}")
        found += hosts
    return found


@contextmanager
def sysfs_of(path: Path) -> Iterator[Path]:
    """Yield the root of sysfs of a host, which exists in this context only.

    Raise Misconfigured for a file that is malformed or cannot be read.
    """
    with TemporaryDirectory(prefix="conformance-") as name:
        folder = Path(name)
        try:
            if path.name.endswith(_CAPTURES):
                unpack(load_capture(path), folder)
            else:
                machine.build_machine(machine.read_machine(path), folder)
        except Invalid as exc:
            raise Misconfigured(exc.message) from exc
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as exc:
            # The description of a machine is a file of somebody else: any of its parts may be
            # wrong.
            raise Misconfigured(f"{path}: {type(exc).__name__}: {exc}") from exc
        yield folder / "sys"


def options_of_host(driver: Any, sysfs_root: Path) -> dict[str, Any]:
    """Return options with which a driver selects every device of a host, as ``cyborg-capture``."""
    declared = getattr(driver, "OPTIONS", None)
    if not isinstance(declared, tuple) or not all(isinstance(o, Option) for o in declared):
        return {}  # the rule options_are_valid fails
    return options_for_capture(driver, Sysfs(sysfs_root))


def run_rules_on_tree(
    driver: Any, options: Mapping[str, Any], host: str, sysfs_root: Path, **parameters: Any
) -> HostResults:
    """Run all rules that do not change a host on the tree of a host with this name.

    The parameters are those of ``conformance``.
    """
    # All rules of a host share one environment, and so its first discovery.
    started_at = time.monotonic()
    checks = conformance(driver, options, sysfs_root, **parameters)
    results = [check.run() for check in checks]
    try:
        devices = checks[0].env.discovered_devices()[1]
    except environment.RuleBlocked:
        devices = []  # the rules say why
    return HostResults(host, devices, results, time.monotonic() - started_at)


def format_hosts(found: Sequence[HostResults]) -> Iterator[str]:
    """Yield a line for each host, below it its failures, and a line with the sums."""
    width = max(len(item.host) for item in found)
    for item in found:
        yield (
            f"{item.host:{width}}  {len(item.devices):4} devices  {_counts(item.results)}  "
            f"{item.seconds:.2f} s"
        )
        for result in item.failures:
            yield f"  {result.rule.name}  {result.outcome}  {result.reason}"
    every = [result for item in found for result in item.results]
    devices = sum(len(item.devices) for item in found)
    yield f"{len(found)} hosts: {devices} devices, {_counts(every)}"
