# SPDX-License-Identifier: Apache-2.0
"""The search of an image by its properties."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from cyborg.agent.images.store import GlanceImageStore
from cyborg.core.errors import DriverFailed, Unavailable
from cyborg.testing.fake_glance import FakeGlance
from cyborg.tests.fixtures.hosts.image_store import make_store

FUNCTION: dict[str, Any] = {"accel:function_id": "D8424DC4A4A3C413F89E433683F9040B"}
PROJECT = "a" * 32


@pytest.fixture
def store(glance: FakeGlance, tmp_path: Path) -> Iterator[GlanceImageStore]:
    store = make_store(glance, tmp_path, trusted_projects=(PROJECT,))
    yield store
    store.close()


def test_find_returns_the_only_image(glance: FakeGlance, store: GlanceImageStore) -> None:
    uuid = glance.add_image(**FUNCTION)
    glance.add_image(**FUNCTION | {"accel:function_id": "another"})
    glance.add_image(status="deactivated", **FUNCTION)
    assert store.find(FUNCTION) == uuid
    for path in glance.requested_paths:
        query = {key: values[0] for key, values in parse_qs(urlsplit(path).query).items()}
        assert FUNCTION.items() <= query.items()
        assert (query["status"], query["limit"]) == ("active", "5")


def test_find_returns_an_image_of_a_trusted_project(
    glance: FakeGlance, store: GlanceImageStore
) -> None:
    uuid = glance.add_image(owner=PROJECT, visibility="private", **FUNCTION)
    assert store.find(FUNCTION) == uuid


@pytest.mark.parametrize("visibility", ["private", "shared", "community"])
def test_find_ignores_the_image_of_a_tenant(
    visibility: str, glance: FakeGlance, store: GlanceImageStore
) -> None:
    glance.add_image(visibility=visibility, owner="b" * 32, **FUNCTION)
    with pytest.raises(DriverFailed, match=r"no active image with accel:function_id=D8424.*trust"):
        store.find(FUNCTION)


def test_find_of_several_images_names_three(glance: FakeGlance, store: GlanceImageStore) -> None:
    uuids = [glance.add_image(**FUNCTION) for _ in range(4)]
    with pytest.raises(DriverFailed, match="several images have accel:function_id=") as raised:
        store.find(FUNCTION)
    assert sum(uuid in raised.value.message for uuid in uuids) == 3


def test_find_does_not_believe_a_service_that_ignores_filters(
    glance: FakeGlance, store: GlanceImageStore
) -> None:
    glance.add_image(**FUNCTION)
    glance.body = b'{"images": [{"id": "4d5b0d6a-8f8c-4f67-9f4e-3f2d1c0b9a87"}]}'
    with pytest.raises(DriverFailed, match="no active image"):
        store.find(FUNCTION)


def test_find_without_properties_asks_nothing(glance: FakeGlance, store: GlanceImageStore) -> None:
    with pytest.raises(DriverFailed, match="without a property"):
        store.find({})
    assert glance.requested_paths == []


def test_find_without_a_list_is_unavailable(glance: FakeGlance, store: GlanceImageStore) -> None:
    glance.body = b'{"images": 5}'
    with pytest.raises(Unavailable, match="no list of images"):
        store.find(FUNCTION)


def test_find_of_failing_service_is_unavailable(
    glance: FakeGlance, store: GlanceImageStore
) -> None:
    glance.status = 503
    with pytest.raises(Unavailable, match=r"search of an image: .*503"):
        store.find(FUNCTION)
