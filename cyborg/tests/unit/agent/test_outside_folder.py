# SPDX-License-Identifier: Apache-2.0
"""What the options of drivers of their own process may be, the folder of the sockets above all."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oslo_config import cfg

from cyborg import conf as options
from cyborg.agent import outside
from cyborg.core.errors import Misconfigured
from cyborg.fixtures.outside import folder


@pytest.fixture
def place() -> Iterator[Path]:
    with folder() as path:
        yield path


def conf(**values: object) -> cfg.ConfigOpts:
    made = cfg.ConfigOpts()
    options.register(made, options.AGENT_GROUPS)
    made([], project="cyborg", default_config_files=[], default_config_dirs=[])
    for name, value in values.items():
        made.set_override(name, value, group="agent")
    return made


def test_it_is_off_by_default() -> None:
    assert outside.load(conf()) is None


def test_each_name_is_a_backend(place: Path) -> None:
    made = outside.load(conf(socket_dir=str(place), socket_drivers=["a", "b-1"]), ["fake"])
    assert made is not None
    assert list(made.drivers) == ["a", "b-1"]
    assert made.drivers["a"].backend == "a"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["agent"], "found 'agent'; expected up to 40 of a-z"),
        (["../x"], "found '../x'; expected up to 40"),
        (["a", "a"], "found 'a'; expected a name that no other backend has"),
        (["fake"], "found 'fake'; expected a name that no other"),
    ],
)
def test_names_that_cannot_be(place: Path, names: list[str], message: str) -> None:
    with pytest.raises(Misconfigured, match=rf"^\[agent\] socket_drivers: {message}"):
        outside.load(conf(socket_dir=str(place), socket_drivers=names), ["fake"])


def test_drivers_without_a_folder() -> None:
    with pytest.raises(Misconfigured, match=r"found 'a'; expected nothing, as long as"):
        outside.load(conf(socket_drivers=["a"]))


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
    "missing": (lambda p: p / "none", r"a directory that is there \(No such file"),
    "a file": (lambda p: made_file(p / "f"), "expected a directory"),
    "a link": (linked, "a path without symbolic links, such as /"),
    "for all": (lambda p: made_folder(p / "d", 0o755), "of mode 0700 or 0750, not 0755"),
    "sticky": (lambda p: made_folder(p / "d", 0o1777), "of mode 0700 or 0750, not 1777"),
    "below one for all": (
        lambda p: made_folder(made_folder(p / "d", 0o777) / "e", 0o700),
        "others cannot replace: /.*/d lets them",
    ),
    "too long": (lambda p: made_folder(p / ("d" * 60), 0o700), "a path of at most 61 bytes"),
}


@pytest.mark.parametrize(("make", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_folders_that_are_not_safe(place: Path, make: Callable[[Path], Path], message: str) -> None:
    # As a string: a Path would take the dots away.
    path = str(make(place))
    with pytest.raises(Misconfigured, match=rf"^\[agent\] socket_dir: found .*{message}"):
        outside.load(conf(socket_dir=path, socket_drivers=["a"]))
