# SPDX-License-Identifier: Apache-2.0
from typing import Any

from cyborg.cli.common.driver_cells import HostsWithRemarks, Options, Settings

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
    assert HostsWithRemarks([HOST, other]).human_readable().splitlines() == [
        "compute-1 (gpus) READY",
        "  remark: rule 'vendor=15b3' matches no device of this host",
        "compute-2 (gpus) READY",
    ]


def test_settings_shows_values_with_sources() -> None:
    options = [
        {"name": "devices", "value": ["vendor=10de", "vendor=1002"], "source": "api"},
        {"name": "token", "value": "***", "source": "file"},
        {"name": "adopt", "value": [], "source": "default"},
    ]
    cell = Settings([{"host": "compute-1", "backend": "gpus", "options": options}])
    assert cell.human_readable().splitlines() == [
        "gpus: devices = vendor=10de, vendor=1002 (api)",
        "gpus: token = *** (file)",
        "gpus: adopt = unset (default)",
    ]
    assert cell.machine_readable()[0]["options"] == options


def test_options_marks_host_only_option() -> None:
    option = {"name": "gate", "kind": "str", "default": "", "help": "A path.", "host_only": True}
    assert Options([option]).human_readable() == "gate (str, unset, host file only): A path."
