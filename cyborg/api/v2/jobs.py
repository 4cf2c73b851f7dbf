# SPDX-License-Identifier: Apache-2.0
"""/v2/jobs and /v2/outbox: long-running work on hosts, and messages to other services."""

from collections.abc import Mapping
from typing import Any

from cyborg.api import types
from cyborg.api.controller import PageRequest, RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.core.drivers.rollout import Kind, StepState
from cyborg.core.errors import Conflict, NotFound, WrongState
from cyborg.core.jobs import progress
from cyborg.core.jobs.job import JobKind, JobState
from cyborg.db.jobs import read
from cyborg.db.outbox import read as outbox_read

KIND = types.Enum(*Kind, *JobKind)
STATE = types.Enum(*JobState)
STEP_STATE = types.Enum(*StepState)
ACTIVITY_SINCE = (2, 5)


class Step(types.JsonObject, row=read.StepRow):
    """The step of a job for a backend on a host; ``error`` is the reason of a failure, or null."""

    state = types.required(STEP_STATE)


class Activity(types.JsonObject, row=progress.Activity):
    """What the host of a job does at the moment: ``done`` of ``total`` parts of a step, or null."""


class JobSummary(types.JsonObject, row=read.JobRow, links=True):
    """A job without its steps; ``host`` is null for a job on many hosts.

    ``subject`` is the name of a driver, or the uuid of an instance, a deployable or a device.
    ``progress`` is the number of steps in each state. ``activity`` is shown from version 2.5 on,
    and null unless the host works on the job.
    """

    kind = types.required(KIND)
    state = types.required(STATE)
    activity = types.optional(Activity)


class Job(JobSummary):
    """A job with its steps on a page of hosts, ordered by host and backend.

    Only driver jobs have steps.
    """

    steps = types.required([Step])
    steps_links = types.optional([types.Link])


class JobCreated(types.JsonObject):
    """A new job."""

    uuid = types.required(types.Uuid())
    kind = types.required(KIND)
    state = types.required(STATE)
    links = types.required([types.Link])


# What the operations of other collections that start a job declare.
STARTS_JOB: Mapping[str, Any] = {
    "answer": JobCreated,
    "status": 202,
    "raises": (NotFound, Conflict),
}


def serialize_created(
    request: RequestContext, kind: Kind | JobKind, result: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a new job as JSON, and set the Location header to its URL."""
    # Not read from the database, which may be a replica that does not have the job yet.
    row = {"uuid": result["uuid"], "kind": str(kind), "state": str(JobState.OPEN)}
    return request.created(JobCreated, row, JOBS.name)


def show(request: RequestContext, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job of the list as JSON."""
    return _select_fields(request, request.serialize(JobSummary, row, JOBS.name))


def _select_fields(request: RequestContext, body: dict[str, Any]) -> dict[str, Any]:
    """Return a job as the version of the request shows it."""
    if request.version < ACTIVITY_SINCE:
        # Deleted here instead of a second type: the field is the only difference.
        del body["activity"]
    return body


JOBS = Collection("jobs", "job", read, JobSummary, since=(2, 4), show=show)


class Controller(Resource):
    """The operations on jobs."""

    find = JOBS.find(
        "List jobs without their steps; ``host`` is the host of the job or of one of its steps.",
        uuid=types.Uuid(),
        kind=KIND,
        state=STATE,
        host=types.Text(),
        subject=types.Text(),
    )

    @JOBS.operation(
        "GET jobs/{uuid}", "get_one", answer=Job, query={"step_state": STEP_STATE}, paged=True
    )
    def get(
        self, request: RequestContext, uuid: str, step_state: str | None, page: PageRequest
    ) -> Any:
        """Show a job with its steps on a page of hosts.

        ``limit`` is a number of hosts, and ``marker`` the name of a host. ``step_state`` selects
        the steps in this state.
        """
        with self.context.reader.connect() as connection:
            row = JOBS.find_row(connection, uuid)
            # A page of hosts and not of steps: those of a host are shown together.
            hosts, marker = page.read(
                lambda window: read.find_hosts(connection, uuid, page=window, state=step_state)
            )
            steps = read.find_steps(connection, uuid, hosts, step_state)
        details = {**row, "steps": steps}
        body = request.serialize_page(Job, details, JOBS.name, "steps", marker)
        return _select_fields(request, body)

    @JOBS.operation("DELETE jobs/{uuid}", raises=(WrongState,))
    def cancel(self, request: RequestContext, uuid: str) -> None:
        """Cancel a driver job, which ends its steps in progress, or a job that drains a device."""
        self.context.conductor.job_cancel(uuid)


MESSAGE_STATES = ("pending", "dead")


class Message(types.JsonObject, row=outbox_read.MessageRow):
    """A message to another service; ``error`` is the error of the last failed delivery, or null."""

    state = types.required(types.Enum(*MESSAGE_STATES))
    payload = types.required(types.Validated("object", dict))


OUTBOX = Collection("outbox", "outbox", outbox_read, Message, nouns="messages", since=(2, 4))


class OutboxController(Resource):
    """The operations on the outbox."""

    find = OUTBOX.find(
        "List pending messages and dead letters (messages whose delivery failed for good).",
        state=types.Enum(*MESSAGE_STATES),
        kind=types.Text(64),
        subject=types.Text(),
    )

    @OUTBOX.operation("POST outbox/{uuid}/retry", raises=(WrongState,))
    def retry(self, request: RequestContext, uuid: str) -> None:
        """Retry the delivery of a dead letter now."""
        self.context.conductor.outbox_retry(uuid)

    @OUTBOX.operation("DELETE outbox/{uuid}", raises=(WrongState,))
    def delete(self, request: RequestContext, uuid: str) -> None:
        """Delete a dead letter."""
        self.context.conductor.outbox_delete(uuid)
