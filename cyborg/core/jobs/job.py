# SPDX-License-Identifier: Apache-2.0
"""Jobs: long-running work on a host, and the decisions that follow from its status.

A job is a row of the database before it is sent to an agent. The conductor that leases the row
sends the job repeatedly until the agent reports its result. The agent keeps a checkpoint of each
job (started, completed, failed), so that a job sent twice runs once.

====================  ==========================  =============================================
kind                  deadline passed or failed   cancelled (the ARQ is unbound or deleted)
====================  ==========================  =============================================
prepare               ARQs become BindFailed, a   the agent refuses the job if it has not begun;
                      release job undoes it       a release job undoes it otherwise
release               retried with a growing      not possible; the handle is dirty until it is
                      delay; after the deadline   done
                      unbound ARQs are
                      UnbindFailed until it is
                      done
plug                  the attach is undone        the agent refuses the job if it has not begun;
                                                  an unplug job undoes it otherwise
unplug                never: retried with a       not possible; the guest may have the device until
                      growing delay               it is done
restore               never: retried with a       the agent refuses the job if it has not begun;
                      growing delay               a release job undoes it otherwise
program               the deployable is           after a reboot: it is not
                      uncordoned, its bitstream   retried any more
                      unknown; after a reboot it
                      is retried with a growing
                      delay
partition             failed: the agent has       while the device drains: it
                      restored the previous       is open again, with its old
                      layout; only draining has   layout
                      a deadline, because the
                      device must stay cordoned
                      during the change; after a  after a reboot: as program
                      reboot as program
====================  ==========================  =============================================
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from cyborg.core.codec import Serializable
from cyborg.core.errors import Invalid
from cyborg.core.life_cycle import LifeCycle, Transition
from cyborg.core.validation import malformed, optional, parse_uuid, string


def parse_guest_arq(value: Any) -> dict[str, Any]:
    """Return the fields of an ARQ that name its device. Raise Invalid if one is malformed.

    The values of ``attach_handle_info`` depend on the type; ``cyborg.os_acc`` parses them.
    """
    if not isinstance(value, Mapping):
        raise Invalid(f"devices: expected objects, found {type(value).__name__}", field="arguments")
    uuid = parse_uuid(value.get("uuid"), "devices['uuid']")
    info = value.get("attach_handle_info")
    if not isinstance(info, Mapping):
        raise Invalid(
            f"attach_handle_info of ARQ {uuid}: expected an object, found {type(info).__name__}",
            field="attach_handle_info",
        )
    with malformed(f"device of ARQ {uuid}", "devices"):
        texts = {name: string(value[name]) for name in ("state", "attach_handle_type")}
    handle = parse_uuid(value.get("attach_handle_uuid"), "attach_handle_uuid")
    return {"uuid": uuid, **texts, "attach_handle_uuid": handle, "attach_handle_info": dict(info)}


PATH = "/program"
VERB = "replace"


def parse_program(body: Any) -> str:
    """Return the uuid of the image that a body of PATCH deployables/{uuid}/program names.

    The body is a JSON patch of one operation: ``[{"path": "/program", "op": "replace", "value":
    [{"image_uuid": uuid}]}]``. Raise Invalid with the name of the field.
    """
    operation = _only(body, "body", ("path", "op", "value"))
    for key, expected in (("path", PATH), ("op", VERB)):
        if operation[key] != expected:
            raise Invalid(f"{key}: {str(operation[key])[:60]!r} is not {expected!r}", field=key)
    image = _only(operation["value"], "value", ("image_uuid",))
    return parse_uuid(image["image_uuid"], "image_uuid")


def _only(value: Any, name: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the single object of a list. Raise Invalid unless it has exactly these keys."""
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], Mapping):
        raise Invalid(f"{name}: expected a list of one object", field=name)
    found = value[0]
    if missing := [key for key in keys if key not in found]:
        raise Invalid(f"{missing[0]}: missing in {name}", field=missing[0])
    if unknown := sorted(str(key) for key in found if key not in keys):
        shown = unknown[0][:60]
        raise Invalid(f"{shown}: unknown field of {name}, expected {', '.join(keys)}", field=shown)
    return dict(found)


