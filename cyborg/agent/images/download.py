# SPDX-License-Identifier: Apache-2.0
"""Download of the data of an image into a file, verified while the data arrive."""

import hashlib
import hmac
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from cyborg.core.errors import DriverFailed, TimedOut
from cyborg.core.image import ImageMetadata
from cyborg.core.jobs.progress import show_activity
from cyborg.core.log import get_logger

LOG = get_logger(__name__)

PROGRESS_INTERVAL = 5.0  # seconds between two lines of progress in the log
_READ = 1 << 20


class Deadline:
    """Point in time at which a call must end. The error text names the limit ``seconds``."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self._end - self._clock())

    @property
    def error(self) -> str:
        """Return the error for a deadline that has passed."""
        return (
            f"not complete in {self.seconds:g} s; see whether Glance is slow, or raise [glance] "
            "download_timeout"
        )

    def check(self) -> None:
        """Raise TimedOut if the time is over."""
        if not self.left():
            raise TimedOut(self.error)


class Signature(Protocol):
    """Verification of the signature of an image; it reads the data once."""

    def update(self, chunk: bytes) -> None:
        """Add data of the image."""

    def verify(self) -> None:
        """Raise DriverFailed if the signature is not valid for the data."""


class Digest:
    """Digest of the data of an image, compared with the digest in the image service."""

    def __init__(self, image: ImageMetadata, signature: Signature | None = None) -> None:
        self._image = image
        self._signature = signature
        self._size = 0
        self._hash = hashlib.new(image.algorithm or "")

    def update(self, chunk: bytes) -> None:
        """Add data. Raise DriverFailed as soon as there are more bytes than expected."""
        self._size += len(chunk)
        # Now, not at the end: a service that sends without an end must not fill the disk.
        if self._size > (self._image.size or 0):
            raise DriverFailed(
                f"image {self._image.uuid}: Glance sends more than the {self._image.size} bytes "
                "that it declares; the download was stopped. Check the stores of Glance"
            )
        self._hash.update(chunk)
        if self._signature is not None:
            # While the data pass: a second pass over gigabytes would take as long as the download.
            self._signature.update(chunk)

    def verify(self) -> None:
        """Raise DriverFailed if the size, the digest or the signature is wrong."""
        self.verify_digest()
        if self._signature is not None:
            self._signature.verify()

    def verify_digest(self) -> None:
        """Raise DriverFailed if the size or the digest is wrong."""
        if self._size != self._image.size:
            raise DriverFailed(
                f"image {self._image.uuid}: Glance sent {self._size} bytes and declares "
                f"{self._image.size}; check the stores of Glance"
            )
        if not hmac.compare_digest(self._hash.hexdigest(), self._image.digest or ""):
            raise DriverFailed(
                f"image {self._image.uuid}: the {self._image.algorithm} digest of the data is "
                f"{self._hash.hexdigest()[:16]}..., expected {self._image.digest!s:.16}...: the "
                "data were changed in a store of Glance or on the way; upload the image again"
            )


def copy(
    image: ImageMetadata,
    chunks: Iterable[bytes],
    file: int,
    check: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
    signature: Signature | None = None,
) -> None:
    """Write the data of an image to a file descriptor and verify them.

    The activity of the current job shows how much is written. ``check`` is called for each chunk
    and raises an exception to stop the copy. Raise DriverFailed if the size, digest or signature is
    wrong, and OSError.
    """
    digest = Digest(image, signature)
    logged, size = clock(), 0
    with show_activity(f"fetch image {image.uuid}", image.size) as set_done:
        for chunk in chunks:
            check()
            digest.update(chunk)
            left = memoryview(chunk)
            while left:
                left = left[os.write(file, left) :]
            size += len(chunk)
            set_done(size)
            now = clock()
            # By time and not by size: how fast Glance is differs by a factor of a hundred.
            if now - logged >= PROGRESS_INTERVAL:
                logged = now
                percent = 100 * size // (image.size or 1)
                LOG.info(
                    "Downloading image, %d %% of %d bytes", percent, image.size, image=image.uuid
                )
    digest.verify()


def is_intact(image: ImageMetadata, file: int, signature: Signature | None = None) -> bool:
    """Return whether the data in a file descriptor have the size and digest of the image.

    Raise DriverFailed if the digest is right but the signature is not valid. Raise OSError.
    """
    digest, size = Digest(image, signature), 0
    try:
        with show_activity(f"verify cached image {image.uuid}", image.size) as set_done:
            for chunk in _read(file):
                digest.update(chunk)
                size += len(chunk)
                set_done(size)
        digest.verify_digest()
    # Damaged: the caller downloads the image again. A signature that is not valid raises below,
    # because another download would not help.
    except DriverFailed:
        return False
    digest.verify()
    return True


def _read(file: int) -> Iterator[bytes]:
    while chunk := os.read(file, _READ):
        yield chunk
