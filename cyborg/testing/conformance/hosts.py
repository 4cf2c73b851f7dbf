# SPDX-License-Identifier: Apache-2.0
"""The kit on hosts of captures, and of machines that are described by public data.

Each host is a tree of sysfs in a temporary folder, so no hardware is needed, and the rules that
change a host are skipped. ``doc/source/contributor/captures.rst`` describes both kinds of files.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cyborg.core.drivers.registry import Option
from cyborg.core.errors import Invalid, Misconfigured
from cyborg.core.inventory.device import Device
from cyborg.drivers.replay.recorder import load_capture, options_for_capture, unpack
from cyborg.drivers.sysfs import Sysfs
from cyborg.testing import captures, machine
from cyborg.testing.conformance.environment import RULES, DriverUnderTest, Environment, RuleBlocked
from cyborg.testing.conformance.kit import Check, Outcome, Result

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
            raise Misconfigured(f"{path}: {type(exc).__name__}: {exc}") from exc
        yield folder / "sys"


def options_of_host(driver: Any, sysfs_root: Path) -> dict[str, Any]:
    """Return options with which a driver selects every device of a host, as ``cyborg-capture``."""
    declared = getattr(driver, "OPTIONS", None)
    if not isinstance(declared, tuple) or not all(isinstance(o, Option) for o in declared):
        return {}  # the rule options_are_valid fails
    return options_for_capture(driver, Sysfs(sysfs_root))


def run_rules_on_tree(
    driver: Any,
    options: Mapping[str, Any],
    host: str,
    sysfs_root: Path,
    *,
    limit: float = 10.0,
    allow: Sequence[str] = (),
    entry_point: str | None = None,
) -> HostResults:
    """Run all rules that do not change a host on the tree of a host with this name.

    The parameters are those of ``cyborg.testing.conformance.kit.conformance``.
    """
    started_at = time.monotonic()
    env = Environment(
        DriverUnderTest(
            driver,
            dict(options),
            sysfs_root,
            limit=limit,
            allow=tuple(allow),
            entry_point=entry_point,
        )
    )
    results = [Check(rule, env).run() for rule in RULES]
    try:
        devices = env.discovered_devices()[1]
    except RuleBlocked:
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


def _counts(results: Sequence[Result]) -> str:
    counts = [f"{sum(r.outcome is o for r in results)} {o.lower()}" for o in Outcome]
    return ", ".join(counts)