# Items of a job: the limit of ARQs in one PATCH.
MAX_ITEMS = 1024
# Characters of a driver's error that are stored.
MAX_ERROR = 1000


class JobKind(StrEnum):
    """Kinds of jobs, in the order in which due jobs are leased.

    A restore comes after the partition job of its device (``db.jobs.write.lease``). Instances wait
    for jobs of the first four kinds, operators for jobs of the next two kinds. Nothing waits for
    the last kind.
    """

    RESTORE = "restore"  # prepare a bound handle again after its host has rebooted
    PREPARE = "prepare"  # make handles ready for an instance
    PLUG = "plug"  # attach prepared devices to a running guest
    UNPLUG = "unplug"  # take devices from a guest
    PARTITION = "partition"  # change the layout of a device
    PROGRAM = "program"  # load an image into a deployable
    RELEASE = "release"  # undo a prepare and clean the handles


# Kinds that are retried until they succeed. The others fail, and their work is undone.
RETRIED_KINDS = frozenset({JobKind.RELEASE, JobKind.RESTORE, JobKind.UNPLUG})

# Kinds that change a running guest, not the device: no driver takes part.
GUEST_KINDS = frozenset({JobKind.PLUG, JobKind.UNPLUG})

# Argument of a partition or program job that applies again what a device had before a reboot.
#
# No operator has requested it, so it is retried like a restore, until an operator cancels it.
AFTER_REBOOT = "after_reboot"

# Failed attempts, in some minutes, after which such a job ends if it is impossible.
GIVE_UP_ATTEMPTS = 8

# Argument of a job that an operator has cancelled, and that ends with its running work.
CANCELLED = "cancelled"

# Argument of a partition job that waits until nothing uses its device; no agent has it yet.
DRAINS = "drains"

# Kinds that change what a device reports: a discovery follows them.
INVENTORY_KINDS = frozenset({JobKind.PROGRAM, JobKind.PARTITION})


class JobState(StrEnum):
    """State of a job; open jobs are leased repeatedly until they end."""

    OPEN = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobEvent(StrEnum):
    """Events that end a job."""

    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


_OPEN = (JobState.OPEN,)
JOB_LIFE_CYCLE = LifeCycle(
    "job",
    JobState.OPEN,
    (
        Transition(JobEvent.FINISH, _OPEN, JobState.DONE, "the agent reports success"),
        Transition(
            JobEvent.FAIL, _OPEN, JobState.FAILED, "it is not retried, or an operator abandons it"
        ),
        Transition(
            JobEvent.CANCEL,
            _OPEN,
            JobState.CANCELLED,
            "its ARQs are unbound or deleted, or an operator cancels it",
        ),
    ),
    final=frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED}),
)


