# SPDX-License-Identifier: Apache-2.0
"""The decision about an active partition."""

import itertools

from cyborg.core.inventory.activations import HandleUse, PartitionUse, find_use

SET, OTHER = "the partition", "an overlapping one"


def test_partition_is_unused_only_if_no_device_of_it_is_in_use() -> None:
    """All uses of two members and of a third device."""
    uses = (None, "alone", SET, OTHER)
    for first, second, third in itertools.product(uses, repeat=3):
        states = {1: first, 2: second, 3: third}
        handles = [
            HandleUse(number, None if use == "alone" else use)
            for number, use in states.items()
            if use is not None
        ]
        found = find_use(SET, {1, 2}, handles)
        if SET in states.values():
            assert found is PartitionUse.USED
        else:
            is_free = first is second is None
            assert found is (PartitionUse.UNUSED if is_free else PartitionUse.OVERLAPPED)
