# SPDX-License-Identifier: Apache-2.0
"""``cyborg-dbsync``: bring the database to the schema of this release, or tell where it is."""

import logging
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log

from cyborg import conf as options
from cyborg.core.errors import CyborgError, Unavailable
from cyborg.db import migrate, trouble
from cyborg.db.engine import make_engine

CLI_OPTIONS = [
    cfg.FloatOpt(
        "wait",
        default=60.0,
        min=0.0,
        help="Seconds to wait for a database that does not answer.",
    ),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 1 with the reason on stderr."""
    conf = cfg.ConfigOpts()
    options.register(conf)
    log.register_options(conf)
    conf.register_cli_opts([*CLI_OPTIONS, cfg.SubCommandOpt("verb", handler=_verbs)])
    try:
        conf(
            sys.argv[1:] if argv is None else list(argv),
            project="cyborg",
            prog="cyborg-dbsync",
            version=metadata.version("cyborg"),
        )
        log.setup(conf, "cyborg")
        if not conf.debug:
            # Their lines say again what is reported below.
            for name in ("alembic", "oslo_db"):
                logging.getLogger(name).setLevel(logging.ERROR)
        engine = make_engine(conf)
        try:
            _wait(engine, conf.wait)
            conf.verb.run(engine, conf)
        finally:
            engine.dispose()
    except (CyborgError, cfg.Error) as error:
        words = trouble.reason(error)
        why = "" if words == str(error) else f": {words}"
        sys.stderr.write(f"cyborg-dbsync: {error}{why}\n")
        return 1
    except trouble.FAILURES as error:
        sys.stderr.write(f"cyborg-dbsync: the database refused: {trouble.reason(error)}\n")
        return 1
    return 0


def _verbs(parsers: Any) -> None:
    parser = parsers.add_parser("upgrade", help="take the steps that are missing")
    parser.add_argument("revision", nargs="?", default="head", help="where to stop (head)")
    parser.set_defaults(
        run=lambda engine, conf: migrate.upgrade(engine, conf.verb.revision, report=_say)
    )
    parser = parsers.add_parser("version", help="tell the revision of the database")
    parser.set_defaults(run=lambda engine, conf: _version(engine))
    parser = parsers.add_parser(
        "stamp", help="mark the database as being at a revision, and take no step"
    )
    parser.add_argument("revision")
    parser.set_defaults(
        run=lambda engine, conf: migrate.stamp(engine, conf.verb.revision, report=_say)
    )


def _version(engine: sa.Engine) -> None:
    found, newest = migrate.version(engine), migrate.head()
    if found == newest:
        _say(f"{found} (head)")
    else:
        _say(f"{found or 'none'} (head is {newest})")


def _wait(engine: sa.Engine, seconds: float) -> None:
    """Wait until the database answers; raises Unavailable when it has not in time."""
    deadline, pause = time.monotonic() + seconds, 0.5
    while True:
        try:
            with trouble.explained(), engine.connect():
                return
        except Unavailable as away:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            _say(f"{away}; waiting for up to {left:.0f} s more")
            time.sleep(min(pause, left))
            pause = min(pause * 2, 10.0)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
