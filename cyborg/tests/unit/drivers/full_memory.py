# SPDX-License-Identifier: Apache-2.0
"""A memory of drivers on a disk that can be full."""

from cyborg.drivers.base import VolatileMemory


class FullMemory(VolatileMemory):
    """Memory whose changes are lost at a restart of the agent while ``is_full``.

    The present process knows them, as in the agent.
    """

    is_full = True

    def put(self, key: str, text: str | None) -> bool:
        """Store the text of a key, or remove it; return False while the disk is full."""
        super().put(key, text)
        return not self.is_full
