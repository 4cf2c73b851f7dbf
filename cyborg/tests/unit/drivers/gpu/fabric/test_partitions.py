# SPDX-License-Identifier: Apache-2.0
"""Values of partitions, and comparisons of them."""

from typing import Any

import pytest

from cyborg.drivers.gpu.fabric import partitions
from cyborg.drivers.gpu.fabric.partitions import FabricState, Partition, parse_partitions

ALL = Partition(0, (1, 2, 3, 4))
LEFT, RIGHT = Partition(1, (1, 2), is_active=True), Partition(2, (3, 4))
SINGLE = Partition(3, (3,), is_active=True)
EVERY = (ALL, LEFT, RIGHT, SINGLE)


def gpu(module: Any, links: int = 18) -> dict[str, Any]:
    return {
        "physicalId": module,
        "uuid": "",
        "pciBusId": "",
        "numNvLinksAvailable": links,
        "maxNumNvLinks": 18,
        "nvlinkLineRateMBps": 25000,
    }


def body(*gpus: dict[str, Any], number: int = 3, active: int = 0, count: int = 0) -> dict[str, Any]:
    return {
        "partitionId": number,
        "isActive": active,
        "numGpus": count or len(gpus),
        "gpuInfo": list(gpus),
    }


def test_parse_partitions_keeps_the_order_of_gpus_and_sorts_partitions() -> None:
    listed = {"partitionInfo": [body(gpu(5), gpu(3, 16), number=7, active=1), body(gpu(1))]}
    assert parse_partitions(listed) == (
        Partition(3, (1,), False, 18, 18, 25000),
        Partition(7, (5, 3), True, 16, 18, 25000),
    )


@pytest.mark.parametrize(
    "malformed",
    [
        None,
        {},
        {"partitionInfo": {}},
        {"partitionInfo": [{}]},
        {"partitionInfo": [body()]},
        {"partitionInfo": [body(gpu(1), count=2)]},
        {"partitionInfo": [body(gpu(1), gpu(1))]},
        {"partitionInfo": [body(gpu("1"))]},
        {"partitionInfo": [body(*map(gpu, range(17)))]},
        {"partitionInfo": [body(gpu(1)), body(gpu(2))]},
    ],
)
def test_parse_partitions_malformed_list_is_an_error(malformed: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        parse_partitions(malformed)


def test_find_overlapping_returns_other_active_partitions() -> None:
    assert partitions.find_overlapping(EVERY, ALL) == [LEFT, SINGLE]
    assert partitions.find_overlapping(EVERY, RIGHT) == [SINGLE]
    assert partitions.find_overlapping(EVERY, LEFT) == []


def test_find_foreign_obstacles_closes_what_overlaps_partitions_of_others() -> None:
    found = partitions.find_foreign_obstacles(FabricState(EVERY, own=frozenset({1})))
    assert found.keys() == {0, 2, 3}
    assert "another program activated partition 3" in found[2]
    assert partitions.find_foreign_obstacles(FabricState(EVERY, own=frozenset({1, 3}))) == {}
