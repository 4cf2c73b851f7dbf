# SPDX-License-Identifier: Apache-2.0
"""/v2/device_contexts: requests for accelerators with their own life cycle.

Nova binds a context through its ARQs; another service reserves, binds and unbinds it here.
"""

from datetime import datetime
from typing import Any

import wsme

from cyborg.api import types
from cyborg.api.controller import RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.api.v2 import explanations
from cyborg.api.v2.arqs import ARQS, AcceleratorRequestV26
from cyborg.core.binding.profile import hidden_profile_name, parse_groups
from cyborg.core.contexts import context as core
from cyborg.core.contexts.states import ContextState
from cyborg.core.errors import Conflict, Forbidden, NotFound, Unavailable
from cyborg.db.binding import read as arqs_read
from cyborg.db.contexts import read

STATE = types.Enum(*ContextState)
SWITCH = types.Enum("0", "1")


def _json(name: str, schema: Any) -> types.Validated:
    """Return the type of a field that ``core.contexts.context`` checks with the other fields."""
    return types.Validated(name, lambda value: value, schema)


class ContextSuccessor(types.JsonObject, row=read.SuccessorRow):
    """The new device of a device context whose old device is under maintenance.

    ``error`` is for administrators; it is null for other callers.
    """


class DeviceContext(types.JsonObject, row=read.ContextRow, links=True):
    """A device context.

    ``epoch`` is the fencing token of its last use: it rises with each lease, and each bind without
    a lease. A lease ends at ``expires_at``. ``hidden_profile`` is the name of its device profile
    for the flavor of a server, and ``device_profile`` the name of the profile that it was made
    from. ``error`` is why the last bind or reservation failed or was refused, or why a former
    handle is not clean, without hosts and providers, which administrators find in the explanation;
    the next bind or reservation clears it. An unbound context is deleted at
    ``expires_at``, unless this is null. ``successor`` is null unless its device is, or
    was, under maintenance.
    """

    state = types.required(STATE)
    hidden_profile = types.required(str)
    successor = types.optional(ContextSuccessor)


class DeviceContextDetail(DeviceContext):
    """A device context with its ARQs.

    ``POST /v2/accelerator_requests`` with the hidden profile replaces them by new ones.
    """

    arqs = types.required([AcceleratorRequestV26])


class DeviceContextCreate(types.JsonObject):
    """A device context to create: exactly one of resources, groups and device_profile.

    ``requires`` and ``forbids`` are traits, and only allowed with ``resources``. Resources and
    traits may also be strings such as ``FPGA:1`` and ``CUSTOM_A,CUSTOM_B``. A name that is no
    standard resource class or trait gets the prefix ``CUSTOM_``.
    """

    name = types.optional(types.Text(min_length=1))
    description = types.optional(types.Text(core.MAX_DESCRIPTION, lines=True))
    resources = types.optional(_json("resources", {str: int}))
    requires = types.optional(_json("requires", [str]))
    forbids = types.optional(_json("forbids", [str]))
    groups = types.optional(_json("groups", [{str: str}]))
    device_profile = types.optional(types.Text(min_length=1))
    config_data = types.optional(_json("config_data", {str: str}))


class DeviceContextUpdate(types.JsonObject):
    """Changes of a device context. A missing field keeps its value, null removes it."""

    name = types.optional(types.Text(min_length=1))
    description = types.optional(types.Text(core.MAX_DESCRIPTION, lines=True))
    config_data = types.optional(_json("config_data", {str: str}))
    expires_at = types.optional(_json("expires_at", datetime))


class DeviceContextReserve(types.JsonObject):
    """Where a device context is reserved: one resource provider for each group.

    A group is named by its number, or as in the mappings of Placement. With ``epoch``, the lease of
    this epoch is renewed.
    """

    hostname = types.required(types.Text(min_length=1))
    mappings = types.required(_json("mappings", {str: [str]}))
    lease_seconds = types.optional(_json("lease_seconds", int))
    epoch = types.optional(_json("epoch", int))


class DeviceContextBind(types.JsonObject):
    """Where a device context is bound, and for which instance.

    ``epoch`` is the epoch of its lease. Without a lease, ``mappings`` must be given.
    """

    hostname = types.required(types.Text(min_length=1))
    instance_uuid = types.required(types.Uuid())
    mappings = types.optional(_json("mappings", {str: [str]}))
    epoch = types.optional(_json("epoch", int))


class DeviceContextUnbind(types.JsonObject):
    """The lease or bind that ends, named by its ``epoch`` or, a bind only, by its instance.

    Administrators may omit both.
    """

    epoch = types.optional(_json("epoch", int))
    instance_uuid = types.optional(types.Uuid())


