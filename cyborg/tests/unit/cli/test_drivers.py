# SPDX-License-Identifier: Apache-2.0
from typing import Any

from cyborg.cli.drivers import (
    show_hosts,
    show_options,
    show_settings,
    summarize_hosts,
    summarize_statuses,
)

HOST: dict[str, Any] = {
    "host": "compute-1",
    "backend": "gpus",
    "status": "READY",
    "error": None,
    "desired_status": None,
    "applied": None,
    "state": "up",
    "remarks": ["rule 'vendor=15b3' matches no device of this host"],
}


def test_hosts_with_remarks_shows_remarks_below_backend() -> None:
    other = {**HOST, "host": "compute-2", "remarks": []}
    assert show_hosts([HOST, other], remarks=True).human_readable().splitlines() == [
        "compute-1 (gpus) READY",
        "  remark: rule 'vendor=15b3' matches no device of this host",
        "compute-2 (gpus) READY",
    ]


def test_statuses_shows_largest_number_first() -> None:
    numbers = {"FAILED": 2, "READY": 9998, "UNKNOWN": 2}
    cell = summarize_statuses(numbers)
    assert cell.human_readable() == "9998 READY, 2 FAILED, 2 UNKNOWN"
    assert cell.machine_readable() == numbers
    assert summarize_statuses({}).human_readable() == ""


def test_hosts_summary_names_one_backend_and_counts_several() -> None:
    assert summarize_hosts([HOST]).human_readable() == "compute-1 (gpus) READY"
    several = [{**HOST, "status": "FAILED"}, HOST, HOST]
    assert summarize_hosts(several).human_readable() == "2 READY, 1 FAILED"


def test_settings_shows_values_with_sources() -> None:
    options = [
        {"name": "devices", "value": ["vendor=10de", "vendor=1002"], "source": "api"},
        {"name": "token", "value": "***", "source": "file"},
        {"name": "adopt", "value": [], "source": "default"},
    ]
    cell = show_settings([{"host": "compute-1", "backend": "gpus", "options": options}])
    assert cell.human_readable().splitlines() == [
        "gpus: devices = vendor=10de, vendor=1002 (api)",
        "gpus: token = *** (file)",
        "gpus: adopt = unset (default)",
    ]
    assert cell.machine_readable()[0]["options"] == options


def test_options_marks_host_only_option() -> None:
    option = {"name": "gate", "kind": "str", "default": "", "help": "A path.", "host_only": True}
    assert show_options([option]).human_readable() == "gate (str, unset, host file only): A path."
