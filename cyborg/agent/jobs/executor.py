# SPDX-License-Identifier: Apache-2.0
"""Execution of a job: the calls of drivers for the items of the job, and their errors."""

from collections.abc import Callable, Mapping
from functools import partial

from cyborg.agent.backends.backend import error_text
from cyborg.agent.guests.devices import GuestDevices
from cyborg.core.errors import CyborgError, DriverFailed, NotFound
from cyborg.core.inventory.device import Ability
from cyborg.core.jobs import job, progress
from cyborg.core.log import get_logger
from cyborg.drivers import base

LOG = get_logger(__name__)


class Aborted(Exception):
    """The job was cancelled, or the agent is stopping, before the next item of the job."""


RemovedDriverLookup = Callable[[str], base.Driver | None]

# Part of the timeout of a plug job in which it is retried: then its error has the reason.
PLUG_PART = 0.8

# What an operator can do about a release job without its backend.
RELEASE_HINT = (
    "; put the backend, or only its section, back into the configuration file of the host and "
    "restart the agent, or abandon the cleaning: cyborg uninstall-driver DRIVER --host HOST "
    "--backend BACKEND --force"
)

NO_LIVE_ATTACH = "live attach is not enabled on this host: set [libvirt] live_attach = true"


def execute(
    spec: job.JobSpec,
    drivers: Mapping[str, base.Driver],
    should_continue: Callable[[], bool] = lambda: True,
    removed_driver: RemovedDriverLookup = lambda _: None,
    guests: GuestDevices | None = None,
) -> str | None:
    """Execute the items in order; return the error text, or None if all succeeded.

    ``removed_driver`` looks up the driver of a removed backend, which is still needed to release
    its handles. The first failure ends the job. Only a release continues with the other items,
    unless the item is that of a device set. A job of another kind does not start unless there is a
    driver for every item. Raise Aborted when ``should_continue`` returns False before an item. The
    activity of the job shows the item. A job of GUEST_KINDS needs ``guests`` instead of a driver.
    """
    if spec.kind in job.GUEST_KINDS:
        return _change_guest(spec, should_continue, guests)
    releasing = spec.kind is job.JobKind.RELEASE
    # The activity of a single item shows no count, such as 0 of 1.
    total = len(spec.items) if len(spec.items) > 1 else None

    def run(number: int, item: job.WorkItem) -> None:
        call = _driver_call(spec, item, drivers, removed_driver)
        step = f"{spec.kind} {progress.describe_subject(item)}"
        with progress.show_activity(step, total, number):
            call()

    # Looked up before the first call: a job that one backend cannot do must not begin with the
    # others. But a release does what it can: a backend that is missing must not keep the handles of
    # the others dirty.
    items_to_check = () if releasing else spec.items
    for item in items_to_check:
        if not should_continue():
            raise Aborted
        if error := _attempt(spec, item, lambda i: _driver_call(spec, i, drivers, removed_driver)):
            return error[: job.MAX_ERROR]
    errors: list[str] = []
    for number, item in enumerate(spec.items):
        if not should_continue():
            raise Aborted
        error = _attempt(spec, item, partial(run, number))
        if error is None:
            continue
        errors.append(error)
        # An item without a handle is that of a device set, and the first of its job: while the
        # guest of the set still has the devices, these must not be reset either.
        if not releasing or not item.handle:
            # What earlier items, or a part of this one, have prepared is not undone here: the
            # conductor answers a failed prepare with a release job for all items, which also comes
            # if this agent dies now.
            return errors[0][: job.MAX_ERROR]
    return "; ".join(errors)[: job.MAX_ERROR] or None


def _attempt(
    spec: job.JobSpec, item: job.WorkItem, func: Callable[[job.WorkItem], object]
) -> str | None:
    """Call a function for an item; return the error text if it raises."""
    try:
        func(item)
    except BaseException as exc:  # a SystemExit is a failure too
        LOG.debug("Job item failed", job=spec.job_uuid, device=item.device, exc_info=True)
        return progress.describe_failure(spec.kind, item, error_text(exc))
    return None


