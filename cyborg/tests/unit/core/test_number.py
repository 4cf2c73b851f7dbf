# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from cyborg.core.placement import Inventory, _describe_inventory_drift
from cyborg.core.text import format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2147483647, "2147483647"),
        (2147483647.0, "2147483647"),
        (0, "0"),
        (-1, "-1"),
        (16.0, "16"),
        (1.5, "1.5"),
        (0.25, "0.25"),
    ],
)
def test_format_number_whole_number_has_all_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_describe_drift_max_unit_has_all_digits() -> None:
    desired = Inventory(total=4)
    (line,) = _describe_inventory_drift("FPGA", desired, replace(desired, max_unit=2147483647))
    assert "max_unit 2147483647, not" in line
