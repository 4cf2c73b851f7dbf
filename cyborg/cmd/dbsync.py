# SPDX-License-Identifier: Apache-2.0
"""``cyborg-dbsync``: upgrade the database to the schema of this release, or show its revision.

``import`` takes over a database of OpenStack Cyborg: see ``cyborg.cmd.dbsync_import``. ``purge``
deletes old rows: see ``cyborg.cmd.dbsync_purge``.
"""

import logging
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log

from cyborg import conf as options
from cyborg.cmd import dbsync_custody, dbsync_import, dbsync_purge
from cyborg.cmd.common import add_format, wait_for_database, write_line
from cyborg.compat.oslo import set_up_logging
from cyborg.conf.options import reference_release
from cyborg.core.errors import CyborgError
from cyborg.db import errors, migrate
from cyborg.db.custody import write as custody_keys
from cyborg.db.engine import make_engine

CLI_OPTIONS = [
    cfg.FloatOpt(
        "wait",
        default=60.0,
        min=0.0,
        help="Seconds to wait for a database that does not respond.",
    ),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 1 with the reason on stderr."""
    conf = cfg.ConfigOpts()
    options.register(conf, options.DBSYNC_GROUPS)
    log.register_options(conf)
    conf.register_cli_opts([*CLI_OPTIONS, cfg.SubCommandOpt("verb", handler=_verbs)])
    try:
        conf(
            sys.argv[1:] if argv is None else list(argv),
            project="cyborg",
            prog="cyborg-dbsync",
            version=metadata.version("cyborg"),
        )
        set_up_logging(conf, "cyborg-dbsync")
        if not conf.debug:
            # Their log lines would duplicate the output of this command.
            for name in ("alembic", "oslo_db"):
                logging.getLogger(name).setLevel(logging.ERROR)
        # Without statement timeouts: a migration of a large table can take long.
        engine = make_engine(conf, bounded=False)
        try:
            # In containers the database often starts at the same time.
            wait_for_database(engine, conf.wait)
            conf.verb.run(engine, conf)
        finally:
            engine.dispose()
    except (CyborgError, cfg.Error) as error:
        # The message of our own error often lacks that of the database driver.
        reason = errors.reason(error)
        details = "" if reason == str(error) else f": {reason}"
        sys.stderr.write(f"cyborg-dbsync: {error}{details}\n")
        return 1
    except errors.FAILURES as error:
        sys.stderr.write(f"cyborg-dbsync: database error: {errors.reason(error)}\n")
        return 1
    return 0


def _verbs(parsers: Any) -> None:
    parser = parsers.add_parser("upgrade", help="apply the missing migrations")
    parser.add_argument("revision", nargs="?", default="head", help="target revision (head)")
    parser.set_defaults(
        run=lambda engine, conf: migrate.upgrade(engine, conf.verb.revision, report=write_line)
    )
    parser = parsers.add_parser("version", help="show the revision of the database")
    parser.set_defaults(run=lambda engine, conf: _version(engine))
    parser = parsers.add_parser(
        "stamp", help="set the revision of the database without a migration"
    )
    parser.add_argument("revision")
    parser.set_defaults(
        run=lambda engine, conf: migrate.stamp(engine, conf.verb.revision, report=write_line)
    )
    parser = parsers.add_parser("import", help="take over a database of OpenStack Cyborg")
    parser.add_argument(
        "--from", required=True, dest="source", metavar="URL", help="URL of the former database"
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be taken")
    add_format(parser)
    parser.set_defaults(
        run=lambda engine, conf: dbsync_import.run(
            custody_keys.attach(engine, custody_keys.load(conf)),
            conf.verb.source,
            reference_release(conf),
            dry_run=conf.verb.dry_run,
            as_json=conf.verb.format == "json",
        )
    )
    dbsync_purge.add_parser(parsers)
    dbsync_custody.add_parser(parsers)


def _version(engine: sa.Engine) -> None:
    current, head = migrate.version(engine), migrate.head()
    write_line(f"{current} (head)" if current == head else f"{current or 'none'} (head is {head})")
