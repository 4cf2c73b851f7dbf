# SPDX-License-Identifier: Apache-2.0
"""``cyborg device-profile-*``: named sets of requested accelerators."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import argument, field_argument, flag
from cyborg.cli.common.rest import Collection, Row


def parse_group(text: str) -> dict[str, str]:
    """Parse a group. Raise ArgumentTypeError, which argparse shows with the argument's name.

    >>> parse_group("resources:FPGA=1, trait:CUSTOM_X=required")
    {'resources:FPGA': '1', 'trait:CUSTOM_X': 'required'}
    """
    return _parse_json(text) if text.lstrip().startswith(("{", "[")) else _parse_pairs(text)


def _parse_json(text: str) -> dict[str, str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        # RecursionError: the parser calls itself for each nested bracket.
        raise argparse.ArgumentTypeError(f"not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON group must be an object")
    # The service takes texts only, and people write the number 1 for "1".
    return {key: item if isinstance(item, str) else json.dumps(item) for key, item in value.items()}


def _parse_pairs(text: str) -> dict[str, str]:
    """Return the keys and values of ``KEY=VALUE,...``. Raise ArgumentTypeError."""
    group: dict[str, str] = {}
    for pair in text.split(","):
        key, equals, value = pair.strip().partition("=")
        if not equals or not key:
            raise argparse.ArgumentTypeError(
                f"{pair.strip()!r} is not of the form KEY=VALUE, such as resources:FPGA=1"
            )
        if key in group:
            raise argparse.ArgumentTypeError(f"duplicate key {key}")
        group[key] = value
    return group


SHORT = formatting.columns_of("uuid, name, groups")
LONG = formatting.columns_of("description, created_at, updated_at", after=SHORT)
PROFILES = Collection(
    "/device_profiles",
    SHORT,
    LONG,
    nouns="device profiles",
    object_key="device_profile",
    has_names=True,
)


class Create(base.Create, of=PROFILES):
    """Create a device profile."""

    ARGUMENTS = (
        field_argument("name", help="name: letters, digits, '-' and '_', at most 255 characters"),
        field_argument(
            "--group",
            to="groups",
            metavar="KEY=VALUE,...",
            type=parse_group,
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


class Delete(base.CallEach, of=PROFILES):
    """Delete device profiles that no accelerator request uses."""

    ARGUMENTS = (argument("profile", nargs="+", help="name or uuid of a profile"),)


FITS = "fits"
ALL_HOSTS = "all hosts"
ALL_GROUPS = "all"
LAST_FAILURE = "last_failure"
SUMMARY = formatting.columns_of("group, result, providers, handles, reason")
LONG_SUMMARY = formatting.columns_of("remedy", after=SUMMARY)
PROVIDERS = formatting.columns_of(
    "hostname=Host, address, group, free_handles=Free, result, reason"
)
LONG_PROVIDERS = formatting.columns_of(
    "handles, remedy, owners, resource_class, uuid=Provider, device_uuid=Device", after=PROVIDERS
)
CAPACITY = formatting.columns_of("hostname=Host, servers, free_handles=Free, losses=Lost to")
LONG_CAPACITY = formatting.columns_of("handles, exact, remedies", after=CAPACITY)
EXPLANATIONS = Collection("/device_profiles", SUMMARY, LONG_SUMMARY, nouns="providers")
CAPACITIES = Collection("/device_profiles", CAPACITY, LONG_CAPACITY, nouns="hosts")
_PROFILE = argument("profile", help="name or uuid of the profile")


class Explain(listing.Lister, of=EXPLANATIONS):
    """Explain which providers can serve a device profile now, and why the others cannot.

    Each provider counts at the first predicate that it fails. With --host or --providers, there is
    a row for each provider and each group, for administrators.
    """

    UNCUT_COLUMNS = ("Result", "Address")
    ARGUMENTS = (
        _PROFILE,
        field_argument("--host", help="the providers of this host"),
        flag("--providers", "the providers of all hosts"),
    )

    def take_action(self, args: argparse.Namespace) -> Any:
        """Return the table."""
        path = f"{self.find_path(args)}/explanation"
        if args.host is None and not args.providers:
            # The counts are those of all providers on every page.
            explanation = self.app.rest.call("GET", path, params={"limit": 1})
            return self.build_rows(args, summary_rows(explanation))
        explanation = self.app.rest.read_whole(path, "providers", **self.read_fields(args))
        return self.build_rows(
            args, _provider_rows(explanation), short=PROVIDERS, long=LONG_PROVIDERS
        )


class Capacity(listing.Lister, of=CAPACITIES):
    """Show how many more servers with a device profile fit now, and why handles cannot be used.

    The first row is the whole cloud; the rows of hosts are for administrators.
    """

    UNCUT_COLUMNS = ("Servers", "Host")
    ARGUMENTS = (_PROFILE, field_argument("--host", help="only this host"))

    def read_rows(self, args: argparse.Namespace) -> list[dict[str, Any]]:
        """Return a row for the cloud, and one for each host."""
        path = f"{self.find_path(args)}/capacity"
        capacity = self.app.rest.read_whole(path, "hosts", **self.read_fields(args))
        rows = list(capacity["hosts"])
        if args.host is None:
            # The totals of the answer are those of the cloud, or of the only host.
            rows.insert(0, {**capacity, "hostname": ALL_HOSTS})
        return [_capacity_row(row) for row in rows]


def summary_rows(explanation: Row) -> Iterator[dict[str, Any]]:
    """Yield the rows of an explanation with numbers of providers, as the command shows them."""
    # With one group the row of the group says the same.
    if len(explanation["groups"]) > 1:
        hosts = explanation["fitting_hosts"]
        text = f"hosts that can serve all groups together: {hosts}"
        yield {"group": ALL_GROUPS, "result": FITS if hosts else "no_host", "reason": text}
    for group in explanation["groups"]:
        number = group["group"]
        fitting = {"providers": group["fitting_providers"], "handles": group["free_handles"]}
        yield {"group": number, "result": FITS, **fitting}
        for reason in group["reasons"]:
            yield {"group": number, **reason, "result": reason["code"]}
    yield from _failure_rows(explanation)


def _provider_rows(explanation: Row) -> Iterator[dict[str, Any]]:
    for provider in explanation["providers"]:
        # A bound accelerator has an instance; a leased one its request only.
        owners = provider["owners"]
        text = ", ".join(row["instance_uuid"] or row["arq_uuid"] for row in owners)
        cell = formatting.Text(owners, text)
        for group in provider["groups"]:
            yield {**provider, **group, "result": group["code"] or FITS, "owners": cell}
    yield from _failure_rows(explanation)


def _failure_rows(explanation: Row) -> Iterator[dict[str, Any]]:
    """Yield the reasons of the last failure of a device context."""
    failure = explanation["last_failure"]
    if failure is None:
        return
    host = f" on host {failure['hostname']}" if failure["hostname"] else ""
    # A failure without groups has a code and a reason of its own.
    for group in failure["groups"] or [{**failure, "group": None, "handles": None}]:
        yield {
            "hostname": failure["hostname"],
            "group": group["group"],
            "result": LAST_FAILURE,
            "handles": group["handles"],
            "uuid": group.get("provider_uuid"),
            "reason": f"{failure['at']}{host}: {group['code']}: {group['reason']}",
        }


def _capacity_row(row: Row) -> dict[str, Any]:
    servers = row["servers"]
    losses = {loss["code"]: loss["handles"] for loss in row["losses"]}
    return {
        **row,
        "servers": servers if row["exact"] else formatting.Text(servers, f"at least {servers}"),
        "losses": formatting.Text(losses, ", ".join(f"{code} {n}" for code, n in losses.items())),
        "remedies": {loss["code"]: loss["remedy"] for loss in row["losses"]},
    }
