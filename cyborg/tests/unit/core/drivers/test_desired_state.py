# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.drivers import desired_state
from cyborg.core.drivers.desired_state import (
    BackendOutcome,
    DesiredBackend,
    DesiredHostState,
    DesiredStatus,
)
from cyborg.core.errors import Invalid

NAMES = st.text("abc", min_size=1, max_size=6)
HOSTS = st.builds(
    DesiredHostState,
    generation=st.integers(0, 9),
    backends=st.lists(
        st.builds(
            DesiredBackend,
            backend=NAMES,
            driver=NAMES,
            status=st.sampled_from(DesiredStatus),
            generation=st.integers(0, 9),
            config=st.dictionaries(NAMES, st.integers() | st.lists(NAMES)),
        ),
        unique_by=lambda item: item.backend,
        max_size=4,
    ).map(tuple),
)


@pytest.mark.slow
@given(HOSTS)
def test_round_trip(host: DesiredHostState) -> None:
    assert desired_state.load_host(host.to_dict() | {"unknown": 1}) == host


@given(st.lists(st.builds(BackendOutcome, NAMES, st.integers(0, 9), st.none() | NAMES), max_size=4))
def test_outcomes_round_trip(outcomes: list[BackendOutcome]) -> None:
    assert desired_state.load_outcomes([item.to_dict() for item in outcomes]) == tuple(outcomes)


BACKEND = {"backend": "a", "driver": "b", "status": "enabled", "generation": 1}


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"generation": "1", "backends": []},
        {"generation": True, "backends": []},
        {"generation": 1, "backends": [{**BACKEND, "status": "perhaps"}]},
        {"generation": 1, "backends": [{**BACKEND, "config": [1]}]},
        {"generation": 1, "backends": [BACKEND, BACKEND]},
        {"generation": 1, "backends": [{**BACKEND, "backend": f"b{n}"} for n in range(257)]},
    ],
)
def test_load_host_malformed_is_rejected(body: Any) -> None:
    with pytest.raises(Invalid):
        desired_state.load_host(body)


@pytest.mark.parametrize("body", [None, {}, [1], [{"backend": "a"}], [{**BACKEND, "error": 7}]])
def test_load_outcomes_malformed_is_rejected(body: Any) -> None:
    with pytest.raises(Invalid):
        desired_state.load_outcomes(body)


@pytest.mark.parametrize("name", ["", "a b", "[x]", "-a", "a" * 256, 7, None, "a\n"])
def test_parse_backend_name_invalid_is_rejected(name: Any) -> None:
    with pytest.raises(Invalid, match="invalid backend name"):
        desired_state.parse_backend_name(name)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([*desired_state.ManagedOption])),
        max_size=8,
    )
)
def test_managed_options_last_change_wins(changes: list[tuple[str, str]]) -> None:
    config: dict[str, list[str]] = {}
    for address, option in changes:
        config = {**config, **desired_state.managed_options(config, address, option)}
    last = dict(changes)
    for option in desired_state.ManagedOption:
        assert set(config.get(option, [])) == {a for a, found in last.items() if found == option}
