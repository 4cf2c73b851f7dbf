# SPDX-License-Identifier: Apache-2.0
"""From configuration files to drivers."""

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from oslo_config import cfg
from oslo_log import log

from cyborg import conf as options
from cyborg.agent.backends import factory
from cyborg.agent.backends.catalogue import DriverCatalogue
from cyborg.core.drivers.desired_state import DesiredBackend, DesiredStatus
from cyborg.core.drivers.registry import COUNTERPARTS
from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.inventory.device import Ability
from cyborg.drivers.fake import FakeDriver
from cyborg.drivers.generic import GenericDriver


def read(tmp_path: Path, text: str) -> cfg.ConfigOpts:
    path = tmp_path / "cyborg.conf"
    path.write_text(text)
    conf = cfg.ConfigOpts()
    options.register(conf, options.AGENT_GROUPS)
    log.register_options(conf)
    conf([], project="cyborg", default_config_files=[str(path)], default_config_dirs=[])
    return conf


@functools.cache
def installed() -> DriverCatalogue:
    """Return the installed drivers, found once: a scan costs 0.1 s of CPU."""
    return DriverCatalogue()


def test_load_drivers_without_backends_returns_none(tmp_path: Path) -> None:
    assert factory.load_drivers(read(tmp_path, "")) == []


def test_load_drivers_reads_section_of_each_backend(tmp_path: Path) -> None:
    conf = read(
        tmp_path,
        """
[agent]
enabled_backends = gen0, f1
enabled_drivers = fake
[gen0]
driver = generic
devices = vendor=8086,product=37c8|37c9
devices = class=03
[f1]
driver = fake
num_devices = 3
address = 0001:00:00.0
[fake]
num_handles = 2
""",
    )
    generic, second, short = factory.load_drivers(conf, tmp_path)
    assert isinstance(generic, GenericDriver)
    assert generic.options["devices"] == ["vendor=8086,product=37c8|37c9", "class=03"]
    assert generic.sysfs_root == tmp_path
    assert isinstance(second, FakeDriver)
    assert (second.backend, len(second.discover())) == ("f1", 3)
    assert (short.backend, short.options["num_devices"]) == ("fake", 1)
    assert [len(d.deployables[0].handles) for d in short.discover()] == [2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[agent]\nenabled_drivers = genric",
            r"\[agent\] enabled_drivers: found 'genric' \(did you mean generic or nic\?\); "
            r"expected one of the drivers of cyborg\.accelerator\.driver: .*fake, .*generic",
        ),
        *(
            (
                f"[agent]\nenabled_drivers = {name}",
                f"enabled_drivers: found '{name}', which is a driver of OpenStack Cyborg and "
                + (f"is the driver '{own}' here" if own else "has no counterpart")
                + "; convert the configuration file with cyborg-status convert-config",
            )
            for name, own in COUNTERPARTS.items()
        ),
        (
            "[agent]\nenabled_backends = x\n[x]\ndriver = nothing_like_it",
            r"\[x\] driver: found 'nothing_like_it'; expected one of the drivers",
        ),
        ("[agent]\nenabled_backends = x", r"\[x\] driver: found nothing; expected the driver"),
        ("[agent]\nenabled_backends = rpc", r"enabled_backends: found 'rpc', which is a section"),
        ("[agent]\nenabled_drivers = fake,fake", r"enabled_drivers: found 'fake' twice"),
        (
            "[agent]\nenabled_drivers = fake\n[fake]\nnum_devices = many",
            r"\[fake\] num_devices: .*'many'.*; expected a value of type int",
        ),
        (
            "[agent]\nenabled_drivers = fake\n[fake]\nnum_devices = -1",
            r"\[fake\] num_devices: found -1; expected 0 to 4096",
        ),
        (
            "[agent]\nenabled_drivers = generic\n[generic]\ndevices = vendor=80",
            r"\[generic\] devices: found 'vendor=80'; expected four hexadecimal digits",
        ),
    ],
)
def test_load_drivers_invalid_option_raises_misconfigured(
    tmp_path: Path, text: str, message: str
) -> None:
    conf = read(tmp_path, text)
    with pytest.raises(Misconfigured, match=message):
        factory.DriverFactory(conf, installed(), tmp_path).load_all({})


