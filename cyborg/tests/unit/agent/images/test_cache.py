# SPDX-License-Identifier: Apache-2.0
"""The cache of images: its limits, its verification, concurrent users, and what a kill leaves."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.images.spool import Spool
from cyborg.agent.images.store import GlanceImageStore
from cyborg.core.errors import DriverFailed, Misconfigured, Unavailable
from cyborg.testing.fake_glance import FakeGlance
from cyborg.tests.fixtures.hosts.image_store import make_store
from cyborg.tests.fixtures.machine.processes import wait_until

DATA = bytes(range(256)) * 100
UUID = "4d5b0d6a-8f8c-4f67-9f4e-3f2d1c0b9a87"

Make = Callable[..., GlanceImageStore]


@pytest.fixture
def make(glance: FakeGlance, tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def build(**options: Any) -> GlanceImageStore:
            store = make_store(glance, tmp_path, max_image_size=len(DATA), **options)
            stack.callback(store.close)
            return store

        yield build


def files(spool: Path) -> set[str]:
    return {path.name for path in spool.iterdir()} - {"lock"}


def fetch(store: GlanceImageStore, uuid: str) -> bytes:
    with store.open(uuid) as image:
        return image.path.read_bytes()


def test_second_open_downloads_nothing(glance: FakeGlance, make: Make) -> None:
    store, uuid = make(), glance.add_image(DATA)
    assert fetch(store, uuid) == fetch(store, uuid) == DATA
    assert glance.downloads == [uuid]


def test_cache_survives_a_restart(glance: FakeGlance, make: Make) -> None:
    uuid = glance.add_image(DATA)
    first = make()
    fetch(first, uuid)
    first.close()
    assert fetch(make(), uuid) == DATA
    assert glance.downloads == [uuid]


def test_cached_image_that_was_deactivated_is_refused(glance: FakeGlance, make: Make) -> None:
    store, uuid = make(), glance.add_image(DATA)
    fetch(store, uuid)
    glance.images[uuid]["status"] = "deactivated"
    with pytest.raises(DriverFailed, match="deactivated"):
        fetch(store, uuid)


@pytest.mark.parametrize("damaged", [b"x" + DATA[1:], DATA[1:], b""])
def test_damaged_cached_image_is_downloaded_again(
    damaged: bytes, glance: FakeGlance, make: Make, spool: Path
) -> None:
    store, uuid = make(), glance.add_image(DATA)
    fetch(store, uuid)
    (spool / uuid).write_bytes(damaged)
    assert fetch(store, uuid) == DATA
    assert glance.downloads == [uuid] * 2


def test_link_in_place_of_an_image_is_not_followed(
    glance: FakeGlance, make: Make, spool: Path, tmp_path: Path
) -> None:
    store, uuid = make(), glance.add_image(DATA)
    other = tmp_path / "other"
    other.write_bytes(DATA)
    (spool / uuid).symlink_to(other)
    with pytest.raises(DriverFailed, match=r"cannot be stored in .*: Too many levels"):
        fetch(store, uuid)
    assert other.read_bytes() == DATA


def test_least_recently_used_image_is_removed(glance: FakeGlance, make: Make, spool: Path) -> None:
    store = make(cache_size=2 * len(DATA))
    first, second, third = (glance.add_image(DATA) for _ in range(3))
    fetch(store, first)
    fetch(store, second)
    for age, uuid in enumerate((first, second)):
        os.utime(spool / uuid, (1000 - age, 1000 - age))
    fetch(store, third)
    assert files(spool) == {first, third}
    # The times of the file system have a resolution of some milliseconds.
    os.utime(spool / third, (1000, 1000))
    fetch(store, first)
    fetch(store, second)
    assert files(spool) == {first, second}


def test_image_in_use_is_not_removed(glance: FakeGlance, make: Make, spool: Path) -> None:
    store = make(cache_size=2 * len(DATA))
    first, second, third = (glance.add_image(DATA) for _ in range(3))
    with store.open(first) as image:
        fetch(store, second)
        fetch(store, third)
        assert files(spool) == {first, third}
        with store.open(third), pytest.raises(Unavailable, match="there is no room for 25600"):
            fetch(store, second)
        assert image.path.read_bytes() == DATA
    assert fetch(store, second) == DATA


def test_full_disk_makes_room_before_it_fails(glance: FakeGlance, make: Make, spool: Path) -> None:
    free = [1 << 30]
    store = make(free=lambda folder: free[0])
    first, second = glance.add_image(DATA), glance.add_image(DATA)
    fetch(store, first)
    free[0] = 0
    fetch(store, second)
    assert files(spool) == {second}
    with store.open(second), pytest.raises(Unavailable, match="free space on the disk"):
        fetch(store, first)


def test_missing_directory_is_reported_with_the_remedy(
    glance: FakeGlance, make: Make, spool: Path
) -> None:
    store, uuid = make(), glance.add_image(DATA)
    shutil.rmtree(spool)
    with pytest.raises(DriverFailed, match=rf"cannot be stored in {spool}: No such file .*correct"):
        fetch(store, uuid)


def test_concurrent_users_of_an_image_share_one_download(
    glance: FakeGlance, make: Make, spool: Path
) -> None:
    store, uuid = make(), glance.add_image(DATA)
    glance.gate = threading.Event()
    with ThreadPoolExecutor(6) as pool:
        results = [pool.submit(fetch, store, uuid) for _ in range(6)]
        # Six times the metadata, and the data.
        wait_until("all requests are made", lambda: len(glance.requested_paths) >= 7)
        glance.gate.set()
        assert [result.result() for result in results] == [DATA] * 6
    assert glance.downloads == [uuid]
    assert files(spool) == {uuid}


def test_concurrent_downloads_of_different_images(glance: FakeGlance, make: Make) -> None:
    store = make()
    uuids = [glance.add_image(DATA) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda uuid: fetch(store, uuid), uuids)) == [DATA] * 6


def test_failed_download_does_not_fail_the_others(glance: FakeGlance, make: Make) -> None:
    store, uuid = make(), glance.add_image(DATA)
    glance.breaks = 1
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(fetch, store, uuid) for _ in range(4)]
        errors = [result.exception() for result in results]
    assert [type(error) for error in errors if error] == [Unavailable]


KILLED = """
import os, sys
from pathlib import Path
from cyborg.agent.images.spool import Spool

