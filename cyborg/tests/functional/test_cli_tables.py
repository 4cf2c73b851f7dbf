# SPDX-License-Identifier: Apache-2.0
"""Compare table and JSON of every list command on a filled service with golden files.

``CYBORG_TEST_WRITE_GOLDEN=1`` rewrites the files; review the difference before you commit it.
"""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

import cyborg
from cyborg.conductor.audit import runner
from cyborg.tests.fixtures.cli.golden import compare
from cyborg.tests.fixtures.clouds.filled_service import INSTANCE, Client, filled_service
from cyborg.tests.fixtures.machine.processes import wait_until

__all__ = ["filled_service"]

FOLDER = Path(__file__).parent / "cli_golden"
PICTURE = FOLDER.parents[3] / "doc" / "source" / "admin" / "topology.svg"
WIDTH = 80
LISTS = (
    "accelerator-list",
    "arq-list",
    "attribute-list",
    "audit",
    "deployable-list",
    "device-context-list",
    "device-list",
    "device-profile-capacity one-fpga",
    "device-profile-explain one-fpga",
    "device-profile-explain two-fpgas --providers",
    "device-profile-list",
    "driver-list",
    "hardware-list",
    "job-list",
    "outbox-list",
    "service-list --sort-column Service --sort-column Host",
    "service-list --kind backend",
)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SHORT = re.compile(r"(?<![\w.:-])[0-9a-f]{8}(?![\w.:-])")
# No age is compared: what is compared grows older on a slow machine. format_age() has doctests.
_AGE = re.compile(r"(?:(?<=oldest for )|(?<=last seen ))\d+ (?:s|min|h|d)\b")
_HASH = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:\+00:00|Z)")


class Stable:
    """Replace values that differ between runs: each uuid by its number, each time by one time."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def text(self, text: str) -> str:
        """Return a text of the same width, with the same uuids in the same places."""
        text = _UUID.sub(lambda m: self._number(m[0]) + m[0][8:].translate(_DIGITS), text)
        text = _SHORT.sub(lambda m: self._number(m[0]), text)
        text = _HASH.sub("0" * 64, text)
        # 3600 s at the start; the width of the column is the same for another hour.
        text = re.sub(r"\d{4} s ago", "3600 s ago", text)
        # The abbreviated name of the hidden profile of a device context.
        text = re.sub(r"ctx-[0-9a-f-]+~", lambda m: f"ctx-{'0' * (len(m[0]) - 5)}~", text)
        return _TIME.sub(
            lambda m: "2026-01-01T00:00:00Z" if m[0].endswith("Z") else "2026-01-01T00:00:00+00:00",
            text,
        )

    def _number(self, uuid: str) -> str:
        return self._known.setdefault(uuid[:8], f"{len(self._known) + 1:08}")


_DIGITS = str.maketrans("0123456789abcdef", "0" * 16)


@pytest.fixture(autouse=True)
def short_recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pause of an audit: the conductor runs in this process."""
    monkeypatch.setattr(runner, "RECHECK_DELAY", 0.2)


def file_name(command: str) -> str:
    """Return the name of a command's files."""
    plain = re.sub(r" (--sort-column \w+|one-fpga|two-fpgas)", "", command)
    return plain.replace(" --kind ", "-").replace(" --", "-")


def test_each_list_command_has_a_golden_file() -> None:
    verbs = {entry.name for entry in metadata.entry_points(group="cyborg.cli")}
    # This service has no devices with layouts (test_layouts.py), no Nova
    # (test_attachment_commands.py), and no device sets (unit/cli/test_device_sets.py).
    others = {"device-layout-list", "attachment-list", "device-set-list"}
    assert {name for name in verbs if name.endswith("-list")} - others <= {
        command.split()[0] for command in LISTS
    }


