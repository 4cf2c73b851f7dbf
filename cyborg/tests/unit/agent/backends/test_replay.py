# SPDX-License-Identifier: Apache-2.0
"""An agent that replays a capture: what it accepts, and that it knows nothing of its machine."""

from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.backends import factory
from cyborg.agent.backends.catalogue import DriverCatalogue
from cyborg.agent.backends.factory import deny_host_work, open_replay
from cyborg.agent.report.host_identity import HostIdentityProvider
from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.drivers import privileged
from cyborg.drivers.base import Driver
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.testing import captures
from cyborg.tests.fixtures.machine.options import make_conf

FILE = str(captures.FOLDER / "nvme.jsonl")


def test_agent_without_replay_manages_its_machine() -> None:
    assert open_replay(make_conf()) is None


@pytest.mark.slow
def test_replayed_backends_show_the_devices_of_the_capture() -> None:
    conf = make_conf(agent={"replay": FILE, "enabled_drivers": ["nvme", "crypto"]})
    host = open_replay(conf)
    assert host is not None
    try:
        drivers = factory.DriverFactory(
            conf, DriverCatalogue(), create=host.create_driver
        ).load_all({})
        assert [driver.sysfs_root for driver in drivers] == [host.sysfs_root] * 2
        conf.set_override("devices", ["class=0108"], group="nvme")
        nvme = factory.DriverFactory(conf, DriverCatalogue(), create=host.create_driver)
        assert [d.address for d in nvme.from_config("nvme").discover()] == [
            "0000:5e:00.0",
            "0000:d9:00.0",
        ]
    finally:
        host.close()


class UnknownDriver(NvmeDriver):
    """A driver of another package, whose host work is not simulated."""


def test_backend_of_an_unknown_driver_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: DriverCatalogue, name: str) -> type[Driver]:
        return UnknownDriver

    monkeypatch.setattr(DriverCatalogue, "driver", load)
    conf = make_conf(agent={"replay": FILE, "enabled_drivers": ["nvme"]})
    host = open_replay(conf)
    assert host is not None
    try:
        create = host.create_driver
        (driver,) = factory.DriverFactory(conf, DriverCatalogue(), create=create).load_all({})
        with pytest.raises(DriverFailed, match="cannot be replayed"):
            driver.discover()
    finally:
        host.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": f"{__file__}.json"}, "replay: .*: No such file"),
        ({"replay": __file__}, "replay: .*line 1"),
        ({"replay": FILE, "replay_faults": ["fire"]}, "replay_faults: 'fire' is no fault"),
        ({"replay_faults": ["0000:5e:00.0:eio"]}, "found faults without"),
        ({"replay": FILE, "external_driver_dir": "/run/x"}, "external drivers cannot"),
        ({"replay": FILE, "external_drivers": ["acme"]}, "external drivers cannot"),
    ],
)
def test_unusable_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Misconfigured, match=rf"\[agent\] .*{message}"):
        open_replay(make_conf(agent=options))


def test_identity_of_a_replayed_host_is_its_configured_name(tmp_path: Path) -> None:
    file = tmp_path / "compute_id"
    file.write_text("0b4bd0f5-2f0e-4f0a-8d2c-3f6f0b5c8a11")
    conf = make_conf(agent={"replay": FILE, "compute_id_file": str(file)})
    conf.set_override("host", "replayed-1")
    identity = HostIdentityProvider(conf).identity()
    assert (identity.compute_id, set(identity.names)) == (None, {"replayed-1"})


def test_process_that_replays_has_no_privileged_functions() -> None:
    deny_host_work(make_conf())
    from cyborg.drivers.privileged import nvme

    deny_host_work(make_conf(agent={"replay": FILE}))
    try:
        with pytest.raises(DriverFailed, match="this process replays a capture"):
            nvme.erase("0000:5e:00.0", 1.0, ["sanitize, block erase"])
    finally:
        privileged.deny_calls(None)
