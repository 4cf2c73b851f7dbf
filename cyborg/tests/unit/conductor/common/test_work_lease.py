# SPDX-License-Identifier: Apache-2.0
"""Leases of rows: their owners, how long they last, and what the log says of them."""

import logging
import os
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from cyborg.conductor.common.work_lease import (
    LeaseLost,
    Leasing,
    WorkLease,
    new_owner,
    process_owner,
)
from cyborg.tests.fixtures.machine.options import make_conf


def test_owner_names_host_and_process() -> None:
    assert process_owner("compute-1").startswith(f"compute-1:{os.getpid()}:")
    assert new_owner("compute-1").startswith(process_owner("compute-1") + ":")


def test_owners_differ() -> None:
    assert len({new_owner("h") for _ in range(100)}) == 100


def test_owner_fits_the_column() -> None:
    assert len(new_owner("h" * 255)) <= 255


FORK = """
import os
from cyborg.conductor.common.work_lease import process_owner
print(process_owner("h"), flush=True)
if os.fork() == 0:
    print(process_owner("h"), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
def test_forked_process_has_owners_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=True
    )
    parent, child = (line.split(":") for line in done.stdout.splitlines())
    assert parent[0] == child[0] == "h"
    assert parent[1] != child[1]
    assert parent[2] != child[2]


class Clocks:
    """The database's time and the monotonic clock, which a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return datetime(2030, 1, 31) + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return 1000.0 + self.seconds

    def begin(self, request_timeout: float = 10.0) -> WorkLease:
        """Begin a lease of three requests, 30 seconds by default."""
        conf = make_conf(conductor={"lease_timeout": 15})
        leasing = Leasing(conf, "widgets", now=self.now, clock=self.monotonic, requests=3)
        return leasing.begin(request_timeout=request_timeout)


def test_lease_lasts_as_long_as_its_requests_or_the_option() -> None:
    clocks = Clocks()
    assert clocks.begin().until == clocks.now() + timedelta(seconds=30)
    assert clocks.begin(request_timeout=1.0).until == clocks.now() + timedelta(seconds=15)


def test_slow_database_makes_a_lease_no_longer_here_than_in_the_row() -> None:
    clocks = Clocks()

    def answer_late() -> datetime:
        now = clocks.now()
        clocks.seconds += 5.0
        return now

    leasing = Leasing(make_conf(), "widgets", now=answer_late, clock=clocks.monotonic)
    lease = leasing.begin()
    assert clocks.now() + timedelta(seconds=lease.end - clocks.monotonic()) == lease.until


def test_lease_has_time_for_requests_that_end_within_it() -> None:
    clocks = Clocks()
    lease = clocks.begin()
    clocks.seconds = 20.0
    assert lease.has_time()
    clocks.seconds = 20.1
    assert not lease.has_time()


def test_renewed_lease_is_as_long_as_a_new_one() -> None:
    clocks, ends = Clocks(), list[datetime]()
    lease = clocks.begin()
    assert not lease.needs_renewal()
    clocks.seconds = 10.0
    assert lease.needs_renewal()

    def write(until: datetime) -> bool:
        ends.append(until)
        return True

    lease.renew(write)
    assert ends == [clocks.now() + timedelta(seconds=30)]
    assert not lease.needs_renewal()
    clocks.seconds = 30.0
    assert lease.has_time()


def test_log_names_the_purpose_and_the_times(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    lease = clocks.begin()
    with caplog.at_level(logging.DEBUG):
        lease.taken(2, lease.start - timedelta(seconds=1.5))
        clocks.seconds = 4.0
        lease.ended()
        with pytest.raises(LeaseLost):
            lease.renew(lambda until: False)
    assert [record.getMessage() for record in caplog.records] == [
        "Lease of widgets: took 2 row(s) after 1.5 s",
        "Lease of widgets ended, held for 4.0 s",
        "Lease of widgets lost after 4.0 s, another conductor goes on",
    ]
