# SPDX-License-Identifier: Apache-2.0
"""Where a driver is installed and which backends use it: what a change of it may be about.

Everything is read in a few statements, however many hosts there are.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import sqlalchemy as sa

from cyborg.core import option, wanted
from cyborg.core.driver import driver_uuid, hint, near
from cyborg.core.errors import Conflict, NotFound
from cyborg.core.option import Option
from cyborg.core.rollout import StepState
from cyborg.core.wanted import Wish
from cyborg.db.store import drivers as read
from cyborg.db.store import wanted as wishes
from cyborg.db.store.rollouts import NewStep

MAX_NAMED = 20
MAX_BACKENDS = wanted.MAX_BACKENDS - 16  # of one host: jobs of several drivers may be under way


@dataclass(frozen=True, slots=True)
class Place:
    """One host; ``error`` says why the driver cannot be imported there."""

    service_id: int
    host: str
    down: bool
    installed: bool = False
    error: str | None = None
    options: tuple[Option, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """One backend on one host; ``wish`` is None where only the configuration file names it.

    ``before`` is what is wanted of it (``core.wanted.Wanted``), as plain values; ``applied`` tells
    whether its agent has said that it is so.
    """

    service_id: int
    host: str
    backend: str
    driver: str
    down: bool
    wish: Wish | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] | None = None
    applied: bool = True

    def step(self) -> NewStep:
        """Return the step of a job that changes this backend."""
        return NewStep(self.host, self.backend, StepState.WAITING, self.before)


class Targets:
    """Where one driver is, as of one transaction. ``driver`` is its name."""

    def __init__(self, tx: sa.Connection, key: str) -> None:
        """``key`` is a driver's name or uuid. Raises NotFound, with near names."""
        self._tx = tx
        known = read.names(tx)
        by_uuid = {driver_uuid(name): name for name in known}
        name = key if key in known else by_uuid.get(key.lower())
        if name is None:
            alike = near(key, known)
            raise NotFound(f"no agent has a driver {key[:255]!r}{hint(alike)}", near=alike)
        self.driver = name
        found = read.installed(tx, name)
        self._places = {
            row["id"]: Place(
                row["id"],
                row["host"],
                row["down_since"] is not None,
                row["id"] in found,
                found[row["id"]]["error"] if row["id"] in found else None,
                tuple(option.load(one) for one in found[row["id"]]["options"])
                if row["id"] in found
                else (),
            )
            for row in read.agents(tx)
        }

    @classmethod
    def of_backend(cls, tx: sa.Connection, host: str, backend: str) -> Self:
        """Return where the driver of one backend of one host is. Raises NotFound."""
        agents = {row["host"]: row["id"] for row in read.agents(tx)}
        if host not in agents:
            raise _no_host([host], agents)
        used = read.running(tx, backend=backend)
        known = wishes.find(tx, backend=backend).get((agents[host], backend))
        key = (agents[host], backend)
        wish = known.wanted if known else None
        name = wish.driver if wish and wish.wish is not Wish.ABSENT else used.get(key)
        if name is None:
            raise NotFound(f"host {host} has no backend {backend}", field="backend")
        return cls(tx, name)

    def place(self, service_id: int) -> Place:
        """Return one host."""
        return self._places[service_id]

    def importable(self, hosts: Collection[str] | None) -> list[Place]:
        """Return where the driver can be enabled: on these hosts, or wherever it can.

        Raises NotFound for a host that no agent is of, and Conflict when it cannot be imported on
        one of these, or anywhere, with what each said.
        """
        places = self._chosen(hosts)
        good = [place for place in places if place.installed and place.error is None]
        bad = [place for place in places if not place.installed or place.error is not None]
        if (hosts is not None and bad) or not good:
            told = [
                f"{place.host}: {place.error or 'it is not installed'}" for place in bad[:MAX_NAMED]
            ]
            if len(bad) > MAX_NAMED:
                told.append(f"{len(bad) - MAX_NAMED} more hosts")
            raise Conflict(
                f"driver {self.driver} cannot be imported on {len(bad)} of the hosts where it was "
                f"looked for: {'; '.join(told)}",
                driver=self.driver,
                hosts=[place.host for place in bad[:MAX_NAMED]],
            )
        return good

    def parse(
        self, place: Place, config: Mapping[str, Any], *, unset: bool = False
    ) -> dict[str, Any]:
        """Read options as the driver of this host declares them. Raises Invalid, Conflict.

        With ``unset``, None is a value: the host's configuration file says it again.
        """
        if not config:
            return {}
        if not place.installed or place.error is not None:
            raise Conflict(
                f"the options of driver {self.driver} are not known on {place.host}: "
                f"{place.error or 'it is not installed there'}",
                host=place.host,
            )
        return option.parse_all(place.options, config, unset=unset)

    def present(
        self, *, driver: str | None = None, backend: str | None = None
    ) -> dict[tuple[int, str], Target]:
        """Return backends by agent and name: what agents tell of, and what is wanted of them."""
        used = read.running(self._tx, driver, backend)
        told = wishes.find(self._tx, driver, backend)
        found: dict[tuple[int, str], Target] = {}
        for key in sorted({*used, *told}):
            place = self._places.get(key[0])
            if place is None:
                continue
            known = told.get(key)
            wish = known.wanted if known else None
            found[key] = Target(
                place.service_id,
                place.host,
                key[1],
                wish.driver if wish else used[key],
                place.down,
                wish.wish if wish else None,
                wish.config if wish else {},
                wish.to_dict() if wish else None,
                known is None or known.applied,
            )
        return found

    def backends(self, hosts: Collection[str] | None, backend: str | None) -> list[Target]:
        """Return the driver's backends on hosts, in their order. Raises NotFound for none."""
        chosen = {place.service_id for place in self._chosen(hosts)}
        found = [
            target
            for (service_id, name), target in self.present(driver=self.driver).items()
            if service_id in chosen
            and backend in (None, name)
            and target.wish is not Wish.ABSENT
            and target.driver == self.driver
        ]
        if not found:
            where = "" if hosts is None else f" of {', '.join(sorted(hosts)[:MAX_NAMED])}"
            what = "backend" if backend is None else f"backend {backend}"
            raise NotFound(f"driver {self.driver} has no {what}{where}", driver=self.driver)
        return sorted(found, key=lambda target: (target.host, target.backend))

    def check_room(
        self,
        backend: str,
        places: Sequence[Place],
        present: Mapping[tuple[int, str], Target],
    ) -> None:
        """Raise Conflict for places that would have more backends than an agent takes."""
        new = {place.service_id: place.host for place in places}
        for id_ in list(new):
            known = present.get((id_, backend))
            if known is not None and known.before is not None:
                del new[id_]
        if full := sorted(new[id_] for id_ in wishes.full(self._tx, new, MAX_BACKENDS)):
            raise Conflict(
                f"{', '.join(full[:MAX_NAMED])}: {MAX_BACKENDS} backends have been named there "
                "over the API, uninstalled ones included: use one of these names again",
                hosts=full[:MAX_NAMED],
            )

    def _chosen(self, hosts: Collection[str] | None) -> list[Place]:
        every = sorted(self._places.values(), key=lambda place: place.host)
        if hosts is None:
            return every
        known = {place.host for place in every}
        if unknown := sorted(set(hosts) - known):
            raise _no_host(unknown, known)
        return [place for place in every if place.host in set(hosts)]


def _no_host(unknown: Sequence[str], known: Collection[str]) -> NotFound:
    alike = near(unknown[0], known)
    told = f"no agent is of host {unknown[0][:255]!r}{hint(alike)}"
    return NotFound(told, field="hosts", near=alike)