class AgentJobStatus(StrEnum):
    """Status of a job at its agent."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class JobDecision(StrEnum):
    """Decision of the conductor about a job."""

    FINISH = "finish"
    UNDO = "undo"
    WAIT = "wait"
    RETRY = "retry"


def is_retryable(kind: JobKind, arguments: Mapping[str, Any]) -> bool:
    """Return whether a job is retried after a failure."""
    # A cancelled job ends with its running work, so that a failure is its end, too.
    restores = AFTER_REBOOT in arguments and CANCELLED not in arguments
    return kind in RETRIED_KINDS or restores


def decide(
    kind: JobKind, status: AgentJobStatus | None, *, overdue: bool, retryable: bool
) -> JobDecision:
    """Return the decision about a job from its status at the agent.

    ``status`` is None if the agent did not answer. ``overdue`` is set if the deadline of the job
    has passed, ``retryable`` is the result of ``is_retryable``. Work that succeeded is never
    undone, even if it is reported late.
    """
    # First, whatever the deadline: the host has the work, and to undo it would need a second job.
    if status is AgentJobStatus.DONE:
        return JobDecision.FINISH
    # A layout has no deadline here: its device must stay cordoned during the change.
    is_late = overdue and kind is not JobKind.PARTITION
    if not retryable and (status is AgentJobStatus.FAILED or is_late):
        return JobDecision.UNDO
    return JobDecision.WAIT if status is AgentJobStatus.RUNNING else JobDecision.RETRY


@dataclass(frozen=True, slots=True)
class WorkItem(Serializable):
    """One attach handle to prepare or release, or one deployable to program.

    ``backend`` is the configured driver; ``device``, ``deployable`` and ``handle`` are addresses.
    ``handle`` is empty for work on the whole deployable. ``accel`` holds the ``accel:`` keys of the
    profile's group, without the prefix.
    """

    backend: str
    device: str
    deployable: str
    handle: str = ""
    accel: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Specification of a job for an agent; all items succeed or none.

    ``timeout`` is the limit for the whole job on the host, in seconds. ``image`` is the uuid of the
    image to program. ``layout`` is the layout to apply; if that fails, ``previous_layout`` is
    restored, unless it is None. ``instance`` is for the log and the driver. ``cancels`` are the
    uuids of jobs that must not begin if their message arrives later. A ``retried`` job that has
    failed runs again when it is requested again. ``devices`` are the ARQs, as the REST API shows
    them, whose devices a job of GUEST_KINDS changes in the guest of ``instance``. With
    ``guest_expected``, Nova shows that this guest runs on the host, so that its absence there does
    not prove that the device is detached.
    """

    job_uuid: str
    kind: JobKind
    items: tuple[WorkItem, ...]
    timeout: float
    instance: str | None = None
    image: str | None = None
    layout: str | None = None
    previous_layout: str | None = None
    cancels: tuple[str, ...] = ()
    retried: bool = False
    devices: tuple[Mapping[str, Any], ...] = ()
    guest_expected: bool = False


def load_job_spec(job: Any, kind: Any, arguments: Any, seconds: Any) -> JobSpec:
    """Parse a job from the bus. Raise Invalid if it is malformed."""
    uuid = parse_uuid(job, "job")
    with malformed("job", "arguments"):
        work = JobSpec(
            job_uuid=uuid,
            kind=JobKind(kind),
            items=tuple(map(WorkItem.from_dict, arguments["items"])),
            timeout=float(seconds),
            instance=optional(string, arguments.get("instance")),
            image=optional(string, arguments.get("image")),
            layout=optional(string, arguments.get("layout")),
            previous_layout=optional(string, arguments.get("previous_layout")),
            cancels=tuple(parse_uuid(uuid_, "cancels") for uuid_ in arguments.get("cancels", ())),
            retried=is_retryable(JobKind(kind), arguments),
            devices=tuple(map(parse_guest_arq, arguments.get("devices", ()))),
            guest_expected=arguments.get("guest_expected") is True,
        )
    if (problem := _find_problem(work)) is not None:
        raise Invalid(problem.text, field=problem.field)
    return work


class _Problem(NamedTuple):
    """What is wrong with a job, and with which of its fields."""

    field: str
    text: str


def _find_problem(work: JobSpec) -> _Problem | None:
    """Return the first rule that a job breaks, None if it keeps all."""
    items = len(work.items)
    devices = len(work.devices)
    in_guest = work.kind in GUEST_KINDS
    if not 1 <= items <= MAX_ITEMS:
        return _Problem("items", f"the job has {items} items: expected 1 to {MAX_ITEMS}")
    if devices > MAX_ITEMS:
        return _Problem("devices", f"the job has {devices} devices: expected up to {MAX_ITEMS}")
    # A timeout that is not a number (NaN) is out of range, too.
    if not 0 < work.timeout < 86400:
        text = f"timeout {work.timeout:g} s out of range: expected up to a day"
        return _Problem("timeout", text)
    if (work.kind is JobKind.PROGRAM) != (work.image is not None):
        text = "a program job must have an image, and no other job may have one"
        return _Problem("image", text)
    if (work.kind is JobKind.PARTITION) != (work.layout is not None):
        text = "a partition job must have a layout, and no other job may have one"
        return _Problem("layout", text)
    if in_guest != bool(devices):
        text = "a job that changes a guest must have devices, and no other job may have some"
        return _Problem("devices", text)
    if in_guest and work.instance is None:
        return _Problem("instance", "a job that changes a guest must have an instance")
    return None
