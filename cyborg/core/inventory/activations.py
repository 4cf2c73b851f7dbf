# SPDX-License-Identifier: Apache-2.0
"""Decide what happens to an active partition of a fabric: whether an accelerator request has it.

An agent knows which partitions it has activated, but not which of them a request still has: a
request ends in the database, also while the agent is stopped or after a restored backup.
"""

from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import NamedTuple


class PartitionUse(StrEnum):
    """Use of an active partition that the agent of the host has activated."""

    USED = "used"  # an ARQ has it, or its devices are cleaned after one
    UNUSED = "unused"  # neither the partition nor one of its devices is in use
    OVERLAPPED = "overlapped"  # it is not used, but one of its devices is
    MISSING = "missing"  # it is not used, and the host does not report one of its devices


class HandleUse(NamedTuple):
    """A handle that has an owner or is not clean, and the provider of the set of its claim."""

    id: int
    set_provider: str | None


def find_use(
    provider: str, members: Collection[int], used_handles: Iterable[HandleUse]
) -> PartitionUse:
    """Return the use of a partition whose set has this provider and these handles."""
    handles = list(used_handles)
    if any(handle.set_provider == provider for handle in handles):
        return PartitionUse.USED
    if any(handle.id in members for handle in handles):
        return PartitionUse.OVERLAPPED
    return PartitionUse.UNUSED
