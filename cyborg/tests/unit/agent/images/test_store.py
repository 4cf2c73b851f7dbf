# SPDX-License-Identifier: Apache-2.0
"""Images fetched from a Glance that answers well, badly or slowly."""

import hashlib
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.images.store import GlanceImageStore
from cyborg.core.errors import DriverFailed, TimedOut, Unavailable
from cyborg.testing.fake_glance import FakeGlance
from cyborg.tests.fixtures.hosts.image_store import make_store

DATA = bytes(range(256)) * 1000
NOBODY = "4d5b0d6a-8f8c-4f67-9f4e-3f2d1c0b9a87"
TEN_GIB = 10 << 30

Make = Callable[..., GlanceImageStore]


@pytest.fixture
def make(glance: FakeGlance, tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def build(**options: Any) -> GlanceImageStore:
            store = make_store(glance, tmp_path, **options)
            stack.callback(store.close)
            return store

        yield build


def files(spool: Path) -> set[str]:
    return {path.name for path in spool.iterdir()} - {"lock"}


def fetch(store: GlanceImageStore, uuid: str) -> bytes:
    with store.open(uuid) as image:
        return image.path.read_bytes()


def test_open_returns_a_private_file_with_the_data_and_the_properties(
    glance: FakeGlance, make: Make, spool: Path
) -> None:
    uuid = glance.add_image(DATA, **{"accel:function_id": "F1", "protected": False})
    with make().open(uuid) as image:
        assert image.path == spool / uuid
        assert image.path.read_bytes() == DATA
        assert (image.uuid, image.size) == (uuid, len(DATA))
        assert image.properties == {"accel:function_id": "F1"}
        assert stat.S_IMODE(image.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(spool.stat().st_mode) == 0o700
    assert files(spool) == {uuid}


def test_open_accepts_a_uuid_in_capitals(glance: FakeGlance, make: Make) -> None:
    uuid = glance.add_image(DATA)
    assert fetch(make(), uuid.upper()) == DATA


def test_open_accepts_data_without_declared_length(glance: FakeGlance, make: Make) -> None:
    glance.chunked = True
    assert fetch(make(), glance.add_image(DATA)) == DATA


@pytest.mark.parametrize(
    "name", ["..", "../../etc/passwd", f"{NOBODY}\n", f"{NOBODY}/../x", "", "a b", "é" * 36]
)
def test_open_refuses_a_name_that_is_no_uuid(
    name: str, glance: FakeGlance, make: Make, spool: Path
) -> None:
    with pytest.raises(DriverFailed, match="is not a uuid: refer to the image by its uuid"):
        fetch(make(), name)
    assert glance.requested_paths == []
    assert files(spool) == set()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"size": TEN_GIB}, "has 10737418240 bytes, more than the maximum of 1048576: .* raise"),
        ({"size": None}, "has no data"),
        ({"size": 0}, "has no data"),
        ({"status": "queued", "size": None}, "has status queued, expected active"),
        ({"status": "deactivated"}, "has status deactivated"),
        ({"container_format": "ova"}, "has container format ova, expected bare"),
        ({"os_hash_value": None}, "has no os_hash_value"),
        ({"os_hash_algo": None}, "has no os_hash_value"),
        (
            {"os_hash_algo": "md5", "os_hash_value": "0" * 32},
            "has a digest of md5, which is too weak",
        ),
        ({"os_hash_algo": "sha1", "os_hash_value": "0" * 40}, "has a digest of sha1"),
        ({"os_hash_value": "0" * 127}, "has a malformed os_hash_value, expected 128 hex"),
        ({"os_hash_value": "x" * 128}, "has a malformed os_hash_value"),
    ],
)
def test_open_refuses_an_image_by_its_metadata_without_a_download(
    attributes: Mapping[str, Any], message: str, glance: FakeGlance, make: Make, spool: Path
) -> None:
    uuid = glance.add_image(DATA, **attributes)
    with pytest.raises(DriverFailed, match=f"^image {uuid} {message}"):
        fetch(make(), uuid)
    assert glance.downloads == []
    assert files(spool) == set()


