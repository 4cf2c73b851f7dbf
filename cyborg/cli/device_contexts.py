# SPDX-License-Identifier: Apache-2.0
"""``cyborg device-context-*``: requests for accelerators, independent of servers."""

from collections.abc import Iterator
from typing import Any

from cyborg.cli import device_profiles
from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import Arguments, argument, field_argument, flag
from cyborg.cli.common.rest import Collection, CommandError, Row
from cyborg.cli.device_profiles import parse_group

SHORT = formatting.columns_of("uuid, name, state, groups, instance_uuid=Instance, hostname=Host")
LONG = formatting.columns_of(
    "description, device_profile=Made from, hidden_profile=Profile, config_data, error, successor, "
    "project_id=Project, epoch, expires_at=Expires, created_at, updated_at",
    after=SHORT,
)
DETAIL = formatting.columns_of("arqs=ARQs", after=LONG)
CONTEXTS = Collection(
    "/device_contexts",
    SHORT,
    LONG,
    nouns="device contexts",
    filters=lambda text: {"name": text},
    expected="the name",
)


parse_pair = base.pair_parser(":", "KEY:VALUE, such as key1:val1")
_CONFIG_DATA = argument(
    "--config-data",
    type=parse_pair,
    action="append",
    metavar="KEY:VALUE",
    help="data for the driver; repeat the option for several keys",
)


def _read_config_data(args: Arguments) -> dict[str, str]:
    """Return the config data. Raise CommandError for a duplicate key."""
    # A dictionary keeps the last of equal keys.
    pairs = dict(args.config_data)
    if len(pairs) != len(args.config_data):
        raise CommandError("--config-data: the keys must be different")
    return pairs


class Create(base.Create, of=CONTEXTS):
    """Create a device context and print its uuid; with -f json or -f table print the context."""

    ARGUMENTS = (
        (
            field_argument(
                "--resources",
                metavar="CLASS:AMOUNT,...",
                help="resource classes and amounts, such as FPGA:1",
            ),
            field_argument(
                "--group",
                dest="groups",
                metavar="KEY=VALUE,...",
                type=parse_group,
                action="append",
                help="a request group as in device-profile-create; repeat the option for several "
                "groups",
            ),
            field_argument(
                "--device-profile",
                "--device-profile-id",
                dest="device_profile",
                metavar="PROFILE",
                help="name or uuid of the device profile whose groups are copied",
            ),
        ),
        field_argument(
            "--requires",
            action="append",
            metavar="TRAIT,...",
            help="traits that the devices must have, with --resources; can be repeated",
        ),
        field_argument(
            "--forbids",
            action="append",
            metavar="TRAIT,...",
            help="traits that the devices must not have, with --resources; can be repeated",
        ),
        _CONFIG_DATA,
        field_argument("--name", help="name"),
        field_argument("--description", help="free text"),
    )

    @property
    def formatter_default(self) -> str:
        """Return the formatter that prints a value alone, for scripts."""
        return "value"

    def take_action(self, args: Arguments) -> Any:
        """Create the context and return it, or its uuid alone."""
        fields = self.read_fields(args)
        for name in ("requires", "forbids"):
            if name in fields:
                fields[name] = ",".join(fields[name])
        if args.config_data:
            fields["config_data"] = _read_config_data(args)
        row = self.app.rest.call("POST", CONTEXTS.path, fields)
        # For scripts: CONTEXT=$(cyborg device-context-create ...).
        if args.formatter == "value" and not args.columns:
            return ("UUID",), (row["uuid"],)
        return CONTEXTS.build_object(row)


class List(listing.Lister, of=CONTEXTS):
    """List device contexts."""

    ARGUMENTS = (
        field_argument("--state", help="only contexts in this state, such as unbound"),
        field_argument("--instance", help="only the contexts of this instance"),
        field_argument("--host", help="only the contexts that are bound on this host"),
        field_argument(
            "--device-profile", help="only the contexts that were made from this device profile"
        ),
    )


