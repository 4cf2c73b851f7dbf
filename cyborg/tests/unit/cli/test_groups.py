# SPDX-License-Identifier: Apache-2.0
import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.cli import groups

KEYS = st.text("abcXYZ:_-.09", min_size=1)
VALUES = st.text("abcXYZ:=_-.09")


def test_words_become_a_group() -> None:
    assert groups.parse("resources:FPGA=1, trait:CUSTOM_X=required") == {
        "resources:FPGA": "1",
        "trait:CUSTOM_X": "required",
    }


@given(st.dictionaries(KEYS, VALUES, min_size=1))
def test_both_forms_mean_the_same(group: dict[str, str]) -> None:
    words = ",".join(f"{key}={value}" for key, value in group.items())
    assert groups.parse(words) == groups.parse(json.dumps(group)) == group


def test_numbers_in_json_become_strings() -> None:
    assert groups.parse('{"resources:FPGA": 2}') == {"resources:FPGA": "2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not KEY=VALUE"),
        ("resources:FPGA", "'resources:FPGA' is not KEY=VALUE"),
        ("=1", "'=1' is not KEY=VALUE"),
        ("a=1,a=2", "a is given twice"),
        ("{", "not JSON"),
        ("[1]", "must be one object"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said.replace("(", r"\(")):
        groups.parse(text)
