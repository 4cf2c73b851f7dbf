# SPDX-License-Identifier: Apache-2.0
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.fixtures.processes import BIN, Daemon, ini, until

SECTIONS: dict[str, dict[str, Any]] = {
    "DEFAULT": {"host": "here"},
    "agent": {"enabled_drivers": "fake"},
    "conductor": {"hello_interval": 0.5},
}


def daemon(folder: Path, *words: str, **sections: dict[str, Any]) -> Daemon:
    """Return a service on a folder; its sections are those above and the given ones."""
    file = folder / "service.conf"
    file.write_text(ini(SECTIONS | sections))
    command = [
        *(BIN / "cyborg-standalone", "--config-file", file, "--state-dir", folder / "state"),
        *("--port", "0", "--placement-port", "0", *words),
    ]
    return Daemon("standalone", command, folder, {})


def endpoint(service: Daemon) -> str:
    """Wait for the line that says that the service is ready, and return its URL."""

    def ready() -> str | None:
        if not service.alive():
            raise AssertionError(service.tail())
        said = re.findall(r"ready: .*--os-endpoint (\S+)", service.log.read_text())
        return str(said[-1]) if said else None

    service.log.touch()
    return str(until("the service is ready", ready))


def devices(url: str) -> list[str]:
    return [d["uuid"] for d in requests.get(f"{url}/v2/devices", timeout=10).json()["devices"]]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Daemon]:
    made = daemon(tmp_path)
    made.start()
    yield made
    made.kill()


def test_it_stops_in_two_seconds_and_leaves_no_port(service: Daemon) -> None:
    url = endpoint(service)
    assert requests.get(f"{url}/healthcheck", timeout=10).status_code == 200
    begin = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - begin < 2
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=5)
    assert "Traceback" not in service.log.read_text()


def test_what_it_knows_survives_a_power_cut(service: Daemon) -> None:
    url = endpoint(service)
    before = until("the fake card is found", lambda: devices(url))
    service.kill()
    service.log.unlink()
    service.start()
    assert devices(endpoint(service)) == before


def test_two_cannot_share_a_state(service: Daemon, tmp_path: Path) -> None:
    endpoint(service)
    other = daemon(tmp_path)
    other.log = tmp_path / "other.log"
    assert refusal(other) == (
        f"cyborg-standalone: another cyborg-standalone runs on {tmp_path / 'state'}"
    )


def refusal(service: Daemon) -> str:
    """Start a service that must end by itself with code 1; return its last line."""
    service.start()
    until("it gives up", lambda: not service.alive(), 30)
    assert service.stop() == 1
    text = service.log.read_text()
    assert "Traceback" not in text
    return text.splitlines()[-1]


def test_it_listens_on_loopback_alone(tmp_path: Path) -> None:
    said = refusal(daemon(tmp_path, "--listen", "0.0.0.0"))
    assert "[standalone] placement_port = 0.0.0.0" in said or "loopback" in said


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"agent": {"enabled_drivers": "none-such"}}, "none-such"),
        ({"standalone": {"threads": "many"}}, "threads"),
        (
            {
                "agent": {"enabled_backends": "gen0"},
                "gen0": {"driver": "generic", "devices": "vendor=cheese"},
            },
            "cheese",
        ),
    ],
)
def test_a_wrong_option_is_named(
    tmp_path: Path, sections: dict[str, dict[str, Any]], said: str
) -> None:
    assert said in refusal(daemon(tmp_path, **sections))


def test_a_file_that_does_not_parse_is_named(tmp_path: Path) -> None:
    service = daemon(tmp_path)
    (tmp_path / "service.conf").write_text("[agent\nenabled\n")
    assert "service.conf" in refusal(service)
