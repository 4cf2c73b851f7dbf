# SPDX-License-Identifier: Apache-2.0
"""Names of providers, classes and traits."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import names
from cyborg.core.errors import Invalid


@given(st.text(max_size=40))
def test_a_custom_name_is_one_and_stays_one(text: str) -> None:
    try:
        name = names.custom(text)
    except Invalid:
        assert not any(c.isascii() and c.isalnum() for c in text.upper().removeprefix("CUSTOM_"))
        return
    assert names.is_trait(name)
    assert names.is_resource_class(name)
    assert names.custom(name) == name


def test_a_custom_name_is_readable() -> None:
    assert names.custom("gzip-v2.1") == "CUSTOM_GZIP_V2_1"
    with pytest.raises(Invalid):
        names.custom("x" * 250)


def test_a_provider_keeps_its_uuid() -> None:
    assert names.provider_name("h", "0000:3d:00.0") == "h_0000:3d:00.0"
    # A constant: a change of it would make every provider of every installation anew.
    assert names.provider_uuid("h", "0000:3d:00.0") == "62b6e9b5-4096-5a67-a3ed-235459095a52"


@given(st.text(min_size=1), st.text(min_size=1))
def test_two_places_have_two_uuids(one: str, two: str) -> None:
    first, second = (names.provider_uuid("h", place) for place in (one, two))
    assert (first == second) == (one == two)
    assert uuid.UUID(first).version == 5


@pytest.mark.parametrize(
    ("name", "is_class", "is_trait"),
    [
        ("FPGA", True, False),
        ("HW_CPU_X86_AVX", False, True),
        ("CUSTOM_X", True, True),
        ("CUSTOM_", False, False),
        ("CUSTOM_x", False, False),
        ("CUSTOM_X\n", False, False),
        ("", False, False),
        ("CUSTOM_" + "X" * 249, False, False),
    ],
)
def test_what_placement_takes(name: str, is_class: bool, is_trait: bool) -> None:
    assert names.is_resource_class(name) is is_class
    assert names.is_trait(name) is is_trait
