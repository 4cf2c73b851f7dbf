# SPDX-License-Identifier: Apache-2.0
from importlib import metadata

from cyborg.cli.common import base
from cyborg.cli.common.base import plan
from cyborg.cli.common.pci_ids import UNKNOWN

# Commands that change several objects without an argument for each.
MANY = {
    *("device-layout-set", "detach-host", "detach-instance", "host-forget"),
    *("install-driver", "uninstall-driver", "update-driver"),
}


def accepts_several(command: type[base.Command]) -> bool:
    first = next(iter(command.ARGUMENTS), None)
    return isinstance(first, base.Argument) and first.options.get("nargs") in ("+", "*")


def test_commands_that_change_several_objects_have_a_dry_run() -> None:
    entries = metadata.entry_points(group="cyborg.cli")
    classes: dict[str, type[base.Command]] = {entry.name: entry.load() for entry in entries}
    several = {name for name, command in classes.items() if accepts_several(command)}
    assert len(several) > 8
    dry = {name for name, command in classes.items() if base.DRY_RUN in command.OPTIONS}
    # Without --repair, an audit only shows what it would repair.
    assert dry == several | MANY


def test_plan_shows_names_place_and_state_of_an_object_without_control_characters() -> None:
    row = {"uuid": "3f", "name": "a\x1b[1mb", "hostname": "h", "address": None, "state": "free"}
    change = plan("delete", "accelerator", row)
    assert "\x1b" not in str(change)
    assert str(change).endswith(", h, free)")


def test_plan_names_the_model_as_lists_do() -> None:
    board = '{"vendor_id": "0xABCD", "product_id": "0xABCD"}'
    row = {"uuid": "3f", "model": UNKNOWN, "vendor": "0xABCD", "std_board_info": board}
    assert str(plan("enable", "device", row)) == "would enable device 3f (abcd:abcd)"
