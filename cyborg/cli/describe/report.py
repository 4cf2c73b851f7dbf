# SPDX-License-Identifier: Apache-2.0
"""Search of an object by uuid, name or address; its fields, what belongs to it and hinders it.

The number of requests does not depend on the number of objects.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cyborg.cli import device_profiles
from cyborg.cli.common import formatting
from cyborg.cli.common.rest import Collection, CommandError, RestClient, Row
from cyborg.cli.describe import kinds
from cyborg.cli.describe.kinds import EXPLANATION, REASONS, Kind, Related
from cyborg.cli.devices import format_schedulable_until
from cyborg.cli.jobs import format_step
from cyborg.core.hosts import Liveness
from cyborg.core.naming import provider_name

# Maximum number of objects of one kind that a text names.
MAX_CANDIDATES = 5
_PREFIX = re.compile(r"[0-9a-f]{4,8}|[0-9a-f]{8}-[0-9a-f-]{0,27}")
_ADDRESS = re.compile(r"(?:(?P<host>.+)[/_])?(?P<address>[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)")
_HIDDEN_PROFILE = "ctx-"
# Statuses that mean that the caller sees no such objects.
_INVISIBLE = (403, 404)
_NO_NAME = (*_INVISIBLE, 400)


@dataclass(frozen=True, slots=True)
class Found:
    """An object that a text names; ``row`` is its row in a list."""

    kind: Kind
    row: Row


@dataclass
class Search:
    """A search for the objects that a text names; ``remarks`` tell what was not searched."""

    rest: RestClient
    text: str
    remarks: list[str] = field(default_factory=list)

    def run(self) -> list[Found]:
        """Return the objects, at most MAX_CANDIDATES of each kind. Raise CommandError."""
        text = self.text.strip().lower()
        if address := _ADDRESS.fullmatch(text):
            return list(self._by_address(address["host"], address["address"]))
        if formatting.UUID.fullmatch(text):
            # A page starts after its marker: the last digit is cut, so that it has this uuid.
            found = next(self._by_uuid(text, text[:-1]), None)
            if found:
                return [found]
            return [*self._instance(text), *self._filtered(kinds.DEPLOYABLE, rp_uuid=text)]
        # A name first: an object may be called as a uuid begins.
        found_objects = list(self._by_name(self.text.strip()))
        if _PREFIX.fullmatch(text):
            found_objects += self._by_uuid(text, text)
        return found_objects

    def _by_uuid(self, text: str, marker: str) -> Iterator[Found]:
        # In the order of uuids, a page can start after any text.
        # 16: with a whole uuid the marker lacks its last digit.
        page = {"sort_key": "uuid", "marker": marker, "limit": 16}
        for kind in kinds.KINDS:
            matching = [row for row in self._page(kind, page) if str(row["uuid"]).startswith(text)]
            yield from (Found(kind, row) for row in matching[:MAX_CANDIDATES])

    def _instance(self, uuid: str) -> Iterator[Found]:
        for kind in (kinds.ACCELERATOR, kinds.CONTEXT):
            if self._page(kind, {"instance": uuid, "limit": 1}):
                yield Found(kinds.INSTANCE, {"uuid": uuid})
                return
        requests = self.rest.call("GET", "/accelerator_requests", params={"instance": uuid})
        if requests["arqs"]:
            yield Found(kinds.INSTANCE, {"uuid": uuid})

    def _by_address(self, host: str | None, address: str) -> Iterator[Found]:
        devices = list(self._filtered(kinds.DEVICE, address=address, hostname=host))
        # Otherwise the address of a function, which only its accelerators have.
        yield from devices or self._filtered(kinds.ACCELERATOR, address=address, host=host)

    def _by_name(self, name: str) -> Iterator[Found]:
        """Yield the objects that have this name, kind by kind."""
        host, slash, binary = name.rpartition("/")
        # HOST/DAEMON, or HOST/SET with the address of a device set.
        if slash:
            yield from self._filtered(kinds.SERVICE, host=host, binary=binary)
            yield from self._filtered(kinds.DEPLOYABLE, name=provider_name(host, binary))
            return
        if name.startswith(_HIDDEN_PROFILE):
            yield from self._named(kinds.CONTEXT, name.removeprefix(_HIDDEN_PROFILE))
            return
        yield from self._named(kinds.PROFILE, name)
        yield from self._named(kinds.DRIVER, name)
        for kind, parameter in ((kinds.SERVICE, "host"), (kinds.DEVICE, "hostname")):
            if self._page(kind, {parameter: name, "limit": 1}):
                yield Found(kinds.HOST, {"name": name})
                break
        for kind in (kinds.CONTEXT, kinds.ACCELERATOR):
            yield from self._filtered(kind, name=name)

    def _named(self, kind: Kind, name: str) -> Iterator[Found]:
        try:
            yield Found(kind, kind.collection.read_one(self.rest, name))
        except CommandError as exc:
            # A text that cannot be a name is refused with 400.
            if exc.status not in _NO_NAME:
                raise

    def _filtered(self, kind: Kind, **filters: str | None) -> Iterator[Found]:
        rows = self._page(kind, {**filters, "limit": MAX_CANDIDATES})
        yield from (Found(kind, row) for row in rows)

    def _page(self, kind: Kind, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of a page of a collection, none if it is forbidden."""
        try:
            return kind.collection.read_page(self.rest, **kind.filters, **params)
        except CommandError as exc:
            if exc.status not in _INVISIBLE:
                raise
            if exc.status == 403:
                nouns = kind.collection.rows_key.replace("_", " ")
                self.remarks.append(f"{nouns} are not visible to you")
            return []


