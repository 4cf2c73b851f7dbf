# SPDX-License-Identifier: Apache-2.0
"""/v2/drivers: which drivers are installed, who uses them, and changing that.

A change is recorded as a job, whose place the answer tells; code never travels.
"""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, get_args

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.api.v2 import jobs
from cyborg.core import option
from cyborg.core.catalogue import Support
from cyborg.core.device import DeviceType
from cyborg.core.driver import hint, near
from cyborg.core.errors import Conflict, Invalid, NotFound
from cyborg.core.liveness import Liveness
from cyborg.core.rollout import Kind
from cyborg.core.wanted import Wish
from cyborg.db.read import drivers as read
from cyborg.db.read.paging import Row

NAME = "drivers"
SINCE = (2, 4)
MAX_HOSTS = 10_000  # that one request names
MAX_CONFIG = 65536  # characters of JSON
_NAME = types.Text(shortest=1)
_FLAG = types.OneOf("true", "false")
_ANY = types.Checked("any value", lambda value: value)


def _hosts(value: Any) -> list[str]:
    """Return names of hosts, each once. Raises Invalid."""
    many = isinstance(value, list) and 1 <= len(value) <= MAX_HOSTS
    if not many or None in value:  # WSME lets null be any type's
        raise Invalid(
            f"hosts: must be a list of 1 to {MAX_HOSTS} names; leave it out for all", field="hosts"
        )
    return list(dict.fromkeys(types.load(_NAME, host, "hosts") for host in value))


def _config(value: Any, *, unset: bool = False) -> dict[str, Any]:
    """Return options and their values, of the kinds that any option may have. Raises Invalid.

    With ``unset`` null is a value. Whether the driver has such options the conductor tells.
    """
    if not isinstance(value, dict):
        raise Invalid("config: must be an object of option names and values", field="config")
    for name, given in value.items():
        types.load(_NAME, name, "config")
        if unset and given is None:
            continue
        for one in given if isinstance(given, list) else [given]:
            _value(name, one)
    if (size := len(json.dumps(value))) > MAX_CONFIG:
        raise Invalid(
            f"config: has {size} characters of JSON, at most {MAX_CONFIG} are allowed",
            field="config",
        )
    return value


def _value(name: str, value: Any) -> None:
    if isinstance(value, str):
        types.load(types.Text(option.MAX_VALUE), value, f"config: {name}")
    # JSON has numbers that no float can hold.
    elif not isinstance(value, int | float) or not math.isfinite(value):
        raise Invalid(
            f"config: {name}: must be text, a number, true or false, or a list of such",
            field="config",
        )


def _flag(value: Any) -> bool:
    """Return a truth value, and no word that looks like one. Raises Invalid."""
    if not isinstance(value, bool):
        raise Invalid("reload: must be true or false", field="reload")
    return value


_HOSTS = types.Checked("hosts", _hosts, [_NAME])
_CONFIG = types.Checked("options and their values", _config, {str: _ANY})
_CHANGE = types.Checked(
    "options and their values, or null", partial(_config, unset=True), {str: _ANY}
)


class Place(wtypes.Base):  # type: ignore[misc]
    """One backend of a driver on a host, or a host where it is installed and no backend uses it.

    ``status`` is the word of the agent's last hello; ``INSTALLED`` or ``UNIMPORTABLE`` where there
    is no backend, ``AWAITED`` for one that the agent has not told of yet. ``error`` is a sentence,
    or null when all is well. ``state`` is how fresh that hello is. ``wish`` is what is wanted of
    the backend, null when only its host's configuration file names it; ``applied`` tells whether
    its agent has said that it is so.
    """

    host = wtypes.wsattr(str, mandatory=True)
    backend = wtypes.wsattr(str)
    status = wtypes.wsattr(str, mandatory=True)
    error = wtypes.wsattr(str)
    version = wtypes.wsattr(str)
    wish = wtypes.wsattr(types.OneOf(*Wish))
    applied = wtypes.wsattr(bool)
    state = wtypes.wsattr(types.OneOf(*Liveness), mandatory=True)
    last_seen_at = wtypes.wsattr(datetime, mandatory=True)


class DriverOption(wtypes.Base):  # type: ignore[misc]
    """An option of a driver: ``kind`` is the type of its values."""

    name = wtypes.wsattr(str, mandatory=True)
    kind = wtypes.wsattr(types.OneOf(*get_args(option.Kind)), mandatory=True)
    default = wtypes.wsattr(_ANY)
    help = wtypes.wsattr(str, mandatory=True)


class ListedDriver(wtypes.Base):  # type: ignore[misc]
    """A driver; ``version`` is the one that all its hosts tell, null when they differ.

    ``type`` is the kind of devices that it finds, null for any; ``abilities`` are those that it may
    have, as configured.
    """

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    name = wtypes.wsattr(str, mandatory=True)
    version = wtypes.wsattr(str)
    type = wtypes.wsattr(str)
    support = wtypes.wsattr(types.OneOf(*Support), mandatory=True)
    abilities = wtypes.wsattr([str], mandatory=True)
    hosts = wtypes.wsattr([Place], mandatory=True)
    links = wtypes.wsattr([types.Link], mandatory=True)


