# SPDX-License-Identifier: Apache-2.0
"""Images that a driver loads into a device, and the interface of the store that supplies them.

The agent fetches images from the image service. A driver sees files only: it imports no client of
a service.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cyborg.core.errors import DriverFailed

CheckProperties = Callable[[Mapping[str, str]], None]


@dataclass(frozen=True, slots=True)
class Image:
    """A verified image in a local file.

    ``path`` is a regular file that only the agent can write, of ``size`` bytes. ``properties`` are
    the custom properties of the image in the image service.
    """

    uuid: str
    path: Path
    size: int
    properties: Mapping[str, str]


class ImageStore(Protocol):
    """Store of the images of a host."""

    def open(
        self, uuid: str, check: CheckProperties = lambda properties: None
    ) -> AbstractContextManager[Image]:
        """Yield an image, fetched and verified; its file exists until the context ends.

        ``check`` is called with the custom properties before the image is fetched. It raises
        DriverFailed if the image does not fit the device. Raise DriverFailed also for an image that
        does not exist, is not active, is too large, arrives too slowly, or has another digest or
        signature than the image service says; Unavailable if the service does not answer.
        """

    def find(self, properties: Mapping[str, str]) -> str:
        """Return the uuid of the only active image with these custom properties.

        Raise DriverFailed if there is none or more than one; Unavailable if the service does not
        answer.
        """


class NoImageStore:
    """Store of an agent without an image service."""

    def open(
        self, uuid: str, check: CheckProperties = lambda properties: None
    ) -> AbstractContextManager[Image]:
        """Raise DriverFailed."""
        raise DriverFailed(f"image {uuid} cannot be fetched: {_REMEDY}")

    def find(self, properties: Mapping[str, str]) -> str:
        """Raise DriverFailed."""
        raise DriverFailed(f"images cannot be searched: {_REMEDY}")


_REMEDY = "this agent has no image service; set the section [glance] of its configuration"
