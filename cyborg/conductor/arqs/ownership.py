# SPDX-License-Identifier: Apache-2.0
"""Determine the project of an instance from its allocations in Placement.

A bound ARQ belongs to the project of its instance, not to the project of the token: an
administrator who evacuates a host must not become the owner of the ARQs there.
"""

from typing import Protocol

from cyborg.clients.placement import Placement
from cyborg.core.errors import CyborgError, Unavailable

INCOMPLETE_CONSUMER_PROJECT = "00000000-0000-0000-0000-000000000000"
"""Project in Placement of a consumer that was created without a project."""


class OwnerLookup(Protocol):
    """Interface of ``OwnerResolver``."""

    def find_project(self, instance: str) -> str | None:
        """Return the project of an instance, None if it has no allocation. Raise Unavailable."""


class OwnerResolver:
    """Lookup of the projects of instances; not cached, because allocations change."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def find_project(self, instance: str) -> str | None:
        """Return the project of an instance, None if it has no allocation or no project.

        Raise Unavailable for any error of Placement.
        """
        try:
            project = self._placement.consumer_project(instance)
        except Unavailable:
            raise
        except CyborgError as exc:
            raise Unavailable(exc.message) from exc
        return None if project == INCOMPLETE_CONSUMER_PROJECT else project
