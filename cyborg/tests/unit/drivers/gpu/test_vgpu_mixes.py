# SPDX-License-Identifier: Apache-2.0
"""Mixes of vGPUs: their names, which mixes a card can have, and what a mix needs."""

from dataclasses import replace

import pytest

from cyborg.drivers.base import InvalidOption
from cyborg.drivers.gpu.mixes import Mix, parse_mixes, trait_of
from cyborg.drivers.kernel.nvml import GpuFacts

TIME_SLICED = GpuFacts(
    max_vgpus={"A-70C": 2, "A-35C": 4, "A-18C": 7},
    vgpu_memory={"A-70C": 70, "A-35C": 35, "A-18C": 18},
    heterogeneous=False,
)
BACKED = GpuFacts(
    mig="enabled",
    max_vgpus={"A-1-18C": 7, "A-3-71C": 2, "A-3-35C": 4},
    mig_profiles={"1g": 7, "3g": 2},
    mig_instances={"1g": 4, "3g": 1},
    vgpu_profiles={"A-1-18C": "1g", "A-3-71C": "3g", "A-3-35C": "3g"},
    vgpus_per_instance={"A-3-35C": 2},
)


def parse(text: str) -> Mix:
    (mix,) = parse_mixes([text])
    return mix


@pytest.mark.parametrize(
    "text",
    ["", "A-70C", "0xA-70C", "2x", "2xA\tB", "1xA+2xA", "1xA+", "1000xA", "1xA+1xNVIDIA A", "x"],
)
def test_parse_malformed_mix_is_an_invalid_option(text: str) -> None:
    with pytest.raises(InvalidOption, match="numbers of different vGPU types"):
        parse_mixes([text])


def test_parse_names_mixes_without_product_lines_and_once() -> None:
    mixes = parse_mixes(["1xNVIDIA A-2C + 2xA-1C", "1xA-2C+2xA-1C"])
    assert mixes == (Mix({"A-2C": 1, "A-1C": 2}),)
    assert (mixes[0].name, trait_of(mixes[0].name)) == (
        "1xA-2C+2xA-1C",
        "CUSTOM_GPU_LAYOUT_1XA_2C_2XA_1C",
    )


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([f"1xA-{n}C" for n in range(63)], "at most 62 mixes"),
        (["+".join(f"1xA-{n}C" for n in range(60))], "fewer types"),
    ],
)
def test_parse_too_many_mixes_or_types_is_an_invalid_option(
    texts: list[str], expected: str
) -> None:
    with pytest.raises(InvalidOption, match=expected):
        parse_mixes(texts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2xA-70C", True),
        ("3xA-70C", False),
        ("1xA-70C+2xA-35C", True),
        ("1xA-70C+3xA-35C", False),
        ("7xA-18C", True),
        ("1xB-1C", False),
    ],
)
def test_time_sliced_mix_is_possible_within_the_framebuffer(text: str, expected: bool) -> None:
    types = ("A-70C", "A-35C", "A-18C", "B-1C")
    assert (parse(text).find_obstacle(types, TIME_SLICED) is None) is expected
    assert parse(text).find_obstacle(("A-141C",), TIME_SLICED), "no rule enables its types"
    assert parse(text).find_obstacle(types, GpuFacts()), "without NVML"


def test_mix_of_several_sizes_needs_the_heterogeneous_mode() -> None:
    types, mixed, single = ("A-70C", "A-35C"), parse("1xA-70C+2xA-35C"), parse("2xA-70C")
    assert (mixed.is_heterogeneous(TIME_SLICED), single.is_heterogeneous(TIME_SLICED)) == (
        True,
        False,
    )
    unsupported = replace(TIME_SLICED, heterogeneous=None)
    assert mixed.find_obstacle(types, unsupported) == "it has no mode for vGPUs of different sizes"
    assert single.find_obstacle(types, unsupported) is None
    assert not mixed.is_applied(TIME_SLICED)
    assert mixed.is_applied(replace(TIME_SLICED, heterogeneous=True))
    assert not single.is_applied(replace(TIME_SLICED, mig_pending=True))
    assert single.is_applied(replace(TIME_SLICED, heterogeneous=True))


@pytest.mark.parametrize(
    ("text", "instances"),
    [
        ("1xA-3-71C+4xA-1-18C", {"3g": 1, "1g": 4}),
        ("3xA-3-35C+1xA-1-18C", {"3g": 2, "1g": 1}),
        ("1xA-3-71C+1xA-3-35C", {"3g": 2}),
        ("2xA-3-71C+1xA-3-35C", None),
        ("8xA-1-18C", None),
    ],
)
def test_mig_backed_mix_needs_the_instances_of_its_types(
    text: str, instances: dict[str, int] | None
) -> None:
    mix = parse(text)
    assert (mix.find_obstacle(BACKED.vgpu_profiles, BACKED) is None) is (instances is not None)
    if instances is not None:
        assert mix.instances(BACKED) == instances
        assert mix.is_applied(BACKED) is (instances == {"3g": 1, "1g": 4})


def test_mix_of_mig_backed_and_other_types_is_not_possible() -> None:
    facts = replace(BACKED, max_vgpus={**BACKED.max_vgpus, "A-18C": 7})
    mix = parse("1xA-1-18C+1xA-18C")
    assert mix.find_obstacle(("A-1-18C", "A-18C"), facts) == "its types are not all MIG-backed"
