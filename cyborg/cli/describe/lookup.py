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
            if found:
                return [found]
            return [*self._instance(text), *self._filtered(kinds.DEPLOYABLE, rp_uuid=text)]
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

    def _by_address(self, host: str | None, address: str) -> Iterator[Found]:
        devices = list(self._filtered(kinds.DEVICE, address=address, hostname=host))
        # Otherwise the address of a function, which only its accelerators have.
        yield from devices or self._filtered(kinds.ACCELERATOR, address=address, host=host)

    def _by_name(self, name: str) -> Iterator[Found]:
        host, slash, binary = name.rpartition("/")
        if slash:
            yield from self._filtered(kinds.SERVICE, host=host, binary=binary)
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
