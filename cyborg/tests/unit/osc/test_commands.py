# SPDX-License-Identifier: Apache-2.0
"""The plug-in of ``openstack``: import cost, commands and options."""

import argparse
import configparser
import functools
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cliff import command

import cyborg
from cyborg.cli.commands import COMMANDS
from cyborg.cli.common.rest import DEFAULT_MICROVERSION, CommandError
from cyborg.osc import plugin

ROOT = Path(cyborg.__file__).parent.parent
GROUP = "openstack.cyborg.v2"


@functools.cache
def entries() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


@pytest.mark.static
def test_setup_cfg_has_the_commands_of_the_table() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    if not setup.has_section("entry_points"):
        pytest.skip("not run from a source tree")
    plugin_names = [entry.entry_point for entry in COMMANDS.values() if entry.is_own]
    for group, points in (
        ("cyborg.cli", {name: f"cyborg.cli.{entry.path}" for name, entry in COMMANDS.items()}),
        (GROUP, {name: f"cyborg.osc.plugin:{name}" for name in plugin_names}),
    ):
        expected = "\n".join(f"{name} = {path}" for name, path in sorted(points.items()))
        assert setup["entry_points"][group].strip() == expected
        installed = {entry.name: entry.value for entry in metadata.entry_points(group=group)}
        assert installed == points, "install the project again"


@pytest.mark.parametrize("name", sorted(entries()))
def test_every_command_is_based_on_cyborg_command(name: str) -> None:
    plugin_command = entries()[name].load()
    assert issubclass(plugin_command, command.Command)
    _, base, *_ = plugin_command.__mro__[1:]
    assert base.__module__.startswith("cyborg.cli.")
    assert plugin_command.__doc__ == base.__doc__


def test_commands_of_others_are_installed_with_python_cyborgclient() -> None:
    """This plug-in has all commands that the other clients do not have."""
    others = metadata.entry_points(group="openstack.accelerator.v2").names
    foreign = {entry.entry_point for entry in COMMANDS.values() if not entry.is_own}
    assert foreign <= others
    assert not others & set(entries())


@pytest.mark.slow
def test_plugin_imports_no_heavy_modules() -> None:
    # Every command of openstack imports the plug-in.
    heavy = ("cliff", "openstack", "keystoneauth1", "cyborg.cli", "cyborg.core", "rich")
    code = (
        "import sys; from cyborg.osc import plugin; "
        f"print(*[m for m in {heavy!r} if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""


def test_api_version_option_and_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*arguments: str) -> str:
        parser = plugin.build_option_parser(argparse.ArgumentParser())
        return str(parser.parse_args(arguments).os_cyborg_api_version)

    monkeypatch.delenv("OS_CYBORG_API_VERSION", raising=False)
    assert parsed() == plugin.DEFAULT_API_VERSION == DEFAULT_MICROVERSION
    assert parsed("--os-cyborg-api-version", "2.3") == "2.3"
    monkeypatch.setenv("OS_CYBORG_API_VERSION", "2.1")
    assert parsed() == "2.1"
    # For versions other than 2.x openstack finds no commands and lists the valid versions.
    versions = ("2", "2.1", "2.99", "1.0", "latest", "")
    assert [plugin.check_api_version(version) for version in versions] == [True] * 3 + [False] * 3
    assert plugin.API_VERSIONS[-1] == DEFAULT_MICROVERSION


@pytest.mark.slow
def test_call_without_service_in_catalog_raises() -> None:
    class Cloud:
        """A cloud with an empty catalog."""

        def get_session(self) -> Any:
            return SimpleNamespace(timeout=None, get_endpoint=lambda *a, **k: None)

        def __getattr__(self, name: str) -> Any:
            return lambda service: None

    manager = SimpleNamespace(_cli_options=Cloud(), _api_version={plugin.API_NAME: "2.4"})
    with pytest.raises(CommandError, match="no accelerator service"):
        plugin.make_client(manager).call("GET", "/drivers")
