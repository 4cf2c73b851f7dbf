# SPDX-License-Identifier: Apache-2.0
"""The devices of hosts, by NUMA node, with their handles and the owners of these."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cyborg.cli.common import formatting, pci_ids
from cyborg.cli.common.rest import CommandError, RestClient, Row
from cyborg.cli.device_sets import ALL_OFFERS, find_owner
from cyborg.cli.devices import format_schedulable_until
from cyborg.core.inventory.device_set import OfferState

# Maximum number of hosts of one view: three requests for each.
MAX_HOSTS = 100
# Maximum number of devices, and of handles, of a host in one view.
MAX_ROWS = 1000
AGENT = "cyborg-agent"
OWNED = ("bound", "preparing")


@dataclass(frozen=True, slots=True)
class Handle:
    """A handle; ``owner`` says who has it, and is empty for a handle without an owner."""

    address: str
    state: str
    owner: str
    error: str | None


@dataclass(frozen=True, slots=True)
class DeployableView:
    """A deployable with its handles, ordered by address."""

    uuid: str
    resource_class: str
    handles: Sequence[Handle]

    @property
    def counts(self) -> Counter[str]:
        """Return the number of handles by state."""
        return Counter(handle.state for handle in self.handles)


@dataclass(frozen=True, slots=True)
class SetView:
    """A device set; ``owner`` is empty without an owner, ``devices`` are the uuids of members."""

    name: str
    size: int
    offer: str
    owner: str
    handles: Sequence[str]
    devices: Collection[str]

    @property
    def is_withheld(self) -> bool:
        """Return whether no server can get the set now, and none has it."""
        return not self.owner and self.offer == OfferState.WITHHELD


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device: ``status`` is as in ``device-list``, ``health`` also has the reason.

    ``sets`` are those of a source of device sets, ``member_of`` those that have the device and are
    not withheld.
    """

    address: str
    name: str
    type: str
    status: str
    health: str
    is_unhealthy: bool
    root: str | None
    deployables: Sequence[DeployableView]
    sets: Sequence[SetView] = ()
    member_of: Sequence[SetView] = ()


@dataclass(frozen=True, slots=True)
class HostView:
    """A host. ``nodes`` has the devices by NUMA node, those of an unknown node last.

    ``is_partial`` is True if the host has more devices or handles than MAX_ROWS.
    """

    name: str
    state: str
    nodes: Mapping[int | None, Sequence[DeviceView]]
    is_partial: bool


@dataclass(frozen=True, slots=True)
class TopologyView:
    """Hosts, and the number of further hosts."""

    hosts: Sequence[HostView]
    num_more: int = 0
    # The answers of the service, for machines.
    document: list[dict[str, Any]] = field(default_factory=list)


def fetch_topology(rest: RestClient, host: str | None, max_hosts: int) -> TopologyView:
    """Return one host, or the first hosts by name. Raise CommandError.

    It needs two requests, and three for each shown host.
    """
    # Agents and not devices: a host without devices is shown, too.
    params = {"binary": AGENT, "kind": "daemon", "host": host, "sort_key": "host"}
    rows = rest.call("GET", "/services", params={**params, "limit": max_hosts})["services"]
    num_more = 0
    if host is None:
        hosts = rest.call("GET", "/summary")["hosts"]
        num_more = max(0, hosts["up"] + hosts["late"] + hosts["down"] - len(rows))
    elif not rows:
        raise CommandError(f"no agent has reported the host {host}")
    views, document = [], []
    for row in rows:
        name = str(row["host"])
        devices = rest.call("GET", "/devices", params={"hostname": name, "limit": MAX_ROWS})
        handles = rest.call("GET", "/accelerators", params={"host": name, "limit": MAX_ROWS})
        sets = _read_sets(rest, name)
        # More pages are not read: the view of a host is limited, and says so.
        pages = (devices, handles, sets)
        is_partial = any(f"{key}_links" in page for page in pages for key in page)
        objects = {"devices": devices["devices"], "accelerators": handles["accelerators"]}
        objects["device_sets"] = sets["deployables"]
        document.append({"host": name, "state": row["state"], "is_partial": is_partial, **objects})
        views.append(_host(name, row["state"], is_partial, **objects))
    return TopologyView(views, num_more, document)


