# SPDX-License-Identifier: Apache-2.0
"""Command line of the conformance kit: ``python -m cyborg.testing.conformance``; see ``kit``."""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from cyborg.agent.backends.catalogue import NAMESPACE
from cyborg.agent.backends.factory import options_of
from cyborg.core import external
from cyborg.core.errors import Misconfigured, TimedOut
from cyborg.testing.conformance import environment, kit


def main(argv: list[str] | None = None) -> int:
    """Test a driver, print the table of results and return the exit code."""
    args = _parser().parse_args(argv)
    if args.list:
        for rule in environment.RULES:
            sys.stdout.write(f"{rule.name}  {rule.sentence} [{rule.source}]\n")
        return 0
    try:
        if args.capture or args.all_captures:
            return _test_on_hosts(args)
        results = _test_external(args) if args.socket else _test_class(args)
    except (Misconfigured, TimedOut) as exc:
        sys.stderr.write(f"cyborg.testing.conformance: {exc.message}\n")
        return 2
    for line in kit.format_table(results):
        sys.stdout.write(f"{line}\n")
    failures = (kit.Outcome.FAILED, kit.Outcome.BLOCKED)
    return 1 if any(result.outcome in failures for result in results) else 0


def _test_on_hosts(args: argparse.Namespace) -> int:
    """Test a driver on each host, print a line for each, and return the exit code."""
    if args.socket or args.work or args.image is not None or args.sysfs_root != "/sys":
        raise Misconfigured(
            "--capture tests a driver class on trees without hardware; omit --socket, --work, "
            "--image and --sysfs-root"
        )
    driver, entry_point = _load(args.driver)
    given = _options(driver, args.option)
    files = kit.packaged_hosts() if args.all_captures else []
    all_results: list[kit.HostResults] = []
    parameters = {"limit": args.limit, "allow": args.allow, "entry_point": entry_point}
    for path in [*files, *kit.find_hosts(args.capture)]:
        with kit.sysfs_of(path) as root:
            options = given or kit.options_of_host(driver, root)
            # Without options a constructor that fails violates a rule.
            if options:
                _check_options(driver, options, str(root))
            results = kit.run_rules_on_tree(driver, options, path.name, root, **parameters)
            all_results.append(results)
    for line in kit.format_hosts(all_results):
        sys.stdout.write(f"{line}\n")
    return 1 if any(results.failures for results in all_results) else 0


def _test_class(args: argparse.Namespace) -> list[kit.Result]:
    driver, entry_point = _load(args.driver)
    options = _options(driver, args.option)
    if options:
        _check_options(driver, options, args.sysfs_root)
    return kit.run_rules(
        driver,
        options,
        sysfs_root=args.sysfs_root,
        limit=args.limit,
        allow=args.allow,
        work=args.work or args.image is not None,  # an image is programmed into this host
        image=args.image,
        entry_point=entry_point,
    )


def _test_external(args: argparse.Namespace) -> list[kit.Result]:
    folder, file = os.path.split(os.path.abspath(args.socket))
    name = file.removesuffix(external.SUFFIX)
    has_suffix = file != name
    if not has_suffix or not external.is_driver_name(name):
        raise Misconfigured(
            f"--socket: found {args.socket!r}; expected <folder>/<name>{external.SUFFIX}"
        )
    work = args.work or args.image is not None  # an image is programmed into this host
    return kit.run_rules_on_external(
        folder,
        name,
        limit=args.limit,
        registration_timeout=args.patience,
        work=work,
        image=args.image,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cyborg.testing.conformance",
        description="Check on this host that a driver meets the rules of Cyborg's driver API.",
    )
    add = parser.add_argument
    add("driver", nargs="?", default="", help=f"entry point in {NAMESPACE}, or module:Class")
    add(
        "-o",
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the backend; repeatable, also with the same key for the kind multi",
    )
    add(
        "--socket",
        metavar="PATH",
        help="test the external driver at this socket; the kit takes the place of the agent",
    )
    add(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for its hello message (%(default)s)",
    )
    add("--sysfs-root", default="/sys", metavar="DIR", help="root of sysfs (%(default)s)")
    add(
        "--limit",
        type=float,
        default=10.0,
        metavar="S",
        help="timeout of a call in seconds (%(default)s)",
    )
    add(
        "--allow",
        action="append",
        default=[],
        metavar="PATH",
        help="prefix of paths that the driver may write or connect to; repeatable",
    )
    add(
        "--work",
        action="store_true",
        help="also run rules that change this host: set it up, use a handle, partition a device",
    )
    add("--image", metavar="UUID", help="also program this image into a device of this host")
    add(
        "--capture",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="test on this capture of a host, description of a machine, or folder with these, "
        "instead of this host; repeatable",
    )
    add(
        "--all-captures",
        action="store_true",
        help="test on all captures and machines of this package",
    )
    add("--list", action="store_true", help="print the rules and exit")
    return parser


def _load(name: str) -> tuple[Any, str | None]:
    """Return a driver class, and the name of its entry point or None. Raise Misconfigured."""
    module, colon, attribute = name.partition(":")
    try:
        if colon:
            return getattr(importlib.import_module(module), attribute), None
        entry_points = {e.name: e for e in metadata.entry_points(group=NAMESPACE)}
        if name in entry_points:
            return entry_points[name].load(), name
    except Exception as exc:
        # The import of a driver can raise any exception.
        raise Misconfigured(f"cannot load {name}: {type(exc).__name__}: {exc}") from exc
    similar = difflib.get_close_matches(name, entry_points, n=3)
    hint = f" (did you mean {' or '.join(similar)}?)" if similar else ""
    raise Misconfigured(
        f"driver: found {name!r}{hint}; expected module:Class or one of "
        f"{', '.join(sorted(entry_points))}"
    )


def _check_options(driver: Any, options: Mapping[str, Any], sysfs_root: str) -> None:
    """Raise Misconfigured if the driver rejects the options, which is no violation of a rule."""
    call = environment.Environment(
        environment.DriverUnderTest(driver, options, sysfs_root)
    ).try_create()
    if isinstance(call.error, Misconfigured):
        raise call.error


def _options(driver: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``KEY=VALUE`` options by name. Raise Misconfigured."""
    declared = {option.name: option for option in getattr(driver, "OPTIONS", ())}
    options: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or key not in declared:
            names = ", ".join(declared) or "none, the driver has no options"
            raise Misconfigured(f"-o {argument}: expected KEY=VALUE, where KEY is one of {names}")
        # The same option as the agent makes it: it parses the text.
        option = next(o for o in options_of(driver) if o.name == key)
        try:
            value = option.type(text)
        except ValueError as exc:
            raise Misconfigured(f"-o {argument}: {exc}") from exc
        # Only this kind is repeated in a configuration file; of the others the last one counts.
        multi = declared[key].kind == "multi"
        options[key] = [*options.get(key, []), value] if multi else value
    return options


if __name__ == "__main__":
    sys.exit(main())
