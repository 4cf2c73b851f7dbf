# SPDX-License-Identifier: Apache-2.0
"""Carrying out a job: which driver is called for each of its items, and what comes of it."""

from collections.abc import Callable, Mapping
from functools import partial

from oslo_log import log

from cyborg.agent.backend import words
from cyborg.core.device import Ability
from cyborg.core.errors import DriverFailed, NotFound
from cyborg.core.job import MAX_ERROR, Item, JobKind, Work
from cyborg.drivers.base import Driver, Prepares, Programs, Sanitises

LOG = log.getLogger(__name__)


class Halted(Exception):
    """Somebody wants no more of the job's items to begin."""


Retired = Callable[[str], Driver | None]


def carry_out(
    work: Work,
    drivers: Mapping[str, Driver],
    go_on: Callable[[], bool] = lambda: True,
    retired: Retired = lambda _: None,
) -> str | None:
    """Do the items in order, each while ``go_on`` says so; return what failed, None if nothing.

    ``retired`` returns the driver of a backend that was given up: it still takes back.

    The first failure ends a job, but for a release: that takes back what it can. Of other jobs
    nothing is begun unless a driver is there for every item. Raises Halted.
    """
    errors: list[str] = []
    releasing = work.kind is JobKind.RELEASE
    for act in (False, True):
        for item in work.items if act or not releasing else ():
            if not go_on():
                raise Halted
            try:
                call = _call(work, item, drivers, retired)
                if act:
                    call()
            except BaseException as bad:  # a SystemExit is a failure too
                LOG.debug("Job %s failed", work.job, exc_info=True)
                errors.append(f"{work.kind} of {item.handle or item.deployable}: {words(bad)}")
                if not releasing:
                    return errors[0][:MAX_ERROR]
    return "; ".join(errors)[:MAX_ERROR] or None


def _call(
    work: Work, item: Item, drivers: Mapping[str, Driver], retired: Retired
) -> Callable[[], None]:
    """Return the call of the driver. Raises NotFound and DriverFailed when it cannot be."""
    driver = drivers.get(item.backend)
    if driver is None and work.kind is JobKind.RELEASE:
        driver = retired(item.backend)
    if driver is None:
        raise NotFound(
            f"this host has no backend {item.backend!r}; it has {', '.join(drivers) or 'none'}"
        )
    able = driver.abilities
    match work.kind:
        case JobKind.PREPARE if Ability.PREPARES in able and isinstance(driver, Prepares):
            return partial(driver.prepare, item, work.instance)
        case JobKind.RELEASE:
            return partial(_clean, item, driver)
        case JobKind.PROGRAM if Ability.PROGRAMS in able and isinstance(driver, Programs):
            return partial(driver.program, item, work.image or "")
    raise DriverFailed(
        f"backend {item.backend} (driver {driver.name}) cannot {work.kind} as it is configured"
    )


def _clean(item: Item, driver: Driver) -> None:
    """Take back what was prepared, then wipe what the last holder left."""
    # What was prepared before the configuration changed must be taken back all the same.
    if isinstance(driver, Prepares):
        driver.release(item)
    if Ability.SANITISES in driver.abilities and isinstance(driver, Sanitises):
        driver.sanitise(item)
