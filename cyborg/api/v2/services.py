# SPDX-License-Identifier: Apache-2.0
"""/v2/services: the daemons of every host and the backends of its agent, dead or alive."""

import functools
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core import service as core
from cyborg.core.liveness import Liveness
from cyborg.db.read import backends as read_backends
from cyborg.db.read import services as read
from cyborg.db.read.paging import Row

NAME = "services"
SINCE = (2, 4)


class Function(wtypes.Base):  # type: ignore[misc]
    """Something that a backend offers, and how many accelerators have it.

    Those that are owned or being cleaned are ``used``, those that could be given out now ``free``.
    """

    function = wtypes.wsattr(str, mandatory=True)
    total = wtypes.wsattr(int, mandatory=True)
    used = wtypes.wsattr(int, mandatory=True)
    free = wtypes.wsattr(int, mandatory=True)


class Backend(wtypes.Base):  # type: ignore[misc]
    """One configured driver of an agent; ``error`` is a sentence, or null when all is well.

    ``functions`` are those of its devices, in the order of their names.
    """

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    name = wtypes.wsattr(str, mandatory=True)
    driver = wtypes.wsattr(str, mandatory=True)
    status = wtypes.wsattr(str, mandatory=True)
    error = wtypes.wsattr(str)
    functions = wtypes.wsattr([Function], mandatory=True)


class Service(wtypes.Base):  # type: ignore[misc]
    """A daemon with its backends, or, of kind backend, one backend with its daemon's life.

    ``state`` is what the last hello says; ``down_since`` is since when the conductors hold an agent
    for down and have what its host offers closed, null while they do not.
    """

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    kind = wtypes.wsattr(types.OneOf("daemon", "backend"), mandatory=True)
    binary = wtypes.wsattr(str, mandatory=True)
    host = wtypes.wsattr(str, mandatory=True)
    status = wtypes.wsattr(str, mandatory=True)
    state = wtypes.wsattr(types.OneOf(*Liveness), mandatory=True)
    last_seen_at = wtypes.wsattr(datetime, mandatory=True)
    down_since = wtypes.wsattr(datetime)
    backends = wtypes.wsattr([Backend], mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)


class Services(wtypes.Base):  # type: ignore[misc]
    """A list of services."""

    services = wtypes.wsattr([Service], mandatory=True)
    services_links = wtypes.wsattr([types.Link])


class Controller(Resource):
    """The operations on services."""

    @operation(
        rule="cyborg:service:get_all",
        since=SINCE,
        answer=Services,
        query={
            "host": types.Text(),
            "binary": types.Text(64),
            "kind": types.OneOf("daemon", "backend"),
            "function": types.Checked("function", core.parse, types.Text(core.MAX_NAME)),
        },
        paged=True,
    )
    def find(
        self,
        call: Call,
        host: str | None,
        binary: str | None,
        kind: str | None,
        function: str | None,
        page: Asked,
    ) -> Any:
        """List daemons with their backends; of kind daemon without, of kind backend each alone.

        With a function, those that offer it, with what they have of it and of what is below it.
        """
        find = (
            read_backends.find
            if kind == "backend"
            else functools.partial(read.find, functions=kind is None)
        )
        with self.desk.reader.connect() as connection:
            found = page.read(
                lambda part: find(
                    connection, page=part, host=host, binary=binary, function=function
                )
            )
        return call.collection(NAME, self._show(kind), found)

    def _show(self, kind: str | None) -> Callable[[Call, Row], Mapping[str, Any]]:
        judge = self.judging()

        def show(call: Call, row: Row) -> Mapping[str, Any]:
            state = judge(row["last_seen_at"])
            backends = [] if kind == "daemon" else row["backends"]
            return types.dump(
                Service,
                {
                    **row,
                    "kind": kind or "daemon",
                    "state": state,
                    "backends": [types.dump(Backend, backend) for backend in backends],
                },
            )

        return show
