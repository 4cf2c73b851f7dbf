# SPDX-License-Identifier: Apache-2.0
"""Who may sign in at the console, and who waits."""

from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
from webob import exc

from cyborg.api.console import throttle
from cyborg.api.console.throttle import Throttle, client_key
from cyborg.core.errors import Invalid

ANN, BOB = ("default", "ann"), ("default", "bob")


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the seconds."""
        return self.now


def sign_in(limits: Throttle, client: str | None, user: object, correct: bool = True) -> None:
    """Sign in with a correct or a wrong password."""
    with limits.admit(client), limits.call(client, user):
        if not correct:
            raise exc.HTTPUnauthorized


def retry_after(attempt: Callable[[], None]) -> int:
    """Return the seconds of an attempt that is refused."""
    with pytest.raises(exc.HTTPTooManyRequests) as caught:
        attempt()
    return int(caught.value.headers["Retry-After"])


def fail(limits: Throttle, client: str | None, user: object, times: int = 1) -> None:
    """Sign in with wrong passwords."""
    for _ in range(times):
        with pytest.raises(exc.HTTPUnauthorized):
            sign_in(limits, client, user, correct=False)


@pytest.mark.parametrize(
    ("address", "key"),
    [
        (None, None),
        ("", None),
        ("127.0.0.1", None),
        ("::1", None),
        ("192.0.2.1", "192.0.2.1"),
        ("10.9.9.9, 192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::7", "2001:db8::/64"),
        ("unknown", "unknown"),
    ],
)
def test_client_key_is_the_address_that_a_client_cannot_choose(
    address: str | None, key: str | None
) -> None:
    assert client_key(address) == key


def test_address_has_one_sign_in_at_a_time() -> None:
    limits = Throttle()
    with limits.admit("a"):
        assert retry_after(lambda: sign_in(limits, "a", ANN)) == 1
        sign_in(limits, "b", BOB)
    sign_in(limits, "a", ANN)


def test_sign_ins_are_limited_and_free_their_places() -> None:
    limits = Throttle()
    with ExitStack() as stack:
        for number in range(throttle.MAX_SIGN_INS):
            stack.enter_context(limits.admit(str(number)))
        assert retry_after(lambda: sign_in(limits, "more", ANN)) == 2
        assert retry_after(lambda: sign_in(limits, None, ANN)) == 2
    sign_in(limits, "more", ANN)


def test_wait_of_an_address_grows_with_its_wrong_passwords() -> None:
    clock = Clock()
    limits = Throttle(clock)
    waits = []
    for number in range(throttle.FREE_FAILURES + 8):
        fail(limits, "a", number)
        with suppress(exc.HTTPTooManyRequests):
            sign_in(limits, "a", "other")
            continue
        waits.append(retry_after(lambda: sign_in(limits, "a", "other")))
        clock.now += waits[-1]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    sign_in(limits, "b", "other")
    fail(limits, "a", ANN)
    clock.now += throttle.FORGET_AFTER
    sign_in(limits, "a", ANN)


def test_wait_of_a_user_is_for_all_addresses_but_a_known_one() -> None:
    limits = Throttle(Clock())
    sign_in(limits, "home", ANN)
    for number in range(throttle.FREE_FAILURES):
        fail(limits, f"attacker-{number}", ANN)
    assert retry_after(lambda: sign_in(limits, "new", ANN)) == 1
    sign_in(limits, "new", BOB)
    sign_in(limits, "home", ANN)
    # A correct password ends the wait.
    sign_in(limits, "new", ANN)


def test_known_address_is_unknown_after_a_wrong_password() -> None:
    limits = Throttle(Clock())
    sign_in(limits, "home", ANN)
    fail(limits, "home", ANN)
    fail(limits, None, ANN, throttle.FREE_FAILURES - 1)
    assert retry_after(lambda: sign_in(limits, "home", ANN)) == 1


@pytest.mark.parametrize("error", [exc.HTTPRequestTimeout(), Invalid("body: ended too early")])
def test_body_that_does_not_arrive_counts_as_a_failure_of_the_address(error: Exception) -> None:
    limits = Throttle(Clock())
    for _ in range(throttle.FREE_FAILURES):
        with pytest.raises(type(error)), limits.admit("a"):
            raise error
    assert retry_after(lambda: sign_in(limits, "a", ANN)) == 1


def test_other_errors_count_as_no_failure() -> None:
    limits = Throttle(Clock())
    for _ in range(2 * throttle.FREE_FAILURES):
        with (
            pytest.raises(exc.HTTPServiceUnavailable),
            limits.admit("a"),
            limits.call("a", ANN),
        ):
            raise exc.HTTPServiceUnavailable
    sign_in(limits, "a", ANN)


def test_remembered_failures_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "MAX_KEYS", 10)
    failures = throttle.Failures(Clock())
    for number in range(50):
        for _ in range(throttle.FREE_FAILURES):
            failures.add(number)
    assert [number for number in range(50) if failures.seconds_to_wait(number)] == [*range(40, 50)]
