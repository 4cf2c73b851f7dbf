# SPDX-License-Identifier: Apache-2.0
"""The console scripts: each reports which extra of this package is missing.

This module imports only the standard library, because other packages may be missing.
"""

import functools
import importlib
import sys


def _run(name: str, command: str, extra: str) -> int:
    try:
        # main is called in this block because commands import some libraries late.
        code: int = importlib.import_module(f"cyborg.cmd.{name}").main()
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] == "cyborg":
            raise  # a defect of this package, which needs its traceback
        sys.stderr.write(f"{command} needs pip install 'cyborg[{extra}]': {exc}\n")
        return 1
    return code


# Each has the name of its module in cyborg.cmd.
agent = functools.partial(_run, "agent", "cyborg-agent", "agent")
api = functools.partial(_run, "api", "cyborg-api", "api")
capture = functools.partial(_run, "capture", "cyborg-capture", "agent")
client = functools.partial(_run, "client", "cyborg", "client")
conductor = functools.partial(_run, "conductor", "cyborg-conductor", "conductor")
dbsync = functools.partial(_run, "dbsync", "cyborg-dbsync", "conductor")
quickstart = functools.partial(_run, "quickstart", "cyborg-quickstart", "all")
standalone = functools.partial(_run, "standalone", "cyborg-standalone", "standalone")
status = functools.partial(_run, "status", "cyborg-status", "conductor")
