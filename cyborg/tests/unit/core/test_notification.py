# SPDX-License-Identifier: Apache-2.0
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import cyborg
from cyborg.core import notification as notes
from cyborg.core.notification import Event, Priority, Schema, notification

AT = datetime(2026, 1, 2, 3, 4, 5, 678)
GOLDEN = json.loads((Path(__file__).parent / "golden" / "notifications-1.0.json").read_text())
PAGE = Path(cyborg.__file__).parents[1] / "doc" / "source" / "admin" / "notifications.rst"


def row(schema: Schema) -> dict[str, Any]:
    values = {"device_profile_group_id": 0, "groups": [{"resources:FPGA": "1"}]}
    return {name: values.get(name, f"the {name}") for name in schema.fields}


def build(event: Event, values: dict[str, Any]) -> dict[str, Any]:
    return notification(event, values, id_="the id", at=AT, request_id="req-1")


def test_messages_are_what_they_were() -> None:
    """A change here is a change of what listeners get: it raises the version of the schema."""
    made = [build(event, row(notes.schema_of(event))) for event in Event]
    assert made == GOLDEN


@pytest.mark.parametrize("event", Event)
def test_every_type_is_a_noun_a_verb_and_a_phase(event: Event) -> None:
    noun, verb, phase = event.split(".")
    assert noun in notes.SCHEMAS
    assert verb.isalpha()
    assert phase in ("start", "end", "error")
    assert notes.SENTENCES[event].endswith(".")
    assert notes.priority_of(event) is (Priority.ERROR if phase == "error" else Priority.INFO)


def test_a_row_may_hold_more_and_lack_what_is_not_to_be_said() -> None:
    values = row(notes.SCHEMAS["deployable"])
    del values["error"], values["image"]
    data = build(Event.PROGRAMMED, values | {"id": 7, "secret": "x"})["payload"]["data"]
    assert list(data) == list(notes.SCHEMAS["deployable"].fields)
    assert (data["error"], data["image"]) == (None, None)


@pytest.mark.parametrize("schema", notes.SCHEMAS.values(), ids=lambda s: s.name)
def test_a_row_that_lacks_a_field_is_a_mistake(schema: Schema) -> None:
    event = next(event for event in Event if notes.schema_of(event) is schema)
    for name in set(schema.fields) - {"error", "image"}:
        values = row(schema)
        del values[name]
        with pytest.raises(KeyError, match=name):
            build(event, values)


def test_the_page_has_every_type_with_its_sentence() -> None:
    text = PAGE.read_text(encoding="utf-8")
    told = dict(re.findall(r"^``([a-z_]+\.[a-z]+\.[a-z]+)`` +(\S.*)$", text, re.MULTILINE))
    assert told == {str(event): sentence for event, sentence in notes.SENTENCES.items()}


def test_the_page_has_every_schema_with_its_fields() -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^``(\w+)`` (\d+\.\d+)\n((?:    .*\n)+)", text, re.MULTILINE)
    told = {name: (version, re.findall(r"``(\w+)``", fields)) for name, version, fields in blocks}
    assert told == {s.name: (s.version, list(s.fields)) for s in notes.SCHEMAS.values()}
