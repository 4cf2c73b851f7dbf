# SPDX-License-Identifier: Apache-2.0
"""/v2/audits: consistency checks between hardware, database, Placement and Nova."""

from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.collection import Collection
from cyborg.api.controller import RequestContext, Resource
from cyborg.core.audit.sources import Kind, Repair, Source, State
from cyborg.core.errors import Conflict, NotFound
from cyborg.db.audits import read

STATE = types.Enum(*State)


class Finding(types.JsonObject):
    """An inconsistency: the object, the explanation, and advice on how to resolve it.

    ``repair`` is the safe repair that an audit can do, or null; ``repaired`` is true if this audit
    has done or requested it; ``error`` is the reason why the repair failed, or null.
    """

    host = wtypes.wsattr(str, mandatory=True)
    kind = wtypes.wsattr(types.Enum(*Kind), mandatory=True)
    object = wtypes.wsattr(str, mandatory=True)
    explanation = wtypes.wsattr(str, mandatory=True)
    advice = wtypes.wsattr(str, mandatory=True)
    repair = wtypes.wsattr(types.Enum(*Repair))
    repaired = wtypes.wsattr(bool, mandatory=True)
    error = wtypes.wsattr(str)


class AuditSummary(types.JsonObject, row=read.AuditRow, links=True):
    """An audit without its findings; ``hosts_done`` of its ``hosts_total`` hosts are checked.

    ``host`` is null for all hosts. ``num_findings`` is the number of inconsistencies so far.
    """

    state = wtypes.wsattr(STATE, mandatory=True)
    sources = wtypes.wsattr([types.Enum(*Source)], mandatory=True)


class Audit(AuditSummary):
    """An audit with its findings."""

    findings = wtypes.wsattr([Finding], mandatory=True)


class AuditCreated(types.JsonObject):
    """A new audit."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    state = wtypes.wsattr(STATE, mandatory=True)
    links = wtypes.wsattr([types.Link], mandatory=True)


class AuditCreate(types.JsonObject):
    """The scope of an audit, one host or all, and whether it does safe repairs."""

    # An empty name is rejected: it is more likely an unset variable of a script than all hosts.
    host = wtypes.wsattr(types.Text(min_length=1))
    repair = wtypes.wsattr(types.BOOLEAN)


AUDITS = Collection("audits", "audit", read, AuditSummary, since=(2, 4))


class Controller(Resource):
    """The operations on audits."""

    find = AUDITS.find(
        "List the audits of the last days, without their findings.", host=types.Text(), state=STATE
    )
    get = AUDITS.get("Show the progress and the findings of an audit.", Audit)

    @AUDITS.operation(
        "POST audits", answer=AuditCreated, status=202, optional=True, raises=(NotFound, Conflict)
    )
    def create(self, request: RequestContext, body: AuditCreate) -> Any:
        """Start an audit of one host or of all hosts; it runs in the background."""
        result = self.context.conductor.audit_create(body.host or None, bool(body.repair))
        row = {"uuid": result["uuid"], "state": str(State.PENDING)}
        return request.created(AuditCreated, row, AUDITS.name)
