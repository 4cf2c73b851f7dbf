# SPDX-License-Identifier: Apache-2.0
"""The page about hardening: its options and commands exist, and the API rejects what it says."""

import os
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
import requests
from oslo_policy import opts as policy_opts

from cyborg.cli import app
from cyborg.tests.fixtures.clouds.keystone_cloud import KeystoneCloud
from cyborg.tests.fixtures.machine.forked_commands import forked_commands
from cyborg.tests.fixtures.machine.processes import BIN
from cyborg.tests.fixtures.machine.shell import shell
from cyborg.tests.fixtures.machine.transcript import follow, parse
from cyborg.tests.fixtures.machine.tutorial import write_openrc
from cyborg.tests.fixtures.pages.page_cloud import CONFIG, DOC
from cyborg.tests.functional.test_install_guide import known_options

PAGE = DOC / "admin/hardening.rst"
ENTRY = re.compile(r"^(?P<item>\S.*)\n(?P<body>    :Set: .*\n(?:    .*\n)+)", re.MULTILINE)
OPTION = re.compile(r"``\[(\w+)\] (\w+)``")


def test_each_item_has_a_verification() -> None:
    found = {match["item"]: match["body"] for match in ENTRY.finditer(PAGE.read_text())}
    assert len(found) >= 20
    for item, body in found.items():
        assert re.findall(r"^    :(\w+): \S", body, re.MULTILINE) == ["Set", "Verify"], item


def test_options_exist() -> None:
    options = known_options()
    options["oslo_policy"] = {
        option.dest for _, group in policy_opts.list_opts() for option in group
    }
    named = set(OPTION.findall(PAGE.read_text()))
    assert len(named) > 20
    assert {(section, name) for section, name in named if name not in options[section]} == set()


def test_commands_exist_with_their_options() -> None:
    commands = {entry.name: entry for entry in metadata.entry_points(group="cyborg.cli")}
    calls = re.findall(r"\bcyborg ([a-z]+-[a-z-]+|audit)\b([^`\n]*)", PAGE.read_text())
    client = app.CyborgApp([])
    assert len(calls) > 5
    for name, arguments in calls:
        parser = commands[name].load()(client, None).get_parser(name)
        options = {option for action in parser._actions for option in action.option_strings}
        assert set(re.findall(r"--[a-z-]+", arguments)) <= options, (name, arguments)


@pytest.mark.services
def test_api_rejects_what_the_page_says(keystone_cloud: KeystoneCloud, tmp_path: Path) -> None:
    def curl(words: Sequence[str]) -> tuple[int, str]:
        url = words[-1].replace("https://controller:6666", keystone_cloud.endpoint)
        assert list(words[:-1]) == ["-s", "-o", "/dev/null", "-w", "%{http_code}"]
        return 0, f"{requests.get(url, timeout=30).status_code}\n"

    for name in ("admin", "member"):
        write_openrc(tmp_path, name, keystone_cloud.keystone.environment(name))
    paths = {CONFIG: str(keystone_cloud.folder / "api/cyborg.conf")}
    with forked_commands({"curl": curl}, paths) as scripts:
        path = f"{scripts}:{BIN}:{os.environ['PATH']}"
        env = {"PATH": path, "HOME": str(tmp_path), "LANG": "C.UTF-8"}
        with shell(tmp_path, env) as session:
            follow(parse(PAGE.read_text()), PAGE.name, session)
