# SPDX-License-Identifier: Apache-2.0
"""Names of vendors and products from the PCI id database."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.cli.common import pci_ids

TEXT = (
    "# comment\n"
    "10de  NVIDIA Corporation\n"
    "\t20b5  GA100 [A100 PCIe 80GB]\n"
    "\t\t10de 1533  a subsystem\n"
    "1af4  Red Hat, Inc.\n"
    "\t1045  Virtio 1.0 balloon\n"
    "C 03  Display controller\n"
    "\t00  VGA compatible controller\n"
)
NVIDIA = "NVIDIA Corporation (10de)"
NAMES = pci_ids.parse_names(TEXT.splitlines(keepends=True))


@pytest.fixture(autouse=True)
def no_database_read_before() -> Iterator[None]:
    pci_ids.read_names.cache_clear()
    yield
    pci_ids.read_names.cache_clear()


def test_parse_names_returns_vendors_and_products_only() -> None:
    assert NAMES == {
        "10de": ("NVIDIA Corporation", {"20b5": "GA100 [A100 PCIe 80GB]"}),
        "1af4": ("Red Hat, Inc.", {"1045": "Virtio 1.0 balloon"}),
    }


@pytest.mark.parametrize(
    ("row", "vendor", "model"),
    [
        (
            {"vendor": "10de", "model": "10de:20b5"},
            "NVIDIA Corporation (10de)",
            NAMES["10de"][1]["20b5"],
        ),
        ({"vendor": "10de", "model": "10de:ffff"}, NVIDIA, "10de:ffff"),
        ({"vendor": "8086", "model": "8086:37c8"}, "8086", "8086:37c8"),
        ({"vendor": "10de", "model": "A100"}, "10de", "A100"),
        (
            {
                "vendor": "0xABCD",
                "model": pci_ids.UNKNOWN,
                "std_board_info": '{"product_id": "0xABCD"}',
            },
            "0xABCD",
            "abcd:abcd",
        ),
        ({"vendor": "0xABCD", "model": pci_ids.UNKNOWN}, "0xABCD", "abcd"),
        ({"vendor": "ACME", "model": "anvil"}, "ACME", "anvil"),
    ],
)
def test_add_names_known_ids_become_names(row: dict[str, Any], vendor: str, model: str) -> None:
    device = pci_ids.add_names(row, NAMES)
    assert (device["vendor"], device["model"]) == (vendor, model)


@pytest.mark.parametrize("packed", [False, True])
def test_read_names_uses_first_existing_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    file = tmp_path / ("pci.ids.gz" if packed else "pci.ids")
    file.write_bytes(gzip.compress(TEXT.encode()) if packed else TEXT.encode())
    monkeypatch.setattr(pci_ids, "FILES", (tmp_path / "none", file))
    assert pci_ids.read_names() == NAMES


def test_read_names_skips_the_rest_of_an_interrupted_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(TEXT.encode())[:-12])
    (tmp_path / "pci.ids").write_text(TEXT)
    monkeypatch.setattr(pci_ids, "FILES", (tmp_path / "cut.gz", tmp_path / "pci.ids"))
    assert pci_ids.read_names() == NAMES


def test_add_names_without_database_keeps_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pci_ids, "FILES", ())
    row = {"vendor": "10de", "model": "10de:20b5"}
    assert pci_ids.add_names(row) == row