class Driver(ListedDriver):
    """A driver with its options, as its newest version has them."""

    options = wtypes.wsattr([DriverOption], mandatory=True)


class Drivers(wtypes.Base):  # type: ignore[misc]
    """A list of drivers."""

    drivers = wtypes.wsattr([ListedDriver], mandatory=True)
    drivers_links = wtypes.wsattr([types.Link])


class NewDriver(wtypes.Base):  # type: ignore[misc]
    """What is installed: a driver, by name or uuid, as a backend of hosts.

    ``backend`` is named as the driver is when left out; ``hosts`` are all that have the driver.
    """

    driver = wtypes.wsattr(_NAME, mandatory=True)
    backend = wtypes.wsattr(_NAME)
    hosts = wtypes.wsattr(_HOSTS)
    config = wtypes.wsattr(_CONFIG)


class DriverChange(wtypes.Base):  # type: ignore[misc]
    """What changes of a driver's backends: of all, of one ``backend``, of some ``hosts``.

    An option of ``config`` that is null is again what its host's configuration file says.
    ``reload`` has them made anew although nothing else changes.
    """

    backend = wtypes.wsattr(_NAME)
    hosts = wtypes.wsattr(_HOSTS)
    config = wtypes.wsattr(_CHANGE)
    status = wtypes.wsattr(types.OneOf(Wish.ENABLED, Wish.DISABLED))
    reload = wtypes.wsattr(types.Checked("boolean", _flag, like=bool))


class Controller(Resource):
    """The operations on drivers."""

    @operation(
        rule="cyborg:driver:get_all",
        since=SINCE,
        answer=Drivers,
        query={"host": types.Text(), "type": types.OneOf(*DeviceType)},
        paged=True,
    )
    def find(self, call: Call, host: str | None, type: str | None, page: Asked) -> Any:
        """List the drivers that are installed anywhere or used, with their hosts and backends."""
        with self.desk.reader.connect() as connection:
            found = page.read(lambda part: read.find(connection, page=part, host=host, type=type))
        return call.collection(
            NAME, lambda call, row: call.dump(ListedDriver, self._judged(row), NAME), found
        )

    @operation(
        rule="cyborg:driver:get_one",
        since=SINCE,
        answer=Driver,
        path={"key": types.Key()},
        raises=(NotFound,),
    )
    def get(self, call: Call, key: str) -> Any:
        """Show one driver and its options."""
        with self.desk.reader.connect() as connection:
            row = read.get(connection, key)
            known = read.names(connection) if row is None else []
        if row is None:
            alike = hint(near(key, known))
            raise NotFound(f"no agent has a driver {key[: types.MAX_SHOWN]!r}{alike}")
        options = [types.dump(DriverOption, one) for one in row["options"]]
        return call.dump(Driver, self._judged(row), NAME, options=options)

    @operation(
        rule="cyborg:driver:install",
        since=SINCE,
        answer=jobs.BegunJob,
        status=202,
        body=NewDriver,
        raises=(NotFound, Conflict),
    )
    def install(self, call: Call, body: NewDriver) -> Any:
        """Have hosts enable a driver that is installed there, and answer at once."""
        made = self.desk.conductor.driver_install(
            body.driver, body.backend or None, body.hosts or None, body.config or None
        )
        return jobs.begun(call, Kind.INSTALL, made)

    @operation(
        rule="cyborg:driver:update",
        since=SINCE,
        answer=jobs.BegunJob,
        status=202,
        path={"key": types.Key()},
        body=DriverChange,
        raises=(NotFound, Conflict),
    )
    def update(self, call: Call, key: str, body: DriverChange) -> Any:
        """Change a driver's backends, one host after another, and answer at once."""
        config, wish, reload = body.config or None, body.status or None, bool(body.reload)
        if config is None and wish is None and not reload:
            raise Invalid("body: nothing to change: give config, status or reload", field="body")
        made = self.desk.conductor.driver_update(
            key, body.backend or None, body.hosts or None, config, wish, reload
        )
        return jobs.begun(call, Kind.UPDATE, made)

    @operation(
        rule="cyborg:driver:uninstall",
        since=SINCE,
        answer=jobs.BegunJob,
        status=202,
        path={"key": types.Key()},
        query={"drain": _FLAG, "force": _FLAG, "host": types.Many(_NAME), "backend": _NAME},
        raises=(NotFound, Conflict),
    )
    def uninstall(
        self,
        call: Call,
        key: str,
        drain: str | None,
        force: str | None,
        host: Sequence[str] | None,
        backend: str | None,
    ) -> Any:
        """Have hosts give up a driver's backends, and answer at once."""
        hosts = None if host is None else _hosts(list(host))
        made = self.desk.conductor.driver_uninstall(
            key, backend, hosts, drain == "true", force == "true"
        )
        return jobs.begun(call, Kind.UNINSTALL, made)

    def _judged(self, row: Row) -> Mapping[str, Any]:
        state = self.judging()
        places = [
            types.dump(Place, {**place, "state": state(place["last_seen_at"])})
            for place in row["hosts"]
        ]
        return {**row, "hosts": places}
