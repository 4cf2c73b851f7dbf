# SPDX-License-Identifier: Apache-2.0
"""Lookup of objects by abbreviated uuids and by names."""

import argparse
from dataclasses import replace
from typing import Any

import pytest

from cyborg.cli.common.rest import Collection, CommandError, RestClient

FIRST_UUID = "a0000000-0000-4000-8000-00000000000a"
SECOND_UUID = "a0000001-0000-4000-8000-00000000000b"
BEEF_UUID = "beef0000-0000-4000-8000-00000000000c"
ROWS: list[dict[str, Any]] = [
    {"uuid": FIRST_UUID, "name": "beef"},
    {"uuid": SECOND_UUID, "name": "card", "rp": FIRST_UUID},
    {"uuid": BEEF_UUID, "name": "card"},
]
THINGS = Collection("/things", (("UUID", "uuid"),), key="device_things")
PROFILES = replace(THINGS, has_names=True)
CARDS = replace(THINGS, filters=lambda text: {"name": text}, expected="the name")
MESSAGES = replace(THINGS, has_objects=False)


class Listing(RestClient):
    """A service with three objects; it counts the requests."""

    def __init__(self) -> None:
        super().__init__(argparse.Namespace())
        self.calls = 0

    def call(self, method: str, path: str, body: Any = None, params: Any = None, *_: Any) -> Any:
        assert method == "GET"
        self.calls += 1
        if params is None:
            return next(row for row in self._named(path.removeprefix("/things/")))
        assert path == "/things"
        if params.get("sort_key") == "uuid":
            rows = [row for row in ROWS if row["uuid"] > params["marker"]][: params["limit"]]
        elif params:
            rows = self._named(params["name"])[: params["limit"]]
        else:
            rows = ROWS
        return {"device_things": rows}

    def _named(self, name: str) -> list[dict[str, Any]]:
        if "/" in name:
            raise CommandError("not a name", 400)
        return [row for row in ROWS if row["name"] == name]


def find(text: str, collection: Collection = THINGS, field: str = "uuid", calls: int = 1) -> str:
    rest = Listing()
    found = collection.find_uuid(rest, text, field)
    assert rest.calls == calls
    return found


@pytest.mark.parametrize("text", ["a0000000", "A0000000", FIRST_UUID[:9], FIRST_UUID[:20]])
def test_find_uuid_prefix_returns_uuid(text: str) -> None:
    assert find(text) == FIRST_UUID
    assert find(text, CARDS, calls=2) == FIRST_UUID


@pytest.mark.parametrize("collection", [THINGS, PROFILES, CARDS])
@pytest.mark.parametrize("text", [FIRST_UUID, FIRST_UUID.replace("-", ""), "A" * 32])
def test_find_uuid_whole_uuid_sends_no_request(collection: Collection, text: str) -> None:
    assert find(text, collection, calls=0) == text


@pytest.mark.parametrize(("text", "calls"), [("none", 0), ("abc", 0), ("../x", 0), ("dddd", 1)])
def test_find_uuid_other_text_is_unchanged(text: str, calls: int) -> None:
    assert find(text, calls=calls) == text
    assert find(text, PROFILES, calls=calls) == text


def test_find_uuid_name_precedes_prefix() -> None:
    assert find("beef") == BEEF_UUID
    assert find("beef", PROFILES, calls=2) == "beef"
    assert find("beef", CARDS) == FIRST_UUID


def test_find_uuid_ambiguous_text_raises() -> None:
    message = f"^a000 is ambiguous, .* device things such as {FIRST_UUID} and {SECOND_UUID}: add"
    with pytest.raises(CommandError, match=message):
        find("a000")
    message = f"^card is ambiguous, .* device things such as {SECOND_UUID} and {BEEF_UUID}: give"
    with pytest.raises(CommandError, match=message):
        find("card", CARDS)


@pytest.mark.parametrize("text", ["x", "x/y", ""])
def test_find_uuid_unknown_name_raises(text: str) -> None:
    message = f"none of the device things is '{text}': give the uuid, its beginning, or the name"
    with pytest.raises(CommandError, match=message):
        find(text, CARDS)


def test_find_uuid_other_field() -> None:
    assert find("a000", field="rp") == FIRST_UUID


def test_read_each_finds_objects_without_a_path() -> None:
    rest = Listing()
    uuids = [BEEF_UUID, FIRST_UUID]
    assert [row["uuid"] for row in MESSAGES.read_each(rest, uuids)] == uuids
    assert rest.calls == 2
    with pytest.raises(CommandError, match="no device thing a0000002"):
        MESSAGES.read_each(rest, ["a0000002"])
