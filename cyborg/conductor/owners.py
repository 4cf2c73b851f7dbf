# SPDX-License-Identifier: Apache-2.0
"""Whose an instance is: the project of its allocations in Placement.

A request belongs to its instance's project, whoever's token made or bound it: an administrator who
evacuates a host must not become the owner of what is bound there.
"""

from cyborg.clients.placement import Placement
from cyborg.core.errors import CyborgError, Unavailable

NOBODY = "00000000-0000-0000-0000-000000000000"
"""Placement's own word for the project of a consumer that was made without one."""


class Owners:
    """Knows the projects of instances; asks each time, for allocations come and go."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def project_of(self, instance: str) -> str | None:
        """Return the project of an instance, None when it has no allocation or nobody's.

        Raises Unavailable when Placement does not tell.
        """
        try:
            project = self._placement.consumer_project(instance)
        except Unavailable:
            raise
        except CyborgError as bad:
            raise Unavailable(bad.message) from bad
        return None if project == NOBODY else project
