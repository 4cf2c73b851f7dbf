# SPDX-License-Identifier: Apache-2.0
"""/v2/audits: hardware, database, Placement and Nova held against each other."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core.audit import Kind, Repair, Side, State
from cyborg.core.errors import Conflict, Invalid, NotFound
from cyborg.db.read import audits as read
from cyborg.db.read.paging import Row

NAME = "audits"
SINCE = (2, 4)
STATE = types.OneOf(*State)


def _flag(value: Any) -> bool:
    """Return a truth value, and no word that looks like one. Raises Invalid."""
    if not isinstance(value, bool):
        raise Invalid("repair: must be true or false", field="repair")
    return value


class Finding(wtypes.Base):  # type: ignore[misc]
    """A disagreement: what it is about, what each side says, what to do.

    ``repair`` is what an audit may do about it by itself, or null; ``repaired`` tells whether this
    one has done or ordered it, ``error`` why it could not.
    """

    host = wtypes.wsattr(str, mandatory=True)
    kind = wtypes.wsattr(types.OneOf(*Kind), mandatory=True)
    object = wtypes.wsattr(str, mandatory=True)
    explanation = wtypes.wsattr(str, mandatory=True)
    advice = wtypes.wsattr(str, mandatory=True)
    repair = wtypes.wsattr(types.OneOf(*Repair))
    repaired = wtypes.wsattr(bool, mandatory=True)
    error = wtypes.wsattr(str)


class ListedAudit(wtypes.Base):  # type: ignore[misc]
    """An audit without its findings; ``done`` of ``total`` hosts were looked at.

    ``host`` is null for all hosts. ``found`` is how many disagreements there are so far.
    """

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    host = wtypes.wsattr(str)
    repair = wtypes.wsattr(bool, mandatory=True)
    state = wtypes.wsattr(STATE, mandatory=True)
    error = wtypes.wsattr(str)
    sides = wtypes.wsattr([types.OneOf(*Side)], mandatory=True)
    done = wtypes.wsattr(int, mandatory=True)
    total = wtypes.wsattr(int, mandatory=True)
    found = wtypes.wsattr(int, mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class Audit(ListedAudit):
    """An audit with its findings."""

    findings = wtypes.wsattr([Finding], mandatory=True)


class Audits(wtypes.Base):  # type: ignore[misc]
    """A list of audits."""

    audits = wtypes.wsattr([ListedAudit], mandatory=True)
    audits_links = wtypes.wsattr([types.Link])


class BegunAudit(wtypes.Base):  # type: ignore[misc]
    """An audit that was just asked for."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    state = wtypes.wsattr(STATE, mandatory=True)
    links = wtypes.wsattr([types.Link], mandatory=True)


class NewAudit(wtypes.Base):  # type: ignore[misc]
    """What is to be looked at, a host or all, and whether safe repairs are made."""

    # An empty name is a variable that was not set in somebody's script, and not all hosts.
    host = wtypes.wsattr(types.Text(shortest=1))
    repair = wtypes.wsattr(types.Checked("boolean", _flag, like=bool))


def show(call: Call, row: Row) -> Mapping[str, Any]:
    """Return an audit of a list as JSON."""
    return call.dump(ListedAudit, row, NAME)


class Controller(Resource):
    """The operations on audits."""

    @operation(
        rule="cyborg:audit:get_all",
        since=SINCE,
        answer=Audits,
        query={"host": types.Text(), "state": STATE},
        paged=True,
    )
    def find(self, call: Call, host: str | None, state: str | None, page: Asked) -> Any:
        """List the audits of the last days, without what they found."""
        with self.desk.reader.connect() as connection:
            found = page.read(lambda part: read.find(connection, page=part, host=host, state=state))
        return call.collection(NAME, show, found)

    @operation(
        rule="cyborg:audit:get_one",
        since=SINCE,
        answer=Audit,
        path={"uuid": types.Uuid()},
        raises=(NotFound,),
    )
    def get(self, call: Call, uuid: str) -> Any:
        """Show an audit: how far it is, and what it found."""
        with self.desk.reader.connect() as connection:
            row = read.get(connection, uuid)
        if row is None:
            raise NotFound(f"no audit {uuid}")
        findings = [types.dump(Finding, finding) for finding in row["findings"]]
        return call.dump(Audit, row, NAME, findings=findings)

    @operation(
        rule="cyborg:audit:create",
        since=SINCE,
        answer=BegunAudit,
        status=202,
        body=NewAudit,
        optional=True,
        raises=(NotFound, Conflict),
    )
    def create(self, call: Call, body: NewAudit) -> Any:
        """Have a host or all be audited, and answer at once."""
        made = self.desk.conductor.audit_create(body.host or None, bool(body.repair))
        call.locate(call.url(NAME, made["uuid"]))
        return call.dump(BegunAudit, {"uuid": made["uuid"], "state": str(State.PENDING)}, NAME)
