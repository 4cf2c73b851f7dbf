# SPDX-License-Identifier: Apache-2.0
"""/v2/jobs: what takes time, on one host or on many, and how far it is."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core.errors import NotFound, WrongState
from cyborg.core.job import JobKind, JobState
from cyborg.core.rollout import Kind, StepState
from cyborg.db.read import jobs as read
from cyborg.db.read.paging import Row

NAME = "jobs"
SINCE = (2, 4)
KIND = types.OneOf(*Kind, *JobKind)
STATE = types.OneOf(*JobState)


class Step(wtypes.Base):  # type: ignore[misc]
    """One backend on one host that a job is about; ``error`` tells why it failed, or is null."""

    host = wtypes.wsattr(str, mandatory=True)
    backend = wtypes.wsattr(str, mandatory=True)
    state = wtypes.wsattr(types.OneOf(*StepState), mandatory=True)
    error = wtypes.wsattr(str)


class ListedJob(wtypes.Base):  # type: ignore[misc]
    """A job without its steps; ``host`` is null for one that is about many.

    ``subject`` is the name of a driver, or the uuid of an instance or a deployable. ``progress``
    tells how many steps are in which state.
    """

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    kind = wtypes.wsattr(KIND, mandatory=True)
    host = wtypes.wsattr(str)
    subject = wtypes.wsattr(str, mandatory=True)
    state = wtypes.wsattr(STATE, mandatory=True)
    error = wtypes.wsattr(str)
    attempts = wtypes.wsattr(int, mandatory=True)
    progress = wtypes.wsattr({str: int}, mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class Job(ListedJob):
    """A job with its steps, in the order of host and backend; host work has none."""

    steps = wtypes.wsattr([Step], mandatory=True)


class Jobs(wtypes.Base):  # type: ignore[misc]
    """A list of jobs."""

    jobs = wtypes.wsattr([ListedJob], mandatory=True)
    jobs_links = wtypes.wsattr([types.Link])


class BegunJob(wtypes.Base):  # type: ignore[misc]
    """A job that has been recorded and will be done."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    kind = wtypes.wsattr(KIND, mandatory=True)
    state = wtypes.wsattr(STATE, mandatory=True)
    links = wtypes.wsattr([types.Link], mandatory=True)


def begun(call: Call, kind: Kind, made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request that is done by a job, and say where that is."""
    call.locate(call.url(NAME, made["uuid"]))
    row = {"uuid": made["uuid"], "kind": str(kind), "state": str(JobState.OPEN)}
    return call.dump(BegunJob, row, NAME)


def show(call: Call, row: Row) -> Mapping[str, Any]:
    """Return a job of a list as JSON."""
    return call.dump(ListedJob, row, NAME)


class Controller(Resource):
    """The operations on jobs."""

    @operation(
        rule="cyborg:job:get_all",
        since=SINCE,
        answer=Jobs,
        query={"kind": KIND, "state": STATE, "host": types.Text(), "subject": types.Text()},
        paged=True,
    )
    def find(
        self,
        call: Call,
        kind: str | None,
        state: str | None,
        host: str | None,
        subject: str | None,
        page: Asked,
    ) -> Any:
        """List jobs, without their steps; ``host`` is that of the job or of one of its steps."""
        with self.desk.reader.connect() as connection:
            found = page.read(
                lambda part: read.find(
                    connection, page=part, kind=kind, state=state, host=host, subject=subject
                )
            )
        return call.collection(NAME, show, found)

    @operation(
        rule="cyborg:job:get_one",
        since=SINCE,
        answer=Job,
        path={"uuid": types.Uuid()},
        raises=(NotFound,),
    )
    def get(self, call: Call, uuid: str) -> Any:
        """Show a job: how far it is, host by host."""
        with self.desk.reader.connect() as connection:
            row = read.get(connection, uuid)
        if row is None:
            raise NotFound(f"no job {uuid}")
        return call.dump(Job, row, NAME, steps=[types.dump(Step, step) for step in row["steps"]])

    @operation(
        rule="cyborg:job:cancel",
        since=SINCE,
        status=204,
        path={"uuid": types.Uuid()},
        raises=(NotFound, WrongState),
    )
    def cancel(self, call: Call, uuid: str) -> None:
        """Have a job about a driver begin nothing more; what is under way comes to its end."""
        self.desk.conductor.job_cancel(uuid)
