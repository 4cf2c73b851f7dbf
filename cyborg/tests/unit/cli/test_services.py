# SPDX-License-Identifier: Apache-2.0
"""How a table shows what backends offer."""

from cyborg.cli.services import Backends


def test_a_line_for_each_backend_and_function() -> None:
    crypto = {"function": "crypto.ipsec.aes", "total": 4, "used": 1, "free": 2}
    backends = [
        {
            "name": "qat",
            "driver": "generic",
            "status": "READY",
            "error": None,
            "functions": [crypto],
        },
        {"name": "gpus", "driver": "generic", "status": "ERROR", "error": "it hangs"},
    ]
    shown = Backends(backends)
    assert shown.human_readable().splitlines() == [
        "qat (generic) READY",
        "  crypto.ipsec.aes: 1 of 4 used, 2 free",
        "gpus (generic) ERROR: it hangs",
    ]
    assert shown.machine_readable() == backends
    assert Backends(None).human_readable() == Backends([]).human_readable() == ""
