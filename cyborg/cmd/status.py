# SPDX-License-Identifier: Apache-2.0
"""``cyborg-status upgrade check``: check the prerequisites of this release.

Exit status 0: success; 1: warnings; 2: failures, with instructions; 255: the check itself failed.
``cyborg-status pending`` is in ``cyborg.cmd.status_pending``, ``convert-config`` in
``cyborg.cmd.status_convert``.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import closing

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log
from oslo_upgradecheck import common_checks
from oslo_upgradecheck.upgradecheck import Code, Result, UpgradeCommands
from oslo_upgradecheck.upgradecheck import main as run

from cyborg import conf as options
from cyborg.clients import placement
from cyborg.cmd import status_checks, status_convert, status_pending
from cyborg.core.errors import CyborgError, Misconfigured
from cyborg.db import errors, migrate
from cyborg.db.engine import Reader, make_engine
from cyborg.db.schema import outbox, providers


def _report_exceptions(check: Callable[..., Result]) -> Callable[..., Result]:
    """Return a check that fails, without an effect on the others, if ``check`` has an error."""

    @functools.wraps(check)
    def checked(*args: object) -> Result:
        try:
            return check(*args)
        except Exception as exc:  # noqa: BLE001 - the other checks must still be shown
            text = f"The check itself failed: {type(exc).__name__}: {exc}"
            return Result(Code.FAILURE, text)

    return checked


class Checks(UpgradeCommands):
    """Checks to pass before the services of this release start."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self._conf = conf

    def _database(self) -> Result:
        """Check that the database has the schema of this release."""
        try:
            engine = make_engine(self._conf)
            try:
                current = migrate.version(engine)
                if not migrate.is_known(current):
                    return self._require(current)
                pending = migrate.find_pending(engine)
            finally:
                engine.dispose()
        except CyborgError as exc:
            return Result(Code.FAILURE, str(exc))
        except errors.FAILURES as exc:
            return Result(Code.FAILURE, f"database error: {errors.reason(exc)}")
        if pending.required:
            return self._require(current)
        return status_checks.check_contracts(pending)

    @staticmethod
    def _require(current: str | None) -> Result:
        """Return the failure of a database with another revision."""
        return Result(
            Code.FAILURE,
            f"The database is at {current or 'no revision'}, this release requires "
            f"{migrate.head()}. Run 'cyborg-dbsync upgrade'. If that command does not know the "
            "revision, a newer release has upgraded the database.",
        )

    def _work(self) -> Result:
        """Check for dead letters and failing resource providers, which an upgrade does not fix."""
        return self._read(self._check_work)

    @staticmethod
    def _check_work(connection: sa.Connection) -> Result:
        """Warn of dead letters, and of providers that could not be published."""
        count = sa.select(sa.func.count())
        dead = connection.scalar(count.select_from(outbox).where(outbox.c.state == "dead"))
        failing = connection.scalar(
            count.select_from(providers).where(providers.c.error.is_not(None))
        )
        if not dead and not failing:
            return Result(Code.SUCCESS)
        # Neither prevents an upgrade, so that this is only a warning.
        return Result(
            Code.WARNING,
            f"{dead} message(s) could not be delivered, and {failing} resource provider(s) "
            "could not be updated in Placement. 'cyborg outbox-list --state dead' and 'cyborg "
            "deployable-list --long' show the reasons.",
        )

    def _placement(self) -> Result:
        """Check that Placement accepts the credentials and supports the required version."""
        try:
            # Any request that requires a token; the provider need not exist.
            client = placement.make(self._conf)
            client.find(self._conf.host)
        except Misconfigured as exc:
            # A conductor starts without Placement and waits for it, but not with a section that it
            # cannot use.
            return Result(Code.FAILURE, exc.message)
        except CyborgError as exc:
            return Result(Code.WARNING, f"{exc}. The conductor waits for it and retries.")
        if (version := client.version) < placement.MAPPINGS_MICROVERSION:
            return Result(
                Code.WARNING,
                f"Placement supports microversions up to {version[0]}.{version[1]}: attachments, "
                "allocation candidates of device contexts and 'cyborg host-forget --force' need "
                f"{'.'.join(map(str, placement.MAPPINGS_MICROVERSION))}. Upgrade Placement.",
            )
        return Result(Code.SUCCESS)

    def _read(self, check: Callable[[sa.Connection], Result]) -> Result:
        """Return the result of a check of the database."""
        try:
            with closing(Reader(self._conf)) as reader, reader.connect() as connection:
                return check(connection)
        except (CyborgError, *errors.FAILURES):
            return Result(Code.WARNING, "Unknown: the database cannot be read.")

    def _authentication(self) -> Result:
        """Check that requests are authenticated."""
        if self._conf.auth_strategy == "noauth":
            return Result(
                Code.WARNING,
                "[DEFAULT] auth_strategy is noauth: every client on this machine has "
                "administrator rights in the API.",
            )
        return Result(Code.SUCCESS)

    _upgrade_checks: tuple[tuple[str, Callable[..., Result]], ...] = tuple(
        (name, _report_exceptions(check))
        for name, check in (
            ("Database schema", _database),
            ("Unfinished work", _work),
            ("Daemons", lambda self: self._read(status_checks.check_daemons)),
            (
                "RPC pins",
                lambda self: self._read(lambda tx: status_checks.check_pins(tx, self._conf)),
            ),
            (
                "Device profiles",
                lambda self: self._read(lambda tx: status_checks.check_profiles(tx, self._conf)),
            ),
            ("Placement", _placement),
            ("Policy file", lambda self: common_checks.check_policy_json(self, self._conf)),
            ("Policy rules", lambda self: status_checks.check_policy_rules(self._conf)),
            ("Authentication", _authentication),
            ("Service tokens", lambda self: status_checks.check_service_tokens(self._conf)),
            (
                "Options",
                lambda self: status_checks.check_options(
                    status_checks.configuration_files(self._conf)
                ),
            ),
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    # Before the options are registered: convert-config reads the files of another service.
    if args[:1] == [status_convert.VERB]:
        return status_convert.main(args)
    conf = cfg.ConfigOpts()
    options.register(conf, options.STATUS_GROUPS)
    log.register_options(conf)
    # oslo.upgradecheck knows its own command only.
    if "upgrade" not in args:
        return status_pending.main(conf, args)
    return run(conf, "cyborg", Checks(conf), argv=args)


if __name__ == "__main__":
    sys.exit(main())
