# SPDX-License-Identifier: Apache-2.0
"""Answers of agents about jobs, and what they mean for a job that stays open."""

from dataclasses import dataclass
from typing import Any

from cyborg.conductor.jobs.completion import NOT_IN_TIME
from cyborg.core.binding.profile import KEY, AttachTarget
from cyborg.core.errors import Invalid
from cyborg.core.jobs.job import AFTER_REBOOT, MAX_ERROR, AgentJobStatus, JobKind
from cyborg.core.jobs.progress import Activity
from cyborg.core.log import MAX_TRACED_ATTEMPTS
from cyborg.core.text import sanitize
from cyborg.db.jobs.write import JobRow
from cyborg.threads.failures import JITTER, compute_delay

# Seconds between two queries about a running job. Rare, because the agent calls when the job ends:
# a query only replaces a lost call.
POLL_INTERVAL = 15.0
# Shorter intervals: an operator looks at the activity of the job.
POLL_INTERVALS = {JobKind.PROGRAM: 5.0}
# Maximum seconds between two attempts of a job; a server may wait for a restored device.
MAX_RETRY_DELAYS = {JobKind.RELEASE: 600.0, JobKind.RESTORE: 60.0, JobKind.UNPLUG: 60.0}
# Maximum seconds between two attempts of a job with a deadline. Short: a server or an operator
# waits for the end of such a job.
MAX_DELAY = 10.0
# Maximum seconds between two attempts to apply a layout or image again.
AFTER_REBOOT_DELAY = 60.0
NO_AGENT_REASON = "the agent gave no reason"

# Log fields of the subjects of jobs.
_SUBJECTS = {
    str(JobKind.PREPARE): "instance",
    str(JobKind.PROGRAM): "deployable",
    str(JobKind.PARTITION): "device",
    str(JobKind.RESTORE): "instance",
    str(JobKind.PLUG): "instance",
    str(JobKind.UNPLUG): "instance",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What an agent has answered about a job.

    ``status`` is None if the agent is unreachable; ``error`` is then the reason.
    """

    status: AgentJobStatus | None = None
    error: str | None = None
    activity: Activity | None = None


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job that stays open after an answer: it runs, or is retried."""

    row: JobRow
    answer: Answer
    retried: bool
    overdue: bool

    @property
    def kind(self) -> JobKind:
        """Return the kind of the job."""
        return JobKind(self.row["kind"])

    @property
    def failed(self) -> bool:
        """Return whether the answer is a failed attempt."""
        # Work after a reboot has not failed if the agent does not answer.
        restores = self.kind is JobKind.RESTORE or AFTER_REBOOT in self.row["arguments"]
        return self.retried and (not restores or self.answer.status is AgentJobStatus.FAILED)

    @property
    def late(self) -> bool:
        """Return whether the ARQs of a release no longer wait for clean handles."""
        return self.overdue and self.kind is JobKind.RELEASE

    @property
    def message(self) -> str | None:
        """Return the error of the job from now on."""
        message = (self.answer.error or NO_AGENT_REASON) if self.failed else self.row["error"]
        return NOT_IN_TIME if self.late and message is None else message

    @property
    def first_failure(self) -> bool:
        """Return whether the job had no error before."""
        return self.message is not None and self.row["error"] is None

    def draw_delay(self) -> float:
        """Return the seconds until the agent is queried again, with a random part for a retry."""
        if not self.retried:
            return POLL_INTERVALS.get(self.kind, POLL_INTERVAL)
        max_delay = MAX_RETRY_DELAYS.get(self.kind, MAX_DELAY)
        if AFTER_REBOOT in self.row["arguments"]:
            max_delay = AFTER_REBOOT_DELAY
        return compute_delay(self.row["attempts"], max_delay, JITTER.uniform(0.0, 0.5))


def job_fields(row: JobRow) -> dict[str, Any]:
    """Return the log fields of a job: itself, its host and its subject."""
    fields = {"job": row["uuid"], "host": row["host"]}
    subject = _SUBJECTS.get(row["kind"])
    # Under a lease or for a host there is no instance: the subject is what the ARQ belongs to.
    if subject == "instance" and row["arguments"].get("instance") is None:
        items = row["arguments"].get("items") or [{}]
        is_of_host = items[0].get("accel", {}).get(KEY) == AttachTarget.HOST
        subject = "attachment" if is_of_host else "device_context"  # which has a lease
    if subject:
        fields[subject] = row["subject"]
    return fields


def open_trace(row: JobRow) -> str | None:
    """Return the trace of a job; None after some attempts."""
    return row["trace_context"] if row["attempts"] < MAX_TRACED_ATTEMPTS else None


def clean_error(error: Any) -> str | None:
    """Return an error as a text that every database accepts, or None.

    Without this, a job whose error cannot be stored would stay open.
    """
    return None if error is None else sanitize(str(error), MAX_ERROR)


def parse_state(state: Any) -> AgentJobStatus:
    """Parse the status of a job as an agent writes it. Raise Invalid."""
    try:
        return AgentJobStatus(state)
    except ValueError:
        raise Invalid(f"{str(state)[:40]!r} is not a job state", field="state") from None
