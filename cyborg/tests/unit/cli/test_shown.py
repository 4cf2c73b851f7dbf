# SPDX-License-Identifier: Apache-2.0
from cyborg.cli import shown

COLUMNS = (("UUID", "uuid"), ("Board", "std_board_info"))


def test_structures_are_words_for_people_and_values_for_machines() -> None:
    _, rows = shown.table(COLUMNS, [{"uuid": "u", "std_board_info": '{"class": "0108"}'}])
    assert rows[0][0] == "u"
    assert rows[0][1].human_readable() == "class=0108"
    assert rows[0][1].machine_readable() == {"class": "0108"}


def test_nested_structures_stay_readable() -> None:
    assert shown.words([{"a": "1", "b": {"c": [1, None]}}, "x"]) == "a=1 b=(c=(1, )), x"


def test_a_pci_address_is_one_word() -> None:
    handle = {"domain": "0000", "bus": "3b", "device": "00", "function": "1"}
    assert shown.words(handle) == "0000:3b:00.1"
    assert shown.words({**handle, "asked_type": "t"}).startswith("domain=0000 bus=3b ")
    assert shown.cell(handle).machine_readable() == handle


def test_text_that_only_looks_like_json_stays_text() -> None:
    assert shown.cell("{not json") == "{not json"
    for text in ("[" * 4096, '{"a":' * 800, "[" * 900 + "]" * 900):
        assert shown.cell(text) == text


def test_a_missing_field_is_empty() -> None:
    headings, values = shown.one(COLUMNS, {})
    assert headings == ("UUID", "Board")
    assert [v.machine_readable() for v in values] == [None, None]
    assert [v.human_readable() for v in values] == ["", ""]
