# SPDX-License-Identifier: Apache-2.0
"""/v2/drivers: the installed drivers and their backends, and changes to them.

A change is recorded as a job, and the response has its URL. Driver code is never transferred.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from cyborg.api import types
from cyborg.api.controller import PageRequest, RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.api.v2 import jobs
from cyborg.core.drivers import registry
from cyborg.core.drivers.desired_state import DesiredStatus
from cyborg.core.drivers.registry import Support, describe_unknown
from cyborg.core.drivers.rollout import Kind
from cyborg.core.errors import Invalid, NotFound
from cyborg.core.hosts import Liveness, evaluate
from cyborg.core.inventory.device import DeviceType
from cyborg.db.drivers import entries as read_hosts
from cyborg.db.drivers import read

MAX_HOSTS = 10_000  # in one request
MAX_CONFIG = 65536  # characters of JSON
_NAME = types.Text(min_length=1)
_FLAG = types.TRUTH
_ANY = types.Validated("any value", lambda value: value)


def _hosts(value: Any) -> list[str]:
    """Parse a list of host names and remove duplicates. Raise Invalid."""
    is_list = isinstance(value, list) and 1 <= len(value) <= MAX_HOSTS
    if not is_list or None in value:  # WSME accepts null for any type
        raise Invalid(
            f"hosts: must be a list of 1 to {MAX_HOSTS} names; omit it for all hosts", field="hosts"
        )
    return list(dict.fromkeys(types.load(_NAME, host, "hosts") for host in value))


def _config(value: Any, *, unset: bool = False) -> dict[str, Any]:
    """Return options and their values. Raise Invalid if a value has a type that no option can have.

    With ``unset``, null is allowed. The conductor checks whether the driver has the options.
    """
    if not isinstance(value, dict):
        raise Invalid("config: must be an object of option names and values", field="config")
    for name, setting in value.items():
        types.load(_NAME, name, "config")
        if unset and setting is None:
            continue
        # An option can have a list of values.
        for item in setting if isinstance(setting, list) else [setting]:
            _check_value(name, item)
    # Of the whole: each value is limited, but not their number.
    if (size := len(json.dumps(value))) > MAX_CONFIG:
        raise Invalid(
            f"config: has {size} characters of JSON, at most {MAX_CONFIG} are allowed",
            field="config",
        )
    return value


def _check_value(name: str, value: Any) -> None:
    if isinstance(value, str):
        types.load(types.Text(registry.MAX_VALUE), value, f"config: {name}")
    # JSON numbers can be too large for a float; abs() also works for integers that float() rejects.
    elif not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise Invalid(
            f"config: {name}: must be text, a number, true or false, or a list of these",
            field="config",
        )


_HOSTS = types.Validated("hosts", _hosts, [_NAME])
_CONFIG = types.Validated("options and their values", _config, {str: _ANY})
_CONFIG_UPDATE = types.Validated(
    "options and their values, or null", partial(_config, unset=True), {str: _ANY}
)


class HostDriver(types.JsonObject, row=read_hosts.HostDriverRow, without=("late_at", "down_at")):
    """One backend of a driver on a host, or a host where the driver is installed but not used.

    ``status`` is the status in the agent's last heartbeat; ``INSTALLED`` or ``IMPORT_FAILED`` if
    there is no backend, ``NOT_REPORTED`` if the agent has not reported the backend yet. ``error``
    is null without an error. ``remarks`` are notes on the configuration, such as a rule that
    matches no device. ``state`` is the liveness of the agent. ``desired_status`` is null if only
    the host's configuration file has the backend; ``applied`` is whether the agent has applied the
    desired state.
    """

    desired_status = types.optional(types.Enum(*DesiredStatus))
    state = types.required(types.Enum(*Liveness))


class EffectiveOption(types.JsonObject, row=registry.Setting):
    """The effective value of an option of a backend, and its source.

    ``source`` is ``default``, ``file`` (the host's configuration file) or ``api``. A secret is
    shown as ``***``.
    """

    value = types.optional(_ANY)


class EffectiveOptions(types.JsonObject, row=read_hosts.EffectiveOptionsRow):
    """The effective options of one backend, from the last report of its agent."""

    options = types.required([EffectiveOption])


class DriverOption(types.JsonObject, row=registry.Option):
    """An option of a driver; ``kind`` is the type of its values.

    A ``host_only`` option can be set in the configuration file of a host only. The value of a
    ``secret`` option is never shown.
    """

    default = types.optional(_ANY)


class DriverSummary(types.JsonObject, row=read.DriverRow, links=True):
    """A driver; ``version`` is the installed version, null if it differs between hosts.

    ``type`` is the type of the devices that it discovers, null if they can have any type.
    ``abilities`` are all abilities that the driver can have, depending on its configuration.
    ``num_hosts`` is the number of hosts that have the driver or should use it. ``statuses`` is the
    number of entries in ``hosts`` by status; those of hosts whose agent is down are ``UNKNOWN``.
    ``hosts`` has the entries of one host; a list has it only with the filter ``host``.
    """

    support = types.required(types.Enum(*Support))


class Driver(DriverSummary):
    """A driver with the options of its newest version and their effective values.

    ``hosts`` are the entries of a page of hosts, and ``effective_options`` those of their backends.
    """

    hosts = types.required([HostDriver])
    hosts_links = types.optional([types.Link])
    options = types.required([DriverOption])
    effective_options = types.required([EffectiveOptions])


class DriverInstall(types.JsonObject):
    """The driver to enable, by name or uuid, and the name and hosts of the new backend.

    The default of ``backend`` is the name of the driver. The default of ``hosts`` is all hosts with
    the driver.
    """

    driver = types.required(_NAME)
    backend = types.optional(_NAME)
    hosts = types.optional(_HOSTS)
    config = types.optional(_CONFIG)


class DriverUpdate(types.JsonObject):
    """A change of the backends of a driver: of all, of one ``backend``, or of the given ``hosts``.

    Null as the value of an option in ``config`` restores the value of the host's configuration
    file. ``reload`` recreates the backends even if nothing else changes.
    """

    backend = types.optional(_NAME)
    hosts = types.optional(_HOSTS)
    config = types.optional(_CONFIG_UPDATE)
    status = types.optional(types.Enum(DesiredStatus.ENABLED, DesiredStatus.DISABLED))
    reload = types.optional(types.BOOLEAN)


DRIVERS = Collection("drivers", "driver", read, DriverSummary, since=(2, 4))


class Controller(Resource):
    """The operations on drivers."""

    @DRIVERS.list_operation(query={"host": types.Text(), "type": types.Enum(*DeviceType)})
    def find(self, request: RequestContext, page: PageRequest, **filters: str | None) -> Any:
        """List the drivers that are installed or used on any host, with numbers by status.

        With the filter ``host``, each driver has its backends on this host.
        """
        now = self.read_clock()
        return DRIVERS.document(
            request,
            self.read_page(page, read.find, now=now, **filters),
            lambda request, row: _show_summary(request, row, now),
        )

    @DRIVERS.operation(
        "GET drivers/{key}",
        "get_one",
        answer=Driver,
        query={"host": types.Text(), "status": types.Text()},
        paged=True,
    )
    def get(
        self,
        request: RequestContext,
        key: str,
        host: str | None,
        status: str | None,
        page: PageRequest,
    ) -> Any:
        """Show a driver with its options, and a page of its hosts with their effective options.

        ``limit`` is a number of hosts, and ``marker`` the name of a host. ``status`` selects the
        entries of this status.
        """
        # One time for all entries of the response.
        now = self.read_clock()
        with self.context.reader.connect() as connection:
            row = read.get(connection, key, host, now=now)
            if row is None:
                raise NotFound(describe_unknown(key, read.names(connection)))
            name = row["name"]
            # The row counts the hosts of the filter: none means that this host lacks it.
            if host is not None and not row["num_hosts"]:
                raise NotFound(
                    f"host {host[: types.MAX_SHOWN]!r} has no driver {name!r}; omit the host to "
                    "see the hosts that have it"
                )
            filters: dict[str, Any] = {"now": now, "status": status}
            hosts, marker = page.read(
                lambda window: read_hosts.find_hosts(
                    connection, name, page=window, host=host, **filters
                )
            )
            entries = read_hosts.find_entries(connection, name, hosts, **filters)
            # The options of the shown entries only: the status has filtered them.
            shown = {(entry["host"], entry["backend"]) for entry in entries}
            options = [
                backend
                for backend in read_hosts.find_effective_options(connection, name, hosts)
                if (backend["host"], backend["backend"]) in shown
            ]
        details = {**row, "hosts": entries, "effective_options": options}
        return request.serialize_page(
            Driver, _with_liveness(details, now), DRIVERS.name, "hosts", marker
        )

    @DRIVERS.operation("POST drivers", **jobs.STARTS_JOB)
    def install(self, request: RequestContext, body: DriverInstall) -> Any:
        """Enable a driver on hosts where it is installed; a job does it in the background."""
        # None for a missing field, whose value is Unset of WSME, which is not known on the bus.
        result = self.context.conductor.driver_install(
            body.driver, body.backend or None, body.hosts or None, body.config or None
        )
        return jobs.serialize_created(request, Kind.INSTALL, result)

    @DRIVERS.operation("PATCH drivers/{key}", **jobs.STARTS_JOB)
    def update(self, request: RequestContext, key: str, body: DriverUpdate) -> Any:
        """Change the backends of a driver; a job does it host by host in the background."""
        config = body.config or None
        status = body.status or None
        reload = bool(body.reload)
        if config is None and status is None and not reload:
            raise Invalid("body: nothing to change: give config, status or reload", field="body")
        result = self.context.conductor.driver_update(
            key, body.backend or None, body.hosts or None, config, status, reload
        )
        return jobs.serialize_created(request, Kind.UPDATE, result)

    @DRIVERS.operation(
        "DELETE drivers/{key}",
        query={"drain": _FLAG, "force": _FLAG, "host": types.Repeated(_NAME), "backend": _NAME},
        **jobs.STARTS_JOB,
    )
    def uninstall(
        self,
        request: RequestContext,
        key: str,
        drain: str | None,
        force: str | None,
        host: Sequence[str] | None,
        backend: str | None,
    ) -> Any:
        """Uninstall the backends of a driver; a job does it in the background."""
        # The same limits as in the bodies of the other changes.
        hosts = None if host is None else _hosts(list(host))
        result = self.context.conductor.driver_uninstall(
            key, backend, hosts, drain == "true", force == "true"
        )
        return jobs.serialize_created(request, Kind.UNINSTALL, result)


def _show_summary(request: RequestContext, row: read.DriverRow, now: datetime) -> Mapping[str, Any]:
    """Return a driver of the list, which has ``hosts`` only with the filter ``host``."""
    shown = _with_liveness({**row, "hosts": row["hosts"] or []}, now)
    document = dict(DRIVERS.show_row(request, shown))
    # Deleted instead of a second type: a type cannot have a field of some rows only.
    if row["hosts"] is None:
        del document["hosts"]
    return document


def _with_liveness(row: Mapping[str, Any], now: datetime) -> Mapping[str, Any]:
    hosts = [
        {**host, "state": evaluate(host["late_at"], host["down_at"], now)} for host in row["hosts"]
    ]
    return {**row, "hosts": hosts}
