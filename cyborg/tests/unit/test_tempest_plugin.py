# SPDX-License-Identifier: Apache-2.0
"""The tests in ``cyborg.tempest_plugin`` have stable ids, which operators select."""

import re
from collections import Counter
from pathlib import Path

import pytest

import cyborg

FOLDER = Path(cyborg.__file__).parent / "tempest_plugin" / "api"
TEST = re.compile(
    r'^    @decorators\.idempotent_id\("([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"\)\n'
    r"    def (test_\w+)",
    re.MULTILINE,
)


@pytest.mark.static
def test_each_test_has_an_id_of_its_own() -> None:
    ids: Counter[str] = Counter()
    for path in FOLDER.glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        found = TEST.findall(text)
        assert [name for _, name in found] == re.findall(r"    def (test_\w+)", text), path.name
        ids.update(id_ for id_, _ in found)
    assert len(ids) > 10
    assert {id_ for id_, number in ids.items() if number > 1} == set()
