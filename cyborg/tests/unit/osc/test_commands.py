# SPDX-License-Identifier: Apache-2.0
"""The plug-in of ``openstack``: what it must cost nobody, and what it must have."""

import argparse
import configparser
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cliff import command

import cyborg
from cyborg.cli.answers import Refused
from cyborg.cli.rest import LATEST
from cyborg.osc import plugin

ROOT = Path(cyborg.__file__).parent.parent
GROUP = "openstack.cyborg.v2"


def entries() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def test_installed_commands_are_those_of_this_tree() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    if not setup.has_section("entry_points"):
        pytest.skip("not run from a source tree")
    lines = setup["entry_points"][GROUP].strip().splitlines()
    assert {line.partition("=")[0].strip() for line in lines} == set(entries())


@pytest.mark.parametrize("name", sorted(entries()))
def test_every_command_is_that_of_cyborg(name: str) -> None:
    its = entries()[name].load()
    assert issubclass(its, command.Command)
    _, below, *_ = its.__mro__[1:]
    assert below.__module__.startswith("cyborg.cli.")
    assert its.__doc__ == below.__doc__


def test_the_plugin_is_light() -> None:
    # Whoever types openstack imports it, for whatever command.
    heavy = ("cliff", "openstack", "keystoneauth1", "cyborg.cli", "cyborg.core", "rich")
    code = (
        "import sys; from cyborg.osc import plugin; "
        f"print(*[m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_microversion(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*words: str) -> str:
        parser = plugin.build_option_parser(argparse.ArgumentParser())
        return str(parser.parse_args(words).os_cyborg_api_version)

    monkeypatch.delenv("OS_CYBORG_API_VERSION", raising=False)
    assert parsed() == plugin.DEFAULT_API_VERSION == LATEST
    assert parsed("--os-cyborg-api-version", "2.3") == "2.3"
    monkeypatch.setenv("OS_CYBORG_API_VERSION", "2.1")
    assert parsed() == "2.1"
    # Beyond 2 openstack finds no commands, and must say which version there are.
    asked = ("2", "2.1", "2.99", "1.0", "latest", "")
    assert [plugin.check_api_version(version) for version in asked] == [True] * 3 + [False] * 3
    assert plugin.API_VERSIONS[-1] == LATEST


def test_a_cloud_without_the_service() -> None:
    class Cloud:
        """A cloud whose catalogue has nothing."""

        def get_session(self) -> Any:
            return SimpleNamespace(timeout=None, get_endpoint=lambda *a, **k: None)

        def __getattr__(self, name: str) -> Any:
            return lambda service: None

    manager = SimpleNamespace(_cli_options=Cloud(), _api_version={plugin.API_NAME: "2.4"})
    with pytest.raises(Refused, match="no accelerator service"):
        plugin.make_client(manager).call("GET", "/drivers")
