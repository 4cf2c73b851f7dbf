# SPDX-License-Identifier: Apache-2.0
"""``cyborg driver-*`` and ``{install,uninstall,update}-driver``: drivers and their backends."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from cyborg.cli import services
from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import Arguments, Change, argument, field_argument, flag
from cyborg.cli.common.formatting import Text
from cyborg.cli.common.rest import Collection, CommandError, Row
from cyborg.cli.jobs import WAIT_ARGUMENTS, JobCommand, target_arguments
from cyborg.core.inventory.device import DeviceType
from cyborg.core.text import sanitize


def show_hosts(hosts: Sequence[Row], *, remarks: bool = False) -> Text:
    """Return a cell with the hosts of a driver: a line for each backend with its error.

    With ``remarks``, lines with those on the configuration of the backend follow.
    """
    lines = []
    for host in hosts:
        lines.append(_format_host(host))
        lines += [f"  remark: {text}" for text in host.get("remarks") or ()] if remarks else []
    return Text(hosts, "\n".join(lines))


def summarize_statuses(numbers: Mapping[str, int], value: Any = None) -> Text:
    """Return a cell with numbers of backends by status in one line, the largest number first.

    >>> summarize_statuses({"FAILED": 2, "READY": 9998}).human_readable()
    '9998 READY, 2 FAILED'
    """
    # The most frequent first: it is what an operator expects of the whole cloud.
    counts = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    text = ", ".join(f"{count} {status}" for status, count in counts)
    return Text(numbers if value is None else value, text)


def summarize_hosts(hosts: Sequence[Row]) -> Text:
    """Return a cell with the backends of a driver: the name of the only one, or numbers."""
    if len(hosts) == 1:
        return Text(hosts, _format_host({**hosts[0], "error": None}))
    return summarize_statuses(Counter(host["status"] for host in hosts), hosts)


def show_options(options: Sequence[Row]) -> Text:
    """Return a cell with a line for each option of a driver."""
    lines = (
        f"{o['name']} ({o['kind']}, {formatting.to_text(o['default']) or 'unset'}"
        f"{', host file only' if o.get('host_only') else ''}): {o['help']}"
        for o in options
    )
    return Text(options, "\n".join(lines))


def show_settings(backends: Sequence[Row]) -> Text:
    """Return a cell with a line for each option of the backends of one host, with its source."""
    lines = (
        f"{backend['backend']}: {option['name']} = "
        f"{formatting.to_text(option['value']) or 'unset'} ({option['source']})"
        for backend in backends
        for option in backend["options"]
    )
    return Text(backends, "\n".join(lines))


def hosts_with_status(driver: Row) -> list[dict[str, Any]]:
    """Return the hosts of a driver, with the status UNKNOWN if the agent is down."""
    return [
        {**host, "status": services.effective_status(host["status"], host["state"])}
        for host in driver["hosts"]
    ]


def _format_host(host: Row) -> str:
    backend = f" ({host['backend']})" if host["backend"] else ""
    text = f"{host['host']}{backend} {host['status']}"
    if host["desired_status"] in ("disabled", "absent"):
        text += f", desired {host['desired_status']}"
    # None: the host has no desired state of this backend.
    if host["applied"] is False:
        text += ", not applied yet"
    if host["state"] != "up":
        text += f", agent {host['state']}"
    return text + (f": {host['error']}" if host["error"] else "")


def collect_options(pairs: Iterable[tuple[str, str]]) -> dict[str, str | list[str]]:
    """Return the options by name; a repeated option becomes a list.

    >>> collect_options([("rule", "a"), ("n", "1"), ("rule", "b")])
    {'rule': ['a', 'b'], 'n': '1'}
    """
    options: dict[str, list[str]] = {}
    for name, value in pairs:
        options.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in options.items()}


parse_option = base.pair_parser("=", "NAME=VALUE, such as num_devices=2")
CONFIG = argument(
    "--config",
    type=parse_option,
    action="append",
    default=[],
    metavar="NAME=VALUE",
    help="set an option of the driver; repeat it with the same NAME for a list of values",
)


SHORT = formatting.columns_of("name=Driver, type, version, support, hosts")
FIELDS = formatting.columns_of("name=Driver, uuid, type, version, support, hosts")
DETAIL = formatting.columns_of("abilities, options", after=FIELDS)
HOST_DETAIL = formatting.columns_of("settings", after=DETAIL)
LONG = formatting.columns_of("abilities, num_hosts=Number of hosts, statuses", after=FIELDS)
DRIVERS = Collection("/drivers", SHORT, LONG, has_names=True)
_DRIVER = argument("driver_id", help="name or uuid of the driver")
_ON_ALL = (
    "only on this host; by default on all hosts",
    "only this backend; by default all backends of the driver",
)


class List(listing.Lister, of=DRIVERS):
    """List the drivers that are installed on any host, with numbers of backends by status."""

    ARGUMENTS = (
        field_argument("--host", help="only drivers on this host, with their backends"),
        field_argument(
            "--type",
            choices=[kind.value for kind in DeviceType],
            help="only drivers for this type of devices",
        ),
    )

    def take_action(self, args: Arguments) -> Any:
        """Return the table of drivers."""
        show = show_hosts if args.long else summarize_hosts
        rows = self.read_rows(args)
        for row in rows:
            # Without --host there may be 10 000 hosts: the response has their numbers instead.
            on_host = "hosts" in row
            shown = show(hosts_with_status(row)) if on_host else summarize_statuses(row["statuses"])
            row["hosts"] = shown
        return self.build_rows(args, rows)


class Show(base.Show, of=DRIVERS):
    """Show a driver with its options, and with --host their values on that host."""

    ARGUMENTS = (
        _DRIVER,
        field_argument(
            "--host", help="only this host, with the value of each option and its source"
        ),
        field_argument(
            "--status",
            help="only backends of this status, such as FAILED, or UNKNOWN if the agent is down",
        ),
    )

    def take_action(self, args: Arguments) -> Any:
        """Return the driver."""
        path = self.find_path(args)
        row = self.app.rest.read_whole(path, "hosts", **self.read_fields(args))
        cells = {
            "hosts": show_hosts(hosts_with_status(row), remarks=True),
            "options": show_options(row["options"]),
        }
        if not args.host:
            return formatting.build_object(DETAIL, {**row, **cells})
        settings = show_settings(row["effective_options"])
        return formatting.build_object(HOST_DETAIL, {**row, **cells, "settings": settings})


class _DriverJob(JobCommand, of=DRIVERS):
    """Base of the commands that change the backends of a driver on many hosts."""

    OPTIONS = (*WAIT_ARGUMENTS, base.DRY_RUN)

    def preview(self, args: Arguments) -> Iterator[Change]:
        """Yield the backends. Raise CommandError if there is none."""
        rest, path = self.app.rest, self.find_path(args)
        # (None,): one request without the filter, for all hosts.
        pages = [rest.read_whole(path, "hosts", host=host) for host in args.host or (None,)]
        changes = [
            Change(self.ACTION, "backend", uuid=None, details=sanitize(text))
            for page in pages
            for text in self.find_backends(args, page)
        ]
        if not changes:
            raise CommandError(f"no host has such a backend of driver {pages[0]['name']}")
        yield from changes

    def find_backends(self, args: Arguments, driver: Row) -> Iterator[str]:
        """Yield the backends to change as text, such as ``gpus on compute-1 (READY)``."""
        for host in hosts_with_status(driver):
            name = host["backend"]
            if name is not None and args.backend in (None, name):
                yield f"{name} on {host['host']} ({host['status']})"


class Install(_DriverJob):
    """Install a driver as a backend on hosts that have the driver package."""

    ACTION = "install"
    ARGUMENTS = (
        _DRIVER,
        *target_arguments(
            "only on this host; by default on all hosts that have the driver",
            "name of the backend; by default the name of the driver",
        ),
        CONFIG,
    )

    def find_backends(self, args: Arguments, driver: Row) -> Iterator[str]:
        """Yield the new backend of each host."""
        name = args.backend or driver["name"]
        # A host has an entry for each backend of the driver.
        for host in dict.fromkeys(entry["host"] for entry in driver["hosts"]):
            yield f"{name} on {host}"

    def start_job(self, args: Arguments) -> Any:
        """Start the job that installs the driver, and return it."""
        body = {"driver": self.find_uuids(args)[0], **self.read_fields(args)}
        if args.config:
            body["config"] = collect_options(args.config)
        return self.app.rest.call("POST", DRIVERS.path, body)


class Uninstall(_DriverJob):
    """Uninstall a driver from hosts; rejected while any of its devices is in use."""

    ACTION = "uninstall"
    ARGUMENTS = (
        _DRIVER,
        *target_arguments(*_ON_ALL),
        flag("--drain", "cordon the devices of the driver now, and wait until they are released"),
        flag("--force", "uninstall although devices are in use or hosts are down"),
    )

    def start_job(self, args: Arguments) -> Any:
        """Start the job that uninstalls the driver, and return it."""
        # Pairs: a dictionary of parameters cannot repeat one.
        query = [("host", host) for host in args.host or ()]
        query += [("backend", args.backend)] if args.backend is not None else []
        query += [(name, "true") for name in ("drain", "force") if getattr(args, name)]
        return self.app.rest.call(
            "DELETE", self.find_path(args) + (f"?{urlencode(query)}" if query else "")
        )


class Update(_DriverJob):
    """Update the backends of a driver, one host at a time; stop at the first failure."""

    ACTION = "update"
    ARGUMENTS = (
        _DRIVER,
        *target_arguments(*_ON_ALL),
        CONFIG,
        argument(
            "--unset",
            action="append",
            default=[],
            metavar="NAME",
            help="reset this option to the value of the host's configuration file; repeatable",
        ),
        (
            argument(
                "--enable",
                dest="status",
                action="store_const",
                const="enabled",
                help="enable the backends",
            ),
            argument(
                "--disable",
                dest="status",
                action="store_const",
                const="disabled",
                help="disable the backends: their devices are shown and not offered",
            ),
        ),
        flag("--reload", "create the backends again, also without a change"),
    )

    def start_job(self, args: Arguments) -> Any:
        """Start the job that updates the backends, and return it."""
        change: dict[str, Any] = {}
        if args.config or args.unset:
            values: Row = collect_options(args.config)
            # The order of --config and --unset is lost, so that neither can win.
            if conflicts := sorted(set(args.unset) & set(values)):
                raise CommandError(
                    f"option {conflicts[0]}: use either --config or --unset, not both"
                )
            change["config"] = {**values, **dict.fromkeys(args.unset)}
        if args.status:
            change["status"] = args.status
        if args.reload:
            change["reload"] = True
        if not change:
            raise CommandError(
                "nothing to change: use --config, --unset, --enable, --disable or --reload"
            )
        return self.app.rest.call(
            "PATCH", self.find_path(args), {**change, **self.read_fields(args)}
        )
