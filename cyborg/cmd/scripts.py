# SPDX-License-Identifier: Apache-2.0
"""The console scripts: each reports which extra of this package is missing.

This module imports only the standard library, because other packages may be missing.
"""

import importlib
import sys


def agent() -> int:
    """Run ``cyborg-agent``."""
    return _run("cyborg-agent", "agent", "cyborg.cmd.agent")


def api() -> int:
    """Run ``cyborg-api``."""
    return _run("cyborg-api", "api", "cyborg.cmd.api")


def capture() -> int:
    """Run ``cyborg-capture``."""
    return _run("cyborg-capture", "agent", "cyborg.cmd.capture")


def client() -> int:
    """Run ``cyborg``."""
    return _run("cyborg", "client", "cyborg.cmd.client")


def conductor() -> int:
    """Run ``cyborg-conductor``."""
    return _run("cyborg-conductor", "conductor", "cyborg.cmd.conductor")


def dbsync() -> int:
    """Run ``cyborg-dbsync``."""
    return _run("cyborg-dbsync", "conductor", "cyborg.cmd.dbsync")


def standalone() -> int:
    """Run ``cyborg-standalone``."""
    return _run("cyborg-standalone", "standalone", "cyborg.cmd.standalone")


def status() -> int:
    """Run ``cyborg-status``."""
    return _run("cyborg-status", "conductor", "cyborg.cmd.status")


def _run(command: str, extra: str, module: str) -> int:
    try:
        # main is called in this block because commands import some libraries late.
        code: int = importlib.import_module(module).main()
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] == "cyborg":
            raise  # a defect of this package, which needs its traceback
        sys.stderr.write(f"{command} needs pip install 'cyborg[{extra}]': {exc}\n")
        return 1
    return code
