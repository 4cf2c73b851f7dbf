# SPDX-License-Identifier: Apache-2.0
"""The directory of downloaded images: a cache with a maximum size.

The file name of a complete image is its uuid; an incomplete image has the suffix ``.part``.
"""

import contextlib
import fcntl
import itertools
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cyborg.core import errors, log
from cyborg.core.image import CachedFile, plan_evictions

LOG = log.get_logger(__name__)

LOCK = "lock"
PART = ".part"
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_INCOMPLETE = re.compile(rf"{_UUID.pattern}\.\d+{re.escape(PART)}")


def free_bytes(folder: Path) -> int:
    """Return the bytes that this process can use in the file system of a directory."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


class Spool:
    """Cache of the images of one agent, in a directory that only the agent's user can access.

    Methods raise OSError if the file system fails.
    """

    def __init__(
        self, folder: Path, max_bytes: int, free: Callable[[Path], int] = free_bytes
    ) -> None:
        """Use a directory for up to ``max_bytes`` of images; ``free`` returns its free bytes."""
        self.folder = folder
        self._max_bytes = max_bytes
        self._free = free
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()  # blocks of ``use`` by image
        self._download_locks: dict[str, threading.Lock] = {}
        self._reserved: dict[int, int] = {}  # bytes of the downloads in progress
        self._tokens = itertools.count()  # of reservations and of incomplete files
        self._lock_file: int | None = None

    def open(self) -> None:
        """Create, check and lock the directory; remove incomplete images.

        Raise Misconfigured.
        """
        try:
            os.makedirs(self.folder.parent, mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder, 0o700)
            # Another user who owns or enters it could replace an image after its verification.
            status = os.lstat(self.folder)
            if (
                not stat.S_ISDIR(status.st_mode)
                or status.st_uid != os.geteuid()
                or stat.S_IMODE(status.st_mode) & 0o077
            ):
                raise errors.Misconfigured(
                    f"[glance] spool_directory: found {self.folder}; expected a directory of "
                    "the agent's user with mode 0700, or a new path",
                    option="glance.spool_directory",
                )
            self._take_lock()
            self._clean()
        except OSError as exc:
            raise errors.Misconfigured(
                f"[glance] spool_directory: {self.folder} cannot be used: {exc.strerror}; "
                "expected a directory that the agent can create and write",
                option="glance.spool_directory",
            ) from exc

    def close(self) -> None:
        """Release the lock of the directory."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    @contextmanager
    def use(self, uuid: str) -> Iterator[threading.Lock]:
        """Prevent the removal of an image during the block; yield the lock for its download."""
        with self._lock:
            self._users[uuid] += 1
            download_lock = self._download_locks.setdefault(uuid, threading.Lock())
        try:
            yield download_lock
        finally:
            with self._lock:
                self._users[uuid] -= 1
                if not self._users[uuid]:
                    del self._users[uuid], self._download_locks[uuid]

    @contextmanager
    def reserve(self, uuid: str, size: int) -> Iterator[None]:
        """Free space for an image of ``size`` bytes; remove other images if needed.

        Raise Unavailable if this is not enough.
        """
        token = next(self._tokens)
        with self._lock:
            self._evict(uuid, size)
            # Two downloads must not both count on the same free bytes.
            self._reserved[token] = size
        try:
            yield
        finally:
            with self._lock:
                del self._reserved[token]

    def path(self, uuid: str) -> Path:
        """Return the path of a complete image."""
        # The only place where a name from outside becomes a path.
        if not _UUID.fullmatch(uuid):
            raise ValueError(f"{uuid!r} is not a canonical uuid")
        return self.folder / uuid

    def read(self, uuid: str, size: int) -> int | None:
        """Return a file descriptor of a complete image; None if no image has this uuid and size."""
        try:
            file = os.open(self.path(uuid), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_size == size:
            return file
        os.close(file)
        return None

    def touch(self, uuid: str) -> None:
        """Set the time of the last use of an image to now."""
        # The time of the file, and no index, which could differ from the files after a crash.
        os.utime(self.path(uuid), follow_symlinks=False)

    @contextmanager
    def write(self, uuid: str) -> Iterator[int]:
        """Yield the file descriptor of a new file, which becomes the image if the block succeeds.

        Otherwise the file is removed.
        """
        target = self.path(uuid)
        part = target.with_name(f"{uuid}.{next(self._tokens)}{PART}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(part, flags, 0o600)
        try:
            try:
                yield file
                # Before the rename: after a power failure a complete name must not have half of the
                # data.
                os.fsync(file)
            finally:
                os.close(file)
            # Only now, when the block has verified the digest.
            os.rename(part, target)
            self._sync_folder()
        except BaseException:
            # Nothing of a download that failed is left: a later one begins again, under another
            # name.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            raise

    def _evict(self, uuid: str, size: int) -> None:
        """Remove images until an image of this size fits into the limit and the free space."""
        # The old copy of this image does not count: the download replaces it.
        files = [file for file in self._files() if file.uuid != uuid]
        reserved = sum(self._reserved.values())
        total = sum(file.size for file in files) + reserved
        # Reserved bytes may not be written yet, so that they are still among the free ones.
        excess = max(total + size - self._max_bytes, reserved + size - self._free(self.folder))
        evictions = plan_evictions(files, excess)
        if evictions is None:
            raise errors.Unavailable(
                f"there is no room for {size} bytes in {self.folder}: {total} bytes are in use, "
                f"and [glance] cache_size is {self._max_bytes}; free space on the disk, or retry "
                "when other devices have been programmed"
            )
        for name in evictions:
            LOG.info("Removing image from the cache to free space", image=name)
            os.unlink(self.folder / name)

    def _files(self) -> list[CachedFile]:
        files = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if _UUID.fullmatch(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    in_use = entry.name in self._users
                    files.append(CachedFile(entry.name, status.st_size, status.st_mtime_ns, in_use))
        return files

    def _take_lock(self) -> None:
        """Lock the folder for this process. Raise Misconfigured if another one uses it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self.folder / LOCK, flags, 0o600)
        try:
            # A lock of the process, not of the open file: the daemon of oslo.privsep, which is
            # forked, must not keep it when the agent ends.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(file)
            raise errors.Misconfigured(
                f"[glance] spool_directory: another process uses {self.folder}; expected a "
                "directory for each agent",
                option="glance.spool_directory",
            ) from exc
        self._lock_file = file

    def _clean(self) -> None:
        """Remove incomplete images, but no other unknown files."""
        for name in os.listdir(self.folder):
            if _INCOMPLETE.fullmatch(name):
                LOG.info("Removing incomplete download %s", name)
                os.unlink(self.folder / name)

    def _sync_folder(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
