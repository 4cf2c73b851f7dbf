# SPDX-License-Identifier: Apache-2.0
"""/v2/services and /v2/hosts: daemons and backends with their liveness, hosts with capacity."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from cyborg.api import types
from cyborg.api.controller import PageRequest, RequestContext, Resource
from cyborg.api.operation import Collection, operation
from cyborg.core.errors import InUse, WrongState
from cyborg.core.hosts import Liveness, evaluate
from cyborg.core.inventory import functions as core
from cyborg.db.backends import read as read_backends
from cyborg.db.handles import usage
from cyborg.db.services import read


class Function(types.JsonObject, row=read_backends.FunctionRow):
    """A function that a backend offers, such as encryption, and the accelerators that have it.

    ``total``, ``used`` and ``free`` are numbers of accelerators: ``used`` accelerators are bound or
    being cleaned, ``free`` accelerators can be bound now.
    """


class Backend(types.JsonObject, row=read_backends.BackendRow):
    """One configured driver of an agent; ``error`` is null without an error.

    ``functions`` are the functions of the backend's devices, ordered by name.
    """

    functions = types.required([Function])


class Service(types.JsonObject, row=read.ServiceRow, without=("late_at", "down_at")):
    """A daemon with its backends, or one backend with the state of its daemon: see ``kind``.

    ``state`` is the liveness according to the last heartbeat. ``down_since`` is when an agent was
    marked down and its host cordoned, or null.
    """

    kind = types.required(types.Enum("daemon", "backend"))
    state = types.required(types.Enum(*Liveness))


class HostClass(types.JsonObject, row=usage.ClassUseRow):
    """The handles of one resource class of a host by use; each handle counts once.

    ``whole_free`` are the free handles of deployables of which nothing is in use, and
    ``largest_free`` the most free handles of one deployable, which one group of a request can get:
    on a host with device sets, the size of the largest one that is offered.
    """


class Host(types.JsonObject, row=read.HostRow, without=("late_at", "down_at")):
    """A host, which is an agent with its devices.

    ``uuid`` is that of the agent, and ``state`` its liveness according to the last heartbeat.
    ``down_since`` is when it was marked down and the host cordoned, or null.
    """

    state = types.required(types.Enum(*Liveness))


class HostRemoval(
    types.JsonObject,
    counts=("services", "devices", "accelerator_requests", "tombstones", "resource_providers"),
):
    """The numbers of objects that were removed with a host.

    The resource providers are deleted in Placement afterwards.
    """

    host = types.required(str)


_Row = read.ServiceRow | read_backends.AgentBackendRow
# By the kind that is requested: only what the rows show is read.
_FINDERS: Mapping[str | None, Callable[..., list[Any]]] = {
    None: functools.partial(read.find, functions=True),
    "backend": read_backends.find,
    "daemon": read.find_daemons,
}
HOSTS = Collection("hosts", "service", read, Host, since=(2, 6))
SERVICES = Collection("services", "service", read, Service, since=(2, 4))


class Controller(Resource):
    """The operations on services."""

    @SERVICES.list_operation(
        query={
            "host": types.Text(),
            "binary": types.Text(64),
            "kind": types.Enum("daemon", "backend"),
            "function": types.Validated("function", core.parse_name, types.Text(core.MAX_NAME)),
        }
    )
    def find(
        self, request: RequestContext, kind: str | None, page: PageRequest, **filters: str | None
    ) -> Any:
        """List daemons with their backends.

        With kind ``daemon`` the rows have no backends; with kind ``backend`` there is one row for
        each backend, and no row for a daemon.

        With ``function``, list only services that offer it, and show only this function and the
        functions below it.
        """
        rows = self.read_page(page, _FINDERS[kind], **filters)
        return SERVICES.document(request, rows, self._show(kind))

    @SERVICES.operation("DELETE services/{uuid}", raises=(WrongState, InUse))
    def delete(self, request: RequestContext, uuid: str) -> None:
        """Delete a daemon that is down; for an agent, also delete the inventory of its host.

        Fails if any accelerator of the host is in use.
        """
        self.context.conductor.service_delete(uuid)

    @HOSTS.list_operation(query={"hostname": types.Text(), "state": types.Enum(*Liveness)})
    def find_hosts(self, request: RequestContext, page: PageRequest, **filters: str | None) -> Any:
        """List hosts with the use of their accelerators by resource class."""
        now = self.read_clock()

        def show(request: RequestContext, row: read.HostRow) -> dict[str, Any]:
            # Evaluated now, since nobody writes the state when a heartbeat is missing.
            state = evaluate(row["late_at"], row["down_at"], now)
            return types.serialize(Host, {**row, "state": state})

        rows = self.read_page(page, read.find_hosts, now=now, **filters)
        return HOSTS.document(request, rows, show)

    @operation(
        "DELETE hosts/{host}",
        "cyborg:host:forget",
        since=(2, 6),
        answer=HostRemoval,
        path={"host": types.Text(min_length=1)},
        query={"force": types.TRUTH, "dry_run": types.TRUTH},
        raises=(WrongState, InUse),
    )
    def forget_host(
        self, request: RequestContext, host: str, force: str | None, dry_run: str | None
    ) -> Any:
        """Remove a host that left for good: its daemons, devices and resource providers.

        Its daemons must be down. Fails if any accelerator of the host is in use, except with
        ``force``: then the accelerator requests are deleted, and so are the allocations of the
        resource providers in Placement. With ``dry_run`` nothing is removed, and the answer is the
        same.
        """
        removed = self.context.conductor.host_forget(host, force == "true", dry_run == "true")
        return {"host": host, **removed}

    def _show(self, kind: str | None) -> Callable[[RequestContext, _Row], Mapping[str, Any]]:
        """Return a function that shows a row of ``find``; ``kind`` is that of the request."""
        evaluate = self.liveness_evaluator()

        def show(request: RequestContext, row: _Row) -> Mapping[str, Any]:
            # Evaluated now: nobody writes a state when a heartbeat is missing.
            state = evaluate(row["late_at"], row["down_at"])
            return types.serialize(Service, {**row, "kind": kind or "daemon", "state": state})

        return show
