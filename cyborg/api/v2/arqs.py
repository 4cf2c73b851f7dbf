# SPDX-License-Identifier: Apache-2.0
"""/v2/accelerator_requests: create, bind, unbind and delete accelerator requests (ARQs)."""

from collections.abc import Sequence
from typing import Any

from cyborg import tracing
from cyborg.api import types
from cyborg.api.controller import PageRequest, RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.core import errors
from cyborg.core.binding.arqs import BindRequest, UnbindRequest, parse_patch
from cyborg.core.binding.profile import parse_name
from cyborg.core.binding.states import RESOLVED, ArqState
from cyborg.db.binding import read

PATHS = ("/hostname", "/device_rp_uuid", "/instance_uuid", "/project_id")
PROJECT_SINCE = (2, 1)
STATE_SINCE = ATTACHED_SINCE = (2, 6)


class AcceleratorRequest(
    types.JsonObject,
    row=read.ArqRow,
    without=("group", "resource_class", "attached_at", "attach_error"),
    links=True,
):
    """An accelerator request (ARQ)."""

    # Declared: the row has any JSON value, and clients expect texts.
    attach_handle_info = types.required({str: str})


class AcceleratorRequestV26(
    AcceleratorRequest, row=read.ArqRow, only=("attached_at", "attach_error")
):
    """An accelerator request (ARQ), as versions from 2.6 on show it.

    Both new fields are for a device that the agent attaches, and not Nova, otherwise null: since
    when the guest has the device, and why a running guest lacks it.
    """


class AcceleratorRequestCreate(types.JsonObject):
    """The name of the device profile from which accelerator requests are created."""

    # Long: a text that cannot be a name gets 404, as an unknown name does.
    device_profile_name = types.required(types.Text(65536, lines=True))


class PatchOperation(types.JsonObject):
    """One operation of a JSON patch. A body has add operations only, or remove operations only."""

    path = types.required(types.Enum(*PATHS))
    op = types.required(types.Enum("add", "remove"))
    value = types.optional(types.Text())


Patch = types.Validated(
    "map of ARQ uuid to JSON patch operations", parse_patch, {str: [PatchOperation]}
)


def show(request: RequestContext, row: read.ArqRow) -> dict[str, Any]:
    """Return an accelerator request as JSON."""
    kind = AcceleratorRequest if request.version < ATTACHED_SINCE else AcceleratorRequestV26
    return request.serialize(kind, row, ARQS.name)


ARQS = Collection(
    "accelerator_requests",
    "arq",
    read,
    AcceleratorRequestV26,
    show=show,
    key="arqs",
    noun="accelerator request",
    scoped=True,
)


