# SPDX-License-Identifier: Apache-2.0
"""Run one benchmark and print its results.

A benchmark is a module with ``add_options(parser)``, ``measure(args, folder)``, which returns the
results as a dict for JSON, and ``tables(results)``; the docstring of the module is its help. The
exit status is 1 if the results have ``failed``.
"""

import argparse
import importlib
import json
import logging
import signal
import sys
import tempfile
import warnings
from pathlib import Path

from oslo_service import backend

NAMES = (
    "hello",
    "boot",
    "inventory",
    "agents",
    "replay",
    "scale",
    "start",
    "purge",
    "sets",
    "compare",
)


def main() -> int:
    """Run the selected benchmark and return the exit status."""
    # Some libraries import eventlet if it is installed, although it is not used here.
    warnings.filterwarnings("ignore", message=r"\s*Eventlet is deprecated")
    # Set the backend before the first import of a library that would select another one.
    backend.init_backend(backend.BackendType.THREADING)
    import kombu
    import pytest

    from benchmarks import report

    parser = argparse.ArgumentParser(prog="tools/bench", description="Measure a critical path.")
    commands = parser.add_subparsers(required=True, dest="benchmark", metavar="|".join(NAMES))
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in NAMES}
    for name, module in modules.items():
        help_, _, description = str(module.__doc__).partition("\n")
        command = commands.add_parser(name, help=help_, description=f"{help_} {description}")
        module.add_options(command)
        command.add_argument("--format", choices=("table", "json", "rst"), default="table")
    args = parser.parse_args()
    # oslo.messaging warns about more than ten concurrent calls, which is intended here.
    logging.disable(logging.WARNING)
    # A terminated run must also remove its processes and databases.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    module, machine = modules[args.benchmark], report.describe_machine()
    try:
        # Paths of unix sockets are limited in length.
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            results = module.measure(args, Path(folder))
    except (
        *(pytest.skip.Exception, pytest.fail.Exception),
        *(OSError, kombu.exceptions.KombuError),
    ) as exc:
        report.say(f"benchmark failed: {exc}")
        return 1
    results["machine"] = machine | results.get("machine", {})
    if args.format == "json":
        print(json.dumps(results, indent=2))
    else:
        print(report.summarize_machine(results["machine"]) + module.summarize(results))
        render = report.render_rst if args.format == "rst" else report.render_text
        print("\n".join(render(module.tables(results))))
    return int(results.get("failed", False))


if __name__ == "__main__":
    sys.exit(main())
