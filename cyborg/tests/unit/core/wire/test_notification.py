# SPDX-License-Identifier: Apache-2.0
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import cyborg
from cyborg.core.wire import notification as notes
from cyborg.core.wire.notification import Event, Priority, Schema, build_notification

AT = datetime(2026, 1, 2, 3, 4, 5, 678)
GOLDEN = json.loads((Path(__file__).parent / "golden" / "notifications-1.0.json").read_text())
PAGE = Path(cyborg.__file__).parents[1] / "doc" / "source" / "admin" / "notifications.rst"


def row(schema: Schema) -> dict[str, Any]:
    values = {"device_profile_group_id": 0, "groups": [{"resources:FPGA": "1"}]}
    return {name: values.get(name, f"the {name}") for name in schema.fields}


def build(event: Event, values: dict[str, Any]) -> dict[str, Any]:
    return build_notification(event, values, notification_id="the id", at=AT, request_id="req-1")


def test_build_notification_matches_golden() -> None:
    """A change of the golden messages requires a new version of the schema."""
    made = [build(event, row(notes.schema_of(event))) for event in Event]
    assert made == GOLDEN


@pytest.mark.parametrize("event", Event)
def test_event_type_has_noun_verb_and_phase(event: Event) -> None:
    noun, verb, phase = event.split(".")
    assert noun in notes.SCHEMAS
    assert verb.isalpha()
    assert phase in ("start", "end", "error")
    assert event.description.endswith(".")
    assert notes.priority_of(event) is (Priority.ERROR if phase == "error" else Priority.INFO)


def test_build_notification_optional_fields_may_be_missing() -> None:
    values = row(notes.SCHEMAS["deployable"])
    del values["error"], values["image"]
    data = build(Event.PROGRAMMED, values | {"id": 7, "secret": "x"})["payload"]["data"]
    assert list(data) == list(notes.SCHEMAS["deployable"].fields)
    assert (data["error"], data["image"]) == (None, None)


@pytest.mark.parametrize("schema", notes.SCHEMAS.values(), ids=lambda s: s.name)
def test_build_notification_missing_field_raises_key_error(schema: Schema) -> None:
    event = next(event for event in Event if notes.schema_of(event) is schema)
    for name in set(schema.fields) - {"error", "image"}:
        values = row(schema)
        del values[name]
        with pytest.raises(KeyError, match=name):
            build(event, values)


def test_docs_list_every_event_type() -> None:
    text = PAGE.read_text(encoding="utf-8")
    documented = dict(re.findall(r"^``([a-z_]+\.[a-z]+\.[a-z]+)`` +(\S.*)$", text, re.MULTILINE))
    assert documented == {str(event): event.description for event in notes.Event}


def test_docs_list_every_schema() -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^``(\w+)`` (\d+\.\d+)\n((?:    .*\n)+)", text, re.MULTILINE)
    documented = {
        name: (version, re.findall(r"``(\w+)``", fields)) for name, version, fields in blocks
    }
    assert documented == {s.name: (s.version, list(s.fields)) for s in notes.SCHEMAS.values()}
