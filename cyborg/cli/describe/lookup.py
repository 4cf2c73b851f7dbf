# SPDX-License-Identifier: Apache-2.0
"""Which objects have a uuid, the beginning of a uuid, a name or an address.

The number of requests does not depend on the number of objects.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cyborg.cli.common import formatting
from cyborg.cli.common.errors import CommandError
from cyborg.cli.common.rest import RestClient
from cyborg.cli.describe import kinds
from cyborg.cli.describe.kinds import Kind

MAX_CANDIDATES = 5
"""Maximum number of objects of one kind that a text names."""
_PREFIX = re.compile(r"[0-9a-f]{4,8}|[0-9a-f]{8}-[0-9a-f-]{0,27}")
_ADDRESS = re.compile(r"(?:(?P<host>.+)[/_])?(?P<address>[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)")
_HIDDEN_PROFILE = "ctx-"
_INVISIBLE = (403, 404)
"""Statuses that mean that the caller sees no such objects."""
_NO_NAME = (*_INVISIBLE, 400)


@dataclass(frozen=True, slots=True)
class Found:
    """An object that a text names; ``row`` is its row in a list."""

    kind: Kind
    row: Mapping[str, Any]


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
            found = next(self._by_uuid(text, text[:-1]), None)
            return [found] if found else [*self._instance(text), *self._provider(text)]
        found_objects = list(self._by_name(self.text.strip()))
        if _PREFIX.fullmatch(text):
            found_objects += self._by_uuid(text, text)
        return found_objects

    def _by_uuid(self, text: str, marker: str) -> Iterator[Found]:
        # In the order of uuids, a page can start after any text.
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

    def _provider(self, uuid: str) -> Iterator[Found]:
        rows = self._whole_page(kinds.DEPLOYABLE, {}, "resource providers")
        yield from (Found(kinds.DEPLOYABLE, row) for row in rows if row["rp_uuid"] == uuid)

    def _by_address(self, host: str | None, address: str) -> Iterator[Found]:
        params = {"address": address, "hostname": host, "limit": MAX_CANDIDATES}
        devices = self._page(kinds.DEVICE, params)
        yield from (Found(kinds.DEVICE, row) for row in devices)
        if devices:
            return
        # The address of a function, which only its accelerator has.
        for row in self._whole_page(kinds.ACCELERATOR, {"host": host}, "addresses"):
            if formatting.format_address(row.get("attach_handle_info")) == address:
                yield Found(kinds.ACCELERATOR, row)

    def _by_name(self, name: str) -> Iterator[Found]:
        host, slash, binary = name.rpartition("/")
        if slash:
            services = self._page(kinds.SERVICE, {"host": host, "binary": binary, "limit": 1})
            yield from (Found(kinds.SERVICE, row) for row in services)
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
            rows = self._whole_page(kind, {}, "names")
            named = [row for row in rows if row.get("name") == name]
            yield from (Found(kind, row) for row in named[:MAX_CANDIDATES])

    def _named(self, kind: Kind, name: str) -> Iterator[Found]:
        try:
            yield Found(kind, kind.collection.read_one(self.rest, name))
        except CommandError as exc:
            if exc.status not in _NO_NAME:
                raise

    def _page(self, kind: Kind, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._read(kind, params)[0]

    def _whole_page(
        self, kind: Kind, params: Mapping[str, Any], fields: str
    ) -> list[dict[str, Any]]:
        rows, has_more = self._read(kind, params)
        if has_more:
            nouns = kind.collection.rows_key.replace("_", " ")
            self.remarks.append(f"only the {fields} of the first {len(rows)} {nouns} were compared")
        return rows

    def _read(self, kind: Kind, params: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """Return a page of a collection and whether there are more, no rows if it is forbidden."""
        collection = kind.collection
        try:
            page = self.rest.call("GET", collection.path, params={**kind.filters, **params})
        except CommandError as exc:
            if exc.status not in _INVISIBLE:
                raise
            if exc.status == 403:
                nouns = collection.rows_key.replace("_", " ")
                self.remarks.append(f"{nouns} are not visible to you")
            return [], False
        return page[collection.rows_key], f"{collection.rows_key}_links" in page
