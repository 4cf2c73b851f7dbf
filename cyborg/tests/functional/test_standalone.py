# SPDX-License-Identifier: Apache-2.0
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.tests.fixtures.machine.processes import BIN, Daemon, ends_within, ini, wait_until

SECTIONS: dict[str, dict[str, Any]] = {
    "DEFAULT": {"host": "here"},
    "agent": {"enabled_drivers": "fake"},
    "conductor": {"hello_interval": 0.5},
}


def daemon(folder: Path, *words: str, forked: bool = True, **sections: dict[str, Any]) -> Daemon:
    """Return a service in a folder, with additional configuration sections.

    ``forked``: see ``Daemon``; False runs the console script.
    """
    file = folder / "service.conf"
    file.write_text(ini(SECTIONS | sections))
    command = [
        *(BIN / "cyborg-standalone", "--config-file", file, "--state-dir", folder / "state"),
        *("--port", "0", "--placement-port", "0", *words),
    ]
    return Daemon("standalone", command, folder, {}, forked=forked)


def endpoint(service: Daemon) -> str:
    """Wait until the service prints its URL, and return it."""

    def ready() -> str | None:
        if not service.alive():
            raise AssertionError(service.tail())
        endpoints = re.findall(r"ready: .*--os-endpoint (\S+)", service.log.read_text())
        return str(endpoints[-1]) if endpoints else None

    service.log.touch()
    return str(wait_until("the service is ready", ready))


def devices(url: str) -> list[str]:
    return [d["uuid"] for d in requests.get(f"{url}/v2/devices", timeout=60).json()["devices"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("standalone")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Daemon]:
    """Run the service of the tests that leave it as it is."""
    process = daemon(folder)
    process.start()
    yield process
    process.kill()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Daemon]:
    """Return the service that its console script runs."""
    process = daemon(tmp_path, forked=False)
    process.start()
    yield process
    process.kill()


def test_standalone_service_stops_in_two_seconds_and_frees_its_port(script: Daemon) -> None:
    service = script
    url = endpoint(service)
    assert requests.get(f"{url}/healthcheck", timeout=60).status_code == 200
    with ends_within(2):
        assert service.stop() == 0
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=5)
    assert "Traceback" not in service.log.read_text()


def test_standalone_state_survives_sigkill(service: Daemon) -> None:
    url = endpoint(service)
    before = wait_until("the fake card is found", lambda: devices(url))
    service.kill()
    service.log.unlink()
    service.start()
    assert devices(endpoint(service)) == before


def test_browser_request_is_rejected_and_files_are_private(service: Daemon, folder: Path) -> None:
    state = folder / "state"
    url = endpoint(service)
    placement = re.findall(r"Placement listens on (\S+)", service.log.read_text())[-1]
    token = {"X-Auth-Token": "admin"}
    for root, path in ((url, "/v2/devices"), (url, "/"), (placement, "/resource_providers")):
        assert requests.get(root + path, headers=token, timeout=60).status_code == 200
        for header in ({"Host": "rebound.example:6666"}, {"Origin": "http://rebound.example"}):
            answer = requests.get(root + path, headers=token | header, timeout=60)
            assert answer.status_code == 403
            assert "rebound.example" in answer.json()["error_message"]
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in state.iterdir() if p.is_file()}
    assert {name for name in modes if name.endswith(("-wal", "-shm"))}
    assert set(modes.values()) == {0o600}, modes
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_second_service_on_the_same_state_is_rejected(service: Daemon, folder: Path) -> None:
    endpoint(service)
    other = daemon(folder)
    other.log = folder / "other.log"
    assert refusal(other) == (
        f"cyborg-standalone: another cyborg-standalone uses {folder / 'state'}"
    )


def refusal(service: Daemon) -> str:
    """Start a service that must exit with code 1; return its last line."""
    service.start()
    wait_until("it gives up", lambda: not service.alive())
    assert service.stop() == 1
    text = service.log.read_text()
    assert "Traceback" not in text
    return text.splitlines()[-1]


@pytest.mark.matrix
def test_standalone_service_listens_on_loopback_only(tmp_path: Path) -> None:
    message = refusal(daemon(tmp_path, "--listen", "0.0.0.0"))
    assert "[standalone] placement_port = 0.0.0.0" in message or "loopback" in message


# In the default tier, the next test has a wrong file.
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("sections", "message"),
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
def test_invalid_option_is_named_in_the_error(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    assert message in refusal(daemon(tmp_path, **sections))


def test_unparsable_file_is_named_in_the_error(tmp_path: Path) -> None:
    service = daemon(tmp_path)
    (tmp_path / "service.conf").write_text("[agent\nenabled\n")
    assert "service.conf" in refusal(service)
