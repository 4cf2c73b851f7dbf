# SPDX-License-Identifier: Apache-2.0
"""Faults of a replayed host, as the option has them."""

import pytest

from cyborg.core.capture.model import Fault, FaultKind, Operation, parse_fault
from cyborg.core.errors import Invalid


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0000:3b:00.0:eio", Fault("0000:3b:00.0", FaultKind.EIO)),
        ("0000:3B:00.0:ebusy=2", Fault("0000:3b:00.0", FaultKind.EBUSY, 2)),
        (
            " 0000:3b:00.0:stuck_reset@erase",
            Fault("0000:3b:00.0", FaultKind.STUCK_RESET, None, Operation.ERASE),
        ),
        (
            "0000:3b:00.0:disappears=1@create",
            Fault("0000:3b:00.0", FaultKind.DISAPPEARS, 1, Operation.CREATE),
        ),
    ],
)
def test_parse_fault(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    "text",
    [
        "",
        "eio",
        "0000:3b:00.0",
        "0000:3b:00.0:fire",
        "x:eio",
        "0000:3b:00.0:eio=0",
        "0000:3b:00.0:eio@x",
    ],
)
def test_parse_fault_refuses_other_texts(text: str) -> None:
    with pytest.raises(Invalid, match="expected ADDRESS:FAULT"):
        parse_fault(text)
