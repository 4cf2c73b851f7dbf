# SPDX-License-Identifier: Apache-2.0
"""The comparison of two releases finds each change with which they cannot work together."""

import copy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cyborg.tests.fixtures.upgrade.compatibility import find_rpc_breaks, find_schema_breaks
from cyborg.tests.fixtures.upgrade.releases import find_tag

COLUMN = {"type": "VARCHAR()", "nullable": True, "default": None}
TABLES: dict[str, Any] = {
    "devices": {
        "columns": {"uuid": {**COLUMN, "nullable": False}, "host": COLUMN},
        "unique": frozenset({frozenset({"uuid"})}),
        "references": frozenset(),
    }
}
CONTRACTS: dict[str, Any] = {
    "conductor": {
        "version": "1.1",
        "methods": {
            "bind": {
                "arguments": ["uuid", "scope"],
                "optional": ["scope"],
                "since": "1.0",
                "argument_versions": {"scope": "1.1"},
            },
        },
    }
}

Change = Callable[[dict[str, Any]], object]


def change_tables(change: Change) -> list[str]:
    tables = copy.deepcopy(TABLES)
    change(tables)
    return find_schema_breaks(TABLES, tables)


def change_contract(change: Change) -> list[str]:
    contracts = copy.deepcopy(CONTRACTS)
    change(contracts["conductor"])
    return find_rpc_breaks(CONTRACTS, contracts)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.clear(), ["table devices is removed"]),
        (lambda t: t["devices"]["columns"].pop("host"), ["column devices.host is removed"]),
        (
            lambda t: t["devices"]["columns"]["host"].update(type="INTEGER()"),
            ["column devices.host has another type"],
        ),
        (
            lambda t: t["devices"]["columns"]["host"].update(nullable=False),
            ["column devices.host must not be null any more"],
        ),
        (
            lambda t: t["devices"]["columns"].update(new={**COLUMN, "nullable": False}),
            ["column devices.new is new, not null and has no default"],
        ),
        (
            lambda t: t["devices"].update(unique=frozenset({frozenset({"host"})})),
            ["unique of devices: host is new"],
        ),
        # What the former release may ignore.
        (lambda t: t.update(more=TABLES["devices"]), []),
        (lambda t: t["devices"]["columns"].update(new=COLUMN), []),
        (
            lambda t: t["devices"]["columns"].update(
                new={**COLUMN, "nullable": False, "default": "0"}
            ),
            [],
        ),
        (lambda t: t["devices"].update(unique=frozenset({frozenset({"host", "new"})})), []),
        (lambda t: t["devices"]["columns"]["uuid"].update(nullable=True), []),
    ],
)
def test_schema_break_is_found(change: Change, expected: list[str]) -> None:
    assert change_tables(change) == expected


def method(**values: Any) -> dict[str, Any]:
    return {"arguments": [], "optional": [], "since": "1.2", "argument_versions": {}, **values}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c.update(version="1.0"), ["conductor: version 1.0 is lower than 1.1"]),
        (lambda c: c["methods"].pop("bind"), ["conductor.bind: removed"]),
        (
            lambda c: c["methods"].update(more=method(since="1.1")),
            ["conductor.more: new, but declared for version 1.1"],
        ),
        (
            lambda c: c["methods"]["bind"].update(since="1.1"),
            ["conductor.bind: its first version has changed"],
        ),
        (
            lambda c: c["methods"]["bind"].update(optional=[]),
            ["conductor.bind: scope is not optional any more"],
        ),
        (
            lambda c: c["methods"]["bind"]["arguments"].append("more"),
            ["conductor.bind: more is new without a version of its own"],
        ),
        (
            lambda c: c["methods"]["bind"]["arguments"].remove("uuid"),
            ["conductor.bind: uuid is removed"],
        ),
        # What two minor versions may differ in.
        (lambda c: c.update(version="1.2"), []),
        (lambda c: c["methods"].update(more=method()), []),
        (
            lambda c: c["methods"]["bind"].update(
                arguments=["uuid", "scope", "more"],
                optional=["scope", "more"],
                argument_versions={"scope": "1.1", "more": "1.2"},
            ),
            [],
        ),
        (lambda c: (c.update(version="2.0"), c["methods"].clear()), []),
    ],
)
def test_rpc_break_is_found(change: Change, expected: list[str]) -> None:
    assert change_contract(change) == expected


@pytest.mark.slow
@pytest.mark.requires("clone")
def test_former_release_is_that_of_the_last_tag(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=tests", "-c", "user.email=tests@example.org")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, timeout=60)

    git("init", "-q")
    for tag in ("1.2.0", "1.10.0", "notes"):
        git("commit", "-q", "--allow-empty", "-m", tag)
        if tag == "1.2.0":
            assert find_tag(tmp_path) is None
        git("tag", tag)
    assert find_tag(tmp_path) == "1.10.0"
    git("checkout", "-q", "1.2.0")
    assert find_tag(tmp_path) == "1.2.0"
