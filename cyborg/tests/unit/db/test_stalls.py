# SPDX-License-Identifier: Apache-2.0
"""A database that no longer answers: its transactions end within seconds, slow ones do not."""

import contextlib
import threading

import pytest
import sqlalchemy as sa

from cyborg.core.errors import TimedOut, Unavailable
from cyborg.db import schema
from cyborg.db.engine import answers
from cyborg.db.timeouts import PROBE_AFTER, StallDetector
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.bus.proxy import Fault
from cyborg.tests.fixtures.databases.hanging_database import HangingDatabase, limited_engine


class Env:
    """A detector whose clock and whose database the test controls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answers = True
        self.probes = 0
        self.detector = StallDetector(self.probe, lambda: self.now)

    def probe(self) -> bool:
        self.probes += 1
        return self.answers


def test_short_transactions_cause_no_probe() -> None:
    env = Env()
    with env.detector.watch():
        env.now += PROBE_AFTER / 2
        env.detector.run_once()
    assert env.probes == 0


def test_slow_transaction_of_a_database_that_answers_goes_on() -> None:
    env = Env()
    with env.detector.watch():
        env.now += PROBE_AFTER
        env.detector.run_once()
        with env.detector.watch():
            assert env.probes == 1


def test_stalled_database_fails_further_transactions_until_it_answers() -> None:
    env = Env()
    env.answers = False
    with env.detector.watch():
        env.now += PROBE_AFTER
        env.detector.run_once()
    with pytest.raises(Unavailable, match="the database does not answer"), env.detector.watch():
        raise AssertionError
    env.detector.run_once()
    env.answers = True
    env.detector.run_once()
    with env.detector.watch():
        assert env.probes == 3


@pytest.mark.parametrize("succeeds", [True, False])
def test_failed_probe_while_transactions_succeed_is_no_stall(succeeds: bool) -> None:
    """The server is only slow to accept connections; one that fails proves nothing."""
    env = Env()

    def probe() -> bool:
        with contextlib.suppress(ZeroDivisionError), detector.watch():
            1 / succeeds
        return False

    detector = StallDetector(probe, lambda: env.now)
    stalled = contextlib.nullcontext() if succeeds else pytest.raises(Unavailable)
    with detector.watch():
        env.now += PROBE_AFTER
        detector.run_once()
        with stalled, detector.watch():
            env.now += PROBE_AFTER


@pytest.mark.services
@pytest.mark.parametrize("committing", [False, True])
def test_transaction_of_a_stalled_database_ends_long_before_its_timeout(
    hanging: HangingDatabase, committing: bool
) -> None:
    url, proxy = hanging
    engine, probing = limited_engine(url, seconds=300.0), limited_engine(url)
    detector = StallDetector(lambda: answers(probing), iter([0.0, PROBE_AFTER]).__next__)
    uow, errors = UnitOfWork(engine, stalls=detector), list[Exception]()
    waiting = threading.Event()

    def work(tx: sa.Connection) -> None:
        tx.execute(sa.insert(schema.device_profiles).values(uuid="u", name="n", groups=[]))
        proxy.begin(Fault.FROZEN)
        waiting.set()
        if not committing:
            tx.execute(sa.select(schema.device_profiles)).all()

    def run() -> None:
        try:
            uow.run(work)
        except Unavailable as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    waiting.wait()
    detector.run_once()
    thread.join(60)
    proxy.end()
    assert [type(exc) for exc in errors] == [TimedOut if committing else Unavailable]
    engine.dispose()


@pytest.mark.services
def test_answers_is_true_for_an_error_of_the_server(hanging: HangingDatabase) -> None:
    url, proxy = hanging
    engine = limited_engine(url)
    assert answers(engine)
    other = sa.make_url(url).set(database="cyborg_test_missing")
    assert answers(limited_engine(other.render_as_string(hide_password=False)))
    proxy.begin(Fault.FROZEN)
    assert not answers(engine)
    proxy.end()
