# SPDX-License-Identifier: Apache-2.0
"""CPU time of starts: the API, and commands of the client.

The programs run in turns, so that all of them have the same load of the machine. The bare
interpreter is the floor.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.installations import DEVICES, run_standalone
from cyborg.tests.fixtures.machine.processes import BIN, ini

FLOOR = "interpreter"
IMPORT_API = "from cyborg.wsgi import api"
# As the first request in a worker does; opens no connection.
BUILD_API = """from cyborg.wsgi import application as api
from cyborg.wsgi.application import config_arguments
import os
conf = api.configure(config_arguments(os.environ))
conductor = api.make_conductor_client(api.make_transport(conf), conf)
api.make_app(conf, conductor, api.Reader(conf))
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=10, help="runs of each program (%(default)s)")


def measure(args: argparse.Namespace, folder: Path) -> report.Results:
    """Measure the starts; the commands of the client call a standalone service."""
    (folder / "counters").mkdir()  # of the service
    config = folder / "api.conf"
    database = {"connection": f"sqlite:///{folder}/api.db"}
    options = {"auth_strategy": "noauth", "transport_url": "kombu+memory:////"}
    config.write_text(ini({"DEFAULT": options, "database": database}))
    # Without the cloud of the caller, whose service would be called.
    env = {name: value for name, value in os.environ.items() if not name.startswith("OS_")}
    env |= {"OS_CYBORG_CONFIG_FILES": str(config), "OS_CLIENT_CONFIG_FILE": os.devnull}
    with run_standalone(folder, "noauth") as service:
        client = (str(BIN / "cyborg"), "--os-auth-type", "none", "--os-endpoint", service.endpoint)
        programs = {
            FLOOR: (sys.executable, "-c", "pass"),
            "API: import": (sys.executable, "-c", IMPORT_API),
            "API: import and application": (sys.executable, "-c", BUILD_API),
            "cyborg --version": (client[0], "--version"),
            "cyborg device-list": (*client, "device-list"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for number in range(args.rounds):
            for name, command in programs.items():
                seconds[name].append(_measure_cpu(command, folder, env))
            report.say(f"round {number + 1} of {args.rounds}: done")
    floor = min(seconds[FLOOR])
    cells = [
        {
            "program": name,
            "least_s": min(values),
            "median_s": statistics.median(values),
            "floors": min(values) / floor,
        }
        for name, values in seconds.items()
    ]
    return {"cells": cells, "rounds": args.rounds}


def _measure_cpu(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> float:
    """Return the CPU time of a command and its children, user and system, in seconds."""
    log = folder / "command.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        # The sum for all children, from the resource module, would include the service.
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {log.read_text()}")
    return usage.ru_utime + usage.ru_stime


def summarize(results: report.Results) -> str:
    """Return the rest of the first line."""
    return f"; {results['rounds']} runs of each program; {DEVICES} devices in the list."


def tables(results: report.Results) -> Iterator[report.Table]:
    """Yield the table of all programs."""
    columns = {
        **{"Program": "{program}", "Least CPU (s)": "{least_s:.3f}"},
        **{"Median CPU (s)": "{median_s:.3f}", "Least in units of the interpreter": "{floors:.1f}"},
    }
    yield report.make_table("CPU time of a start", columns, results["cells"])
