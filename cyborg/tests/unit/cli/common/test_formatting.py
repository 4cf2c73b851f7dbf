# SPDX-License-Identifier: Apache-2.0
from cyborg.cli.common import formatting

COLUMNS = (("UUID", "uuid"), ("Board", "std_board_info"))


def test_build_object_structure_has_text_and_value() -> None:
    _, cells = formatting.build_object(
        COLUMNS, {"uuid": "u", "std_board_info": '{"class": "0108"}'}
    )
    assert cells[0] == "u"
    assert cells[1].human_readable() == "class=0108"
    assert cells[1].machine_readable() == {"class": "0108"}


def test_to_text_nested_structure() -> None:
    assert formatting.to_text([{"a": "1", "b": {"c": [1, None]}}, "x"]) == "a=1 b=(c=(1, )), x"


def test_to_text_pci_address_is_joined() -> None:
    handle = {"domain": "0000", "bus": "3b", "device": "00", "function": "1"}
    assert formatting.to_text(handle) == "0000:3b:00.1"
    assert formatting.to_text({**handle, "asked_type": "t"}).startswith("domain=0000 bus=3b ")
    assert formatting.to_cell(handle).machine_readable() == handle


def test_only_text_that_the_service_makes_from_json_is_parsed() -> None:
    for text in ("{not json", "[" * 4096, '{"a":' * 800, "[" * 900 + "]" * 900):
        assert formatting.read_value({"std_board_info": text}, "std_board_info") == text
    assert formatting.read_value({"std_board_info": "[1]"}, "std_board_info") == [1]
    assert formatting.read_value({"description": "[1]"}, "description") == "[1]"


def test_to_cell_boolean_has_the_spelling_of_json() -> None:
    assert formatting.to_cell(True).human_readable() == "true"
    assert formatting.to_cell(True).machine_readable() is True
    assert formatting.to_text({"a": [False]}) == "a=(false)"


def test_build_object_missing_field_is_empty() -> None:
    headings, values = formatting.build_object(COLUMNS, {})
    assert headings == ("UUID", "Board")
    assert [v.machine_readable() for v in values] == [None, None]
    assert [v.human_readable() for v in values] == ["", ""]


FIRST_UUID, SIMILAR_UUID = (
    "a0000000-0000-4000-8000-00000000000a",
    "a0000000-0001-4000-8000-00000000000a",
)


def test_uuid_digits_are_unambiguous() -> None:
    def shorten(*uuids: str | None) -> list[str]:
        digits = formatting.uuid_digits(uuids)
        return [str(formatting.to_cell(uuid, digits)) for uuid in uuids if uuid is not None]

    assert shorten(FIRST_UUID, FIRST_UUID, None) == [FIRST_UUID[:8], FIRST_UUID[:8]]
    assert shorten(FIRST_UUID, SIMILAR_UUID) == [FIRST_UUID[:13], SIMILAR_UUID[:13]]
    assert formatting.to_cell(FIRST_UUID) == FIRST_UUID


def test_to_cell_time_is_shown_without_microseconds() -> None:
    time = "2026-11-21T15:45:13.899184+00:00"
    cell = formatting.to_cell(time)
    assert cell.human_readable() == "2026-11-21T15:45:13Z"
    assert cell.machine_readable() == time


def test_format_address_returns_one_string() -> None:
    handle = {"domain": "0000", "bus": "3b", "device": "00", "function": "1"}
    assert (
        formatting.format_address(handle)
        == formatting.format_address({**handle, "vgpu_mark": "x"})
        == "0000:3b:00.1"
    )
    assert formatting.format_address({"mdev": "x"}) == "mdev=x"
    assert formatting.format_address(None) is None


def test_cells_are_sortable_with_empty_last() -> None:
    values = [None, "b", "2026-11-21T15:45:13+00:00", FIRST_UUID, {"k": 1}, "a"]
    cells = sorted(formatting.to_cell(value, 8) for value in values)
    assert [str(cell) for cell in cells][-1] == ""