def test_load_drivers_import_error_fails_discovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "broken-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        f"[{factory.NAMESPACE}]\nbroken = no_such_module_anywhere:Driver\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    broken, fake = factory.load_drivers(read(tmp_path, "[agent]\nenabled_drivers = broken,fake"))
    with pytest.raises(DriverFailed, match="broken cannot be loaded: ModuleNotFoundError"):
        broken.discover()
    assert fake.discover()


class IncompleteDriver(FakeDriver):
    """A driver with the ability prepare but without the method."""

    abilities = frozenset(Ability)
    prepare = None  # type: ignore[assignment]


def test_load_drivers_ability_without_methods_raises_misconfigured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyborg.drivers.fake.FakeDriver", IncompleteDriver)
    conf = read(tmp_path, "[agent]\nenabled_backends = f1\n[f1]\ndriver = fake\n")
    with pytest.raises(
        Misconfigured,
        match=r"^\[f1\] driver: found 'fake', which has ability prepares but not the methods "
        r"of PrepareInterface; expected a driver that has them$",
    ):
        factory.load_drivers(conf, tmp_path)


@pytest.mark.slow
def test_load_drivers_memory_of_a_driver_survives_a_restart(tmp_path: Path) -> None:
    text = f"[DEFAULT]\nhost = a\nstate_path = {tmp_path}\n[agent]\nenabled_backends = x, y\n"
    text += "[x]\ndriver = fake\n[y]\ndriver = fake\naddress = 0001:00:00.0"
    first, _ = factory.load_drivers(read(tmp_path, text), tmp_path)
    first.memory.put("key", "text")
    again = factory.load_drivers(read(tmp_path, text), tmp_path)
    # A device may be moved to another backend of its driver.
    assert [driver.memory.get("key") for driver in again] == ["text", "text"]
    assert (tmp_path / "agent/memory-a.json").exists()


def broken(attribute: str) -> type[FakeDriver]:
    class Broken(FakeDriver):
        def __init__(self, backend: str, *more: Any) -> None:
            if attribute == "exits":
                sys.exit(3)
            if attribute == "raises":
                raise RuntimeError("no library")
            if attribute == "forgets":
                return
            super().__init__("another", *more)

    return Broken


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("exits", "SystemExit: 3"),
        ("raises", "RuntimeError: no library"),
        ("forgets", "AttributeError: "),
        ("misnames", "the driver calls its backend 'another'"),
    ],
)
def test_load_drivers_constructor_error_fails_discovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    monkeypatch.setattr("cyborg.drivers.fake.FakeDriver", broken(fault))
    sick, generic = factory.load_drivers(read(tmp_path, "[agent]\nenabled_drivers = fake,generic"))
    assert (sick.name, generic.name) == ("fake", "generic")
    with pytest.raises(DriverFailed, match=message):
        sick.discover()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["host", "debug", "state_path", "Agent", "default", "OSLO_x"])
def test_load_drivers_reserved_section_raises_misconfigured(tmp_path: Path, name: str) -> None:
    conf = read(tmp_path, f"[agent]\nenabled_backends = {name}\n[{name}]\ndriver = fake\n")
    host = conf.host
    with pytest.raises(Misconfigured, match=f"found '{name}', which is a"):
        factory.DriverFactory(conf, installed(), tmp_path).load_all({})
    builder = factory.DriverFactory(read(tmp_path, ""), installed(), tmp_path)
    with pytest.raises(Misconfigured, match=f"found '{name}', which is a"):
        builder.from_desired(DesiredBackend(name, "fake", DesiredStatus.ENABLED, 1))
    assert conf.host == host, "to oslo.config a section hides the option of its name"


def test_load_drivers_sets_the_name_of_the_host(tmp_path: Path) -> None:
    conf = read(tmp_path, "[DEFAULT]\nhost = compute-7\n[agent]\nenabled_drivers = fake\n")
    (driver,) = factory.load_drivers(conf)
    assert driver.host == "compute-7"