# Maximum number of devices, backends or steps that are named as hindrances.
MAX_NAMED = 10


@dataclass(frozen=True, slots=True)
class Section:
    """Objects that belong to an object; ``error`` tells why they are unknown, if they are."""

    title: str
    collection: Collection
    rows: Sequence[Row]
    has_more: bool = False
    error: str | None = None

    def to_document(self) -> dict[str, Any]:
        """Return the section as JSON."""
        rows = list(map(_with_types, self.rows))
        return {"rows": rows, "has_more": self.has_more, "error": self.error}


@dataclass(frozen=True, slots=True)
class Description:
    """An object with everything about it."""

    kind: Kind
    row: Row
    sections: Sequence[Section]

    def hindrances(self) -> list[str]:
        """Return what prevents the use of the object, or its progress."""
        # The fields and several sections can name the same cause.
        return list(dict.fromkeys(find_hindrances(self)))

    def to_document(self) -> dict[str, Any]:
        """Return the description as JSON, with all fields of all objects."""
        related = {
            section.title.lower().replace(" ", "_"): section.to_document()
            for section in self.sections
        }
        return {
            "kind": self.kind.noun,
            "object": _with_types(self.row),
            "hindrances": self.hindrances(),
            "related": related,
        }


def _with_types(row: Row) -> dict[str, Any]:
    return {key: formatting.read_value(row, key) for key in row}


def describe(rest: RestClient, found: Found) -> Description:
    """Return everything about an object, with one request for each section. Raise CommandError."""
    kind, row = found.kind, found.row
    if not kind.has_complete_rows:
        row = kind.collection.read_one(rest, str(row["uuid"]))
    sections = [_read_section(rest, row, related) for related in kind.related]
    parts = [
        Section(title, collection, row[key], has_more=f"{key}_links" in row)
        for key, (title, collection) in kind.parts.items()
        if row.get(key)
    ]
    return Description(kind, row, [*parts, *(section for section in sections if section)])


