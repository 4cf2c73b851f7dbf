# SPDX-License-Identifier: Apache-2.0
"""``cyborg device-profile-*``: named sets of requested accelerators."""

import argparse
from typing import Any

from cyborg.cli.common import base, formatting, listing, profile_groups
from cyborg.cli.common.base import argument, field_argument
from cyborg.cli.common.collection import Collection

SHORT = formatting.columns_of("uuid, name, groups")
LONG = formatting.columns_of("description, created_at, updated_at", after=SHORT)
PROFILES = Collection("/device_profiles", SHORT, LONG, nouns="device profiles")


class Create(base.Create, of=PROFILES):
    """Create a device profile."""

    ARGUMENTS = (
        field_argument("name", help="name: letters, digits, '-' and '_', at most 255 characters"),
        field_argument(
            "--group",
            to="groups",
            metavar="KEY=VALUE,...",
            type=profile_groups.parse_group,
            action="append",
            required=True,
            help="a request group, such as resources:FPGA=1,trait:CUSTOM_X=required, or the same "
            "as a JSON object; repeat the option for several groups",
        ),
        field_argument("--description", help="free text"),
        field_argument("--uuid", help="uuid of the profile; a new one by default"),
    )

    def build_body(self, fields: dict[str, Any]) -> Any:
        """Return the profile in a list, as the service expects it."""
        return [fields]


class List(listing.Lister, of=PROFILES):
    """List device profiles."""


class Show(base.Show, of=PROFILES):
    """Show one device profile."""

    ARGUMENTS = (argument("profile", help="name or uuid of the profile"),)

    def take_action(self, args: argparse.Namespace) -> Any:
        """Return the profile."""
        response = self.app.rest.call("GET", self.find_path(args))
        return PROFILES.build_object(response["device_profile"])


class Delete(base.CallEach, of=PROFILES):
    """Delete device profiles that no accelerator request uses."""

    ARGUMENTS = (argument("profile", nargs="+", help="name or uuid of a profile"),)
