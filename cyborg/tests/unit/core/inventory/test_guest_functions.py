# SPDX-License-Identifier: Apache-2.0
"""Which functions of guests are withheld: of servers with ARQs, of others, and in between."""

from collections.abc import Collection, Mapping

from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.inventory.functions import (
    FunctionOwner,
    Guest,
    GuestDecision,
    GuestRecord,
    Owners,
    decide,
    list_questions,
)

SERVER, OTHER = "5f0d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e", "9a1d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e"
A, B = "0000:01:00.0", "0000:02:00.0"
NOTHING: Mapping[str, GuestRecord] = {}


def guest(*functions: str, uuid: str = SERVER, running: Collection[str] = ()) -> Guest:
    return Guest(uuid, f"name-{uuid[:4]}", frozenset(functions), frozenset(running))


def owner(value: FunctionOwner | None, address: str = A, uuid: str = SERVER) -> Owners:
    return {(uuid, address): value}


def test_function_of_a_guest_without_an_arq_is_withheld_until_the_guest_ends() -> None:
    decision = decide([guest(A)], NOTHING, owner(None))
    assert (decision.withheld, decision.unknown) == ({A: "name-5f0d"}, False)
    assert list_questions([guest(A)], decision.records) == []
    assert list_questions([guest(A)], decision.records, recheck=True) == [(SERVER, A)]
    again = decide([guest(A)], decision.records, owner(None))
    assert again == decision
    assert decide([guest()], again.records, {}) == GuestDecision()
    assert decide([], again.records, {}) == GuestDecision()


def test_server_with_an_arq_keeps_its_function() -> None:
    bound = decide([guest(A)], NOTHING, owner(FunctionOwner.INSTANCE))
    assert (bound.withheld, bound.unknown) == ({}, False)
    assert list_questions([guest(A)], bound.records) == []
    # Neither a restart of the agent nor a conductor that does not answer changes this.
    assert decide([guest(A)], bound.records, {}) == bound


def test_function_that_is_released_before_its_guest_changes_is_not_withheld() -> None:
    bound = decide([guest(A)], NOTHING, owner(FunctionOwner.INSTANCE))
    assert decide([guest(A)], bound.records, owner(None)).withheld == {}
    # Its next definition has no such function: the record ends.
    changed = decide([guest()], bound.records, {})
    assert changed.records == {}
    assert decide([guest(A)], changed.records, owner(None)).withheld == {A: "name-5f0d"}


def test_guest_that_runs_on_without_its_arq_withholds_the_function() -> None:
    running = guest(A, running=[A])
    bound = decide([running], NOTHING, owner(FunctionOwner.INSTANCE))
    assert list_questions([running], bound.records) == []
    assert list_questions([running], bound.records, recheck=True) == [(SERVER, A)]
    assert decide([running], bound.records, owner(FunctionOwner.INSTANCE)) == bound
    released = decide([running], bound.records, owner(None))
    assert (released.withheld, released.unknown) == ({A: "name-5f0d"}, False)
    # Until it stops, or has an ARQ again, as the next answer says.
    assert list_questions([running], released.records) == []
    assert list_questions([running], released.records, recheck=True) == [(SERVER, A)]
    assert decide([running], released.records, {}) == released
    assert decide([guest(A)], released.records, {}).withheld == {}
    assert decide([running], released.records, owner(FunctionOwner.INSTANCE)).withheld == {}
    assert decide([running], released.records, owner(FunctionOwner.OTHER)).withheld == {}


def test_unknown_owner_neither_withholds_nor_frees_a_function() -> None:
    unknown = decide([guest(A)], NOTHING, {})
    assert (unknown.withheld, unknown.unknown) == ({}, True)
    known = decide([guest(A)], unknown.records, owner(None))
    away = decide([guest(A, B)], known.records, {})
    assert (away.withheld, away.unknown) == ({A: "name-5f0d"}, True)
    bound = decide([guest(A, B)], away.records, {**owner(None), **owner(FunctionOwner.INSTANCE, B)})
    assert (bound.withheld, bound.unknown) == ({A: "name-5f0d"}, False)


def test_function_of_another_arq_stays_with_its_owner() -> None:
    """Such as that of a host, of a context without an instance, or a guest with a wrong XML."""
    decision = decide([guest(A)], NOTHING, owner(FunctionOwner.OTHER))
    assert (decision.withheld, decision.unknown) == ({}, False)
    assert list_questions([guest(A)], decision.records) == [(SERVER, A)]
    assert decide([guest(A)], decision.records, owner(None)).withheld == {A: "name-5f0d"}


def test_function_of_two_guests_is_withheld_for_the_one_without_an_arq() -> None:
    guests = [guest(A), guest(A, uuid=OTHER)]
    bound = decide(
        guests, NOTHING, {**owner(FunctionOwner.INSTANCE), (OTHER, A): FunctionOwner.OTHER}
    )
    assert bound.withheld == {}
    released = decide(guests, bound.records, {(OTHER, A): None})
    assert released.withheld == {A: "name-9a1d"}


def test_guest_that_cannot_be_read_keeps_its_record() -> None:
    known = decide([guest(A), guest(B, uuid=OTHER)], NOTHING, owner(None)).records
    broken = Guest(SERVER, "", frozenset(), is_readable=False)
    assert list_questions([broken], known, recheck=True) == []
    assert decide([broken], known, {}).withheld == {A: "name-5f0d"}
    assert decide([broken], NOTHING, {}) == GuestDecision()


FUNCTIONS = st.frozensets(st.sampled_from([A, B, "0000:03:00.0"]))
ANSWERS = st.sampled_from([None, *FunctionOwner])


@given(
    is_running=st.booleans(),
    steps=st.lists(
        st.tuples(
            FUNCTIONS,
            st.booleans(),
            st.one_of(st.none(), st.lists(ANSWERS, min_size=3, max_size=3)),
        )
    ),
)
def test_no_function_of_an_arq_is_ever_withheld(
    is_running: bool,
    steps: list[tuple[frozenset[str], bool, list[FunctionOwner | None] | None]],
) -> None:
    """It is withheld only after an answer that nothing owns it, and while a guest has it."""
    known = NOTHING
    for functions, recheck, answers in steps:
        guests = [guest(*functions, running=functions if is_running else ())]
        questions = list_questions(guests, known, recheck=recheck)
        owners = {} if answers is None else dict(zip(questions, answers, strict=False))
        decision = decide(guests, known, owners)
        for address in decision.withheld:
            assert address in functions
            if answers is not None and recheck:
                assert owners[SERVER, address] is None
        assert decision.unknown is (answers is None and bool(list_questions(guests, known)))
        assert is_running or not any(r.owned & r.foreign for r in decision.records.values())
        known = decision.records
