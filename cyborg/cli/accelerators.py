# SPDX-License-Identifier: Apache-2.0
"""``cyborg accelerator-*``: attachable accelerators with their instances and labels."""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

from cyborg.cli.common import base, formatting, listing, pci_ids
from cyborg.cli.common.base import argument, field_argument
from cyborg.cli.common.collection import Collection
from cyborg.cli.common.errors import CommandError
from cyborg.cli.common.servers import fetch_states
from cyborg.cli.devices import DEVICES

STATES = ("draining", "preparing", "bound", "error", "dirty", "cordoned", "free")
SHORT = formatting.columns_of(
    "uuid, name, resource_class=Class, hostname=Host, address, state, instance_uuid=Instance"
)
LONG = formatting.columns_of(
    "driver, error, state_reasons, description, tags, type, vendor, model, backend, "
    "attach_handle_type=Handle, attach_handle_info=Handle info, device_uuid=Device, "
    "deployable_uuid=Deployable, rp_uuid=Provider, arq_uuid=Request, project_id=Project, "
    "created_at, updated_at",
    after=SHORT,
)


def _format_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **pci_ids.add_names(row),
        "address": formatting.format_address(row.get("attach_handle_info")),
    }


ACCELERATORS = Collection(
    "/accelerators",
    SHORT,
    LONG,
    format_row=_format_row,
    filters=lambda text: {"name": text},
    expected="the name",
)


class List(listing.Lister, of=ACCELERATORS):
    """List the accelerators of your project or, for an administrator, of all projects."""

    ARGUMENTS = (
        field_argument(
            "--device",
            lookup=DEVICES.find_uuid,
            help="only accelerators of the device with this uuid",
        ),
        field_argument("--driver", help="only accelerators of this driver or backend"),
        field_argument("--host", help="only accelerators of this host"),
        field_argument(
            "--instance",
            lookup=partial(ACCELERATORS.find_uuid, field="instance_uuid"),
            help="only accelerators of the instance with this uuid",
        ),
        field_argument("--resource-class", help="only this resource class, such as PGPU or FPGA"),
        field_argument("--state", choices=STATES, help="only accelerators in this state"),
        argument(
            "--detail",
            action="store_true",
            help="also show the current status of each server in Nova",
        ),
    )

    def take_action(self, args: argparse.Namespace) -> Any:
        """Return the table of accelerators."""
        rows = self.read_rows(args)
        if not args.detail:
            return self.build_rows(args, rows)
        instances = {row["instance_uuid"] for row in rows} - {None}
        found = fetch_states(self.app.rest, instances)
        if found.warning is not None:
            self.app.LOG.warning("%s", found.warning)
        rows = [{**row, "server": found.states.get(row["instance_uuid"])} for row in rows]
        extra = formatting.columns_of("server")
        return self.build_rows(args, rows, (*SHORT, *extra), (*LONG, *extra))


class Show(base.Show, of=ACCELERATORS):
    """Show one accelerator."""

    ARGUMENTS = (argument("accelerator", help="name or uuid of the accelerator"),)


class Update(base.Show, of=ACCELERATORS):
    """Label a bound accelerator; the label is removed when the accelerator is unbound."""

    ARGUMENTS = (
        argument("accelerator", help="name or uuid of the accelerator"),
        field_argument("--name", help="name; an empty name removes it"),
        field_argument("--description", help="free text; an empty text removes it"),
        (
            argument(
                "--tag",
                action="append",
                help="a tag; repeat the option for several tags; they replace all existing tags",
            ),
            argument("--no-tags", action="store_true", help="remove all tags"),
        ),
    )

    def take_action(self, args: argparse.Namespace) -> Any:
        """Update the label and return the accelerator."""
        label = {key: value or None for key, value in self.read_fields(args).items()}
        if args.tag or args.no_tags:
            label["tags"] = args.tag or []
        if not label:
            raise CommandError("nothing to change: use --name, --description, --tag or --no-tags")
        row = self.app.rest.call("PATCH", self.find_path(args), label)
        return ACCELERATORS.build_object(row)
