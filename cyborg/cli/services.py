# SPDX-License-Identifier: Apache-2.0
"""``cyborg service-*``, ``host-forget`` and ``discover-services``: daemons and their backends."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import Arguments, Change, argument, field_argument, flag, plan
from cyborg.cli.common.formatting import Text
from cyborg.cli.common.progress import Progress
from cyborg.cli.common.rest import Collection, Row
from cyborg.cli.devices import DEVICES
from cyborg.cli.terminal import tables
from cyborg.core.hosts import Liveness
from cyborg.core.text import join_limited

UNKNOWN = "UNKNOWN"
SHORT = formatting.columns_of("uuid, binary=Service, host, state, status, backends")
LONG = formatting.columns_of("kind, last_seen_at, down_since, created_at", after=SHORT)


def _filters(text: str) -> dict[str, str]:
    host, _, binary = text.rpartition("/")
    # Without a slash it can only be a uuid.
    return {"host": host, "binary": binary} if host else {}


SERVICES = Collection(
    "/services",
    SHORT,
    LONG,
    filters=_filters,
    expected="HOST/BINARY",
    has_objects=False,
)
HOST_COLUMNS = formatting.columns_of(
    "host, services, devices, accelerator_requests, tombstones, resource_providers"
)
HOSTS = Collection("/hosts", HOST_COLUMNS, HOST_COLUMNS)
BACKEND = formatting.columns_of("uuid, host, name=Backend, driver, status, functions")
LONG_BACKEND = formatting.columns_of(
    "error, state, last_seen_at, down_since, created_at", after=BACKEND
)


def effective_status(status: str, state: str) -> str:
    """Return the last reported status of a daemon; UNKNOWN if it is down.

    >>> effective_status("READY", "down")
    'UNKNOWN'
    """
    return UNKNOWN if state == Liveness.DOWN else status


def show_backends(backends: Sequence[Row] | None) -> Text:
    """Return a cell with a line for each backend and its error, and for each of its functions."""
    lines = []
    for backend in backends or ():
        error = f": {backend['error']}" if backend["error"] else ""
        lines.append(f"{backend['name']} ({backend['driver']}) {backend['status']}{error}")
        lines += [
            f"  {function['function']}: {function['used']} of {function['total']} used, "
            f"{function['free']} free"
            for function in backend.get("functions") or ()
        ]
    return Text(backends, "\n".join(lines))


def summarize_backends(backends: Sequence[Row]) -> Text:
    """Return a cell of one line: the status of the only backend, or counts by status."""
    if len(backends) == 1:
        return Text(backends, f"{backends[0]['name']} {backends[0]['status']}")
    counts = sorted(Counter(backend["status"] for backend in backends).items())
    return Text(backends, ", ".join(f"{count} {status}" for status, count in counts))


def _format_row(row: Row, show: Callable[..., Text]) -> dict[str, Any]:
    state = row["state"]
    backends = [
        {**backend, "status": effective_status(backend["status"], state)}
        for backend in row["backends"]
    ]
    return {**row, "status": effective_status(row["status"], state), "backends": show(backends)}


def format_backend(row: Row) -> dict[str, Any]:
    """Return a row of kind ``backend`` with the fields of its backend."""
    (backend,) = row["backends"]
    status = effective_status(backend["status"], row["state"])
    lines = (f"{f['function']} {f['used']}/{f['total']}" for f in backend["functions"] or ())
    functions = Text(backend["functions"], "\n".join(lines))
    return {**backend, **row, "status": status, "error": backend["error"], "functions": functions}


class ServiceList(listing.Lister, of=SERVICES):
    """List daemons, and the backends of agents with their functions.

    Functions are shown as used/total. --long shows each backend of an agent with its error.
    """

    UNCUT_COLUMNS = ("Service", "State", "Status")
    ARGUMENTS = (
        field_argument(
            "--kind", choices=["daemon", "backend"], help="only this kind; both by default"
        ),
        field_argument("--host", help="only the services of this host"),
        field_argument(
            "--function",
            help="only backends with this function, such as crypto.ipsec, and only its numbers",
        ),
    )

    def take_action(self, args: Arguments) -> Any:
        """Return the table of services."""
        rows = self.read_rows(args)
        if args.kind == "backend":
            return self.build_rows(args, map(format_backend, rows), BACKEND, LONG_BACKEND)
        show = show_backends if args.long else summarize_backends
        return self.build_rows(args, [_format_row(row, show) for row in rows])


class ForgetHost(base.Command, tables.ShowOne, of=HOSTS):
    """Remove a host that left for good, with its devices and its resource providers.

    Its daemons must be down. The number of removed objects of each kind is shown; the resource
    providers are deleted in Placement afterwards.
    """

    ARGUMENTS = (
        argument("host", help="name of the host"),
        flag(
            "--force",
            "also delete the accelerator requests that hold its devices, and what was "
            "allocated of its resource providers in Placement",
        ),
    )

    OPTIONS = (base.DRY_RUN,)

    def preview(self, args: Arguments) -> Iterator[Change]:
        """Yield the daemons and devices of the host, and with --force the requests.

        The service counts the tombstones and the resource providers.
        """
        rest = self.app.rest
        # First: the service refuses it with the same error as the removal.
        removed = self._call(args, dry_run="true")
        for row in SERVICES.list_all(rest, host=args.host, kind="daemon"):
            yield plan("delete", "service", row)
        for row in DEVICES.list_all(rest, hostname=args.host):
            yield plan("delete", "device", row)
        # Without --force the service refuses a host with such requests.
        owned = rest.list_all("/accelerators", "accelerators", host=args.host) if args.force else ()
        for row in owned:
            # Free accelerators have no request to delete.
            if row["arq_uuid"] is not None:
                request = {"uuid": row["arq_uuid"], "instance_uuid": row["instance_uuid"]}
                yield plan("delete", "accelerator request", request)
        for key in ("tombstones", "resource_providers"):
            if removed[key]:
                objects = f"{removed[key]} {key.replace('_', ' ')}"
                yield Change("delete", objects, uuid=None, details="")

    def _call(self, args: Arguments, **params: str) -> Any:
        force = {"force": "true"} if args.force else {}
        path = HOSTS.object_path(args.host)
        return self.app.rest.call("DELETE", path, params=force | params)

    def take_action(self, args: Arguments) -> Any:
        """Remove the host and return the numbers."""
        return HOSTS.build_object(self._call(args))


class ServiceDelete(base.CallEach, of=SERVICES):
    """Delete daemons that are down; the devices of an agent are deleted with it.

    Rejected while a daemon is up, and while a device of the agent's host is in use.
    """

    ARGUMENTS = (
        argument("service", nargs="+", help="uuid of a daemon that is down, or HOST/BINARY"),
    )


DISCOVERY_COLUMNS = formatting.columns_of("uuid=Discovery, host, backend, state, error")
DISCOVERIES = Collection("/discoveries", DISCOVERY_COLUMNS, nouns="backends")
PENDING, DONE = "IN-PROGRESS", "DONE"

MAX_NAMED = 3  # pending backends in an error message


def _name(row: Row) -> str:
    return f"{row['host']} ({row['backend']})"


def _measure(discovery: Row) -> Progress:
    counts, rows = discovery["progress"], discovery.get("backends", ())
    unreported = [_name(row) for row in rows if row["state"] == PENDING]
    named = join_limited(unreported, MAX_NAMED) or f"discovery {discovery['uuid']}"
    total, unfinished = sum(counts.values()), counts.get(PENDING, 0)
    pending = f"{unfinished} of {total} backends have not reported ({named})"
    return Progress(total - unfinished, total, pending if discovery["state"] == PENDING else None)


class Discover(base.WaitCommand, listing.Lister, of=DISCOVERIES):
    """Discover the devices of all backends, or of the backends of a host or driver.

    With --wait the exit status is 1 if the discovery of any backend failed.
    """

    OPTIONS = ()
    ARGUMENTS = (
        field_argument("--host", help="only this host"),
        field_argument("--driver", help="only the backends of this driver"),
        *base.wait_arguments("all backends have reported", 120.0),
    )

    def read_rows(self, args: Arguments) -> Any:
        """Start the discovery, wait with --wait, and return the backends."""
        created = self.app.rest.call("POST", DISCOVERIES.path, self.read_fields(args))
        path = DISCOVERIES.object_path(created["uuid"])
        discovery = None
        if args.wait:
            poll = self.make_poll(DISCOVERIES, created["uuid"], "backends")
            discovery = self.wait(
                poll, _measure, "discovering", args.within, interval=0.2, show_counts=False
            )
        # A poll reads large work without its parts: see make_poll.
        if discovery is None or "backends" not in discovery:
            discovery = self.app.rest.read_whole(path, "backends")
        if args.wait:
            # The table truncates errors to the terminal width; these lines do not.
            for row in discovery["backends"]:
                if row["state"] not in (PENDING, DONE):
                    self.app.LOG.error("%s: %s", _name(row), row["error"] or row["state"])
                    self._status = 1
        return [{"uuid": created["uuid"], **row} for row in discovery["backends"]]
