# SPDX-License-Identifier: Apache-2.0
"""/v2/audits: consistency checks between hardware, database, Placement and Nova."""

from typing import Any

from cyborg.api import types
from cyborg.api.controller import RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.core.audit.sources import Kind, Repair, Source, State
from cyborg.core.errors import Conflict, NotFound
from cyborg.db.audits import read

STATE = types.Enum(*State)


class Finding(types.JsonObject):
    """An inconsistency: the object, the explanation, and advice on how to resolve it.

    ``repair`` is the safe repair that an audit can do, or null; ``repaired`` is true if this audit
    has done or requested it; ``error`` is the reason why the repair failed, or null.
    """

    host = types.required(str)
    kind = types.required(types.Enum(*Kind))
    object = types.required(str)
    explanation = types.required(str)
    advice = types.required(str)
    repair = types.optional(types.Enum(*Repair))
    repaired = types.required(bool)
    error = types.optional(str)


class AuditSummary(types.JsonObject, row=read.AuditRow, links=True):
    """An audit without its findings; ``hosts_done`` of its ``hosts_total`` hosts are checked.

    ``host`` is null for all hosts. ``num_findings`` is the number of inconsistencies so far.
    """

    state = types.required(STATE)
    sources = types.required([types.Enum(*Source)])


class Audit(AuditSummary):
    """An audit with its findings."""

    findings = types.required([Finding])


class AuditCreated(types.JsonObject):
    """A new audit."""

    uuid = types.required(types.Uuid())
    state = types.required(STATE)
    links = types.required([types.Link])


class AuditCreate(types.JsonObject):
    """The scope of an audit, one host or all, and whether it does safe repairs."""

    # An empty name is rejected: it is more likely an unset variable of a script than all hosts.
    host = types.optional(types.Text(min_length=1))
    repair = types.optional(types.BOOLEAN)


AUDITS = Collection("audits", "audit", read, AuditSummary, since=(2, 4))


class Controller(Resource):
    """The operations on audits."""

    find = AUDITS.find(
        "List the audits of the last days, without their findings.", host=types.Text(), state=STATE
    )

    @AUDITS.operation("GET audits/{uuid}", "get_one", answer=Audit)
    def get(self, request: RequestContext, uuid: str) -> Any:
        """Show the progress and the findings of an audit."""
        return request.serialize(Audit, AUDITS.read_row(self, request, uuid), AUDITS.name)

    @AUDITS.operation(
        "POST audits", answer=AuditCreated, status=202, optional=True, raises=(NotFound, Conflict)
    )
    def create(self, request: RequestContext, body: AuditCreate) -> Any:
        """Start an audit of one host or of all hosts; it runs in the background."""
        result = self.context.conductor.audit_create(body.host or None, bool(body.repair))
        # Not read from the database, which may be a replica that does not have the audit yet.
        row = {"uuid": result["uuid"], "state": str(State.PENDING)}
        return request.created(AuditCreated, row, AUDITS.name)