class RequestGroup(types.JsonObject):
    """A request group of Placement; ``suffix`` follows the names of its query parameters."""

    suffix = types.required(str)
    resources = types.required(str)
    required = types.required(str)


class RequestGroups(types.JsonObject):
    """The request groups of a device context, and the query of them for Placement."""

    request_groups = types.required([RequestGroup])
    query = types.required(str)


class AllocationCandidate(types.JsonObject):
    """The uuids of the resource providers for each group, by the number of the group."""

    hostname = types.optional(str)
    mappings = types.required({str: [str]})


class AllocationCandidates(types.JsonObject):
    """Allocation candidates; ``reason`` is the message of Placement if it rejects the query.

    ``rejected_providers``, only with ``explain=1``, are the first 1000 providers that are in no
    candidate.
    """

    allocation_candidates = types.required([AllocationCandidate])
    reason = types.optional(str)
    rejected_providers = types.optional([explanations.RejectedProvider])


def show(request: RequestContext, row: read.ContextRow) -> dict[str, Any]:
    """Return a device context as JSON."""
    return _show(request, row, DeviceContext)


def _show(
    request: RequestContext, row: read.ContextRow, datatype: Any, **fields: Any
) -> dict[str, Any]:
    more: dict[str, Any] = {"hidden_profile": hidden_profile_name(row["uuid"]), **fields}
    more["successor"] = row["successor"]
    if more["successor"] is not None and not request.caller.is_elevated:
        # It may name devices and hosts, which only administrators see.
        more["successor"] = {**more["successor"], "error": None}
    return request.serialize(datatype, row, CONTEXTS.name, **more)


CONTEXTS = Collection(
    "device_contexts", "device_context", read, DeviceContext, since=(2, 6), scoped=True, show=show
)


