# SPDX-License-Identifier: Apache-2.0
"""The counterparts of the drivers of OpenStack Cyborg."""

from importlib.metadata import entry_points

from cyborg.core.drivers.registry import COUNTERPARTS, describe_counterpart


def test_counterparts_are_installed_drivers() -> None:
    installed = {point.name for point in entry_points(group="cyborg.accelerator.driver")}
    assert {own for own in COUNTERPARTS.values() if own is not None} <= installed
    assert not COUNTERPARTS.keys() & installed


def test_describe_counterpart_of_another_name_is_none() -> None:
    assert describe_counterpart("gpu") is None