class Show(base.Show, of=CONTEXTS):
    """Show one device context with the uuids of its ARQs."""

    ARGUMENTS = (argument("context", help="name or uuid of the context"),)

    def take_action(self, args: Arguments) -> Any:
        """Return the context."""
        row = self.app.rest.call("GET", self.find_path(args))
        # arq-show has the rest of each.
        arqs = [arq["uuid"] for arq in row["arqs"]]
        return formatting.build_object(DETAIL, {**row, "arqs": arqs})


class Set(base.Show, of=CONTEXTS):
    """Change an unbound device context."""

    ARGUMENTS = (
        argument("context", help="name or uuid of the context"),
        field_argument("--name", help="name; an empty name removes it"),
        field_argument("--description", help="free text; an empty text removes it"),
        (
            _CONFIG_DATA,
            flag("--no-config-data", "remove the config data"),
        ),
        (
            argument(
                "--expires-at",
                metavar="TIME",
                help="when the unbound context is deleted, in ISO 8601, such as "
                "2030-01-31T12:00:00+00:00",
            ),
            flag("--no-expiry", "never delete the context"),
        ),
    )

    def take_action(self, args: Arguments) -> Any:
        """Change the context and return it."""
        # An empty text removes the field, which the service expects as null.
        changes = {key: value or None for key, value in self.read_fields(args).items()}
        if args.config_data or args.no_config_data:
            changes["config_data"] = _read_config_data(args) if args.config_data else None
        if args.expires_at is not None or args.no_expiry:
            changes["expires_at"] = args.expires_at  # None with --no-expiry
        if not changes:
            raise CommandError(
                "nothing to change: use --name, --description, --config-data, --no-config-data, "
                "--expires-at or --no-expiry"
            )
        row = self.app.rest.call("PATCH", self.find_path(args), changes)
        return CONTEXTS.build_object(row)


class Delete(base.CallEach, of=CONTEXTS):
    """Delete device contexts that are unbound or in error, with their ARQs."""

    ARGUMENTS = (argument("context", nargs="+", help="name or uuid of a context"),)


CANDIDATE = "candidate"
CANDIDATES = formatting.columns_of("hostname=Host, group, result, provider, reason")
LONG_CANDIDATES = formatting.columns_of("address, remedy", after=CANDIDATES)
CONTEXT_EXPLANATIONS = Collection(
    "/device_contexts", device_profiles.SUMMARY, device_profiles.LONG_SUMMARY, nouns="providers"
)
CONTEXT_CANDIDATES = Collection(
    "/device_contexts", CANDIDATES, LONG_CANDIDATES, nouns="allocation candidates"
)


class Explain(device_profiles.Explain, of=CONTEXT_EXPLANATIONS):
    """Explain which providers can serve a device context now, and why the others cannot.

    Each provider counts at the first predicate that it fails. With --host or --providers, there is
    a row for each provider and each group, for administrators. The last rows are the reasons of the
    last failure, such as a refused bind, until the next lease or bind.
    """

    ARGUMENTS = (
        argument("context", help="name or uuid of the context"),
        # All but the profile, in whose place is the context.
        *device_profiles.Explain.ARGUMENTS[1:],
    )


class Candidates(listing.Lister, of=CONTEXT_CANDIDATES):
    """Ask Placement for allocation candidates of a device context, for administrators.

    A candidate has a row for each group. With --explain there is also a row for each group of the
    providers that are in no candidate, with the first predicate that fails.
    """

    UNCUT_COLUMNS = ("Result",)
    ARGUMENTS = (
        argument("context", help="name or uuid of the context"),
        field_argument("--limit", type=int, help="maximum number of candidates, at most 100"),
        flag("--explain", "explain why other providers are none"),
    )

    def read_rows(self, args: Arguments) -> list[dict[str, Any]]:
        """Return the candidates, followed by the other providers."""
        params = self.read_fields(args) | ({"explain": 1} if args.explain else {})
        path = f"{self.find_path(args)}/allocation_candidates"
        answer = self.app.rest.call("GET", path, params=params)
        if answer["reason"]:
            # On stderr, so that JSON stays JSON.
            self.app.stderr.write(f"Placement: {answer['reason']}\n")
        return [*_candidate_rows(answer), *_rejected_rows(answer)]