def _read_sets(rest: RestClient, host: str) -> Row:
    """Return the first page of the device sets of a host, empty if they are not visible."""
    params = {"host": host, "offer": ALL_OFFERS, "limit": MAX_ROWS}
    try:
        page: Row = rest.call("GET", "/deployables", params=params)
    except CommandError as exc:
        if exc.status != 403:
            raise
        return {"deployables": []}
    return page


def _host(
    name: str,
    state: str,
    is_partial: bool,
    devices: Sequence[Row],
    accelerators: Sequence[Row],
    device_sets: Sequence[Row],
) -> HostView:
    """Build the view of a host: its devices by NUMA node, with handles and sets."""
    handles_of: dict[str, list[Row]] = {}
    for row in accelerators:
        handles_of.setdefault(row["device_uuid"], []).append(row)
    # By the device that stands for their source, not by their members.
    sets_of: dict[str, list[SetView]] = {}
    for row in device_sets:
        sets_of.setdefault(row["device_id"], []).append(_set(row))
    all_sets = [each for sets in sets_of.values() for each in sets]
    nodes: dict[int | None, list[DeviceView]] = {}
    # Devices without a NUMA node last.
    ordered = sorted(devices, key=lambda row: (row["numa_node"] is None, row["numa_node"] or 0))
    for row in ordered:
        uuid = row["uuid"]
        member_of = [each for each in all_sets if uuid in each.devices and not each.is_withheld]
        device = _device(row, handles_of.get(uuid, ()), sets_of.get(uuid, ()), member_of)
        nodes.setdefault(row["numa_node"], []).append(device)
    for views in nodes.values():
        views.sort(key=lambda device: (device.root or "", device.address))
    return HostView(name, state, nodes, is_partial)


def _set(row: Row) -> SetView:
    """Return the view of a deployable that is a device set."""
    device_set = row["device_set"]
    owner, members = find_owner(device_set) or "", device_set["members"]
    # Of an instance, find_owner returns the uuid alone.
    if owner and device_set["instance_uuid"]:
        owner = f"instance {owner}"
        owner += f" of project {device_set['project_id']}" if device_set["project_id"] else ""
    return SetView(
        name=str(row["address"]),
        size=device_set["size"],
        offer=str(device_set["offer"]),
        owner=owner,
        handles=[str(member["handle"]) for member in members],
        devices={str(member["device_uuid"]) for member in members},
    )


def _device(
    row: Row,
    accelerators: Sequence[Row],
    sets: Sequence[SetView],
    member_of: Sequence[SetView],
) -> DeviceView:
    """Return the view of a device; ``sets`` are those that it is the source of."""
    named = pci_ids.add_names(row)
    model = str(named["model"])
    health = str(row["health"])
    if row["health_reason"] and health != "ok":
        health = f"{health}: {row['health_reason']}"
    handles_of: dict[str, list[Row]] = {}
    for each in accelerators:
        handles_of.setdefault(each["deployable_uuid"], []).append(each)
    return DeviceView(
        address=str(row["address"]),
        # Existing clients expect this model of a fake device; a view has no use for it.
        name="" if model == pci_ids.UNKNOWN else model,
        type=str(row["type"]),
        status=format_schedulable_until(row),
        health=health,
        is_unhealthy=row["health"] == "unhealthy",
        root=(row.get("topology") or {}).get("pci_root"),
        deployables=[
            # All handles of a deployable have its class.
            DeployableView(uuid, str(handles[0]["resource_class"]), _handles(handles))
            for uuid, handles in handles_of.items()
        ],
        sets=sets,
        member_of=member_of,
    )


def _handles(rows: Sequence[Row]) -> list[Handle]:
    handles = [
        Handle(
            address=formatting.format_address(row["attach_handle_info"]) or str(row["uuid"]),
            state=str(row["state"]),
            owner=_owner(row),
            error=row.get("error"),
        )
        for row in rows
    ]
    return sorted(handles, key=lambda handle: handle.address)


def _owner(row: Row) -> str:
    if row["arq_uuid"] is None:
        return ""
    parts = [f"{row['name']}:"] if row["name"] else []
    if row["instance_uuid"]:
        parts.append(f"instance {row['instance_uuid']}")
    else:
        parts.append(f"request {row['arq_uuid']}")
    if row["project_id"]:
        parts.append(f"of project {row['project_id']}")
    return " ".join(parts)
