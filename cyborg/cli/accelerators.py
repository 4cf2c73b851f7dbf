# SPDX-License-Identifier: Apache-2.0
"""``cyborg accelerator-*``: attachable accelerators with their instances and labels.

``--detail`` adds the status of their servers, fetched from Nova with the caller's token.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

from cyborg.cli.common import base, formatting, listing, pci_ids
from cyborg.cli.common.base import Arguments, argument, field_argument, flag
from cyborg.cli.common.rest import Collection, CommandError, RestClient, Row
from cyborg.cli.devices import DEVICES

SERVICE = "compute"
MAX_CONCURRENT = 8  # requests to Nova
MAX_SINGLE = 1000  # servers that are requested one by one; for more, Nova's list is read
SERVERS_OF_PAGE = 50  # that a page of Nova's list must replace: it takes as long as their requests
MAX_FAILURES = 8  # consecutive failed requests after which none is sent any more
NOT_FOUND = "no such server"
NO_RESPONSE = "unknown (no response from Nova)"
NOT_LISTED = "unknown (not in the list of Nova)"


@dataclass(frozen=True, slots=True)
class ServerStates:
    """Status of servers by uuid. ``warning`` says how many are unknown and why, None if none is."""

    states: Mapping[str, str]
    warning: str | None = None


def fetch_states(rest: RestClient, uuids: Iterable[str]) -> ServerStates:
    """Return the status of each server, such as ``ACTIVE``, ``no such server`` or ``unknown``.

    Nova decides which servers the caller can see. Raise CommandError if the cloud has no Nova or it
    responds to no request.
    """
    from keystoneauth1 import exceptions

    # In a fixed order: of too many servers the same are requested at each call.
    unique = sorted(set(uuids))
    if not unique:
        return ServerStates({})
    try:
        adapter, _ = rest.connect(SERVICE)
    except exceptions.ClientException as exc:
        raise CommandError(f"cannot get the status of servers from Nova: {exc}") from exc
    nova = _Nova(adapter)
    # Nova has no filter by several uuids: of several values of ``uuid`` it uses the last one.
    listed = nova.list_states(unique) if len(unique) > MAX_SINGLE else {}
    # A server of an unreachable cell is not listed; only its own request shows whether it exists.
    absent = [uuid for uuid in unique if uuid not in listed]
    single = nova.get_states(absent[:MAX_SINGLE])
    if not listed and all(state == NO_RESPONSE for state in single.values()):
        raise CommandError(f"cannot get the status of servers from Nova: {nova.error}")
    # NOT_LISTED stays for those absent servers that are too many to be requested.
    states = {**dict.fromkeys(absent, NOT_LISTED), **single, **listed}
    unknown = [state for state in states.values() if state.startswith("unknown")]
    if not unknown:
        return ServerStates(states)
    count = f"{len(unknown)} of {len(unique)} servers"
    warning = f"the status of {count} is unknown: {nova.error or unknown[0]}"
    return ServerStates(states, warning)


class _Nova:
    """Requests for servers; ``error`` is that of the last request without a response, or None."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._failures = 0  # consecutive; threads change it without a lock: the number may be low
        self.error: str | None = None

    def get_states(self, uuids: Sequence[str]) -> dict[str, str]:
        """Return the status of each server; send one request for each, some concurrently."""

        def fetch(uuid: str) -> str:
            response = self._get(f"/servers/{quote(uuid, safe='')}")
            return NO_RESPONSE if response is None else _parse_status(response)

        with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
            return dict(zip(uuids, pool.map(fetch, uuids), strict=True))

    def list_states(self, uuids: Sequence[str]) -> dict[str, str]:
        """Return the status of those servers that are in Nova's list, read page by page.

        It is the list of all projects or, without the permission for it, of the caller's project.
        """
        states: dict[str, str] = {}
        missing = set(uuids)
        query = {"all_tenants": "1"}
        # More pages would take longer than a request for each server, see SERVERS_OF_PAGE.
        for _ in range(len(uuids) // SERVERS_OF_PAGE):
            path = f"/servers/detail?{urlencode(query)}"
            response = self._get(path)
            if response is None:
                # Once more: without this page the servers of all further pages would be missing.
                response = self._get(path)
            if response is not None and response.status_code == 403 and "all_tenants" in query:
                del query["all_tenants"]
                continue
            page = {} if response is None else _parse_page(response)
            states |= {uuid: status for uuid, status in page.items() if uuid in missing}
            missing -= page.keys()
            # A short page is not the end: an operator may have lowered Nova's page limit.
            if not missing or not page:
                break
            last_uuid = [*page][-1]
            # A proxy that drops the query would give the same page for ever.
            if last_uuid == query.get("marker"):
                break
            query["marker"] = last_uuid
        return states

    def _get(self, path: str) -> Any:
        """Return a response, None if the request fails."""
        from keystoneauth1 import exceptions

        if self._failures >= MAX_FAILURES:
            return None
        try:
            response = self._adapter.get(path, raise_exc=False)
        except exceptions.ClientException as exc:
            self._failures += 1
            self.error = str(exc)
            return None
        self._failures = 0
        return response


def _parse_status(response: Any) -> str:
    if response.status_code == 404:
        return NOT_FOUND
    if response.status_code != 200:
        return f"unknown (HTTP {response.status_code})"
    try:
        return str(response.json()["server"]["status"])
    except (ValueError, KeyError, TypeError):
        # A proxy, or another service at the address of Nova.
        return "unknown (unexpected response from Nova)"


def _parse_page(response: Any) -> dict[str, str]:
    """Return the status of each server of a page; empty for another response."""
    if response.status_code != 200:
        # As an empty page: the servers are requested one by one then.
        return {}
    try:
        return {str(row["id"]): str(row["status"]) for row in response.json()["servers"]}
    except (ValueError, KeyError, TypeError):
        return {}


STATES = ("draining", "preparing", "bound", "error", "dirty", "cordoned", "free")
SHORT = formatting.columns_of(
    "uuid, name, resource_class=Class, hostname=Host, address, state, instance_uuid=Instance"
)
LONG = formatting.columns_of(
    "driver, error, state_reasons, description, tags, type, vendor, model, backend, "
    "attach_handle_type=Handle, attach_handle_info=Handle info, device_uuid=Device, "
    "deployable_uuid=Deployable, rp_uuid=Provider, arq_uuid=Request, project_id=Project, "
    "attached_at, attach_error, created_at, updated_at",
    after=SHORT,
)


def _format_row(row: Row) -> dict[str, Any]:
    return {
        **pci_ids.add_names(row),
        # In JSON, too: each type of handle spells its address in another way.
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
        flag("--detail", "also show the current status of each server in Nova"),
    )

    def take_action(self, args: Arguments) -> Any:
        """Return the table of accelerators."""
        rows = self.read_rows(args)
        if not args.detail:
            return self.build_rows(args, rows)
        instances = {row["instance_uuid"] for row in rows} - {None}
        servers = fetch_states(self.app.rest, instances)
        if servers.warning is not None:
            self.app.LOG.warning("%s", servers.warning)
        rows = [{**row, "server": servers.states.get(row["instance_uuid"])} for row in rows]
        extra = formatting.columns_of("server")
        return self.build_rows(args, rows, short=(*SHORT, *extra), long=(*LONG, *extra))


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
            flag("--no-tags", "remove all tags"),
        ),
    )

    def take_action(self, args: Arguments) -> Any:
        """Update the label and return the accelerator."""
        # An empty text removes the field, which the service expects as null.
        label = {key: value or None for key, value in self.read_fields(args).items()}
        if args.tag or args.no_tags:
            label["tags"] = args.tag or []
        if not label:
            raise CommandError("nothing to change: use --name, --description, --tag or --no-tags")
        row = self.app.rest.call("PATCH", self.find_path(args), label)
        return ACCELERATORS.build_object(row)
