# SPDX-License-Identifier: Apache-2.0
"""One line a minute of each kind."""

import logging
import threading

from cyborg.rpc import quiet
from cyborg.rpc.quiet import DRIVER, OnceAMinute, install


def line(number: int, level: int = logging.ERROR) -> logging.LogRecord:
    return logging.LogRecord(DRIVER, level, "impl_rabbit.py", number, "away", None, None)


def test_each_kind_once_a_minute() -> None:
    now = [0.0]
    once = OnceAMinute(lambda: now[0])
    passed = []
    for second in range(0, 121, 20):
        now[0] = float(second)
        passed += [(second, kind) for kind in (10, 20) if once.filter(line(kind))]
    assert passed == [(0, 10), (0, 20), (60, 10), (60, 20), (120, 10), (120, 20)]


def test_what_is_no_trouble_is_not_counted() -> None:
    once = OnceAMinute(lambda: 0.0)
    assert all(once.filter(line(10, logging.INFO)) for _ in range(3))


def test_it_is_installed_once() -> None:
    install()
    install()
    filters = logging.getLogger(DRIVER).filters
    assert len([f for f in filters if isinstance(f, OnceAMinute)]) == 1


def test_one_thread_hears_what_is_said_in_it_though_it_is_not_logged() -> None:
    logger = logging.getLogger(DRIVER)
    heard: list[str] = []
    install()
    with quiet.listening(heard.append):
        for _ in range(2):
            logger.error("Connection failed: %s", "refused")
        logger.info("fine")
        other = threading.Thread(target=logger.error, args=("another's",))
        other.start()
        other.join()
    logger.error("later")
    assert heard == ["Connection failed: refused"] * 2
