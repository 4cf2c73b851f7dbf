# SPDX-License-Identifier: Apache-2.0
"""Limits of the sign-ins of clients that are not authenticated yet, in one process.

Nobody can keep others out: an address has one sign-in at a time, the others wait for a call of
keystone in the order of their arrival, and who sends wrong passwords waits longer each time.
"""

import ipaddress
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager

from webob import exc

from cyborg.api.auth import is_local
from cyborg.api.slots import take_slot, too_many
from cyborg.core.errors import Invalid

# Without the limit, a keystone that hangs would block every thread of the API, and anybody could
# try passwords as fast as keystone compares them.
# Maximum number of calls of keystone at the same time.
MAX_CALLS = 2

# Maximum number of sign-ins at the same time: those that send a body, wait, or call keystone.
MAX_SIGN_INS = 4

# Maximum seconds to wait for a call of keystone, a little more than one call may take.
QUEUE_TIMEOUT = 6.0

# Everybody mistypes a password.
# Failures without a wait.
FREE_FAILURES = 3

# Maximum seconds between two attempts of one user or address.
MAX_WAIT = 60

# Seconds after the last failure until the failures of a user or an address are forgotten.
FORGET_AFTER = 600.0

# Maximum number of users and addresses that are remembered; the oldest are forgotten first.
MAX_KEYS = 4096

# The usual size of the network of one customer.
_IPV6_PREFIX = 64


def client_key(address: str | None) -> str | None:
    """Return the key of a client's address, None for a peer on this machine, which is a proxy."""
    # Of several forwarded addresses, the last one is that of the proxy's client: a client can send
    # the others.
    last = (address or "").rpartition(",")[2].strip()
    if is_local(last):
        return None
    try:
        parsed = ipaddress.ip_address(last)
    except ValueError:
        # A proxy may forward any text.
        return last
    # A socket of both families shows a client of IPv4 with a mapped address.
    mapped = getattr(parsed, "ipv4_mapped", None)
    # A client can use each address of its IPv6 network: the network is the key.
    if parsed.version == 6 and mapped is None:
        return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))
    return str(mapped or parsed)


class Failures:
    """The failed attempts of users and addresses, and how long these must wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The number of failures of each key, and the time of its last one.
        self._found: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

    def add(self, key: Hashable) -> None:
        """Count a failure."""
        number, _ = self._recent(key)
        self._found[key] = (number + 1, self._clock())
        # The first is the one whose last failure is the oldest.
        self._found.move_to_end(key)
        if len(self._found) > MAX_KEYS:
            self._found.popitem(last=False)

    def remove(self, key: Hashable) -> None:
        """Forget the failures of a key."""
        self._found.pop(key, None)

    def seconds_to_wait(self, key: Hashable) -> float:
        """Return the seconds until the next attempt, 0 or less if there is no wait."""
        number, at = self._recent(key)
        if number < FREE_FAILURES:
            return 0
        # The exponent is limited, too: a large power of 2 is an integer of many digits.
        wait: int = min(MAX_WAIT, 2 ** min(number - FREE_FAILURES, 10))
        return at + wait - self._clock()

    def _recent(self, key: Hashable) -> tuple[int, float]:
        number, at = self._found.get(key, (0, 0.0))
        return (number, at) if self._clock() < at + FORGET_AFTER else (0, 0.0)


class Throttle:
    """Admits sign-ins to keystone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls = threading.BoundedSemaphore(MAX_CALLS)
        self._sign_ins = threading.BoundedSemaphore(MAX_SIGN_INS)
        self._lock = threading.Lock()
        self._failures = Failures(clock)
        self._signing_in: set[str] = set()  # addresses
        self._signed_in = OrderedDict[tuple[Hashable, str], None]()  # users at addresses, a set

    @contextmanager
    def admit(self, client: str | None) -> Iterator[None]:
        """Admit one sign-in of a client's address until the end of the block.

        A body that is malformed, or does not arrive in time, is a failure of the address, as a
        wrong password is. A success does not clear these failures: they end FORGET_AFTER seconds
        after the last one. ``client`` is None for a proxy, see ``client_key``: it has no failures,
        because its address is that of all its clients. Raise HTTPTooManyRequests.
        """
        if client is None:
            with _slot(self._sign_ins, timeout=0):
                yield
            return
        with self._lock:
            _check_wait(self._failures.seconds_to_wait(client), "of this address")
            if client in self._signing_in:
                raise too_many("a sign-in of this address is under way", 1)
            self._signing_in.add(client)
        try:
            with _slot(self._sign_ins, timeout=0):
                yield
        except exc.HTTPTooManyRequests:
            # Not a failure of the address: the limit is one of this service.
            raise
        except (exc.HTTPClientError, Invalid):
            with self._lock:
                self._failures.add(client)
            raise
        finally:
            with self._lock:
                self._signing_in.discard(client)

    @contextmanager
    def call(self, client: str | None, user: Hashable) -> Iterator[None]:
        """Admit one call of keystone for a user, which waits for its turn.

        Wrong passwords that others send do not delay a user at an address that has signed in.
        Raise HTTPTooManyRequests.
        """
        with self._lock:
            # An address at which the user has signed in is exempt: otherwise anybody could lock a
            # user out by wrong passwords. That of a proxy (None) is never exempt.
            if client is None or (user, client) not in self._signed_in:
                _check_wait(self._failures.seconds_to_wait(user), "of this user")
        with _slot(self._calls, QUEUE_TIMEOUT):
            try:
                yield
            except exc.HTTPUnauthorized:
                with self._lock:
                    self._failures.add(user)
                    # A proxy, whose client is None, is never recorded, and "" is no address.
                    self._signed_in.pop((user, client or ""), None)
                raise
        with self._lock:
            self._failures.remove(user)
            if client is not None:
                self._signed_in[user, client] = None
                if len(self._signed_in) > MAX_KEYS:
                    self._signed_in.popitem(last=False)


def _slot(slots: threading.Semaphore, timeout: float) -> AbstractContextManager[None]:
    """Take one of the slots. Raise HTTPTooManyRequests if there is none in time."""
    return take_slot(slots, timeout, "too many sign-ins at the same time", 2)


def _check_wait(seconds: float, owner: str) -> None:
    if seconds > 0:
        raise too_many(f"too many failed sign-ins {owner}", math.ceil(seconds))
