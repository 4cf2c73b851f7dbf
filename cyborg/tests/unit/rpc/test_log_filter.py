# SPDX-License-Identifier: Apache-2.0
"""Rate limit of the rabbit driver's log."""

import logging
import threading

from cyborg.rpc import filters as log_filter
from cyborg.rpc.filters import DRIVER, RateLimitFilter, limit_library_log


def make_record(number: int, level: int = logging.ERROR) -> logging.LogRecord:
    return logging.LogRecord(DRIVER, level, "impl_rabbit.py", number, "away", None, None)


def test_filter_passes_each_place_once_a_minute() -> None:
    now = [0.0]
    limiter = RateLimitFilter(lambda: now[0])
    passed = []
    for second in range(0, 121, 20):
        now[0] = float(second)
        passed += [(second, kind) for kind in (10, 20) if limiter.filter(make_record(kind))]
    assert passed == [(0, 10), (0, 20), (60, 10), (60, 20), (120, 10), (120, 20)]


def test_filter_passes_all_info_lines() -> None:
    limiter = RateLimitFilter(lambda: 0.0)
    assert all(limiter.filter(make_record(10, logging.INFO)) for _ in range(3))


def test_install_is_idempotent() -> None:
    limit_library_log()
    limit_library_log()
    filters = logging.getLogger(DRIVER).filters
    assert len([f for f in filters if isinstance(f, RateLimitFilter)]) == 1


def test_capture_warnings_gets_suppressed_warnings_of_its_thread() -> None:
    logger = logging.getLogger(DRIVER)
    captured: list[str] = []
    limit_library_log()
    with log_filter.capture_warnings(captured.append):
        for _ in range(2):
            logger.error("Connection failed: %s", "refused")
        logger.info("fine")
        other = threading.Thread(target=logger.error, args=("another's",))
        other.start()
        other.join()
    logger.error("later")
    assert captured == ["Connection failed: refused"] * 2