class Controller(Resource):
    """The operations on device contexts."""

    find = CONTEXTS.find(
        "List the device contexts of the caller's project, or all for administrators and services.",
        {"instance": "instance_uuid", "host": "hostname"},
        state=STATE,
        instance=types.Uuid(),
        host=types.Text(),
        device_profile=types.Text(),
        name=types.Text(min_length=1),
    )

    @CONTEXTS.operation("GET device_contexts/{uuid}", "get_one", answer=DeviceContextDetail)
    def get(self, request: RequestContext, uuid: str) -> Any:
        """Show one device context with its ARQs."""
        row = CONTEXTS.read_row(self, request, uuid)
        # After the row: its ARQs are visible to whom the context is.
        with self.context.reader.connect() as connection:
            arqs = arqs_read.of_context(connection, uuid)
        return _show(
            request, row, DeviceContextDetail, arqs=[ARQS.show_row(request, arq) for arq in arqs]
        )

    @CONTEXTS.operation(
        "POST device_contexts",
        answer=DeviceContext,
        status=201,
        raises=(NotFound, Forbidden, Conflict),
    )
    def create(self, request: RequestContext, body: DeviceContextCreate) -> Any:
        """Create a device context with its ARQs and its hidden device profile."""
        values = _given(body)
        # The conductor checks it again; a mistake needs no call.
        core.parse_request(values)
        row = self.context.conductor.device_context_create(values, request.caller.project_id)
        # A new context is not bound, and so has no successor.
        more = {"hidden_profile": hidden_profile_name(row["uuid"]), "successor": None}
        return request.created(DeviceContext, {**row, **more}, CONTEXTS.name)

    @CONTEXTS.operation("PATCH device_contexts/{uuid}", answer=DeviceContext, raises=(Conflict,))
    def update(self, request: RequestContext, uuid: str, body: DeviceContextUpdate) -> Any:
        """Change an unbound device context."""
        values = _given(body, keep_null=True)
        # The clock of the database, and not of this host: the conductors compare with it.
        core.parse_changes(values, self.read_clock())
        row = self.context.conductor.device_context_update(
            uuid, values, request.caller.project_scope
        )
        return self._show_changed(request, row)

    @CONTEXTS.operation("DELETE device_contexts/{uuid}", raises=(Conflict,))
    def delete(self, request: RequestContext, uuid: str) -> None:
        """Delete a device context that is unbound or in error.

        With a service token, a bound one is unbound and deleted; the host cleans its former handles
        afterwards.
        """
        caller = request.caller
        self.context.conductor.device_context_delete(
            uuid,
            caller.project_scope,
            # Not is_service: with noauth each caller is a service, and no bound context would be
            # protected from a mistake.
            caller.has_service_token,
        )

    @CONTEXTS.operation(
        "POST device_contexts/{uuid}/pre_bind",
        answer=DeviceContext,
        status=202,
        service="reserving a device context",
        raises=(Conflict, Forbidden, Unavailable),
    )
    def pre_bind(self, request: RequestContext, uuid: str, body: DeviceContextReserve) -> Any:
        """Reserve all accelerators of a device context under a lease, or renew the lease."""
        row = self.context.conductor.device_context_pre_bind(
            uuid, _given(body), request.caller.project_scope
        )
        return self._show_changed(request, row)

    @CONTEXTS.operation(
        "POST device_contexts/{uuid}/bind",
        answer=DeviceContext,
        status=202,
        service="binding a device context",
        raises=(Conflict, Forbidden, Unavailable),
    )
    def bind(self, request: RequestContext, uuid: str, body: DeviceContextBind) -> Any:
        """Bind a device context to an instance, with the accelerators of its lease if it has one.

        Nova is notified as if it had bound the ARQs.
        """
        row = self.context.conductor.device_context_bind(
            uuid, _given(body), request.caller.project_scope
        )
        return self._show_changed(request, row)

    @CONTEXTS.operation(
        "POST device_contexts/{uuid}/unbind",
        answer=DeviceContext,
        status=202,
        optional=True,
        service="unbinding a device context",
        raises=(Conflict,),
    )
    def unbind(self, request: RequestContext, uuid: str, body: DeviceContextUnbind) -> Any:
        """Release the accelerators of a device context, and keep the context."""
        caller = request.caller
        row = self.context.conductor.device_context_unbind(
            uuid, _given(body), caller.project_scope, caller.is_elevated
        )
        return self._show_changed(request, row)

    @CONTEXTS.operation("GET device_contexts/{uuid}/request_groups", answer=RequestGroups)
    def request_groups(self, request: RequestContext, uuid: str) -> Any:
        """Show the query that is sent to Placement for a device context."""
        groups = parse_groups(CONTEXTS.read_row(self, request, uuid)["groups"])
        document = {
            "request_groups": core.build_request_groups(groups),
            "query": core.build_query(groups),
        }
        return types.serialize(RequestGroups, document)

    @CONTEXTS.operation(
        "GET device_contexts/{uuid}/allocation_candidates",
        answer=AllocationCandidates,
        query={"limit": types.PositiveInt(), "explain": SWITCH},
        takes_turns=True,
        raises=(Forbidden, Unavailable),
    )
    def candidates(
        self, request: RequestContext, uuid: str, limit: int | None, explain: str | None
    ) -> Any:
        """Query Placement for allocation candidates of a device context, at most 100.

        With ``explain=1``, for administrators only, show why other providers are in no candidate.
        """
        explained = explain == "1"
        # Refused and not ignored, so that a script does not take the absence for "none rejected".
        if explained and not request.caller.is_elevated:
            raise Forbidden(
                f"explain: only {request.caller.administrators} see the devices of the whole "
                "cloud; omit this parameter",
                field="explain",
            )
        # By the conductor: the API does not talk to Placement.
        answer = self.context.conductor.device_context_candidates(
            uuid,
            request.caller.project_scope,
            # By default Placement has no limit; each candidate is a combination of providers.
            min(limit or core.MAX_CANDIDATES, core.MAX_CANDIDATES),
        )
        document = {"allocation_candidates": answer["candidates"], "reason": answer["reason"]}
        if explained:
            context = CONTEXTS.read_row(self, request, uuid)
            turn = explanations.take_turn(self, host=None)
            with turn, self.context.reader.connect() as connection:
                document["rejected_providers"] = explanations.explain_absent_providers(
                    connection, context, answer["candidates"], answer["reason"]
                )
        return document

    def _show_changed(self, request: RequestContext, row: dict[str, Any]) -> Any:
        """Return a row of the conductor as JSON; add the successor, which the row lacks."""
        with self.context.reader.connect() as connection:
            found = read.successors(connection, [row["uuid"]])
        return CONTEXTS.show_row(request, {**row, "successor": found.get(row["uuid"])})


def _given(body: Any, *, keep_null: bool = False) -> dict[str, Any]:
    """Return the fields that are set in a body; omit null fields unless ``keep_null`` is True."""
    # The order of the fields in the class; WSME has no public list of names.
    values = {name: getattr(body, name) for name in type(body)._wsme_attr_order}
    return {
        name: value
        for name, value in values.items()
        if value is not wsme.Unset and (keep_null or value is not None)
    }
