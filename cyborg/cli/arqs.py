# SPDX-License-Identifier: Apache-2.0
"""``cyborg arq-*``: accelerator requests (ARQs) from creation to release."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import Arguments, argument, field_argument
from cyborg.cli.common.rest import Collection, CommandError, Row
from cyborg.cli.deployables import DEPLOYABLES

SHORT = formatting.columns_of(
    "uuid, state, device_profile_name=Profile, instance_uuid=Instance, hostname=Host, address"
)
LONG = formatting.columns_of(
    "attach_handle_type=Handle, attach_handle_info=Handle info, device_profile_group_id=Group, "
    "device_rp_uuid=Provider, attach_handle_uuid=Handle UUID, project_id=Project, attached_at, "
    "attach_error, created_at, updated_at",
    after=SHORT,
)


def _with_address(row: Row) -> dict[str, Any]:
    return {**row, "address": formatting.format_address(row.get("attach_handle_info"))}


ARQS = Collection(
    "/accelerator_requests", SHORT, LONG, "arqs", "accelerator requests", _with_address
)


class Create(listing.Lister, of=ARQS):
    """Create the accelerator requests of a device profile, one for each requested unit."""

    OPTIONS = (listing.LONG,)
    ARGUMENTS = (
        field_argument("profile", to="device_profile_name", help="name of the device profile"),
    )

    def read_rows(self, args: Arguments) -> Any:
        """Create and return the requests."""
        return self.app.rest.call("POST", ARQS.path, self.read_fields(args))["arqs"]


class List(listing.Lister, of=ARQS):
    """List accelerator requests."""

    ARGUMENTS = (
        field_argument(
            "--instance",
            lookup=partial(ARQS.find_uuid, field="instance_uuid"),
            help="only the requests of this instance",
        ),
        field_argument(
            "--attach-failed",
            choices=("true", "false"),
            help="only requests whose device a running guest lacks, or the others",
        ),
    )


class Show(base.Show, of=ARQS):
    """Show one accelerator request."""

    ARGUMENTS = (argument("arq", help="uuid of the request"),)


def _patch(verb: str, fields: Mapping[str, str | None]) -> list[dict[str, str]]:
    return [
        {"op": verb, "path": path} | ({} if value is None else {"value": value})
        for path, value in fields.items()
    ]


class Bind(base.ServiceTokenCommand, listing.Lister, of=ARQS):
    """Bind requests to an instance: all of them or, if one fails, none."""

    ACTION = "bind"
    OPTIONS = (listing.LONG, base.DRY_RUN)
    ARGUMENTS = (
        argument("arq", nargs="+", help="uuid of a request"),
        argument("--host", required=True, help="name of the host, as in device-list"),
        argument(
            "--provider",
            required=True,
            action="append",
            help="uuid of the allocated resource provider; use it once for all requests or once "
            "for each request, in the same order",
        ),
        argument("--instance", required=True, help="uuid of the instance"),
        argument(
            "--project",
            help="id of the project of the instance, by default as in Placement; an administrator "
            "needs it for a device context if the instance has no allocation",
        ),
        base.SERVICE_TOKEN,
    )

    def read_rows(self, args: Arguments) -> Any:
        """Bind the requests with one call; return the requests of the instance."""
        # The requests of one group often have the same provider, so that one is enough.
        providers = args.provider * len(args.arq) if len(args.provider) == 1 else args.provider
        if len(providers) != len(args.arq):
            raise CommandError(
                f"{len(args.arq)} requests but {len(args.provider)} providers: "
                "use --provider once for all requests or once for each request"
            )
        arqs = self.find_uuids(args)
        providers = DEPLOYABLES.find_uuids(self.app.rest, providers, field="rp_uuid")
        fields = {"/hostname": args.host, "/instance_uuid": args.instance}
        if args.project is not None:
            fields["/project_id"] = args.project
        # One call: the service binds all of them or none.
        body = {
            arq: _patch("add", fields | {"/device_rp_uuid": provider})
            for arq, provider in zip(arqs, providers, strict=True)
        }
        self.call(args, "PATCH", ARQS.path, body)
        # The response to the patch is empty: the list has the new states.
        return ARQS.list_all(self.app.rest, instance=args.instance)


class Unbind(base.ServiceTokenCommand, of=ARQS):
    """Unbind requests from their instance; they can be bound again."""

    ACTION = "unbind"
    OPTIONS = (base.DRY_RUN,)
    ARGUMENTS = (argument("arq", nargs="+", help="uuid of a request"), base.SERVICE_TOKEN)

    def take_action(self, args: Arguments) -> None:
        """Unbind the requests with one call."""
        # No values: an operation that removes a field has none.
        fields = dict.fromkeys(("/hostname", "/device_rp_uuid", "/instance_uuid"))
        self.call(
            args, "PATCH", ARQS.path, dict.fromkeys(self.find_uuids(args), _patch("remove", fields))
        )


class Delete(base.ServiceTokenCommand, of=ARQS):
    """Delete accelerator requests by uuid, or all requests of an instance."""

    ACTION = "delete"
    OPTIONS = (base.DRY_RUN,)
    ARGUMENTS = (
        argument("arq", nargs="*", help="uuid of a request"),
        argument("--instance", help="delete all requests of this instance"),
        base.SERVICE_TOKEN,
    )

    def preview(self, args: Arguments) -> Iterable[base.Change]:
        """Return the requests."""
        _check_selection(args)
        if args.arq:
            return super().preview(args)
        rows = ARQS.list_all(self.app.rest, instance=args.instance)
        return [base.plan(self.ACTION, ARQS.noun, row) for row in rows]

    def take_action(self, args: Arguments) -> None:
        """Delete the requests with one call."""
        # Again, since the preview runs with --dry-run only.
        _check_selection(args)
        if args.arq:
            query = {"arqs": ",".join(self.find_uuids(args))}
        else:
            query = {"instance": args.instance}
        self.call(args, "DELETE", ARQS.path, None, params=query)


def _check_selection(args: Arguments) -> None:
    if bool(args.arq) == bool(args.instance):
        raise CommandError("either uuids of requests or --instance is required")