def _read_section(rest: RestClient, row: Row, related: Related) -> Section | None:
    """Read what belongs to an object; return None if a field that the request needs is null.

    There are four requests: for the only object, named by the field ``key``; for the rows ``below``
    that object; for the rows ``below`` the object itself; or for the rows of the collection. The
    last three have the ``filters``.
    """
    collection = related.collection
    identifier = row.get(related.key or "uuid")
    params = {parameter: row.get(field) for parameter, field in related.filters.items()}
    # The object has no such relation now, as a request that is not bound.
    if (related.key and identifier is None) or None in params.values():
        return None
    try:
        if related.below:
            path = f"{collection.object_path(str(identifier))}/{related.below}"
        elif related.key:
            return Section(related.title, collection, [collection.read_one(rest, str(identifier))])
        else:
            path = collection.path
        page = rest.call("GET", path, params={**params, **related.fixed})
    except CommandError as exc:
        # Without a status the service did not answer at all.
        if exc.status is None:
            raise
        return Section(related.title, collection, (), error=str(exc))
    if related.below == EXPLANATION:
        return Section(related.title, collection, list(device_profiles.summary_rows(page)))
    rows_key = collection.rows_key
    has_more = f"{rows_key}_links" in page
    return Section(related.title, collection, page[rows_key], has_more=has_more)


def find_hindrances(description: Description) -> Iterator[str]:
    """Yield what prevents the use of an object, according to its fields and its sections."""
    row = description.row
    yield from _own_hindrances(row)
    if description.kind.noun == "device" and (text := _not_offered(row)):
        yield text
    if description.kind.noun in ("service", "backend"):
        yield from _service_hindrances(row, None)
    for section in description.sections:
        yield from _limited(_section_hindrances(section, row))


def _own_hindrances(row: Row) -> Iterator[str]:
    """Yield the hindrances that the fields of the object itself show."""
    # The error of a job with steps repeats the errors of the steps.
    if row.get("error") and not row.get("steps"):
        yield str(row["error"])
    if row.get("undeliverable_reason"):
        yield str(row["undeliverable_reason"])
    if row.get("health") not in (None, "ok") and row.get("health_reason"):
        yield f"{row['health']}: {row['health_reason']}"
    for key in ("state_reasons", "job_errors"):
        yield from (str(reason) for reason in row.get(key) or ())
    for key in ("placement", "successor"):
        nested = row.get(key)
        if isinstance(nested, Mapping) and nested.get("error"):
            yield f"{key}: {nested['error']}"


def _section_hindrances(section: Section, row: Row) -> Iterator[str]:
    """Yield the hindrances that the objects of a section show."""
    if section.title == "Services":
        for service in section.rows:
            yield from _service_hindrances(service, row.get("backend"))
    elif section.title == "Devices":
        yield from filter(None, map(_not_offered, section.rows))
    elif section.title == "Steps":
        yield from (format_step(step) for step in section.rows if step["error"])
    elif section.title == "Hosts":
        for host in section.rows:
            if host["error"]:
                yield f"{host['host']} ({host['backend']}) {host['status']}: {host['error']}"
    # A provider fits only if its host serves all groups: if each group has fitting ones, the
    # reasons of the others hinder nothing.
    elif section.title == REASONS and not _all_groups_fit(section):
        for group in section.rows:
            if group["result"] != device_profiles.FITS:
                yield f"{group['result']}: {group.get('reason')}"


def _service_hindrances(service: Row, backend: str | None) -> Iterator[str]:
    """Yield why a daemon or its backends, or one backend, do not work."""
    if service["state"] != Liveness.UP:
        yield f"{service['binary']} of host {service['host']} is {service['state']}"
    for each in service["backends"]:
        if backend in (None, each["name"]) and each["error"]:
            yield f"backend {each['name']} of host {service['host']}: {each['error']}"


def _all_groups_fit(section: Section) -> bool:
    rows = [row for row in section.rows if row["result"] == device_profiles.FITS]
    # 1: the row of all groups together has no number, and fits.
    return all(row.get("providers", 1) for row in rows)


def _not_offered(device: Row) -> str | None:
    text = format_schedulable_until(device)
    return None if text == "yes" else f"Placement offers device {device['address']}: {text}"


def _limited(texts: Iterator[str]) -> Iterator[str]:
    # A host can have thousands of rows with the same cause.
    found = list(texts)
    yield from found[:MAX_NAMED]
    if len(found) > MAX_NAMED:
        yield f"{len(found) - MAX_NAMED} more"
