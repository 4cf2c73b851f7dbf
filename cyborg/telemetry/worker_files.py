# SPDX-License-Identifier: Apache-2.0
"""The files in which the workers of a service keep their metrics, so that each can serve them all.

::

    lock                     held while files are created, read or merged
    serving                  locked by the worker that serves the port
    <pid>-<random>.values    the values of a worker, which maps the file and holds a lock on it
    <pid>-<random>.keys      which metric has which values: a line for each key
    ended.json               the sums of the workers that have ended

Files without a lock are those of workers that have ended: the next worker that starts, or the next
scrape, adds them to ``ended.json`` and deletes them.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyborg.core.log import get_logger
from cyborg.telemetry.recorder import FAMILIES, MAX_VALUES, Key

LOG = get_logger(__name__)

SIZE = MAX_VALUES * 8  # bytes of a file of values

Samples = dict[Key, list[float]]


class MemoryValues:
    """Values of a service that has one process."""

    def __init__(self) -> None:
        self.values = memoryview(bytearray(SIZE)).cast("d")
        self._keys: list[tuple[Key, int]] = []

    def add_key(self, key: Key, width: int) -> None:
        """Record that the next ``width`` values are those of a key."""
        self._keys.append((key, width))

    def lock_serving(self) -> bool:
        """Return True: there is no other worker."""
        return True

    def read(self) -> "Snapshot":
        """Return the values."""
        return Snapshot(_split(list(self._keys), self.values.tolist()), (os.getpid(),))

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Values of all workers, and the processes of those that run."""

    samples: Samples
    pids: tuple[int, ...]


