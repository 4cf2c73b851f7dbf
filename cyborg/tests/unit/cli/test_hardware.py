# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from cyborg.cli.hardware import show_specs, show_status


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ({"remote": 0, "num": 2, "device_type": "FPGA", "acc_capability": {}}, "2 FPGA"),
        ({"remote": 1, "num": 1, "device_type": "NIC", "acc_capability": {}}, "1 NIC, remote"),
        (
            {"remote": 0, "num": 4, "device_type": "CRYPTO", "acc_capability": {"ipsec": {"a": 1}}},
            "4 CRYPTO: ipsec=(a=1)",
        ),
        (None, "0"),
    ],
)
def test_specs_text(specs: Any, text: str) -> None:
    assert show_specs(specs).human_readable() == text
    assert show_specs(specs).machine_readable() == specs


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"setup_required": False, "reboot_required": False}, "ready"),
        ({"setup_required": True, "reboot_required": False}, "setup required"),
        ({"setup_required": True, "reboot_required": True}, "setup required, reboot required"),
    ],
)
def test_status_lists_required_steps(status: Any, text: str) -> None:
    assert show_status(status).human_readable() == text
    assert show_status(status).machine_readable() == status


def test_status_not_offered_shows_reason() -> None:
    status = {"setup_required": False, "reboot_required": False}
    cell = show_status(status, "vda holds the root file system")
    assert cell.human_readable() == "not offered: vda holds the root file system"
    assert cell.machine_readable() == status
