# SPDX-License-Identifier: Apache-2.0
"""``cyborg-capture``: writes what the drivers read on this host to one file. It changes nothing."""

import argparse
import importlib
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from cyborg.core.capture.model import MAX_SOURCE, MAX_UEVENTS, Capture, Uevent
from cyborg.core.capture.scrub import Scrubber, count_files
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.base import Driver
from cyborg.drivers.gpu.fabric.requests import ADDRESS, LIBRARY, FabricRequests
from cyborg.drivers.replay.fabric import dump_partitions
from cyborg.drivers.replay.recorder import record_host, save_capture

_GROUP = "cyborg.accelerator.driver"
MAX_REPORTED = 10  # unreadable files
MAX_WATCH = 86400.0


def main(argv: Sequence[str] | None = None) -> int:
    """Write a capture; return the exit status."""
    args = _parser().parse_args(argv)
    # Before the devices are read, because that takes time.
    if args.file.exists():
        return _fail(f"{args.file} exists: name a new file")
    if args.watch:
        # Before the work: the error for a missing library names the extra that has it.
        importlib.import_module("pyudev")
    drivers = _load_drivers()
    try:
        capture, errors = record_host(drivers, args.source, args.sysfs_root)
    except Invalid as exc:
        return _fail(exc.message)
    if args.fabric is not None:
        capture, errors = _add_fabric(capture, errors, args.fabric, args.fabric_library)
    for error in errors:
        _say(f"warning: {error}")
    try:
        if args.watch:
            _say(f"watching uevents for {args.watch:g} s")
            capture = replace(capture, uevents=tuple(_watch(args.watch)))
    except OSError as exc:
        return _fail(f"uevents cannot be watched: {exc}")
    if args.scrub:
        # A new salt, which nothing stores: with it, guesses of a serial number could be tested.
        capture = Scrubber(secrets.token_bytes(32)).scrub(capture)
    try:
        size = save_capture(capture, args.file)
    except Invalid as exc:
        return _fail(exc.message)
    except OSError as exc:
        return _fail(f"{args.file}: {exc.strerror or exc}")
    unreadable = sorted(capture.unreadable.items())
    for path, error in unreadable[:MAX_REPORTED]:
        _say(f"not readable: /{path}: {error}")
    if len(unreadable) > MAX_REPORTED:
        _say(f"not readable: {len(unreadable) - MAX_REPORTED} more files; run it as root")
    _say(
        f"{args.file}: {size} bytes, {len(capture.folders)} folders, "
        f"{count_files(capture.folders)} files, {len(capture.uevents)} uevents"
        f"{', scrubbed' if capture.scrubbed else ''}"
    )
    return 0


def _add_fabric(
    capture: Capture, errors: list[str], address: str, library: str
) -> tuple[Capture, list[str]]:
    """Return the capture with the partitions of Fabric Manager, and the errors.

    If the partitions cannot be read, the capture is unchanged, and there is one more error.
    """
    try:
        partitions = FabricRequests(address, library=library).list_partitions()
    except DriverFailed as exc:
        return capture, [*errors, f"no partitions are recorded: {exc.message}"]
    return replace(capture, fabric=dump_partitions(partitions)), errors


def _load_drivers() -> list[type[Driver]]:
    """Return the installed drivers; print a warning for each driver that cannot be loaded."""
    drivers: list[type[Driver]] = []
    # In a fixed order, so that two captures of a host can be compared.
    for entry in sorted(metadata.entry_points(group=_GROUP), key=lambda entry: entry.name):
        try:
            driver = entry.load()
        except Exception as exc:  # noqa: BLE001  of another package
            _say(f"warning: driver {entry.name} cannot be loaded: {exc}")
            continue
        if isinstance(driver, type) and issubclass(driver, Driver):
            drivers.append(driver)
    return drivers


def _watch(seconds: float) -> list[Uevent]:
    """Record uevents of the kernel for ``seconds``, or up to MAX_UEVENTS; return them."""
    import pyudev

    monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
    monitor.start()
    begin = time.monotonic()
    uevents: list[Uevent] = []
    while (left := begin + seconds - time.monotonic()) > 0 and len(uevents) < MAX_UEVENTS:
        # None at the timeout.
        device = monitor.poll(left)
        if device is not None:
            uevent = Uevent(
                seconds=round(time.monotonic() - begin, 3),
                action=str(device.action),
                subsystem=str(device.subsystem),
                path=device.device_path,
            )
            uevents.append(uevent)
    return uevents


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cyborg-capture",
        description="Write the devices of this host, as the installed drivers read them, to one "
        "file. It changes nothing on the host. As root it can read more files.",
    )
    add = parser.add_argument
    add("--version", action="version", version=metadata.version("cyborg"))
    add(
        "file", type=Path, metavar="FILE", help="the new file; with the suffix .gz it is compressed"
    )
    add(
        "--source",
        type=_source,
        required=True,
        metavar="TEXT",
        help="where the devices come from, for people: the card and the machine, or the document",
    )
    add(
        "--scrub",
        action="store_true",
        help="replace serial numbers, unique ids, MAC and IP addresses and mount points; equal "
        "values stay equal",
    )
    add(
        "--fabric",
        nargs="?",
        const=ADDRESS,
        metavar="ADDRESS",
        help="record the partitions of NVIDIA Fabric Manager at this host:port or unix socket, by "
        f"default {ADDRESS}; no partition is changed",
    )
    add(
        "--fabric-library",
        default=LIBRARY,
        metavar="FILE",
        help="name or path of the library of Fabric Manager (%(default)s)",
    )
    add(
        "--watch",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="record the uevents of the kernel for this time",
    )
    add(
        "--sysfs-root",
        type=Path,
        default=Path("/sys"),
        metavar="DIR",
        help="the sysfs to read (%(default)s); /proc and /lib/modules are next to it",
    )
    return parser


def _source(text: str) -> str:
    if not text.strip() or len(text) > MAX_SOURCE or not text.isprintable():
        raise argparse.ArgumentTypeError(f"expected 1 to {MAX_SOURCE} printable characters")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WATCH:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 to {MAX_WATCH:g} seconds")
    return seconds


def _fail(problem: str) -> int:
    _say(problem)
    return 1


def _say(line: str) -> None:
    sys.stderr.write(f"cyborg-capture: {line}\n")


if __name__ == "__main__":
    sys.exit(main())
