# SPDX-License-Identifier: Apache-2.0
"""Parsers of options, and records in the memory of a driver."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest

from cyborg.core.codec import Serializable
from cyborg.core.errors import Misconfigured
from cyborg.drivers.base import in_range, load_record, one_of
from cyborg.drivers.fake import FakeDriver


class Mode(StrEnum):
    OFF = "off"
    ON = "on"


@dataclass(frozen=True, slots=True)
class Count(Serializable):
    number: int


@pytest.mark.parametrize("value", [-1, 11, float("nan")])
def test_in_range_rejects_other_numbers(value: float) -> None:
    driver = FakeDriver("f", {})
    driver.options["size"] = value
    with pytest.raises(Misconfigured, match=r"\[f\] size: found .*; expected 0 to 10 MiB"):
        driver.parse_option("size", in_range(0, 10, " MiB"))


@pytest.mark.parametrize("value", ["", "ON", None])
def test_one_of_names_the_values(value: Any) -> None:
    driver = FakeDriver("f", {})
    driver.options["mode"] = value
    with pytest.raises(Misconfigured, match="expected one of off, on"):
        driver.parse_option("mode", one_of(Mode))


def test_parse_option_returns_the_parsed_value() -> None:
    driver = FakeDriver("f", {})
    driver.options |= {"mode": "on", "size": 10}
    assert driver.parse_option("mode", one_of(Mode)) is Mode.ON
    assert driver.parse_option("size", in_range(0, 10)) == 10


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"number": "1"}', "{", "[" * 100_000])
def test_load_record_malformed_text_is_no_record(text: str | None) -> None:
    assert load_record(Count, text) is None


def test_load_record_ignores_the_keys_of_a_newer_release() -> None:
    assert load_record(Count, '{"number": 1, "more": 2}') == Count(1)
