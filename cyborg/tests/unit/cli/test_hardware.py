# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from cyborg.cli.hardware import Specs, Status


@pytest.mark.parametrize(
    ("specs", "said"),
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
def test_what_a_device_is(specs: Any, said: str) -> None:
    assert Specs(specs).human_readable() == said
    assert Specs(specs).machine_readable() == specs


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"setup_required": False, "reboot_required": False}, "ready"),
        ({"setup_required": True, "reboot_required": False}, "setup required"),
        ({"setup_required": True, "reboot_required": True}, "setup required, reboot required"),
    ],
)
def test_what_a_device_waits_for(status: Any, said: str) -> None:
    assert Status(status).human_readable() == said
    assert Status(status).machine_readable() == status
