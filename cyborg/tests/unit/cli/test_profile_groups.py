# SPDX-License-Identifier: Apache-2.0
import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.cli import device_profiles

KEYS = st.text("abcXYZ:_-.09", min_size=1)
VALUES = st.text("abcXYZ:=_-.09")


def test_parse_group_pairs() -> None:
    assert device_profiles.parse_group("resources:FPGA=1, trait:CUSTOM_X=required") == {
        "resources:FPGA": "1",
        "trait:CUSTOM_X": "required",
    }


@given(st.dictionaries(KEYS, VALUES, min_size=1))
def test_parse_group_pairs_and_json_are_equal(group: dict[str, str]) -> None:
    pairs = ",".join(f"{key}={value}" for key, value in group.items())
    assert (
        device_profiles.parse_group(pairs)
        == device_profiles.parse_group(json.dumps(group))
        == group
    )


def test_parse_group_json_numbers_become_strings() -> None:
    assert device_profiles.parse_group('{"resources:FPGA": 2}') == {"resources:FPGA": "2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not of the form KEY=VALUE"),
        ("resources:FPGA", "'resources:FPGA' is not of the form KEY=VALUE"),
        ("=1", "'=1' is not of the form KEY=VALUE"),
        ("a=1,a=2", "duplicate key a"),
        ("{", "not JSON"),
        ("[1]", "must be an object"),
    ],
)
def test_parse_group_invalid_text_raises(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message.replace("(", r"\(")):
        device_profiles.parse_group(text)
