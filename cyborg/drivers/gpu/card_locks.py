# SPDX-License-Identifier: Apache-2.0
"""Locks of cards against changes by several threads, also of several backends.

A change of a layout takes minutes, so a discovery does not wait for the lock of a card: it does not
read the card with NVML, which would show a half-changed one. It waits for writes that create or
remove mediated devices: some kernel drivers count a device as no longer available before its folder
exists.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

from cyborg.core.errors import DriverFailed

TIMEOUT = 5.0  # seconds; a kernel driver can take longer to create a device
READ_TIMEOUT = 30.0  # seconds; NVML initialises a card that nobody else has open

_CARDS: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_MEDIATED = threading.Lock()
_REGISTRY = threading.Lock()
_HOLDERS: dict[str, int] = {}  # the thread that has locked each card
_SINCE: dict[str, float] = {}  # when it did so, by the clock
_clock = time.monotonic


@contextlib.contextmanager
def locked(card: str) -> Iterator[None]:
    """Exclude other changes of a card, by its address.

    Wait until this thread has waited, or another one has had the card, for READ_TIMEOUT. Raise
    DriverFailed then, before any change; repeat it later.
    """
    lock = _lock_of(card)
    if not _wait(card, lock):
        raise DriverFailed(
            f"{card} is being changed by another job, such as one for its layout: try again when "
            "that has ended"
        )
    with _held(card, lock):
        yield


@contextlib.contextmanager
def locked_once(card: str) -> Iterator[None]:
    """Do the same as ``locked``, unless this thread has locked the card already."""
    with contextlib.nullcontext() if is_locked_here(card) else locked(card):
        yield


def is_locked_here(card: str) -> bool:
    """Return whether this thread has locked a card."""
    return _HOLDERS.get(card) == threading.get_ident()


@contextlib.contextmanager
def locked_if_free(card: str) -> Iterator[bool]:
    """Exclude other changes of a card if there is none now; yield whether they are excluded."""
    lock = _lock_of(card)
    acquired = lock.acquire(blocking=False)
    with _held(card, lock) if acquired else contextlib.nullcontext():
        yield acquired


@contextlib.contextmanager
def mediated_devices_excluded() -> Iterator[None]:
    """Wait for a write that creates or removes a mediated device; after TIMEOUT continue."""
    acquired = _MEDIATED.acquire(timeout=TIMEOUT)
    try:
        yield
    finally:
        if acquired:
            _MEDIATED.release()


def _lock_of(card: str) -> threading.Lock:
    with _REGISTRY:
        return _CARDS[card]


def _wait(card: str, lock: threading.Lock) -> bool:
    """Acquire the lock of a card; return whether that succeeded in time."""
    # Not TIMEOUT: the holder may be a discovery that reads the card.
    own_end = _clock() + READ_TIMEOUT

    def find_end() -> float:
        # If the card hangs, its jobs must not take the threads that those of other cards need: so
        # the time that the holder has had it counts.
        return min(own_end, _SINCE.get(card, own_end) + READ_TIMEOUT)

    while not lock.acquire(timeout=max(0.0, find_end() - _clock())):
        # Otherwise another thread has become the holder meanwhile.
        if find_end() <= _clock():
            return False
    return True


@contextlib.contextmanager
def _held(card: str, lock: threading.Lock) -> Iterator[None]:
    """Record that this thread has acquired the lock of a card; release it at the end."""
    _HOLDERS[card], _SINCE[card] = threading.get_ident(), _clock()
    try:
        yield
    finally:
        del _HOLDERS[card], _SINCE[card]
        lock.release()
