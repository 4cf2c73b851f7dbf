# SPDX-License-Identifier: Apache-2.0
"""The images of a host: fetched from Glance, verified while the data arrive, and cached."""

import hashlib
import hmac
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from oslo_config import cfg

from cyborg.agent.images.spool import Spool
from cyborg.conf.options import GLANCE
from cyborg.core import errors, log, validation
from cyborg.core.errors import DriverFailed, TimedOut
from cyborg.core.image import ImageMetadata, ensure_loadable, select_image
from cyborg.core.jobs.progress import show_activity
from cyborg.drivers.base import CheckProperties, Image, ImageStore, NoImageStore
from cyborg.threads.calls import BoundedCalls

LOG = log.get_logger(__name__)


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


@dataclass(eq=False)
class Digest:
    """Digest of the data of an image, compared with the digest in the image service."""

    image: ImageMetadata
    signature: Signature | None = None

    def __post_init__(self) -> None:
        self._size = 0
        # ``or ""``, and ``or 0`` below, are for the types: ensure_loadable has refused an image
        # without an algorithm, a digest or a size.
        self._hash = hashlib.new(self.image.algorithm or "")

    def update(self, chunk: bytes) -> None:
        """Add data. Raise DriverFailed as soon as there are more bytes than expected."""
        self._size += len(chunk)
        # Now, not at the end: a service that sends without an end must not fill the disk.
        if self._size > (self.image.size or 0):
            raise DriverFailed(
                f"image {self.image.uuid}: Glance sends more than the {self.image.size} bytes "
                "that it declares; the download was stopped. Check the stores of Glance"
            )
        self._hash.update(chunk)
        if self.signature is not None:
            # While the data pass: a second pass over gigabytes would take as long as the download.
            self.signature.update(chunk)

    def verify(self) -> None:
        """Raise DriverFailed if the size, the digest or the signature is wrong."""
        self.verify_digest()
        if self.signature is not None:
            self.signature.verify()

    def verify_digest(self) -> None:
        """Raise DriverFailed if the size or the digest is wrong."""
        if self._size != self.image.size:
            raise DriverFailed(
                f"image {self.image.uuid}: Glance sent {self._size} bytes and declares "
                f"{self.image.size}; check the stores of Glance"
            )
        if not hmac.compare_digest(self._hash.hexdigest(), self.image.digest or ""):
            raise DriverFailed(
                f"image {self.image.uuid}: the {self.image.algorithm} digest of the data is "
                f"{self._hash.hexdigest()[:16]}..., expected {self.image.digest!s:.16}...: the "
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
    logged_at, size = clock(), 0
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
            if now - logged_at >= PROGRESS_INTERVAL:
                logged_at = now
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
            for chunk in iter(partial(os.read, file, _READ), b""):
                digest.update(chunk)
                size += len(chunk)
                set_done(size)
        digest.verify_digest()
    except DriverFailed:
        # Damaged: the caller downloads the image again. A signature that is not valid raises below,
        # because another download would not help.
        return False
    digest.verify()
    return True


T = TypeVar("T")
SignatureFactory = Callable[[], Signature | None]

MAX_CALLS = 16  # calls of Glance at a time, including those that exceeded their deadline
MAX_FOUND = 5  # images of a list: more than an error names
RETRY_PAUSE = 1.0  # seconds before the first repetition, more before each further one


class ImageService(Protocol):
    """Client of the image service; see cyborg.clients.glance."""

    def get_image(self, uuid: str) -> ImageMetadata:
        """Return the metadata of an image."""

    def list_images(self, filters: Mapping[str, str], limit: int) -> list[ImageMetadata]:
        """Return the first images that match the filters."""

    def download(self, uuid: str) -> AbstractContextManager[Iterator[bytes]]:
        """Yield the chunks of an image."""

    def project_id(self) -> str | None:
        """Return the project id of the credentials."""


class SignatureService(Protocol):
    """Verification of signatures; see cyborg.agent.images.signature."""

    def load(self, image: ImageMetadata) -> Callable[[], Signature]:
        """Return a function that creates verifiers for the image. Raise DriverFailed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the downloads; the options of ``[glance]`` with these names describe them."""

    max_image_size: int
    download_timeout: float
    retries: int


@dataclass(eq=False)
class GlanceImageStore:
    """Image store of an agent with an image service.

    ``spool`` must be open. If ``signatures`` is set, each image must have a signature.
    """

    service: ImageService
    spool: Spool
    limits: Limits
    trusted_projects: tuple[str, ...] = ()
    signatures: SignatureService | None = None
    clock: Callable[[], float] = time.monotonic
    retry_pause: float = RETRY_PAUSE

    def __post_init__(self) -> None:
        self._calls = BoundedCalls("images", MAX_CALLS)
        self._stopping = threading.Event()

    def close(self) -> None:
        """Stop the downloads and release the directory."""
        self._stopping.set()
        self.spool.close()

    @contextmanager
    def open(self, uuid: str, check: CheckProperties = lambda properties: None) -> Iterator[Image]:
        """Yield an image, fetched and verified, for the block; see ``ImageStore``."""
        deadline = Deadline(self.limits.download_timeout, self.clock)
        # At each use, also if the image is cached: one that was deleted or deactivated in Glance
        # must not be loaded any more.
        image = self._describe(uuid, deadline)
        ensure_loadable(image, self.limits.max_image_size)
        check(image.properties)
        make_signature = self._load_signature(image, deadline)
        with self.spool.use(image.uuid) as download_lock:
            # Another device may be waiting for the same image.
            if not download_lock.acquire(timeout=deadline.left()):
                raise errors.TimedOut(f"image {image.uuid}: {deadline.error}")
            try:
                self._ensure_cached(image, make_signature, deadline)
            finally:
                download_lock.release()
            path = self.spool.path(image.uuid)
            yield Image(image.uuid, path, image.size or 0, image.properties)

    def find(self, properties: Mapping[str, str]) -> str:
        """Return the uuid of the only active image with these properties; see ``ImageStore``."""
        if not properties:
            raise errors.DriverFailed("images cannot be searched without a property")
        deadline = Deadline(self.limits.download_timeout, self.clock)
        return self._call("search of an image", lambda: self._find(properties), deadline)

    def _find(self, properties: Mapping[str, str]) -> str:
        own_project = self.service.project_id()
        # Each project once: a trusted project may be that of the credentials.
        own_projects = (own_project,) if own_project else ()
        projects = tuple(dict.fromkeys((*own_projects, *self.trusted_projects)))
        matching: list[ImageMetadata] = []
        # One request for each owner: images of others cannot fill up a page.
        for scope in ({"visibility": "public"}, *({"owner": owner} for owner in projects)):
            filters = {**properties, **scope, "status": "active"}
            matching += self.service.list_images(filters, MAX_FOUND)
        return select_image(matching, properties, projects)

    def _describe(self, uuid: str, deadline: Deadline) -> ImageMetadata:
        try:
            # The uuid comes from a job, and becomes the name of a file.
            name = validation.parse_uuid(uuid, "image")
        except errors.Invalid as exc:
            raise errors.DriverFailed(
                f"{exc.message}: refer to the image by its uuid in the image service"
            ) from exc
        return self._call(f"image {name}", lambda: self.service.get_image(name), deadline)

    def _load_signature(self, image: ImageMetadata, deadline: Deadline) -> SignatureFactory:
        signatures = self.signatures
        if signatures is None:
            return lambda: None
        return self._call(f"image {image.uuid}", lambda: signatures.load(image), deadline)

    def _ensure_cached(
        self, image: ImageMetadata, make_signature: SignatureFactory, deadline: Deadline
    ) -> None:
        """Download an image, unless the cache has it; record its use."""
        try:
            if not self._is_cached(image, make_signature()):
                self._fetch(image, make_signature, deadline)
            self.spool.touch(image.uuid)
        except OSError as exc:
            raise errors.DriverFailed(
                f"image {image.uuid} cannot be stored in {self.spool.folder}: {exc.strerror}; "
                "correct [glance] spool_directory, its permissions or its disk"
            ) from exc

    def _is_cached(self, image: ImageMetadata, signature: Signature | None) -> bool:
        """Return whether the spool has the image, undamaged. Raise as ``is_intact``."""
        file = self.spool.read(image.uuid, image.size or 0)
        if file is None:
            return False
        # At each use, which takes a second per gigabyte. A record of an earlier verification would
        # be faster, but would not detect a damaged disk.
        try:
            if is_intact(image, file, signature):
                return True
        finally:
            os.close(file)
        LOG.warning(
            "Cached image is damaged, downloading it again; check the disk of %s",
            self.spool.folder,
            image=image.uuid,
        )
        return False

    def _fetch(
        self, image: ImageMetadata, make_signature: SignatureFactory, deadline: Deadline
    ) -> None:
        """Download an image into the spool, with retries until the deadline."""

        def check() -> None:
            deadline.check()
            self._ensure_running()

        def download() -> None:
            with (
                self.spool.reserve(image.uuid, image.size or 0),
                self.service.download(image.uuid) as chunks,
                self.spool.write(image.uuid) as file,
            ):
                copy(image, chunks, file, check, self.clock, make_signature())

        LOG.info("Downloading image of %d bytes", image.size, image=image.uuid)
        begin = self.clock()
        self._call(f"image {image.uuid}", download, deadline)
        LOG.info("Downloaded image in %.1f s", self.clock() - begin, image=image.uuid)

    def _call(self, subject: str, func: Callable[[], T], deadline: Deadline) -> T:
        """Call the image service; retry after a failure.

        Raise DriverFailed, Unavailable or TimedOut.
        """
        attempt = 0
        while True:
            self._ensure_running()
            try:
                return self._calls.call(func, deadline.left())
            except errors.NotFound as exc:
                raise errors.DriverFailed(
                    f"{subject} does not exist, or the agent may not read it ({exc.message}): "
                    "check the uuid, and the project and role of the user in [glance]"
                ) from exc
            except (errors.Forbidden, errors.Invalid) as exc:
                raise errors.DriverFailed(f"{subject}: {exc.message}") from exc
            except errors.Unavailable as exc:
                attempt += 1
                if not deadline.left():
                    raise errors.TimedOut(f"{subject}: {deadline.error}") from exc
                # Repeated logins with a wrong password could lock the user.
                if attempt > self.limits.retries or exc.details.get("status") == 401:
                    raise type(exc)(f"{subject}: {exc.message}", **exc.details) from exc
                pause = min(self.retry_pause * attempt, deadline.left())
                LOG.warning("Request to Glance failed, retrying in %.1f s: %s", pause, exc.message)
            # Not sleep(): a stop must not wait for it.
            self._stopping.wait(pause)

    def _ensure_running(self) -> None:
        if self._stopping.is_set():
            raise errors.Unavailable("the agent is stopping")


if TYPE_CHECKING:
    from cyborg.agent.images.signature import Signatures


class ClosableImageStore(ImageStore, Protocol):
    """Image store that can be closed."""

    def close(self) -> None:
        """Stop the downloads and release the files."""


class _NoImageStore(NoImageStore):
    def close(self) -> None:
        """Do nothing."""


def make_image_store(conf: cfg.ConfigOpts) -> ClosableImageStore:
    """Return the store of section ``[glance]``, or an empty store if it names no service.

    Raise Misconfigured.
    """
    # Without the section keystoneauth is not imported.
    if GLANCE.name not in map(str.lower, conf.list_all_sections()):
        return _NoImageStore()
    GLANCE.register_client(conf)
    section = conf[GLANCE.name]
    if not section.auth_type and not section.endpoint_override:
        return _NoImageStore()

    from cyborg.clients import glance  # a late import, because it imports keystoneauth

    # Otherwise an allowed image could never be stored, and each job with it would fail.
    if section.cache_size < section.max_image_size:
        raise errors.Misconfigured(
            f"[glance] cache_size: found {section.cache_size}; expected at least max_image_size, "
            f"which is {section.max_image_size}",
            option="glance.cache_size",
        )
    client = glance.make(conf)
    signatures = _make_signatures(client.auth, section) if section.require_signature else None
    # An agent of the same name that manages this machine has another spool.
    folder = Path(conf.state_path, "agent", "replay" if conf.agent.replay else "")
    default = folder / f"images-{conf.host}"
    spool = Spool(Path(section.spool_directory or default), section.cache_size)
    spool.open()
    limits = Limits(section.max_image_size, section.download_timeout, section.retries)
    return GlanceImageStore(client, spool, limits, tuple(section.trusted_projects), signatures)


def _make_signatures(auth: Any, section: Any) -> "Signatures":
    """Return the verifier of signatures. Raise Misconfigured without its requirements."""
    if not section.trusted_certificates:
        raise errors.Misconfigured(
            "[glance] trusted_certificates: found none; expected the uuids of certificates, which "
            "require_signature needs",
            option="glance.trusted_certificates",
        )
    try:
        from cyborg.agent.images.signature import Signatures
    except ModuleNotFoundError as exc:
        raise errors.Misconfigured(
            "[glance] require_signature: found true; expected false, or pip install "
            f"'cyborg[signatures]': {exc}",
            option="glance.require_signature",
        ) from exc
    return Signatures(auth, tuple(section.trusted_certificates))