class Controller(Resource):
    """The operations on accelerator requests."""

    @ARQS.list_operation(
        query={
            "instance": types.Uuid(),
            "bind_state": types.Enum("resolved"),
            "state": types.Enum(*ArqState),
            "attach_failed": types.TRUTH,
        },
        query_since={"state": STATE_SINCE, "attach_failed": ATTACHED_SINCE},
        raises=(errors.Unresolved,),
    )
    def find(
        self,
        request: RequestContext,
        instance: str | None,
        bind_state: str | None,
        state: str | None,
        attach_failed: str | None,
        page: PageRequest,
    ) -> Any:
        """List ARQs.

        attach_failed=true selects those whose devices running guests lack: these have an
        attach_error.

        With both instance and bind_state, the response is 423 until all ARQs of the instance are
        resolved: bound, failed to bind, or being deleted.
        """
        tracing.annotate(instance=instance)
        scope = request.caller.project_scope
        # With an instance, an ARQ that is not resolved gives 423 instead of being left out.
        states = set[str](RESOLVED) if bind_state and not instance else None
        if state is not None:
            states = {state} if states is None else states & {state}
        failed = None if attach_failed is None else attach_failed == "true"
        with self.context.reader.connect() as connection:
            if instance and page.is_whole and state is None and failed is None:
                # All rows on one page: Nova follows no links, and an instance cannot start if an
                # ARQ is missing. Nova asks twice for each boot, so ``of_instance`` has a statement
                # that is built only once.
                rows = read.of_instance(connection, instance, scope)
                if bind_state:
                    _require_resolved(rows, instance)
                return ARQS.document(request, (rows, None))
            # All ARQs of the instance, and not only those of the page or of the other filters.
            if bind_state and instance:
                _require_resolved(read.of_instance(connection, instance, scope), instance)
            result = page.read(
                lambda window: read.find(
                    connection,
                    page=window,
                    instance_uuid=instance,
                    project_id=scope,
                    states=states,
                    attach_failed=failed,
                ),
                whole=instance is not None,
            )
        return ARQS.document(request, result)

    get = ARQS.get("Show one ARQ.")

    @ARQS.operation(
        "POST accelerator_requests",
        answer=ARQS.list_type,
        status=201,
        ignore_unknown=True,
        raises=(errors.NotFound, errors.Conflict),
    )
    def create(self, request: RequestContext, body: AcceleratorRequestCreate) -> Any:
        """Create one ARQ for each unit of each group of a profile, in the order of the groups.

        The hidden profile of a device context gives new ARQs, which replace those of the context.
        """
        name = body.device_profile_name
        try:
            parse_name(name)
        except errors.CyborgError:
            # No profile can have an invalid name.
            raise errors.NotFound(
                f"device_profile_name: no device profile {name[:255]!r}; GET /v2/device_profiles "
                "lists the known ones"
            ) from None
        caller = request.caller
        result = self.context.conductor.arq_create(
            name, caller.project_id, context_scope=caller.instance_project
        )
        return ARQS.document(request, (result["arqs"], None))

    @ARQS.operation(
        "PATCH accelerator_requests",
        "update",
        status=202,
        body=Patch,
        service="binding or unbinding an ARQ",
        raises=(errors.NotFound, errors.Conflict),
    )
    def patch(self, request: RequestContext, body: Sequence[BindRequest | UnbindRequest]) -> None:
        """Bind ARQs to an instance, or unbind them: all of them or none."""
        self._patch(request, body)

    @ARQS.operation(
        "PATCH accelerator_requests/{uuid}",
        "update",
        status=202,
        body=Patch,
        service="binding or unbinding an ARQ",
        raises=(errors.Conflict,),
    )
    def patch_one(
        self, request: RequestContext, uuid: str, body: Sequence[BindRequest | UnbindRequest]
    ) -> None:
        """Bind or unbind one ARQ."""
        # The body names the ARQ again: a body for another ARQ is a mistake of the client.
        if [item.request for item in body] != [uuid]:
            raise errors.Invalid(f"body: expected operations of {uuid} only", field="body")
        self._patch(request, body)

    @ARQS.operation(
        "DELETE accelerator_requests",
        "delete",
        query={"arqs": types.CommaSeparated(), "instance": types.Uuid()},
        raises=(errors.NotFound, errors.Conflict),
    )
    def delete_many(
        self, request: RequestContext, arqs: tuple[str, ...] | None, instance: str | None
    ) -> None:
        """Delete the given ARQs, or all ARQs of an instance."""
        if (arqs is None) == (instance is None):
            raise errors.Invalid("query: give either arqs or instance, not both", field="arqs")
        # Only Nova knows that the instance is gone: a user could pull devices from a running one.
        if instance is not None and not request.caller.is_service:
            raise errors.ServiceTokenRequired("deleting ARQs by instance requires a service token")
        if arqs is None:
            self._delete(request, instance=instance)
        elif not arqs:
            raise errors.Invalid(
                "arqs: empty, expected uuids of accelerator requests", field="arqs"
            )
        else:
            self._delete(request, [types.load(types.Uuid(), arq, "arqs") for arq in arqs])

    @ARQS.operation("DELETE accelerator_requests/{uuid}", raises=(errors.Conflict,))
    def delete(self, request: RequestContext, uuid: str) -> None:
        """Delete one ARQ."""
        self._delete(request, [uuid])

    def _patch(self, request: RequestContext, body: Sequence[BindRequest | UnbindRequest]) -> None:
        if any(isinstance(item, BindRequest) and item.project_id is not None for item in body):
            _check_project_override(request)
        requests = [item.to_dict() for item in body]
        scope = request.caller.project_scope
        # A patch has operations of one kind only: parse_patch refuses others.
        if isinstance(body[0], BindRequest):
            self.context.conductor.arq_bind(requests, scope, request.caller.instance_project)
        else:
            self.context.conductor.arq_unbind(requests, scope)

    def _delete(
        self,
        request: RequestContext,
        uuids: list[str] | None = None,
        *,
        instance: str | None = None,
    ) -> None:
        caller = request.caller
        self.context.conductor.arq_delete(uuids, instance, caller.project_scope, caller.is_service)


def _require_resolved(rows: Sequence[read.ArqRow], instance: str) -> None:
    if unresolved := [row["uuid"] for row in rows if row["state"] not in RESOLVED]:
        raise errors.Unresolved(
            f"{len(unresolved)} of {len(rows)} ARQs of instance {instance} are not resolved yet, "
            "retry"
        )


def _check_project_override(request: RequestContext) -> None:
    if request.version < PROJECT_SINCE:
        raise errors.Invalid("/project_id requires microversion 2.1", field="/project_id")
    if not request.caller.is_elevated:
        raise errors.Forbidden(
            f"/project_id: only {request.caller.administrators} may set it; omit it",
            field="/project_id",
        )
