# SPDX-License-Identifier: Apache-2.0
"""Determine the project of an instance from its allocations in Placement.

A bound ARQ belongs to the project of its instance, not to the project of the token: an
administrator who evacuates a host must not become the owner of the ARQs there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cyborg.clients.placement import Placement
from cyborg.core.errors import CyborgError, Unavailable

INCOMPLETE_CONSUMER_PROJECT = "00000000-0000-0000-0000-000000000000"
"""Project in Placement of a consumer that was created without a project."""


@dataclass(frozen=True, slots=True)
class InstanceAllocations:
    """What Placement has of an instance: its project, None if unknown, and units by provider."""

    project: str | None = None
    units: Mapping[str, int] = field(default_factory=dict)


class OwnerLookup(Protocol):
    """Interface of ``OwnerResolver``."""

    def find_allocations(self, instance: str) -> InstanceAllocations:
        """Return the allocations of an instance. Raise Unavailable."""


class OwnerResolver:
    """Lookup of the allocations of instances; not cached, because they change."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def find_allocations(self, instance: str) -> InstanceAllocations:
        """Return the allocations of an instance; without a project if Placement has none.

        Raise Unavailable for any error of Placement.
        """
        try:
            project, units = self._placement.allocations_of(instance)
        except Unavailable:
            raise
        except CyborgError as exc:
            raise Unavailable(exc.message) from exc
        if project == INCOMPLETE_CONSUMER_PROJECT:
            project = None
        return InstanceAllocations(project, units)
