# SPDX-License-Identifier: Apache-2.0
"""What operators ask of drivers: each is checked whole, then recorded as a job with its steps.

Nothing is done here beyond what the record itself needs: to be uninstalled, a backend is closed in
the same transaction, so that nothing of it is given out from then on.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor import limits
from cyborg.conductor.driver_targets import Target, Targets
from cyborg.core import wanted
from cyborg.core.errors import Conflict, InUse, Invalid, NotFound
from cyborg.core.request import parse_uuid
from cyborg.core.rollout import Kind, StepState
from cyborg.core.wanted import Wish
from cyborg.db.store import devices, providers
from cyborg.db.store import rollouts as store
from cyborg.db.store import wanted as wishes
from cyborg.db.store.rollouts import NewStep
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

MAX_HOSTS = 10_000
MAX_CONFIG = 65536  # characters of JSON
MAX_NAMED = 20  # requests that a refusal names


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
        name, chosen = _backend(backend), _hosts(hosts)
        given = _config(config)

        def write(tx: sa.Connection) -> str:
            targets = Targets(tx, asked)
            called = name or targets.driver
            places = targets.importable(chosen)
            parsed = {place.service_id: targets.parse(place, given) for place in places}
            present = targets.present(backend=called)
            steps: list[NewStep] = []
            for place in places:
                there = present.get((place.service_id, called))
                state = _installed(targets.driver, called, place.host, there, parsed)
                before = there.before if there else None
                steps.append(NewStep(place.host, called, state, before))
            # Options are read the same everywhere: the first host's word stands for all.
            parsed_once = next(iter(parsed.values()), {})
            arguments = {"backend": called, "hosts": chosen, "config": parsed_once}
            return self._add(tx, Kind.INSTALL, targets.driver, arguments, steps)

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
        name, chosen = _backend(backend), _hosts(hosts)
        given = _config(config)
        if wish not in (None, Wish.ENABLED, Wish.DISABLED):
            raise Invalid(
                f"status {str(wish)[:40]!r} is neither {Wish.ENABLED} nor {Wish.DISABLED}",
                field="status",
            )
        if not given and wish is None and not reload:
            raise Invalid("nothing to change: expected config, status or reload", field="body")

        def write(tx: sa.Connection) -> str:
            targets = Targets(tx, asked)
            found = targets.backends(chosen, name)
            parsed: dict[str, Any] = {}
            for service_id in sorted({target.service_id for target in found}):
                parsed = targets.parse(targets.place(service_id), given)
            arguments = {"config": parsed, "wish": wish, "reload": bool(reload)}
            return self._add(
                tx,
                Kind.UPDATE,
                targets.driver,
                arguments,
                [target.step() for target in found],
            )

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
        name, chosen = _backend(backend), _hosts(hosts)

        def write(tx: sa.Connection) -> str:
            targets = Targets(tx, asked)
            before = store.open_one(tx, targets.driver)
            if before is not None and force and before["kind"] == Kind.UNINSTALL:
                store.force(tx, before["id"], {**before["arguments"], "force": True}, self._now())
                return str(before["uuid"])
            found = targets.backends(chosen, name)
            if not force and (down := sorted({t.host for t in found if t.down})):
                raise Conflict(
                    f"the agents of {_some(down)} are down: wait for them, or use force, which "
                    "gives up what these hosts have",
                    hosts=down[:MAX_NAMED],
                )
            which = [(target.host, target.backend) for target in found]
            uuid = self._add(
                tx,
                Kind.UNINSTALL,
                targets.driver,
                {"drain": bool(drain), "force": bool(force)},
                [target.step() for target in found],
            )
            self._close(tx, targets.driver, found)
            if not drain and not force and (held := store.held(tx, which)):
                raise _in_use(targets.driver, held, store.holders(tx, which, MAX_NAMED))
            return uuid

        return self._begin(write, closes=True)

    def adopt(self, host: str, address: str, backend: str) -> dict[str, Any]:
        """Have a backend manage a device that its rules leave alone.

        Raises Invalid, NotFound, and Conflict when its driver has no such options.
        """
        return self._manage(
            limits.text("host", host), limits.text("backend", backend), _address(address), True
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
            target, targets = Targets.of_backend(tx, host, backend)
            if device is not None and (held := devices.holders(tx, device)):
                raise InUse(
                    f"device {address} of {host} cannot be released: {_some(held)} hold of it",
                    requests=held[:MAX_NAMED],
                )
            place = targets.place(target.service_id)
            if not {"adopt", "release"} <= {one.name for one in place.options}:
                raise Conflict(
                    f"driver {targets.driver} cannot adopt or release single devices: it has no "
                    "options adopt and release",
                    driver=targets.driver,
                )
            config = wanted.managed(target.config, address, adopt=adopt)
            arguments = {"config": config, "wish": None, "reload": False}
            return self._add(tx, Kind.UPDATE, targets.driver, arguments, [target.step()])

        return self._begin(write)

    def _begin(
        self, write: Callable[[sa.Connection], str], *, closes: bool = False
    ) -> dict[str, Any]:
        try:
            uuid = self._uow.run(write)
        except db_exc.DBDuplicateEntry as bad:
            raise Conflict(
                "another change of this driver was begun at the same time: see the open jobs"
            ) from bad
        self._wake()
        if closes:
            self._wake_publisher()
        return {"uuid": uuid}

    def _add(
        self,
        tx: sa.Connection,
        kind: Kind,
        driver: str,
        arguments: Mapping[str, Any],
        steps: Sequence[NewStep],
    ) -> str:
        if (before := store.open_one(tx, driver)) is not None:
            same = before["kind"] == kind and before["arguments"] == dict(arguments)
            if same and kind is Kind.INSTALL:
                return str(before["uuid"])
            raise Conflict(
                f"driver {driver} is being changed: wait for job {before['uuid']} "
                f"({before['kind']})",
                job=before["uuid"],
            )
        uuid = store.add(tx, kind, driver, arguments, steps, self._now())
        LOG.info("Job %s: %s driver %s, %s backends", uuid, kind, driver, len(steps))
        return uuid

    def _close(self, tx: sa.Connection, driver: str, found: Sequence[Target]) -> None:
        which = [(target.service_id, target.backend) for target in found]
        wishes.close(tx, driver, wishes.find(tx, driver=driver), which)
        hosts = sorted({target.host for target in found})
        wishes.withdraw(tx, hosts)
        providers.mark_hosts(tx, hosts, self._now())


def _installed(
    driver: str, backend: str, host: str, there: Target | None, parsed: Mapping[int, Any]
) -> StepState:
    """Return where an installation begins on a host. Raises Conflict."""
    if there is None or there.wish is Wish.ABSENT:
        return StepState.WAITING
    if there.driver != driver:
        raise Conflict(
            f"backend {backend} of host {host} is one of driver {there.driver}: name another",
            host=host,
            driver=there.driver,
        )
    given = parsed[there.service_id]
    if any(name not in there.config or there.config[name] != given[name] for name in given):
        raise Conflict(
            f"backend {backend} of host {host} is there already with another configuration: "
            "update-driver changes it",
            host=host,
        )
    return StepState.WAITING if there.wish is Wish.DISABLED else StepState.DONE


def _in_use(
    driver: str, held: Mapping[tuple[str, str], int], holders: Sequence[Mapping[Any, Any]]
) -> InUse:
    named = [f"{row['uuid']} (instance {row['instance_uuid']})" for row in holders]
    what = f"{sum(held.values())} accelerators are in use or being cleaned"
    by = f", by {_some(named, sum(held.values()))}" if named else ""
    return InUse(
        f"driver {driver} cannot be uninstalled: {what}{by}; drain waits for them, force does not",
        requests=[row["uuid"] for row in holders],
    )


def _some(names: Sequence[str], total: int | None = None) -> str:
    rest = (total or len(names)) - len(names[:MAX_NAMED])
    more = [f"{rest} more"] if rest > 0 else []
    return ", ".join([*names[:MAX_NAMED], *more])


def _backend(backend: Any) -> str | None:
    return None if backend is None else wanted.backend_name(backend)


def _hosts(hosts: Any) -> list[str] | None:
    if hosts is None:
        return None
    if not isinstance(hosts, list | tuple) or not 1 <= len(hosts) <= MAX_HOSTS:
        raise Invalid(f"hosts must be a list of 1 to {MAX_HOSTS} names", field="hosts")
    return sorted({limits.text("hosts", host) for host in hosts})


def _config(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping) or len(str(config)) > MAX_CONFIG:
        raise Invalid(
            f"config must be an object of at most {MAX_CONFIG} characters", field="config"
        )
    return config


def _address(address: Any) -> str:
    return limits.text("address", address, 120)