def _candidate_rows(answer: Row) -> Iterator[dict[str, Any]]:
    """Yield a row for each group of each candidate."""
    for candidate in answer["allocation_candidates"]:
        mappings = candidate["mappings"]
        # By number: as a text, 10 precedes 2.
        for group in sorted(mappings, key=int):
            for provider in mappings[group]:
                yield {
                    "hostname": candidate["hostname"],
                    "group": int(group),
                    "result": CANDIDATE,
                    "provider": provider,
                }


def _rejected_rows(answer: Row) -> Iterator[dict[str, Any]]:
    for provider in answer.get("rejected_providers", ()):
        for group in provider["groups"]:
            yield {
                **provider,
                **group,
                "provider": provider["uuid"],
                "result": group["code"] or "not_returned",
            }


parse_mapping = base.pair_parser(
    "=", "GROUP=PROVIDER, such as 0=<uuid of a resource provider>", needs_value=True
)
_CONTEXT = argument("context", help="name or uuid of the context")
_HOST = field_argument(
    "--host", to="hostname", required=True, help="name of the host, as in device-list"
)
_MAPPING_HELP = (
    "number of a request group and uuid of its allocated resource provider; repeat the option for "
    "each group"
)


def _mapping_argument(more: str = "", **options: Any) -> base.Argument:
    return argument(
        "--mapping",
        dest="mappings",
        type=parse_mapping,
        action="append",
        metavar="GROUP=PROVIDER",
        help=_MAPPING_HELP + more,
        **options,
    )


class _LeaseCommand(base.ServiceTokenCommand, base.Show, of=CONTEXTS):
    """Base of the commands that claim or release the handles of a context."""

    CALL: str

    def take_action(self, args: Arguments) -> Any:
        """Call the action and return the context."""
        body = self.read_fields(args)
        if mappings := getattr(args, "mappings", None):
            by_group = dict(mappings)
            # Of two mappings of a group, the last would replace the first.
            if len(by_group) != len(mappings):
                raise CommandError("--mapping: a group can be given once only")
            # Lists, as in Placement, which allows several providers for a group.
            body["mappings"] = {group: [provider] for group, provider in by_group.items()}
        path = f"{self.find_path(args)}/{self.CALL}"
        return CONTEXTS.build_object(self.call(args, "POST", path, body or None))


class PreBind(_LeaseCommand, of=CONTEXTS):
    """Reserve the accelerators of a device context for a time, or renew its lease."""

    CALL = "pre_bind"
    ARGUMENTS = (
        _CONTEXT,
        _HOST,
        _mapping_argument(required=True),
        field_argument(
            "--lease-seconds", type=int, metavar="SECONDS", help="time until the lease ends"
        ),
        field_argument("--epoch", type=int, help="renew the lease with this epoch"),
        base.SERVICE_TOKEN,
    )


class Bind(_LeaseCommand, of=CONTEXTS):
    """Bind a device context to an instance, with the accelerators of its lease if it has one."""

    CALL = "bind"
    ARGUMENTS = (
        _CONTEXT,
        _HOST,
        field_argument("--instance", to="instance_uuid", required=True, help="uuid of the server"),
        _mapping_argument("; not needed with a lease"),
        field_argument("--epoch", type=int, help="epoch of the lease"),
        base.SERVICE_TOKEN,
    )


class Unbind(_LeaseCommand, of=CONTEXTS):
    """Release the accelerators of a device context; it can be bound again.

    Name the lease by its epoch, or the bind by its epoch or instance: a later use is not released.
    """

    CALL = "unbind"
    ARGUMENTS = (
        _CONTEXT,
        field_argument("--epoch", type=int, help="epoch of the lease or of the bind"),
        field_argument("--instance", to="instance_uuid", help="uuid of the server"),
        base.SERVICE_TOKEN,
    )
