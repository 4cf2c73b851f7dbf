# SPDX-License-Identifier: Apache-2.0
"""/v2/drivers: which drivers the agents run, and how each does on every host."""

from datetime import datetime
from typing import Any

from oslo_utils import timeutils
from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core.driver import common, near
from cyborg.core.errors import NotFound
from cyborg.core.liveness import Liveness, judge
from cyborg.db.read import drivers as read
from cyborg.db.read.paging import Row

NAME = "drivers"
SINCE = (2, 4)


class Place(wtypes.Base):  # type: ignore[misc]
    """One backend of a driver; ``error`` is a sentence, or null when all is well.

    ``state`` is what the last hello of its agent says; ``status`` is the word of that hello.
    """

    host = wtypes.wsattr(str, mandatory=True)
    backend = wtypes.wsattr(str, mandatory=True)
    status = wtypes.wsattr(str, mandatory=True)
    error = wtypes.wsattr(str)
    version = wtypes.wsattr(str)
    state = wtypes.wsattr(types.OneOf(*Liveness), mandatory=True)
    last_seen_at = wtypes.wsattr(datetime, mandatory=True)


class Driver(wtypes.Base):  # type: ignore[misc]
    """A driver; ``version`` is the one that all its hosts tell, null when they differ."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    name = wtypes.wsattr(str, mandatory=True)
    version = wtypes.wsattr(str)
    hosts = wtypes.wsattr([Place], mandatory=True)
    links = wtypes.wsattr([types.Link], mandatory=True)


class Drivers(wtypes.Base):  # type: ignore[misc]
    """A list of drivers."""

    drivers = wtypes.wsattr([Driver], mandatory=True)
    drivers_links = wtypes.wsattr([types.Link])


class Controller(Resource):
    """The operations on drivers."""

    @operation(
        rule="cyborg:driver:get_all",
        since=SINCE,
        answer=Drivers,
        query={"host": types.Text()},
        paged=True,
    )
    def find(self, call: Call, host: str | None, page: Asked) -> Any:
        """List the drivers that any agent has, each with its backends."""
        with self.desk.reader.connect() as connection:
            found = page.read(lambda part: read.find(connection, page=part, host=host))
        return call.collection(NAME, self._show, found)

    @operation(
        rule="cyborg:driver:get_one",
        since=SINCE,
        answer=Driver,
        path={"key": types.Key()},
        raises=(NotFound,),
    )
    def get(self, call: Call, key: str) -> Any:
        """Show one driver."""
        with self.desk.reader.connect() as connection:
            row = read.get(connection, key)
            known = read.names(connection) if row is None else []
        if row is None:
            alike = near(key, known)
            hint = f"; did you mean {' or '.join(alike)}?" if alike else ""
            raise NotFound(f"no agent has a driver {key[: types.MAX_SHOWN]!r}{hint}")
        return self._show(call, row)

    def _show(self, call: Call, row: Row) -> dict[str, Any]:
        now, conf = timeutils.utcnow(), self.desk.conf.conductor

        def state(seen: datetime) -> str:
            return judge(seen, now, conf.hello_interval, conf.late_after, conf.down_after)

        hosts = [
            types.dump(Place, {**place, "state": state(place["last_seen_at"])})
            for place in row["hosts"]
        ]
        version = common(place["version"] for place in row["hosts"])
        return call.dump(Driver, row, NAME, version=version, hosts=hosts)
