# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import pytest

import cyborg
from cyborg.core import notification as notes
from cyborg.core.notification import Event

PAGE = Path(cyborg.__file__).parents[1] / "doc" / "source" / "admin" / "notifications.rst"


@pytest.mark.parametrize("event", Event)
def test_event_type_has_noun_verb_and_phase(event: Event) -> None:
    noun, verb, phase = event.split(".")
    assert noun in notes.SCHEMAS
    assert verb.isalpha()
    assert phase in ("start", "end", "error")
    assert event.description.endswith(".")


@pytest.mark.static
def test_docs_list_every_event_type() -> None:
    text = PAGE.read_text(encoding="utf-8")
    documented = dict(re.findall(r"^``([a-z_]+\.[a-z]+\.[a-z]+)`` +(\S.*)$", text, re.MULTILINE))
    assert documented == {str(event): event.description for event in notes.Event}


@pytest.mark.static
def test_docs_list_every_schema() -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^``(\w+)`` (\d+\.\d+)\n((?:    .*\n)+)", text, re.MULTILINE)
    documented = {
        name: (version, re.findall(r"``(\w+)``", fields)) for name, version, fields in blocks
    }
    assert documented == {s.name: (s.version, list(s.fields)) for s in notes.SCHEMAS.values()}
