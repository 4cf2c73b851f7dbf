# SPDX-License-Identifier: Apache-2.0
"""``cyborg-status upgrade check``: is everything as this release needs it.

Exit status 0: yes; 1: yes, but look; 2: no, and each line says what to do; 255: the check broke.
``cyborg-status work`` is ``cyborg.cmd.work``.
"""

import sys
from collections.abc import Callable, Sequence

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log
from oslo_upgradecheck import common_checks
from oslo_upgradecheck.upgradecheck import Code, Result, UpgradeCommands
from oslo_upgradecheck.upgradecheck import main as run

from cyborg import conf as options
from cyborg.clients import placement
from cyborg.cmd import work
from cyborg.core.errors import CyborgError, Misconfigured
from cyborg.db import migrate, trouble
from cyborg.db.engine import make_engine
from cyborg.db.reader import Reader
from cyborg.db.schema import outbox, providers


class Checks(UpgradeCommands):
    """What must be true before the services of this release are started."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self._conf = conf

    def _database(self) -> Result:
        """Tell whether the schema is this release's."""
        try:
            engine = make_engine(self._conf)
            try:
                found, newest = migrate.version(engine), migrate.head()
            finally:
                engine.dispose()
        except CyborgError as bad:
            return Result(Code.FAILURE, str(bad))
        except trouble.FAILURES as bad:
            return Result(Code.FAILURE, f"the database refused: {trouble.reason(bad)}")
        if found == newest:
            return Result(Code.SUCCESS)
        return Result(
            Code.FAILURE,
            f"The database is at {found or 'no revision'} and this release needs {newest}. Run "
            "'cyborg-dbsync upgrade'; if it says that it does not know the revision, a newer "
            "release has upgraded the database.",
        )

    def _work(self) -> Result:
        """Tell of promises that nobody could keep: they outlive an upgrade and want a look."""
        dead = sa.select(sa.func.count()).select_from(outbox).where(outbox.c.state == "dead")
        stale = (
            sa.select(sa.func.count()).select_from(providers).where(providers.c.error.is_not(None))
        )
        try:
            reader = Reader(self._conf)
            try:
                with reader.connect() as connection:
                    events, refused = connection.scalar(dead), connection.scalar(stale)
            finally:
                reader.close()
        except (CyborgError, *trouble.FAILURES):
            return Result(Code.WARNING, "Not known: the database cannot be read.")
        if not events and not refused:
            return Result(Code.SUCCESS)
        return Result(
            Code.WARNING,
            f"{events} event(s) could not be delivered to Nova and {refused} resource provider(s) "
            "could not be brought to what is wanted in Placement; the column 'error' of the "
            "tables outbox and providers says why.",
        )

    def _placement(self) -> Result:
        """Tell whether Placement answers these credentials in a version that is new enough."""
        try:
            # Any question that needs a token will do; the answer may well be that there is none.
            placement.make(self._conf).find(self._conf.host)
        except Misconfigured as bad:
            return Result(Code.FAILURE, bad.message)
        except CyborgError as bad:
            return Result(Code.WARNING, f"{bad}. The conductor waits for it and retries.")
        return Result(Code.SUCCESS)

    def _policy(self) -> Result:
        """Tell whether the policy file has a format that is read."""
        return common_checks.check_policy_json(self, self._conf)

    def _authentication(self) -> Result:
        """Tell whether requests are authenticated."""
        if self._conf.auth_strategy == "noauth":
            return Result(
                Code.WARNING,
                "[DEFAULT] auth_strategy is noauth: whoever reaches the API from this machine is "
                "an administrator.",
            )
        return Result(Code.SUCCESS)

    _upgrade_checks: tuple[tuple[str, Callable[..., Result]], ...] = (
        ("Database schema", _database),
        ("Unfinished work", _work),
        ("Placement", _placement),
        ("Policy file", _policy),
        ("Authentication", _authentication),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    conf = cfg.ConfigOpts()
    options.register(conf)
    log.register_options(conf)
    words = list(sys.argv[1:] if argv is None else argv)
    if "upgrade" not in words:
        return work.main(conf, words)
    return run(conf, "cyborg", Checks(conf), argv=words)


if __name__ == "__main__":
    sys.exit(main())
