# SPDX-License-Identifier: Apache-2.0
"""What operators ask of drivers: each is checked whole, then recorded as a job with its steps.

Nothing is done here beyond what the record itself needs: to be uninstalled, a backend is closed in
the same transaction, so that nothing of it is given out from then on.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor import limits
from cyborg.conductor.driver_asks import (
    MAX_NAMED,
    busy,
    check_free,
    in_use,
    installed,
    read_address,
    read_backend,
    read_config,
    read_hosts,
    some,
)
from cyborg.conductor.driver_targets import Target, Targets
from cyborg.core import wanted
from cyborg.core.errors import Conflict, Invalid, NotFound
from cyborg.core.request import parse_uuid
from cyborg.core.rollout import PENDING, Kind
from cyborg.core.wanted import Wish
from cyborg.db.store import devices, providers
from cyborg.db.store import rollouts as store
from cyborg.db.store import wanted as wishes
from cyborg.db.store.rollouts import NewStep
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

ATTEMPTS = 3  # of an operator's wish, when others are faster

Opened = sa.RowMapping | tuple[int, str]
"""The row of a job that is open already, or id and uuid of a new one."""


class Drivers:
    """What may be done to drivers and to what they manage."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        wake: Callable[[], None] = lambda: None,
        wake_publisher: Callable[[], None] = lambda: None,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
    ) -> None:
        """``wake`` is called after the commit of a job, for those who carry it out."""
        self._conf = conf
        self._uow = uow
        self._wake = wake
        self._wake_publisher = wake_publisher
        self._now = now

    def install(
        self,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        config: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Enable a driver on hosts; what is so already is done at once.

        Raises Invalid, NotFound, and Conflict where it cannot be imported, where a backend of the
        name is another driver's or has another configuration, and while another job is open for it.
        """
        asked = limits.text("driver", driver)
        name, chosen = read_backend(backend), read_hosts(hosts)
        given = read_config(config)

        def write(tx: sa.Connection) -> str:
            targets = Targets(tx, asked)
            job = self._open(tx, Kind.INSTALL, targets.driver)
            called = name or targets.driver
            places = targets.importable(chosen)
            parsed = {place.service_id: targets.parse(place, given) for place in places}
            present = targets.present(backend=called)
            targets.check_room(called, places, present)
            steps: list[NewStep] = []
            for place in places:
                there = present.get((place.service_id, called))
                state = installed(targets.driver, called, place.host, there, parsed)
                before = there.before if there else None
                steps.append(NewStep(place.host, called, state, before))
            # Options are read the same everywhere: the first host's word stands for all.
            parsed_once = next(iter(parsed.values()), {})
            arguments = {"backend": called, "hosts": chosen, "config": parsed_once}
            return self._add(tx, job, Kind.INSTALL, targets.driver, arguments, steps)

        return self._begin(write)

    def update(
        self,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        config: Mapping[str, Any] | None,
        wish: str | None,
        reload: bool,
    ) -> dict[str, Any]:
        """Change a driver's backends, one host after another.

        Raises Invalid, NotFound when no host has such a backend, and Conflict while another job is
        open for the driver.
        """
        asked = limits.text("driver", driver)
        name, chosen = read_backend(backend), read_hosts(hosts)
        given = read_config(config)
        if wish not in (None, Wish.ENABLED, Wish.DISABLED):
            raise Invalid(
                f"status {str(wish)[:40]!r} is neither {Wish.ENABLED} nor {Wish.DISABLED}",
                field="status",
            )
        if not given and wish is None and not reload:
            raise Invalid("nothing to change: expected config, status or reload", field="body")

        def write(tx: sa.Connection) -> str:
            targets = Targets(tx, asked)
            job = self._open(tx, Kind.UPDATE, targets.driver)
            found = targets.backends(chosen, name)
            parsed: dict[str, Any] = {}
            for service_id in sorted({target.service_id for target in found}):
                parsed = targets.parse(targets.place(service_id), given, unset=True)
            arguments = {"config": parsed, "wish": wish, "reload": bool(reload)}
            steps = [target.step() for target in found]
            return self._add(tx, job, Kind.UPDATE, targets.driver, arguments, steps)

        return self._begin(write)

    def uninstall(
        self,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        drain: bool,
        force: bool,
    ) -> dict[str, Any]:
        """Have hosts give up a driver's backends.

        ``drain`` waits until what is bound is released; ``force`` does not, and does without agents
        that are down. Raises Invalid, NotFound, InUse with the requests that stand in the way, and
        Conflict for an agent that is down or while another job is open for the driver.
        """
        asked = limits.text("driver", driver)
        name, chosen = read_backend(backend), read_hosts(hosts)

        def write(tx: sa.Connection) -> str:
            targets = Targets(tx, asked)
            job = self._open(tx, Kind.UNINSTALL, targets.driver)
            found = targets.backends(chosen, name)
            if force and isinstance(job, Mapping):
                named = chosen is not None or name is not None
                return self._force(tx, job["uuid"], targets.driver, found, named=named)
            if not force and (down := sorted({t.host for t in found if t.down})):
                raise Conflict(
                    f"the agents of {some(down)} are down: wait for them, or use force, which "
                    "gives up what these hosts have",
                    hosts=down[:MAX_NAMED],
                )
            which = [(target.host, target.backend) for target in found]
            arguments = {"drain": bool(drain), "force": bool(force)}
            steps = [target.step() for target in found]
            uuid = self._add(tx, job, Kind.UNINSTALL, targets.driver, arguments, steps)
            self._close(tx, targets.driver, found)
            if not drain and not force and (held := store.held(tx, which)):
                raise in_use(targets.driver, held, store.holders(tx, which, MAX_NAMED))
            return uuid

        return self._begin(write, closes=True)

    def _force(
        self, tx: sa.Connection, uuid: str, driver: str, found: Sequence[Target], *, named: bool
    ) -> str:
        """Have an open uninstallation give up these backends, and no others, whatever is bound.

        Raises Conflict unless it waits for all of them that were ``named``.
        """
        job, which = store.lock(tx, uuid), {(target.host, target.backend) for target in found}
        if job is None or job["exclusive"] is None or job["kind"] != Kind.UNINSTALL:
            raise busy(driver, uuid)
        steps = store.of_job(tx, job["id"])
        waiting = {(s["host"], s["backend"]) for s in steps if s["state"] in PENDING}
        if not which & waiting or (named and not which <= waiting):
            others = some(sorted({host for host, _ in which - waiting}))
            raise busy(driver, uuid, f", which does not wait for anything of {others}")
        forced = {(host, backend) for host, backend in job["arguments"].get("forced", ())}
        arguments = {**job["arguments"], "forced": sorted(forced | (which & waiting))}
        store.ask(tx, job["id"], arguments, self._now())
        return uuid

    def adopt(self, host: str, address: str, backend: str) -> dict[str, Any]:
        """Have a backend manage a device that its rules leave alone.

        Raises Invalid, NotFound, and Conflict when its driver has no such options.
        """
        return self._manage(
            limits.text("host", host), limits.text("backend", backend), read_address(address), True
        )

    def release(self, uuid: str) -> dict[str, Any]:
        """Have a device's backend leave it alone from now on.

        Raises Invalid, NotFound, InUse while something of it is bound, and Conflict.
        """
        device = parse_uuid(uuid, "uuid")

        def read_one(tx: sa.Connection) -> sa.RowMapping | None:
            return devices.by_uuid(tx, device)

        row = self._uow.run(read_one)
        if row is None:
            raise NotFound(f"no hardware {device}", uuid=device)
        return self._manage(row["host"], row["backend"], row["address"], False, device)

    def _manage(
        self, host: str, backend: str, address: str, adopt: bool, device: str | None = None
    ) -> dict[str, Any]:
        def write(tx: sa.Connection) -> str:
            targets = Targets.of_backend(tx, host, backend)
            job = self._open(tx, Kind.UPDATE, targets.driver)
            (target,) = targets.backends([host], backend)
            if device is not None:
                check_free(devices.holders(tx, device), devices.dirty(tx, device), address, host)
            place = targets.place(target.service_id)
            if not {"adopt", "release"} <= {one.name for one in place.options}:
                raise Conflict(
                    f"driver {targets.driver} cannot adopt or release single devices: it has no "
                    "options adopt and release",
                    driver=targets.driver,
                )
            config = wanted.managed(target.config, address, adopt=adopt)
            config = targets.parse(place, config)
            arguments = {"config": config, "wish": None, "reload": False}
            return self._add(tx, job, Kind.UPDATE, targets.driver, arguments, [target.step()])

        return self._begin(write)

    def _begin(
        self, write: Callable[[sa.Connection], str], *, closes: bool = False
    ) -> dict[str, Any]:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(db_exc.DBDuplicateEntry):
                uuid = self._uow.run(write)
                break
            # Another change of the driver was begun at the same moment: now it can be seen.
        else:
            raise Conflict("others keep changing this driver: see the open jobs and try again")
        self._wake()
        if closes:
            self._wake_publisher()
        return {"uuid": uuid}

    def _open(self, tx: sa.Connection, kind: Kind, driver: str) -> Opened:
        """Begin a job for a driver, or return the one that is open.

        Before anything is read of what the job is about: no other changes that from here on.
        """
        before = store.open_one(tx, driver)
        return before if before is not None else store.add(tx, kind, driver, {}, self._now())

    def _add(
        self,
        tx: sa.Connection,
        job: Opened,
        kind: Kind,
        driver: str,
        arguments: Mapping[str, Any],
        steps: Sequence[NewStep],
    ) -> str:
        if isinstance(job, Mapping):
            same = job["kind"] == kind and job["arguments"] == dict(arguments)
            if same and kind is Kind.INSTALL:
                return str(job["uuid"])
            raise busy(driver, job["uuid"], f" ({job['kind']})")
        id_, uuid = job
        store.promise(tx, id_, arguments, steps)
        LOG.info("Job %s: %s driver %s, %s backends", uuid, kind, driver, len(steps))
        return uuid

    def _close(self, tx: sa.Connection, driver: str, found: Sequence[Target]) -> None:
        which = [(target.service_id, target.backend) for target in found]
        wishes.lock_all(tx, {target.service_id for target in found})
        wishes.close(tx, driver, wishes.find(tx, driver=driver), which)
        hosts = sorted({target.host for target in found})
        wishes.withdraw(tx, hosts)
        providers.mark_hosts(tx, hosts, self._now())
