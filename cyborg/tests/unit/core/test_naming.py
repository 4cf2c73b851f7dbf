# SPDX-License-Identifier: Apache-2.0
"""Names of providers, classes and traits."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import naming
from cyborg.core.errors import Invalid


@given(st.text(max_size=40))
def test_make_custom_name_is_valid_and_idempotent(text: str) -> None:
    try:
        name = naming.make_custom_name(text)
    except Invalid:
        assert not any(c.isascii() and c.isalnum() for c in text.upper().removeprefix("CUSTOM_"))
        return
    assert naming.is_trait(name)
    assert naming.is_resource_class(name)
    assert naming.make_custom_name(name) == name


def test_make_custom_name_examples() -> None:
    assert naming.make_custom_name("gzip-v2.1") == "CUSTOM_GZIP_V2_1"
    with pytest.raises(Invalid):
        naming.make_custom_name("x" * 250)


def test_provider_uuid_is_stable() -> None:
    assert naming.provider_name("h", "0000:3d:00.0") == "h_0000:3d:00.0"
    # A constant: a change of it would make every provider of every installation anew.
    assert naming.provider_uuid("h", "0000:3d:00.0") == "62b6e9b5-4096-5a67-a3ed-235459095a52"


@given(st.text(min_size=1), st.text(min_size=1))
def test_provider_uuid_differs_by_host_and_address(left: str, right: str) -> None:
    first, second = (naming.provider_uuid("h", place) for place in (left, right))
    assert (first == second) == (left == right)
    assert uuid.UUID(first).version == 5


def test_handle_uuid_is_stable_and_differs_by_host_deployable_and_handle() -> None:
    place = ("h", "0000:3d:00.0", "0000:3d:00.0/nvidia-222/0")
    # A constant: with another one, an agent would not recognise its mediated devices.
    assert naming.handle_uuid(*place) == "14f04b53-0c90-5aed-8348-24eba5debe67"
    others = [(*place[:n], "other", *place[n + 1 :]) for n in range(3)]
    assert len({naming.handle_uuid(*other) for other in (place, *others)}) == 4


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
def test_names_valid_in_placement(name: str, is_class: bool, is_trait: bool) -> None:
    assert naming.is_resource_class(name) is is_class
    assert naming.is_trait(name) is is_trait