# Not the multiprocess mode of prometheus_client: an environment variable selects it before the
# first import, it keeps the files of each worker for ever, and a full disk kills the worker,
# because its files are sparse.
class WorkerFiles:
    """The files of this worker in a directory, and access to those of the others."""

    def __init__(self, directory: Path) -> None:
        """Create the files of this worker. Raise OSError."""
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        with self._locked(), contextlib.ExitStack() as undo:
            self._merge_ended()
            # Without all of its files, this worker must leave none of them.
            self._values = _create(directory / f"{name}.values")
            undo.callback((directory / f"{name}.values").unlink)
            undo.callback(os.close, self._values)
            # Without blocks on the disk, a write to the mapped file could kill the process.
            os.posix_fallocate(self._values, 0, SIZE)
            fcntl.flock(self._values, fcntl.LOCK_EX)
            self._keys = _create(directory / f"{name}.keys")
            undo.callback((directory / f"{name}.keys").unlink)
            undo.callback(os.close, self._keys)
            # Mapped, so that a worker that is killed loses nothing: the kernel has its values.
            self._map = mmap.mmap(self._values, SIZE)
            self.values = memoryview(self._map).cast("d")
            undo.pop_all()
        self._keys_size = 0
        self._serving: int | None = None

    def add_key(self, key: Key, width: int) -> None:
        """Record that the next ``width`` values are those of a key. Raise OSError."""
        line = json.dumps([key, width]).encode() + b"\n"
        # A key that a full disk has cut off must not stand before the next one.
        os.ftruncate(self._keys, self._keys_size)
        if os.write(self._keys, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._keys_size += len(line)

    def lock_serving(self) -> bool:
        """Return whether this worker may serve the port, because no other one does."""
        if self._serving is None:
            descriptor = os.open(self._directory / "serving", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                os.close(descriptor)
                if isinstance(exc, BlockingIOError):
                    return False
                raise
            self._serving = descriptor
        return True

    def read(self) -> Snapshot:
        """Return the values of all workers, including those that have ended. Raise OSError."""
        with self._locked():
            running = self._merge_ended()
            samples = _load_ended(self._directory)[0]
            for name in running:
                found, _ = _read_worker(self._directory, name)
                _add(samples, found, with_gauges=True)
        return Snapshot(samples, tuple(int(name.partition("-")[0]) for name in running))

    def close(self) -> None:
        """Close the files; their values count as those of a worker that has ended."""
        self.values.release()
        self._map.close()
        os.close(self._values)
        os.close(self._keys)
        if self._serving is not None:
            os.close(self._serving)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the directory, without which no file is created or deleted."""
        descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _merge_ended(self) -> list[str]:
        """Add the values of ended workers to the sums; return the names of the running ones."""
        names = sorted(path.stem for path in self._directory.glob("*-*.values"))
        running = [name for name in names if _is_locked(self._directory / f"{name}.values")]
        ended = sorted(set(names) - set(running))
        if not ended:
            return running
        samples, merged = _load_ended(self._directory)
        for name in set(ended) - merged:
            found, error = _read_worker(self._directory, name)
            if error is not None:
                LOG.warning("Metrics of the ended worker %s are lost: %s", name, error)
            _add(samples, found, with_gauges=False)
        # The names are in the same file as the sums: a worker that is killed before it has
        # deleted the files does not cause them to be added twice.
        document = {"merged": ended, "samples": list(samples.items())}
        file = self._directory / "ended.json.new"
        file.write_text(json.dumps(document), encoding="utf-8")
        file.replace(self._directory / "ended.json")
        for name in ended:
            (self._directory / f"{name}.keys").unlink(missing_ok=True)
            (self._directory / f"{name}.values").unlink(missing_ok=True)
        return running


def _create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)


def _is_locked(path: Path) -> bool:
    """Return whether the worker of a file runs."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # A lock, not the pid in the name, which another process may have by now.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _read_worker(directory: Path, name: str) -> tuple[Samples, str | None]:
    """Return the values of a worker; without values, why its files cannot be read.

    The keys are read before the values, so that each key has its values.
    """
    try:
        lines = (directory / f"{name}.keys").read_bytes().split(b"\n")[:-1]
        keys = [(_check_key(key), int(width)) for key, width in map(json.loads, lines)]
        content = (directory / f"{name}.values").read_bytes()[:SIZE]
        values = struct.unpack(f"{len(content) // 8}d", content)
    # Such as after a crash of the host: metrics must not fail a worker.
    except (OSError, ValueError, TypeError, RecursionError, struct.error) as exc:
        return {}, f"{type(exc).__name__}: {exc}"
    return _split(keys, values), None


def _check_key(key: Any) -> Key:
    """Return a key of a file. Raise TypeError."""
    if not isinstance(key, list) or not all(isinstance(text, str) for text in key) or not key:
        raise TypeError(f"not a key: {str(key)[:60]}")
    return tuple(key)


def _split(keys: list[tuple[Key, int]], values: Any) -> Samples:
    samples, index = {}, 0
    for key, width in keys:
        samples[key] = list(values[index : index + width])
        index += width
    return samples


def _add(samples: Samples, added: Mapping[Key, list[float]], *, with_gauges: bool) -> None:
    """Add the values of a worker; of a gauge, keep the greatest value.

    Leave out values that another release has stored in another form.
    """
    for key, values in added.items():
        family = FAMILIES.get(key[0])
        if family is None or len(values) != family.width or len(key) != 1 + len(family.labels):
            continue
        if not family.is_gauge:
            old = samples.get(key, [0.0] * len(values))
            samples[key] = [a + b for a, b in zip(old, values, strict=True)]
        elif with_gauges:
            samples[key] = [max(values[0], samples.get(key, values)[0])]


def _load_ended(directory: Path) -> tuple[Samples, set[str]]:
    """Return the sums of the ended workers, and the names of those whose files may remain.

    They start again from 0, as after a loss of the directory, if the file cannot be read.
    """
    samples: Samples = {}
    try:
        document = json.loads((directory / "ended.json").read_text(encoding="utf-8"))
        stored = {
            _check_key(key): [float(value) for value in values]
            for key, values in document["samples"]
        }
        merged = {str(name) for name in document["merged"]}
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return samples, set()
    _add(samples, stored, with_gauges=False)
    return samples, merged
