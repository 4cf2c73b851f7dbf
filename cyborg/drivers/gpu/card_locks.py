# SPDX-License-Identifier: Apache-2.0
"""Locks of cards against changes by several threads, also of several backends.

A change of a layout takes minutes, so a discovery does not wait for the lock of a card: it does not
read the card with NVML, which would show a half-changed one. It waits for writes that create or
remove mediated devices: some kernel drivers count a device as no longer available before its folder
exists.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator

from cyborg.core.errors import DriverFailed

TIMEOUT = 5.0  # seconds; a kernel driver can take longer to create a device
READ_TIMEOUT = 30.0  # seconds; NVML initialises a card that nobody else has open

_CARDS: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_MEDIATED = threading.Lock()
_REGISTRY = threading.Lock()
_HOLDERS: dict[str, int] = {}  # the thread that has locked each card


@contextlib.contextmanager
def locked(card: str) -> Iterator[None]:
    """Exclude other changes of a card, by its address; wait for READ_TIMEOUT.

    Raise DriverFailed, before any change, if another one does not end in time; repeat it then.
    """
    lock = _lock_of(card)
    # Not TIMEOUT: a discovery reads each card with its lock, also one that servers share.
    if not lock.acquire(timeout=READ_TIMEOUT):
        raise DriverFailed(
            f"{card} is being changed by another job, such as one for its layout: try again when "
            "that has ended"
        )
    _HOLDERS[card] = threading.get_ident()
    try:
        yield
    finally:
        del _HOLDERS[card]
        lock.release()


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
    if acquired:
        _HOLDERS[card] = threading.get_ident()
    try:
        yield acquired
    finally:
        if acquired:
            del _HOLDERS[card]
            lock.release()


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
