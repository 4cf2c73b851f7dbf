# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import wanted
from cyborg.core.errors import Invalid
from cyborg.core.wanted import Applied, Wanted, WantedHost, Wish

NAMES = st.text("abc", min_size=1, max_size=6)
HOSTS = st.builds(
    WantedHost,
    revision=st.integers(0, 9),
    backends=st.lists(
        st.builds(
            Wanted,
            backend=NAMES,
            driver=NAMES,
            wish=st.sampled_from(Wish),
            revision=st.integers(0, 9),
            config=st.dictionaries(NAMES, st.integers() | st.lists(NAMES)),
        ),
        unique_by=lambda one: one.backend,
        max_size=4,
    ).map(tuple),
)


@given(HOSTS)
def test_there_and_back(host: WantedHost) -> None:
    assert wanted.load_host(host.to_dict() | {"unknown": 1}) == host


@given(st.lists(st.builds(Applied, NAMES, st.integers(0, 9), st.none() | NAMES), max_size=4))
def test_outcomes_there_and_back(outcomes: list[Applied]) -> None:
    assert wanted.load_applied([one.to_dict() for one in outcomes]) == tuple(outcomes)


ONE = {"backend": "a", "driver": "b", "wish": "enabled", "revision": 1}


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"revision": "1", "backends": []},
        {"revision": True, "backends": []},
        {"revision": 1, "backends": [{**ONE, "wish": "perhaps"}]},
        {"revision": 1, "backends": [{**ONE, "config": [1]}]},
        {"revision": 1, "backends": [ONE, ONE]},
        {"revision": 1, "backends": [{**ONE, "backend": f"b{n}"} for n in range(257)]},
    ],
)
def test_malformed_wishes(body: Any) -> None:
    with pytest.raises(Invalid):
        wanted.load_host(body)


@pytest.mark.parametrize("body", [None, {}, [1], [{"backend": "a"}], [{**ONE, "error": 7}]])
def test_malformed_outcomes(body: Any) -> None:
    with pytest.raises(Invalid):
        wanted.load_applied(body)


@pytest.mark.parametrize("name", ["", "a b", "[x]", "-a", "a" * 256, 7, None, "a\n"])
def test_names_that_no_backend_has(name: Any) -> None:
    with pytest.raises(Invalid, match="not usable as a name"):
        wanted.backend_name(name)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=8))
def test_the_last_word_on_a_device_counts(words: list[tuple[str, bool]]) -> None:
    config: dict[str, list[str]] = {}
    for address, adopt in words:
        config = {**config, **wanted.managed(config, address, adopt=adopt)}
    last = dict(words)
    assert set(config.get("adopt", [])) == {a for a, adopt in last.items() if adopt}
    assert set(config.get("release", [])) == {a for a, adopt in last.items() if not adopt}
