# SPDX-License-Identifier: Apache-2.0
"""Table cells of the backends of services."""

from cyborg.cli import services
from cyborg.cli.services import show_backends, summarize_backends


def test_backends_shows_line_for_each_backend_and_function() -> None:
    crypto = {"function": "crypto.ipsec.aes", "total": 4, "used": 1, "free": 2}
    backends: list[dict[str, object]] = [
        {
            "name": "qat",
            "driver": "generic",
            "status": "READY",
            "error": None,
            "functions": [crypto],
        },
        {"name": "gpus", "driver": "generic", "status": "ERROR", "error": "it hangs"},
    ]
    cell = show_backends(backends)
    assert cell.human_readable().splitlines() == [
        "qat (generic) READY",
        "  crypto.ipsec.aes: 1 of 4 used, 2 free",
        "gpus (generic) ERROR: it hangs",
    ]
    assert cell.machine_readable() == backends
    assert show_backends(None).human_readable() == show_backends([]).human_readable() == ""


def test_status_of_down_agent_is_unknown() -> None:
    backend = {"name": "gpus", "driver": "generic", "status": "READY", "error": None}
    row = {"state": "down", "status": "READY", "backends": [backend]}
    formatted = services._format_row(row, show_backends)
    assert formatted["status"] == "UNKNOWN"
    assert formatted["backends"].human_readable() == "gpus (generic) UNKNOWN"
    assert services._format_row({**row, "state": "late"}, show_backends)["status"] == "READY"


def test_backends_summary_names_one_and_counts_several() -> None:
    def summarize(*states: str) -> str:
        backends = [{"name": f"b{n}", "status": state} for n, state in enumerate(states)]
        return summarize_backends(backends).human_readable()

    assert summarize() == ""
    assert summarize("READY") == "b0 READY"
    assert summarize("READY", "ERROR", "READY") == "1 ERROR, 2 READY"
