# SPDX-License-Identifier: Apache-2.0
"""cyborg-status convert-config: a file in, a file out."""

import stat
from pathlib import Path

import pytest
from oslo_config import cfg

from cyborg import conf as options
from cyborg.cmd import status

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


def test_services_accept_the_new_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.conf", tmp_path / "new.conf"
    old.write_text(OLD)
    assert status.main(["convert-config", str(old), "--output", str(new)]) == 0
    assert "periodic_interval is dropped" in capsys.readouterr().err
    assert stat.S_IMODE(new.stat().st_mode) == 0o600, "it has passwords"
    conf = cfg.ConfigOpts()
    options.register(conf)
    conf.register_opt(cfg.MultiStrOpt("devices"), group="generic")
    conf(["--config-file", str(new)], project="cyborg")
    assert (conf.api.host_ip, conf.api.workers) == ("10.0.0.1", 4)
    assert conf.database.connection == "mysql+pymysql://cyborg:secret@db/cyborg"
    assert conf.agent.enabled_drivers == ["generic"]
    assert conf.generic.devices == ["vendor=8086,product=0b2b", "vendor=10de"]


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