@pytest.mark.parametrize("command", LISTS)
def test_list_table_fits_80_columns_with_one_line_per_row(
    filled_service: Client, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    out, _ = filled_service.run(command, code=int(command == "audit"))
    assert max(map(len, out.splitlines())) <= WIDTH
    if command != "audit":
        listed = json.loads(filled_service.run(f"{command} -f json")[0])
        assert len(out.splitlines()) == len(listed) + 4
    assert not re.search(r"T\d\d:\d\d:\d\d\.\d", out)
    compare(FOLDER / f"{file_name(command)}.txt", Stable().text(out))


@pytest.mark.parametrize("command", LISTS)
def test_list_json_is_stable_and_has_full_uuids(filled_service: Client, command: str) -> None:
    parsed = json.loads(filled_service.run(f"{command} -f json", code=int(command == "audit"))[0])
    assert parsed
    for row in parsed:
        assert all(_UUID.fullmatch(row[key]) for key in ("UUID",) if key in row)
        assert isinstance(row.get("Address"), str | None)
        assert "miss model info" not in json.dumps(row)
    if command == "job-list":
        for row in parsed:
            assert row["Attempts"] > 0
            row["Attempts"] = 2  # a slow machine needs more of them for the same job
    text = json.dumps(parsed, indent=1) + "\n"
    compare(FOLDER / f"{file_name(command)}.json", Stable().text(text))


@pytest.mark.parametrize("command", ["top", "topology"])
def test_view_is_stable(filled_service: Client, command: str) -> None:
    text = _AGE.sub("an age", filled_service.run(command)[0])
    compare(FOLDER / f"{command}.txt", Stable().text(text))


def test_picture_is_that_of_the_documentation(filled_service: Client, tmp_path: Path) -> None:
    picture = tmp_path / "topology.svg"
    filled_service.run(f"topology --svg {picture}")
    compare(PICTURE, Stable().text(picture.read_text()))


def custody_command(client: Client) -> str:
    """Return the command for the device that is bound, once all its records are in the chain."""
    device = client.field("device-list --address 0000:0c:00.0")
    command = f"device-custody {device}"

    def is_sealed() -> bool:
        listed = json.loads(client.run(f"{command} -f json")[0])
        return all(row["No."] is not None for row in listed)

    wait_until("the records are sealed", is_sealed)
    return command


def test_device_custody_table_fits_80_columns(
    filled_service: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = custody_command(filled_service)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    out, _ = filled_service.run(command)
    assert max(map(len, out.splitlines())) <= WIDTH
    compare(FOLDER / "device-custody.txt", Stable().text(out))


def test_device_custody_json_is_stable(filled_service: Client) -> None:
    command = custody_command(filled_service)
    parsed = json.loads(filled_service.run(f"{command} -f json")[0])
    text = json.dumps(parsed, indent=1) + "\n"
    compare(FOLDER / "device-custody.json", Stable().text(text))


def test_device_custody_verify_computes_hashes_and_signatures(
    filled_service: Client, tmp_path: Path
) -> None:
    command = custody_command(filled_service)
    listed = json.loads(filled_service.run(f"{command} --long -f json")[0])
    _, message = filled_service.run(f"{command} --verify --event claimed")
    last = listed[-1]
    unchanged = f"records 1 to {last['No.']} are unchanged; the last hash is {last['Hash']}\n"
    assert message == (f"{unchanged}not proved: that a conductor wrote them (give --key-file)\n")
    _, message = filled_service.run(f"{command} --verify --key-file {filled_service.key_file}")
    assert message == unchanged
    other = tmp_path / "other.key"
    other.write_text("cd" * 32)
    _, error = filled_service.run(f"{command} --verify --key-file {other}", code=1)
    assert "which is not in the key file" in error


def test_device_custody_anchors_of_all_devices(filled_service: Client, tmp_path: Path) -> None:
    device = custody_command(filled_service).split()[1]
    anchors, later = tmp_path / "anchors.json", tmp_path / "later.json"
    assert filled_service.run(f"device-custody --export-anchor {anchors}") == ("", "")
    chains = json.loads(anchors.read_text())["chains"]
    assert device in chains
    _, error = filled_service.run(f"device-custody --export-anchor {anchors}", code=1)
    assert "File exists" in error
    verify = f"device-custody {device} --verify --anchor"
    assert "are unchanged" in filled_service.run(f"{verify} {anchors}")[1]
    chains[device]["sequence"] += 1
    later.write_text(json.dumps({"chains": chains | {INSTANCE: chains[device]}}))
    _, error = filled_service.run(f"{verify} {later}", code=1)
    assert "but the anchor has its record" in error
    _, error = filled_service.run(f"device-custody --verify --anchor {later}", code=1)
    assert f"device {INSTANCE}: no device" in error
    assert "custody logs are not proved" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "name a device, or give --verify or --export-anchor"),
        ("--anchor x", "--key-file and --anchor need --verify"),
        ("--verify --key-file /none", "cannot read /none"),
        ("--verify --key-file setup.py", "line 2 is not a key"),
        ("--verify --anchor setup.py", "expected a JSON object"),
    ],
)
def test_device_custody_names_a_wrong_argument(
    filled_service: Client, options: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(cyborg.__file__).parents[1])
    assert message in filled_service.run(f"device-custody {options}", code=1)[1]


def test_device_profile_explain_of_host_has_owners_and_remedies(filled_service: Client) -> None:
    command = "device-profile-explain two-fpgas --host compute-1 --long -f json"
    found = json.loads(filled_service.run(command)[0])
    assert {row["Host"] for row in found} == {"compute-1"}
    (taken,) = [row for row in found if row["Result"] == "taken"]
    assert [owner["instance_uuid"] for owner in taken["Owners"]] == [INSTANCE]
    assert "accelerator-list" in taken["Remedy"]
    _, message = filled_service.run("device-profile-explain two-fpgas --host none", code=1)
    assert "unknown host 'none'; known are" in message


def test_device_context_explain_and_candidates(filled_service: Client) -> None:
    context = json.loads(filled_service.run("device-context-list -f json")[0])[0]["UUID"]
    command = f"device-context-explain {context[:8]} --host compute-1 --long -f json"
    found = json.loads(filled_service.run(command)[0])
    assert {row["Host"] for row in found} == {"compute-1"}
    assert {"fits", "maintaining"} <= {row["Result"] for row in found}
    summary, _ = filled_service.run(f"device-context-explain {context}")
    assert "| maintaining |" in summary
    command = f"device-context-candidates {context} --explain --long -f json"
    found = json.loads(filled_service.run(command)[0])
    results = {row["Provider"]: row["Result"] for row in found}
    assert len(results) == len(found), "a provider is a candidate or explained"
    assert {"candidate", "maintaining"} <= set(results.values())
    plain = json.loads(filled_service.run(f"device-context-candidates {context} -f json")[0])
    assert {row["Result"] for row in plain} == {"candidate"}
    one, _ = filled_service.run(f"device-context-candidates {context} --limit 1 -f json")
    assert len(json.loads(one)) == 1


def test_device_profile_capacity_of_host_has_no_row_of_the_cloud(filled_service: Client) -> None:
    command = "device-profile-capacity one-fpga --host compute-1 --long -f json"
    (row,) = json.loads(filled_service.run(command)[0])
    assert (row["Host"], row["Exact"], row["Handles"]) == ("compute-1", True, 7)
    assert set(row["Remedies"]) == set(row["Lost to"]) == {"maintaining", "taken"}
    with_spaces, _ = filled_service.run("device profile capacity one-fpga --host compute-1 -f json")
    assert json.loads(with_spaces)[0]["Servers"] == row["Servers"]
    filled_service.run("device-profile-capacity none", code=1)
