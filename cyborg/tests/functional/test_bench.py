# SPDX-License-Identifier: Apache-2.0
"""The counts of the boot path: figures that hold on every machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "tools" / "bench"
MOST = 24
"""Statements of a boot and delete of one server, beginnings and ends of transactions among them."""

MOST_CALLS = 4
"""Calls of Placement for one device of a host that has changed."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    words = "boot --mode standalone --concurrency 1 --others 0,500 --cycles 6 --no-floor"
    done = subprocess.run(
        [sys.executable, BENCH, *words.split(), "--format", "json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_a_boot_takes_few_statements(found: dict[str, Any]) -> None:
    for cell in found["cells"]:
        assert 4 < cell["statements"] + cell["statements_outbox"] <= MOST


def test_other_requests_add_no_statement(found: dict[str, Any]) -> None:
    few, many = found["cells"]
    assert (few["others"], many["others"]) == (0, 500)
    assert few["statements"] == many["statements"]


def test_each_change_is_one_call_of_the_bus(found: dict[str, Any]) -> None:
    for cell in found["cells"]:
        assert cell["rpc"] == {"arq_create": 1.0, "arq_patch": 1.0, "arq_delete": 1.0}


def test_all_is_measured(found: dict[str, Any]) -> None:
    for cell in found["cells"]:
        assert cell["cycles"] == 6
        assert 0 < cell["p50_ms"] <= cell["p99_ms"]
        assert cell["cpu_ms"]["standalone"] > 0
    rss, _ = found["memory"]["standalone"]["idle"]["standalone"]
    assert rss > 0


@pytest.fixture(scope="module")
def inventory() -> dict[tuple[int, str], dict[str, Any]]:
    """What the inventory of a small and of a large host costs, by devices and what is done."""
    words = "inventory --devices 8 256 --format json"
    done = subprocess.run(
        [sys.executable, BENCH, *words.split()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    return {(cell["devices"], cell["what"]): cell for cell in cells}


@pytest.mark.parametrize("devices", [8, 256])
def test_an_unchanged_hello_costs_two_statements_and_no_call(
    inventory: dict[tuple[int, str], dict[str, Any]], devices: int
) -> None:
    cell = inventory[devices, "unchanged hello"]
    assert cell["hello_statements"] + cell["hello_commits"] == 2
    assert cell["calls"] == 0


def test_one_changed_device_costs_the_same_in_a_large_host(
    inventory: dict[tuple[int, str], dict[str, Any]],
) -> None:
    few, many = (inventory[devices, "one device changed"] for devices in (8, 256))
    counts = [key for key in few if key.endswith(("statements", "commits")) or key == "calls"]
    assert len(counts) == 5
    assert {key: few[key] for key in counts} == {key: many[key] for key in counts}
    # Beside the ends of three transactions.
    assert many["report_statements"] + many["publishing_statements"] <= 12
    assert many["calls"] <= MOST_CALLS


def test_a_first_report_is_one_transaction(
    inventory: dict[tuple[int, str], dict[str, Any]],
) -> None:
    few, many = (inventory[devices, "first report"] for devices in (8, 256))
    assert many["report_commits"] == 1
    assert few["report_statements"] == many["report_statements"]
    assert many["floor_ms"] > 0
