# SPDX-License-Identifier: Apache-2.0
"""Validation of the options of external drivers, mainly of the socket directory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oslo_config import cfg

from cyborg import conf as options
from cyborg.agent.external import driver
from cyborg.core.errors import Misconfigured
from cyborg.tests.fixtures.hosts.external_drivers import socket_folder


@pytest.fixture
def place() -> Iterator[Path]:
    with socket_folder() as path:
        yield path


def conf(**values: object) -> cfg.ConfigOpts:
    new_conf = cfg.ConfigOpts()
    options.register(new_conf, options.AGENT_GROUPS)
    new_conf([], project="cyborg", default_config_files=[], default_config_dirs=[])
    for name, value in values.items():
        new_conf.set_override(name, value, group="agent")
    return new_conf


def test_load_without_options_returns_none() -> None:
    assert driver.load(conf()) is None


def test_load_creates_backend_per_name(place: Path) -> None:
    driver_host = driver.load(
        conf(external_driver_dir=str(place), external_drivers=["a", "b-1"]), ["fake"]
    )
    assert driver_host is not None
    assert list(driver_host.drivers) == ["a", "b-1"]
    assert driver_host.drivers["a"].backend == "a"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["agent"], "found 'agent'; expected a name of up to 40 characters a-z"),
        (["../x"], "found '../x'; expected a name of up to 40"),
        (["a", "a"], "found 'a'; expected a name that no other backend has"),
        (["fake"], "found 'fake'; expected a name that no other"),
    ],
)
def test_load_invalid_name_raises_misconfigured(
    place: Path, names: list[str], message: str
) -> None:
    with pytest.raises(Misconfigured, match=rf"^\[agent\] external_drivers: {message}"):
        driver.load(conf(external_driver_dir=str(place), external_drivers=names), ["fake"])


def test_load_drivers_without_folder_raises_misconfigured() -> None:
    with pytest.raises(Misconfigured, match=r"found 'a'; expected nothing, because"):
        driver.load(conf(external_drivers=["a"]))


def made_folder(path: Path, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def made_file(path: Path) -> Path:
    path.write_text("")
    return path


def linked(place: Path) -> Path:
    made_folder(place / "d", 0o700)
    (place / "l").symlink_to(place / "d")
    return place / "l"


BAD_FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "relative": (lambda _: Path("drivers"), "an absolute path without"),
    "not plain": (lambda p: p / "x" / "..", "an absolute path without"),
    "missing": (lambda p: p / "none", r"an existing directory \(No such file"),
    "a file": (lambda p: made_file(p / "f"), "expected a directory"),
    "a link": (linked, "a path without symbolic links, such as /"),
    "for all": (lambda p: made_folder(p / "d", 0o755), "of mode 0700 or 0750, not 0755"),
    "sticky": (lambda p: made_folder(p / "d", 0o1777), "of mode 0700 or 0750, not 1777"),
    "below one for all": (
        lambda p: made_folder(made_folder(p / "d", 0o777) / "e", 0o700),
        "other users cannot replace through /.*/d",
    ),
    "too long": (lambda p: made_folder(p / ("d" * 60), 0o700), "a path of at most 61 bytes"),
}


@pytest.mark.parametrize(("make", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_owner_uid_unsafe_folder_raises_misconfigured(
    place: Path, make: Callable[[Path], Path], message: str
) -> None:
    # As a string: a Path would take the dots away.
    path = str(make(place))
    with pytest.raises(Misconfigured, match=rf"^\[agent\] external_driver_dir: found .*{message}"):
        driver.load(conf(external_driver_dir=path, external_drivers=["a"]))
