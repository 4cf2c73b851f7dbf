# SPDX-License-Identifier: Apache-2.0
"""The counts of the boot path, which are the same on every machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.matrix

BENCH = Path(__file__).parents[3] / "tools" / "bench"
# Statements of a boot and delete of one server, beginnings and ends of transactions among them.
#
# They are 25 on an idle machine. On a slow one a heartbeat is recorded during the six cycles.
MOST = 28

# Calls of Placement for one device of a host that has changed.
MOST_CALLS = 4


def run_bench(*words: str) -> dict[str, Any]:
    """Return the results of a benchmark."""
    process = subprocess.run(
        [BENCH, *words, "--format", "json"],
        env=os.environ | {"CYBORG_VENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    results = json.loads(process.stdout)
    assert isinstance(results, dict)
    return results


@pytest.fixture(scope="module")
def boot() -> dict[str, Any]:
    """Return the cost of a boot without and with other ARQs."""
    words = "boot --mode standalone --concurrency 1 --others 0,500 --cycles 6 --no-floor"
    return run_bench(*words.split())


def test_boot_statement_count_is_limited(boot: dict[str, Any]) -> None:
    for cell in boot["cells"]:
        assert 4 < cell["statements"] + cell["statements_outbox"] <= MOST


def test_boot_statement_count_is_independent_of_other_arqs(boot: dict[str, Any]) -> None:
    few, many = boot["cells"]
    assert (few["others"], many["others"]) == (0, 500)
    assert few["statements"] == many["statements"]


def test_each_write_request_is_one_rpc_call(boot: dict[str, Any]) -> None:
    for cell in boot["cells"]:
        assert cell["rpc"] == {"arq_create": 1.0, "arq_bind": 1.0, "arq_delete": 1.0}


def test_bench_measures_all_values(boot: dict[str, Any]) -> None:
    for cell in boot["cells"]:
        assert cell["cycles"] == 6
        assert 0 < cell["p50_ms"] <= cell["p99_ms"]
        assert cell["cpu_ms"]["standalone"] > 0
    rss, _ = boot["memory"]["standalone"]["idle"]["standalone"]
    assert rss > 0


@pytest.fixture(scope="module")
def inventory() -> dict[tuple[int, str], dict[str, Any]]:
    """Return the cost of the inventory of a small and a large host, by devices and operation."""
    cells = run_bench("inventory", "--devices", "8", "256")["cells"]
    return {(cell["devices"], cell["what"]): cell for cell in cells}


@pytest.mark.parametrize("devices", [8, 256])
def test_unchanged_heartbeat_costs_two_statements_and_no_call(
    inventory: dict[tuple[int, str], dict[str, Any]], devices: int
) -> None:
    cell = inventory[devices, "unchanged hello"]
    assert cell["hello_statements"] + cell["hello_commits"] == 2
    assert cell["calls"] == 0


def test_changed_device_cost_is_independent_of_host_size(
    inventory: dict[tuple[int, str], dict[str, Any]],
) -> None:
    few, many = (inventory[devices, "one device changed"] for devices in (8, 256))
    counts = [key for key in few if key.endswith(("statements", "commits")) or key == "calls"]
    assert len(counts) == 5
    assert {key: few[key] for key in counts} == {key: many[key] for key in counts}
    # In addition to three COMMITs. One finds out whether the host has device sets.
    assert many["report_statements"] + many["publishing_statements"] <= 13
    assert many["calls"] <= MOST_CALLS


def test_first_report_is_one_transaction(
    inventory: dict[tuple[int, str], dict[str, Any]],
) -> None:
    few, many = (inventory[devices, "first report"] for devices in (8, 256))
    assert many["report_commits"] == 1
    assert few["report_statements"] == many["report_statements"]
    assert many["floor_ms"] > 0


@pytest.mark.long
def test_replay_has_no_problem() -> None:
    words = "replay --hosts 2 --binds 16 --threads 2 --interval 1"
    results = run_bench(*words.split())
    assert (results["binds"], results["releases"]) == (16, 16)
    assert results["devices"] == 22
    assert (results["violations"], results["findings"]) == (0, 0)
    assert results["chains"] >= 22
    assert results["layouts"] > 0


def test_hello_prints_one_row_for_each_step() -> None:
    cells = run_bench("hello", "--devices", "2")["cells"]
    assert [cell["what"] for cell in cells] == ["first report", "unchanged hello"]
    assert [cell["statements"] for cell in cells][1:] == [1]


@pytest.mark.long
def test_bench_measures_each_start() -> None:
    cells = {cell["program"]: cell for cell in run_bench("start", "--rounds", "1")["cells"]}
    assert list(cells) == [
        "interpreter",
        "API: import",
        "API: import and application",
        "cyborg --version",
        "cyborg device-list",
    ]
    assert all(0 < cell["least_s"] <= cell["median_s"] for cell in cells.values())
    assert cells["interpreter"]["floors"] == 1


def test_sets_measures_each_policy_and_load() -> None:
    words = "sets --hosts 10 --days 1 --hours 2 --warm-up 1 --load 0.9 1.3"
    cells = run_bench(*words.split())["cells"]
    policies = ["disjoint", "all", "random", "perfect", "migrating"]
    assert [(cell["load"], cell["policy"]) for cell in cells] == [
        (load, policy) for load in (0.9, 1.3) for policy in policies
    ]
    for cell in cells:
        assert 0.1 < cell["acceptance_all"] <= 1
        assert cell["policy"] != "disjoint" or not any(cell["failed"].values())


@pytest.mark.long
@pytest.mark.services
@pytest.mark.requires("compiler")
def test_sets_measures_reservations_in_placement() -> None:
    found = run_bench("sets", "--reservations", "1")["reservations"]
    assert found["bound"].keys() == found["reserved"].keys() == {"1", "2", "4", "8"}
    for size, (seconds,) in found["reserved"].items():
        # The last set is reserved after the commit, which is before the answer.
        assert found["bound"][size][0] > 0
        assert 0 < seconds < 60


@pytest.mark.long
@pytest.mark.requires("clone")
def test_compare_measures_both_revisions() -> None:
    # Durations of one round are noise; the counts of statements are equal.
    words = "compare HEAD --rounds 1 --cycles 2 --limit 100000"
    cells = {
        (cell["benchmark"], cell["name"]): cell
        for cell in run_bench(*words.split())["cells"]
        if cell["cell"] in ("standalone", "unchanged hello")
    }
    assert cells["boot", "statements"]["old"] > 4
    assert cells["hello", "statements"]["ratio"] == 1
    assert cells["inventory", "hello_statements"]["ratio"] == 1
