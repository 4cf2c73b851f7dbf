# SPDX-License-Identifier: Apache-2.0
"""cyborg-status convert-config: a file in, a file out that the services accept."""

import re
import stat
from pathlib import Path

import pytest
from oslo_config import cfg
from oslo_log import log

from cyborg import conf as options
from cyborg.agent.backends import factory
from cyborg.api import auth
from cyborg.cmd import status, status_convert
from cyborg.conductor.service import ConductorService
from cyborg.core.migration import config_conversion
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.fixtures.migration import former_configs
from cyborg.tests.fixtures.migration.former_configs import FIELD, RELEASES

OLD = """[DEFAULT]
debug = true
periodic_interval = 60
[api]
host_ip = 10.0.0.1
api_workers = 4
[database]
connection = mysql+pymysql://cyborg:secret@db/cyborg
[agent]
enabled_drivers = pci_driver
[pci]
passthrough_whitelist = {"vendor_id": "8086", "product_id": "0b2b"}
passthrough_whitelist = {"vendor_id": "10de"}
"""
PLACES = {
    "BROKER": "rabbit://guest:guest@127.0.0.1:1/",
    "DATABASE": "mysql+pymysql://cyborg:secret@127.0.0.1:1/cyborg",
    "KEYSTONE": "http://127.0.0.1:1/v3",
    "PORT": "6666",
}


def convert(text: str, folder: Path) -> Path:
    """Convert a configuration and return the new file."""
    old, new = folder / "old.conf", folder / "new.conf"
    old.write_text(text)
    assert status.main(["convert-config", str(old), "--output", str(new)]) == 0
    return new


def assert_services_accept(file: Path, sysfs: Path) -> None:
    """Create what each service creates from its options at its start."""
    for groups in (options.API_GROUPS, options.CONDUCTOR_GROUPS, options.AGENT_GROUPS):
        conf = cfg.ConfigOpts()
        options.register(conf, groups)
        log.register_options(conf)
        conf(["--config-file", str(file)], project="cyborg", default_config_dirs=[])
        options.check(conf)
        if groups is options.API_GROUPS:
            auth.check_config(conf)
        elif groups is options.CONDUCTOR_GROUPS:
            ConductorService(conf).open()
        else:
            factory.load_drivers(conf, sysfs)


@pytest.mark.slow
def test_services_accept_the_new_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = convert(OLD, tmp_path)
    stderr = capsys.readouterr().err
    assert "replaced: [DEFAULT] periodic_interval: write [agent] discovery_interval" in stderr
    assert "options: 5 converted, 1 replaced, 0 not needed, 1 by hand" in stderr
    assert "secret" not in stderr
    assert stat.S_IMODE(new.stat().st_mode) == 0o600, "it has passwords"
    conf = cfg.ConfigOpts()
    options.register(conf)
    conf.register_opt(cfg.MultiStrOpt("devices"), group="generic")
    conf(["--config-file", str(new)], project="cyborg")
    assert (conf.api.host_ip, conf.api.workers) == ("10.0.0.1", 4)
    assert conf.database.connection == "mysql+pymysql://cyborg:secret@db/cyborg"
    assert conf.agent.enabled_drivers == ["generic"]
    assert conf.generic.devices == [
        "vendor=8086,product=0b2b,resource_class=CUSTOM_PCI",
        "vendor=10de,resource_class=CUSTOM_PCI",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("release", sample(RELEASES, "12", "17"))
def test_each_option_of_a_release_has_one_outcome_that_services_accept(
    release: str, tmp_path: Path
) -> None:
    database, bus = PLACES["DATABASE"], PLACES["BROKER"]
    former = former_configs.make_settings(
        release,
        {
            "DEFAULT": {"transport_url": bus, "log_config_append": ""},
            "database": {"connection": database, "slave_connection": database},
        },
    )
    found = config_conversion.convert(former, status_convert.known_options())
    places = sorted((section, name) for section, names in former.items() for name in names)
    assert sorted((outcome.section, outcome.name) for outcome in found.outcomes) == places
    assert len(places) > 330
    neither = [outcome for outcome in found.outcomes if "neither service" in outcome.note]
    assert neither == [], "each has its counterpart, or a reason of its own"
    for outcome in found.outcomes:
        # A note names the line to write, unless the option is converted or not needed.
        by_hand = outcome.kind in ("by hand", "replaced")
        assert bool(re.search(r"\bwrite\b|proxy", outcome.note)) or not by_hand, outcome
    assert_services_accept(convert(former_configs.render(former), tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sample(FIELD, "agent", "drivers", "install-guide"))
def test_configurations_of_the_field_are_accepted(name: str, tmp_path: Path) -> None:
    folders = {"LOGS": str(tmp_path), "STATE": str(tmp_path)}
    new = convert(former_configs.read_field(name, PLACES | folders), tmp_path)
    if name == "agent":  # it has no database
        conf = cfg.ConfigOpts()
        options.register(conf, options.AGENT_GROUPS)
        conf(["--config-file", str(new)], project="cyborg", default_config_dirs=[])
        options.check(conf)
        assert factory.load_drivers(conf, tmp_path) == []
    else:
        assert_services_accept(new, tmp_path)


@pytest.mark.slow
def test_files_are_read_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "00.conf", tmp_path / "01.conf"
    first.write_text("[agent]\nenabled_drivers = fake_driver\n")
    second.write_text(
        "[agent]\nenabled_drivers = nvidia_gpu_driver\n[gpu_devices]\nenabled_vgpu_types = a-1\n"
        "[vgpu_a-1]\ndevice_addresses = 0000:3d:00.0\n"
    )
    assert status.main(["convert-config", str(first), str(second)]) == 0
    written = capsys.readouterr()
    assert "enabled_drivers = gpu\n" in written.out
    assert "mdev_types = address=0000:3d:00.0,type=a-1\n" in written.out
    assert "3 converted, 0 replaced" in written.err


@pytest.mark.slow
def test_existing_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.conf"
    old.write_text(OLD)
    assert status.main(["convert-config", str(old), "--output", str(old)]) == 1
    assert "File exists" in capsys.readouterr().err
    assert old.read_text() == OLD


@pytest.mark.parametrize(("text", "error"), [(None, "No such file"), ("x = 1\n y\nz", "at line")])
def test_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, error: str
) -> None:
    old = tmp_path / "old.conf"
    if text is not None:
        old.write_text(text)
    assert status.main(["convert-config", str(old)]) == 1
    assert error in capsys.readouterr().err
