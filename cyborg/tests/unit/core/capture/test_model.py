# SPDX-License-Identifier: Apache-2.0
"""The format of captures: what is read back, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.capture import model
from cyborg.core.capture.model import Capture, Folder, Uevent
from cyborg.core.errors import Invalid

DEVICE = "sys/devices/pci0000:3a/0000:3b:00.0"
CAPTURE = Capture(
    "a card",
    {
        DEVICE: Folder({"vendor": b"0x8086\n", "config": b"\x86\x80", "reset": None}),
        "sys/bus/pci/devices": Folder({}, {"0000:3b:00.0": f"../../../{DEVICE[4:]}"}),
        "sys/class/net": Folder(),
    },
    kernel="6.1.0",
    names={"0000:3b:00.0": ("Intel", None)},
    unreadable={"sys/a": "EACCES"},
    uevents=(Uevent(0.5, "add", "pci", "/devices/pci0000:3a"),),
    nvml={"0000:3b:00.0": {"memory": 8, "max_vgpus": {"A10-6Q": 4}}},
)
HEADER = {"format": model.FORMAT, "version": model.VERSION, "source": "x"}


def text_of(*lines: Any) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def test_parse_returns_what_was_dumped() -> None:
    assert model.parse("".join(model.dump(CAPTURE))) == CAPTURE


@given(content=st.binary(max_size=40))
def test_parse_returns_every_content(content: bytes) -> None:
    capture = Capture("x", {"proc": Folder({"crypto": content})})
    assert model.parse("".join(model.dump(capture))) == capture


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"dir": "etc"}, "is no folder in lib, proc, sys"),
        ({"dir": "/sys"}, "is no folder in"),
        ({"dir": "sys/../etc"}, "is not a valid file name"),
        ({"dir": "sys//a"}, "is not a valid file name"),
        ({"dir": "sys/a\nb"}, "control character"),
        ({"dir": "sys", "files": {"..": "x"}}, "is not a valid file name"),
        ({"dir": "sys", "files": {"a/b": "x"}}, "is not a valid file name"),
        ({"dir": "sys", "files": {"a": 3}}, "TypeError"),
        ({"dir": "sys", "files": {"a": {"base64": "?"}}}, "base64"),
        ({"dir": "sys", "files": {"a": "x"}, "links": {"a": "b"}}, "a file and a link"),
        ({"dir": "sys", "links": {"a": "/etc"}}, "is not a valid file name"),
        ({"dir": "sys", "links": {"a": "../../etc"}}, "leaves the tree"),
        ({"dir": "sys", "links": {"a": "b/../../../etc"}}, "is not a valid file name"),
        ({"dir": "sys", "links": {"a": ""}}, "is not a valid file name"),
        ({"uevent": [1]}, "ValueError"),
        ({"uevent": [float("inf"), "add", "pci", "/a"]}, "expected 0 to"),
        ({"uevent": [float("nan"), "add", "pci", "/a"]}, "expected 0 to"),
        ({"uevent": [-1, "add", "pci", "/a"]}, "expected 0 to"),
        ([], "expected an object"),
    ],
)
def test_parse_refuses_a_line(line: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        model.parse(text_of(HEADER, line))


def test_parse_refuses_a_folder_below_a_link_or_a_file() -> None:
    for above in ({"links": {"a": "../lib"}}, {"files": {"a": "x"}}):
        with pytest.raises(Invalid, match="which is no folder"):
            model.parse(text_of(HEADER, {"dir": "sys", **above}, {"dir": "sys/a/b"}))


def test_parse_refuses_a_folder_that_occurs_twice() -> None:
    with pytest.raises(Invalid, match="line 3: sys occurs twice"):
        model.parse(text_of(HEADER, {"dir": "sys"}, {"dir": "sys"}))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": "tar"}, "it is no capture"),
        ({"version": 2}, "version 2 is unknown: expected 1"),
        ({"source": " "}, "printable characters"),
        ({"source": "a\nb"}, "printable characters"),
        ({"scrubbed": 1}, "TypeError"),
        ({"names": []}, "expected an object"),
    ],
)
def test_parse_refuses_a_header(header: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        model.parse(text_of({**HEADER, **header}))


def test_parse_refuses_what_exceeds_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(HEADER, {"dir": "sys", "files": {"a": "xx", "b": "x"}}, {"dir": "proc"})
    for name, message in (
        ("MAX_TEXT", "more than 1 bytes"),
        ("MAX_FILE", "a file has 2 bytes, expected up to 1"),
        ("MAX_FOLDERS", "2 folders, expected up to 1"),
        ("MAX_NAMES", "up to 1"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(model, name, 1)
            with pytest.raises(Invalid, match=message):
                model.parse(text)


@pytest.mark.parametrize("text", ["", "\n", "{", "[" * 100_000])
def test_parse_refuses_what_is_no_capture(text: str) -> None:
    with pytest.raises(Invalid):
        model.parse(text)


def test_merge_unites_the_cards() -> None:
    other = Capture("b", {"sys/bus/pci/devices": Folder({}, {"0000:5e:00.0": "../../../d"})})
    merged = model.merge("both", [CAPTURE, other])
    assert sorted(merged.folders["sys/bus/pci/devices"].links) == ["0000:3b:00.0", "0000:5e:00.0"]
    assert merged.folders[DEVICE] == CAPTURE.folders[DEVICE]
    assert (merged.kernel, merged.names, merged.uevents) == ("6.1.0", CAPTURE.names, ())
    assert merged.nvml == CAPTURE.nvml


def test_merge_refuses_different_files() -> None:
    other = Capture("b", {DEVICE: Folder({"vendor": b"0x10de\n"})})
    with pytest.raises(Invalid, match=f"the captures differ in {DEVICE}/vendor"):
        model.merge("both", [CAPTURE, other])
