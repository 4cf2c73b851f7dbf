# SPDX-License-Identifier: Apache-2.0
"""A conductor that is killed within a transaction leaves neither units nor locks."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.limits import make_source
from cyborg.core.errors import OverLimit
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine.options import make_conf

pytestmark = pytest.mark.slow

LIMIT = 3
PROJECT = "project-1"
# Creates one ARQ, and stops before the commit of a second one.
CHILD = """
import sys, threading
import sqlalchemy as sa
from cyborg.db.engine import make_engine
from cyborg.tests.functional.test_limits import PROJECT, make_arqs
from cyborg.tests.fixtures.machine.options import make_conf

engine = make_engine(make_conf(database={"connection": sys.argv[1]}))
arqs = make_arqs(engine)
arqs.create("fpga", PROJECT, PROJECT)

def stop(connection):
    print("before the commit", flush=True)
    threading.Event().wait()

sa.event.listen(engine, "commit", stop)
arqs.create("fpga", PROJECT, PROJECT)
"""


def make_arqs(engine: sa.Engine) -> Arqs:
    """Return the ARQs of a conductor with a limit of LIMIT FPGAs."""
    quota = {"driver": "static", "default_limits": {"FPGA": str(LIMIT)}}
    conf, uow = make_conf(quota=quota), UnitOfWork(engine)
    source = make_source(conf)
    assert source is not None
    return Arqs(conf, uow, limit_source=source)


def test_kill_before_commit_leaves_no_units_and_no_lock(engine: sa.Engine) -> None:
    rows.insert_profile(engine)
    # The child adds the settings of a session to the URL itself.
    plain = engine.url.difference_update_query(["plugin", "init_command"])
    url = plain.render_as_string(hide_password=False)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, url], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "before the commit\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
    arqs = make_arqs(engine)
    for _ in range(LIMIT - 1):
        arqs.create("fpga", PROJECT, PROJECT)
    with pytest.raises(OverLimit) as raised:
        arqs.create("fpga", PROJECT, PROJECT)
    assert raised.value.details["used"] == LIMIT
    assert len(rows.read(engine, schema.arqs)) == LIMIT