def _change_guest(
    spec: job.JobSpec, should_continue: Callable[[], bool], guests: GuestDevices | None
) -> str | None:
    """Attach the devices of a job to its guest, or detach them. Return the error text or None.

    Raise Aborted.
    """
    if guests is None:
        return NO_LIVE_ATTACH
    instance = str(spec.instance)  # never None in a job of GUEST_KINDS
    if not should_continue():
        raise Aborted
    try:
        with progress.show_activity(f"{spec.kind} server {instance}"):
            if spec.kind is job.JobKind.PLUG:
                # The rest of the timeout is for the answer, which has the reason of a failure.
                seconds = PLUG_PART * spec.timeout
                is_complete = (
                    guests.plug(instance, spec.devices, should_continue, seconds) is not None
                )
            else:
                is_complete = guests.unplug(
                    instance, spec.devices, should_continue, guest_expected=spec.guest_expected
                )
    except CyborgError as exc:
        return error_text(exc)[: job.MAX_ERROR]
    if not is_complete:
        raise Aborted
    return None


def _driver_call(
    spec: job.JobSpec,
    item: job.WorkItem,
    drivers: Mapping[str, base.Driver],
    removed_driver: RemovedDriverLookup,
) -> Callable[[], None]:
    """Return a function that calls the driver for an item.

    Raise NotFound without the backend, and DriverFailed if the driver does not support the job.
    """
    driver = drivers.get(item.backend)
    if driver is None and spec.kind is job.JobKind.RELEASE:
        driver = removed_driver(item.backend)
    if driver is None:
        message = (
            f"this host has no backend {item.backend!r}; it has {', '.join(drivers) or 'none'}"
        )
        raise NotFound(message + (RELEASE_HINT if spec.kind is job.JobKind.RELEASE else ""))
    abilities = driver.abilities
    # A program job always has an image, a partition job a layout: ``or ""`` is for the types.
    match spec.kind:
        case job.JobKind.PREPARE | job.JobKind.RESTORE if (
            Ability.PREPARES in abilities and isinstance(driver, base.PrepareInterface)
        ):
            return partial(driver.prepare, item, spec.instance)
        case job.JobKind.RELEASE:
            return partial(_clean, item, driver)
        case job.JobKind.PROGRAM if Ability.PROGRAMS in abilities and isinstance(
            driver, base.ProgramInterface
        ):
            return partial(driver.program, item, spec.image or "")
        case job.JobKind.PARTITION if Ability.PARTITIONS in abilities and isinstance(
            driver, base.PartitionInterface
        ):
            return partial(_partition, item, driver, spec.layout or "", spec.previous_layout)
    raise DriverFailed(
        f"backend {item.backend} (driver {driver.name}) does not support {spec.kind} "
        "in its configuration"
    )


def _partition(
    item: job.WorkItem, driver: base.PartitionInterface, layout: str, previous: str | None
) -> None:
    """Apply a layout; if that fails, restore the previous one. Raise DriverFailed."""
    error = _try_partition(item, driver, layout)
    if error is None:
        return
    if previous is not None and previous != layout:
        # This undoes the half-applied layout: without a known layout the device could not be used.
        restore_error = _try_partition(item, driver, previous)
        if restore_error is not None:
            error += f"; the previous layout {previous} cannot be restored: {restore_error}"
    raise DriverFailed(error)


def _try_partition(item: job.WorkItem, driver: base.PartitionInterface, layout: str) -> str | None:
    """Apply a layout; return the error, or None."""
    try:
        driver.partition(item, layout)
    except Exception as exc:
        LOG.debug("Layout %s cannot be applied", layout, device=item.device, exc_info=True)
        return error_text(exc)
    return None


def _clean(item: job.WorkItem, driver: base.Driver) -> None:
    """Release a handle, then sanitise it."""
    # Not checked against the abilities: the handle may have been prepared under an older
    # configuration.
    if isinstance(driver, base.PrepareInterface):
        driver.release(item)
    if Ability.SANITISES in driver.abilities and isinstance(driver, base.SanitiseInterface):
        driver.sanitise(item)