def test_open_checks_the_properties_before_the_download(glance: FakeGlance, make: Make) -> None:
    uuid = glance.add_image(DATA, region="A")

    def check(properties: Mapping[str, str]) -> None:
        raise DriverFailed(f"not for region {properties['region']}")

    with pytest.raises(DriverFailed, match="not for region A"), make().open(uuid, check):
        pytest.fail("the image was opened")
    assert glance.downloads == []


def test_open_of_more_data_than_declared_stops_the_download(
    glance: FakeGlance, make: Make, spool: Path
) -> None:
    uuid = glance.add_image(DATA)
    glance.sent[uuid] = DATA * 200
    with pytest.raises(DriverFailed, match="sends more than the 256000 bytes that it declares"):
        fetch(make(retries=2), uuid)
    assert glance.downloads == [uuid]
    assert files(spool) == set()


def test_open_of_fewer_data_than_declared_fails(
    glance: FakeGlance, make: Make, spool: Path
) -> None:
    uuid = glance.add_image(DATA)
    glance.sent[uuid] = DATA[:-1]
    with pytest.raises(DriverFailed, match="sent 255999 bytes and declares 256000"):
        fetch(make(), uuid)
    assert files(spool) == set()


def test_open_of_other_data_fails(glance: FakeGlance, make: Make, spool: Path) -> None:
    uuid = glance.add_image(DATA)
    glance.sent[uuid] = DATA[:-1] + b"x"
    with pytest.raises(DriverFailed, match=r"the sha512 digest of the data is .*, expected .*"):
        fetch(make(), uuid)
    assert files(spool) == set()


def test_open_uses_the_algorithm_of_the_image(glance: FakeGlance, make: Make) -> None:
    digest = hashlib.sha256(DATA).hexdigest().upper()
    assert fetch(make(), glance.add_image(DATA, os_hash_algo="sha256", os_hash_value=digest))


def test_open_of_broken_download_is_repeated(glance: FakeGlance, make: Make, spool: Path) -> None:
    uuid = glance.add_image(DATA)
    glance.breaks = 2
    assert fetch(make(retries=2), uuid) == DATA
    assert glance.downloads == [uuid] * 3
    assert files(spool) == {uuid}


@pytest.mark.parametrize("chunked", [False, True])
def test_open_of_download_that_always_breaks_is_unavailable(
    chunked: bool, glance: FakeGlance, make: Make, spool: Path
) -> None:
    uuid = glance.add_image(DATA)
    glance.breaks, glance.chunked = 9, chunked
    with pytest.raises(Unavailable, match=f"image {uuid}.* the connection to Glance broke"):
        fetch(make(retries=1), uuid)
    assert glance.downloads == [uuid] * 2
    assert files(spool) == set()


def test_open_of_dripping_data_ends_at_the_deadline(glance: FakeGlance, make: Make) -> None:
    uuid = glance.add_image(DATA)
    glance.drip = threading.Event()
    with pytest.raises(TimedOut, match=r"not complete in 0\.2 s; .*download_timeout"):
        fetch(make(timeout=0.2), uuid)


def test_open_without_answer_ends_at_the_deadline(glance: FakeGlance, make: Make) -> None:
    uuid = glance.add_image(DATA)
    glance.hang = threading.Event()
    with pytest.raises(TimedOut, match=r"not complete in 0\.2 s"):
        fetch(make(timeout=0.2), uuid)


def test_open_without_answer_is_unavailable(glance: FakeGlance, make: Make) -> None:
    uuid = glance.add_image(DATA)
    glance.hang = threading.Event()
    with pytest.raises(TimedOut, match=r"Glance did not answer in 0\.1 s"):
        fetch(make(request_timeout=0.1), uuid)


@pytest.mark.slow
def test_open_of_stalled_data_is_unavailable(glance: FakeGlance, make: Make, spool: Path) -> None:
    uuid = glance.add_image(DATA)
    glance.gate = threading.Event()
    with pytest.raises(TimedOut, match=r"Glance sent no data for 1 s"):
        fetch(make(request_timeout=1.0), uuid)
    assert files(spool) == set()


