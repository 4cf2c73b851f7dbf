# SPDX-License-Identifier: Apache-2.0
"""Lookup of objects by abbreviated uuids."""

import argparse
from typing import Any

import pytest

from cyborg.cli.common.collection import Collection
from cyborg.cli.common.errors import CommandError
from cyborg.cli.common.rest import RestClient

FIRST_UUID = "a0000000-0000-4000-8000-00000000000a"
SECOND_UUID = "a0000001-0000-4000-8000-00000000000b"
THINGS = Collection("/things", (("UUID", "uuid"),), key="device_things")


class Listing(RestClient):
    """A service that lists two objects and counts the requests."""

    def __init__(self) -> None:
        super().__init__(argparse.Namespace())
        self.calls = 0

    def list_all(self, path: str, key: str, /, **params: Any) -> list[dict[str, Any]]:
        assert (path, key, params) == ("/things", "device_things", {})
        self.calls += 1
        return [
            {"uuid": FIRST_UUID, "name": "beef"},
            {"uuid": SECOND_UUID, "name": None, "rp": FIRST_UUID},
        ]


def find(text: str, field: str = "uuid") -> str:
    return THINGS.find_uuid(Listing(), text, field)


@pytest.mark.parametrize(
    "text", ["a0000000", "A0000000", FIRST_UUID[:9], FIRST_UUID[:20], FIRST_UUID]
)
def test_find_uuid_prefix_returns_uuid(text: str) -> None:
    assert find(text) == FIRST_UUID


@pytest.mark.parametrize(
    "text", ["beef", "none", "abc", "dddd", "../x", FIRST_UUID.replace("-", "")]
)
def test_find_uuid_other_text_is_unchanged(text: str) -> None:
    assert find(text) == text


def test_find_uuid_ambiguous_prefix_raises() -> None:
    message = (
        rf"^a000 is ambiguous: 2 device things match \({FIRST_UUID}, {SECOND_UUID}\); "
        "add more digits$"
    )
    with pytest.raises(CommandError, match=message):
        find("a000")


def test_find_uuid_other_field() -> None:
    assert find("a000", "rp") == FIRST_UUID


def test_find_uuids_sends_at_most_one_request() -> None:
    rest, uuids = Listing(), [FIRST_UUID, SECOND_UUID]
    assert THINGS.find_uuids(rest, uuids) == uuids
    assert rest.calls == 0
    assert THINGS.find_uuids(rest, ["a0000000", "a0000001"]) == uuids
    assert rest.calls == 1


CARDS = Collection(
    "/things",
    (("UUID", "uuid"),),
    key="device_things",
    labels=lambda row: (row["name"], f"host/{row['name']}"),
    expected="the name",
)


def test_find_uuid_label_returns_uuid() -> None:
    found = [CARDS.find_uuid(Listing(), text) for text in ("beef", "host/beef", "a0000001")]
    assert found == [FIRST_UUID, FIRST_UUID, SECOND_UUID]
    rest = Listing()
    assert CARDS.find_uuids(rest, [FIRST_UUID, "A" * 32]) == [FIRST_UUID, "A" * 32]
    assert rest.calls == 0


def test_find_uuid_unknown_or_ambiguous_label_raises() -> None:
    message = "none of the device things is 'x/y': give the uuid, its beginning, or the name"
    with pytest.raises(CommandError, match=message):
        CARDS.find_uuid(Listing(), "x/y")
    with pytest.raises(CommandError, match="none of the device things is ''"):
        CARDS.find_uuid(Listing(), "")
    both = Collection("/things", (), key="device_things", labels=lambda row: ("card",))
    with pytest.raises(CommandError, match="card is ambiguous: 2 device things"):
        both.find_uuid(Listing(), "card")