spool = Spool(Path(sys.argv[1]), 1 << 20)
spool.open()
with spool.write(sys.argv[2]) as file:
    os.write(file, b"half")
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_killed_agent_leaves_an_incomplete_file_that_the_next_start_removes(
    glance: FakeGlance, make: Make, spool: Path
) -> None:
    kept, uuid = glance.add_image(DATA), glance.add_image(DATA)
    first = make()
    fetch(first, kept)
    first.close()
    (spool / "notes").write_text("not of the agent")
    done = subprocess.run([sys.executable, "-c", KILLED, spool, uuid], check=False)
    assert done.returncode == -9
    assert files(spool) == {kept, "notes", f"{uuid}.0.part"}
    store = make()
    assert files(spool) == {kept, "notes"}
    assert fetch(store, uuid) == DATA


OTHER = """
import sys
from pathlib import Path
from cyborg.agent.images.spool import Spool
from cyborg.core.errors import Misconfigured

try:
    Spool(Path(sys.argv[1]), 1).open()
except Misconfigured as exc:
    print(exc.message)
"""


@pytest.mark.slow
def test_directory_of_another_agent_is_refused(make: Make, spool: Path) -> None:
    make()
    done = subprocess.run(
        [sys.executable, "-c", OTHER, spool], check=True, capture_output=True, text=True
    )
    assert f"another process uses {spool}" in done.stdout


def test_directory_that_others_can_read_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o750)  # The mode of mkdir depends on the umask.
    link = tmp_path / "link"
    (tmp_path / "private").mkdir(0o700)
    link.symlink_to(tmp_path / "private")
    file = tmp_path / "file"
    file.touch(0o600)
    for path in (folder, link, file):
        with pytest.raises(Misconfigured, match="expected a directory of the agent's user"):
            Spool(path, 1).open()
    with pytest.raises(Misconfigured, match="cannot be used: File exists"):
        Spool(file / "spool", 1).open()


@pytest.mark.parametrize("name", ["..", "lock", f"{UUID}\n", f"../{UUID}", UUID.upper(), ""])
def test_path_of_no_canonical_uuid_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a canonical uuid"):
        Spool(tmp_path, 1).path(name)