def test_open_of_unknown_image_fails(make: Make) -> None:
    with pytest.raises(DriverFailed, match=f"image {NOBODY} does not exist, or .* may not read"):
        fetch(make(), NOBODY)


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (302, DriverFailed, "a redirect, which is refused"),
        (400, DriverFailed, "answered 400"),
        (401, Unavailable, r"refused the credentials of \[glance\] \(401\)"),
        (403, DriverFailed, "may not read it"),
        (404, DriverFailed, "does not exist"),
        (429, Unavailable, "answered 429"),
        (503, Unavailable, "answered 503"),
    ],
)
@pytest.mark.parametrize("request_kind", ["status", "data_status"])
def test_open_reports_the_status_of_glance(
    request_kind: str,
    status: int,
    error: type[Exception],
    message: str,
    glance: FakeGlance,
    make: Make,
    spool: Path,
) -> None:
    uuid = glance.add_image(DATA)
    setattr(glance, request_kind, status)
    glance.headers = {"Location": f"{glance.url}/v2/elsewhere"}
    with pytest.raises(error, match=f"image {uuid}.* {message}"):
        fetch(make(), uuid)
    assert not any("elsewhere" in path for path in glance.requested_paths)
    assert files(spool) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("status", "requests"), [(401, 1), (403, 1), (404, 1), (503, 3)])
def test_open_repeats_only_what_may_succeed(
    status: int, requests: int, glance: FakeGlance, make: Make
) -> None:
    uuid = glance.add_image(DATA)
    glance.status = status
    with pytest.raises((DriverFailed, Unavailable)):
        fetch(make(retries=2), uuid)
    assert len(glance.requested_paths) == requests


@pytest.mark.parametrize("status", [204, 206])
def test_open_refuses_a_response_without_all_data(
    status: int, glance: FakeGlance, make: Make
) -> None:
    uuid = glance.add_image(DATA)
    glance.data_status = status
    with pytest.raises(DriverFailed, match=f"answered {status} .*, expected 200"):
        fetch(make(), uuid)


def test_open_refuses_compressed_data(glance: FakeGlance, make: Make) -> None:
    uuid = glance.add_image(DATA)
    glance.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(DriverFailed, match="with the encoding gzip, expected none"):
        fetch(make(), uuid)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "not JSON"),
        (b"[]", "expected an image as an object, found list"),
        (b'{"id": "x"}', "'x' is not a uuid"),
        (b'{"id": "%s"}' % NOBODY.encode(), f"image {NOBODY}, not "),
        (b"[" + b" " * (2 << 20), "more than 1048576 bytes of metadata"),
        (b'{"size": "5"}', "size: invalid value"),
        (b'{"id": "%s", "status": 5}' % NOBODY.encode(), "status: expected a string"),
    ],
)
def test_open_of_malformed_metadata_is_unavailable(
    body: bytes, message: str, glance: FakeGlance, make: Make
) -> None:
    uuid = glance.add_image(DATA)
    glance.body = body
    with pytest.raises(Unavailable, match=f"unexpected response from Glance: .*{message}"):
        fetch(make(), uuid)


def test_open_of_unreachable_glance_is_unavailable(glance: FakeGlance, make: Make) -> None:
    uuid = glance.add_image(DATA)
    glance.url = "http://127.0.0.1:1"
    with pytest.raises(Unavailable, match="Glance cannot be reached"):
        fetch(make(retries=1), uuid)


def test_open_after_close_is_unavailable(glance: FakeGlance, make: Make) -> None:
    store = make()
    store.close()
    with pytest.raises(Unavailable, match="the agent is stopping"):
        fetch(store, glance.add_image(DATA))


def test_close_stops_a_download(glance: FakeGlance, make: Make, spool: Path) -> None:
    uuid = glance.add_image(DATA)
    glance.drip = threading.Event()
    store = make(retries=5)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            fetch(store, uuid)
        except Unavailable as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    while not files(spool):
        thread.join(0.01)
    store.close()
    thread.join(120)
    assert [str(error) for error in errors] == ["the agent is stopping"]
    assert files(spool) == set()
