# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.log import LENGTH, parse_trace_context

VALID = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize("value", [VALID, VALID[:-2] + "00", VALID[:-2] + "ff"])
def test_well_formed_context_is_accepted(value: str) -> None:
    assert parse_trace_context(value) == value
    assert len(value) == LENGTH


@pytest.mark.parametrize(
    "value",
    [
        *(None, 1, b"00", [VALID], "", "00", VALID + "\n", VALID + "-x", " " + VALID),
        VALID.upper(),
        VALID.replace("-", "_"),
        VALID.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        VALID.replace("00f067aa0ba902b7", "0" * 16),
        "01" + VALID[2:],
        "ff" + VALID[2:],
        VALID.replace("4", "g"),
        VALID * 1000,
    ],
)
def test_malformed_context_is_none(value: Any) -> None:
    assert parse_trace_context(value) is None


@given(st.text(alphabet="0123456789abcdef-\n ", max_size=60))
def test_any_text_is_accepted_whole_or_not_at_all(text: str) -> None:
    assert parse_trace_context(text) in (None, text)
