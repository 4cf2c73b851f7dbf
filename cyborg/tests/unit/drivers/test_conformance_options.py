# SPDX-License-Identifier: Apache-2.0
"""Detection of options for paths, commands and secrets by the conformance kit."""

from pathlib import Path

import pytest

from cyborg.core.drivers.registry import Option
from cyborg.drivers.fake import FakeDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.testing.conformance.kit import Outcome, run_rules
from cyborg.tests.unit.drivers.bad_drivers import Good

RULE = "path_options_are_host_only"


def outcome(tmp_path: Path, *options: Option) -> Outcome:
    class Optioned(Good):
        OPTIONS = (*Good.OPTIONS, *options)

    (result,) = [r for r in run_rules(Optioned, sysfs_root=tmp_path) if r.rule.name == RULE]
    return result.outcome


@pytest.mark.parametrize(
    "option",
    [
        Option("firmware_file", "str", "", "What is loaded."),
        Option("helper", "str", "/usr/bin/helper", "What helps."),
        Option("tools", "multi", ("/usr/bin/a",), "What helps."),
        Option("helper", "str", "", "The command to run before a card is reset."),
        Option("notes", "list", (), "Paths of files that are read."),
        Option("api_token", "str", "", "By which the card is reached.", host_only=True),
    ],
)
def test_path_command_or_secret_option_without_flag_fails(option: Option, tmp_path: Path) -> None:
    assert outcome(tmp_path, option) is Outcome.FAILED


@pytest.mark.parametrize(
    "option",
    [
        Option("firmware_file", "str", "", "What is loaded.", host_only=True),
        Option("api_token", "str", "", "How it is reached.", host_only=True, secret=True),
        Option("profile", "str", "", "How the card is divided."),
        Option("file_count", "int", 1, "How many files it has."),
    ],
)
def test_other_options_pass(option: Option, tmp_path: Path) -> None:
    assert outcome(tmp_path, option) is Outcome.PASSED


def test_drivers_of_this_package_mark_host_only_options() -> None:
    assert {o.name for o in FakeDriver.OPTIONS if o.host_only} == {
        *("gate", "sick", "absent", "divided", "journal")
    }
    assert not [o.name for o in GenericDriver.OPTIONS if o.host_only]
