# SPDX-License-Identifier: Apache-2.0
"""What a host does about its backends, given what is wanted and what it remembers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import convergence
from cyborg.core.convergence import Act, Held, Move, after, difference, effective
from cyborg.core.errors import Invalid
from cyborg.core.option import Option
from cyborg.core.wanted import Wanted, WantedHost, Wish

ON, OFF, GONE = Wish.ENABLED, Wish.DISABLED, Wish.ABSENT


def wish(revision: int, wish: Wish = ON, backend: str = "f1", **config: Any) -> Wanted:
    return Wanted(backend, "fake", wish, revision, config)


def held(wanted: Wanted, error: str | None = None, applied: Wanted | None = None) -> Held:
    return Held(wanted, error, applied if error else wanted)


def act(before: Held | None, wanted: Wanted | None, *configured: str) -> Act:
    host = WantedHost(9, () if wanted is None else (wanted,))
    remembered = {} if before is None else {before.wanted.backend: before}
    (move,) = difference(remembered, host, configured)
    assert (move.backend, move.wanted) == ("f1", wanted)
    return move.act


@pytest.mark.parametrize(
    ("before", "wanted", "configured", "expected"),
    [
        (None, wish(1), (), Act.START),
        (None, wish(1, OFF), (), Act.START),
        (None, wish(1, GONE), (), Act.KEEP),
        (None, wish(1), ("f1",), Act.REPLACE),
        (None, wish(1, GONE), ("f1",), Act.STOP),
        (held(wish(1)), wish(1), (), Act.KEEP),
        (held(wish(1)), wish(2, num=2), (), Act.REPLACE),
        (held(wish(1)), wish(2, GONE), (), Act.STOP),
        (held(wish(1, GONE)), wish(2), ("f1",), Act.START),
        (held(wish(1, GONE)), wish(2, GONE), ("f1",), Act.KEEP),
        # Nothing of the backend itself differs.
        (held(wish(1)), wish(2, OFF), (), Act.KEEP),
        (held(wish(1, OFF)), wish(2), (), Act.KEEP),
        # The same once more is a reload.
        (held(wish(1)), wish(2), (), Act.REPLACE),
        # After a failure the same as is applied only takes the failure back ...
        (held(wish(2, num=2), "no", wish(1)), wish(3), (), Act.KEEP),
        # ... unless it was a reload that failed.
        (held(wish(2), "no", wish(1)), wish(3), (), Act.REPLACE),
        # What failed is not tried again until somebody wants it again.
        (held(wish(2, num=2), "no", wish(1)), wish(2, num=2), (), Act.KEEP),
        (held(wish(2, num=2), "no"), wish(2, num=2), (), Act.KEEP),
        (held(wish(2, num=2), "no"), wish(3, num=2), (), Act.START),
        # Nothing is wanted any more: as the file says.
        (held(wish(1)), None, (), Act.STOP),
        (held(wish(1)), None, ("f1",), Act.REPLACE),
        (held(wish(1, GONE)), None, ("f1",), Act.START),
        (held(wish(1, GONE)), None, (), Act.KEEP),
        (held(wish(1), "no"), None, ("f1",), Act.KEEP),
    ],
)
def test_what_is_done(
    before: Held | None, wanted: Wanted | None, configured: tuple[str, ...], expected: Act
) -> None:
    assert act(before, wanted, *configured) is expected


def test_ends_come_last() -> None:
    host = WantedHost(2, (wish(2, GONE, "a"), wish(2, ON, "b")))
    moves = difference({}, host, ["a"])
    assert [(move.act, move.backend) for move in moves] == [(Act.STOP, "a"), (Act.START, "b")][::-1]


def test_a_failure_leaves_what_was_applied() -> None:
    first, second = wish(1), wish(2, num=2)
    before = after(Move(Act.START, "f1", first), None, None)
    assert before == Held(first, None, first)
    assert after(Move(Act.REPLACE, "f1", second), before, "no") == Held(second, "no", first)
    assert after(Move(Act.START, "f1", first), None, "no") == Held(first, "no", None)
    failed = Held(second, "no", first)
    assert after(Move(Act.KEEP, "f1", second), failed, None) == failed
    assert after(Move(Act.REPLACE, "f1", None), before, None) is None
    assert after(Move(Act.REPLACE, "f1", None), before, "no") == before, "it is tried again"


NAMES = ("a", "b", "c")
WISHES = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(st.sampled_from(list(Wish)), st.integers(0, 1))
)


@given(
    st.frozensets(st.sampled_from(NAMES)),
    st.lists(st.tuples(WISHES, st.frozensets(st.sampled_from(NAMES))), max_size=6),
)
def test_whatever_comes_what_runs_is_what_is_applied(
    configured: frozenset[str], rounds: list[tuple[dict[str, tuple[Wish, int]], frozenset[str]]]
) -> None:
    """A host that plays the moves runs what it remembers, and what is wanted where none failed."""
    running: dict[str, Any] = dict.fromkeys(configured, "file")
    remembered: dict[str, Held] = {}
    for revision, (wishes, failing) in enumerate(rounds, 1):
        host = WantedHost(
            revision,
            tuple(wish(revision, one, name, num=num) for name, (one, num) in wishes.items()),
        )
        for move in difference(remembered, host, configured):
            builds = move.act in (Act.START, Act.REPLACE)
            error = "no" if builds and move.backend in failing else None
            assert (move.backend in running) is (move.act in (Act.REPLACE, Act.STOP)) or (
                move.act is Act.KEEP
            )
            if move.act is Act.STOP:
                del running[move.backend]
            elif builds and error is None:
                running[move.backend] = "file" if move.wanted is None else move.wanted.config
            left = after(move, remembered.pop(move.backend, None), error)
            if left is not None:
                remembered[move.backend] = convergence.load(json.loads(json.dumps(left.to_dict())))
                assert remembered[move.backend] == left
        for name in NAMES:
            applied = remembered[name].applied if name in remembered else None
            file = "file" if name in configured else None
            ours = None if applied is None or applied.wish is GONE else applied.config
            assert running.get(name) == (file if applied is None else ours)
        for one in host.backends:
            if remembered[one.backend].error is None:
                assert running.get(one.backend) == (None if one.wish is GONE else one.config)


OPTIONS = (
    Option("count", "int", 1, "How many."),
    Option("rules", "multi", (), "Which."),
    Option("name", "str", "x", "What."),
)


def test_the_file_is_over_the_defaults_and_a_wish_over_both() -> None:
    assert effective(OPTIONS, {}, {}) == {"count": 1, "rules": [], "name": "x"}
    values = effective(OPTIONS, {"count": 2, "name": "y"}, {"count": "3", "rules": "a=b"})
    assert values == {"count": 3, "rules": ["a=b"], "name": "y"}
    with pytest.raises(Invalid, match="no option 'cuont'; did you mean count"):
        effective(OPTIONS, {}, {"cuont": 3})
