# SPDX-License-Identifier: Apache-2.0
"""/v2/devices/{uuid}/custody: the custody log of a device."""

from typing import Any

from cyborg.api import types
from cyborg.api.controller import PageRequest, RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.core.custody import Event
from cyborg.core.errors import NotFound
from cyborg.db.custody import read

EVENTS = types.Enum(*Event)


class CustodyRecord(types.JsonObject, row=read.RecordRow, names={"host": "hostname"}):
    """A record of a custody log.

    ``details`` depends on ``event``. ``sequence`` and ``hash`` are null until a conductor has added
    the record to the chain of the device; until then ``signature`` is that of the conductor that
    wrote the record, if it has a key.
    """

    event = types.required(EVENTS)
    details = types.required(types.Validated("object", dict))


class CustodyChain(
    types.JsonObject,
    row=read.ChainRow,
    only=("sequence", "hash", "base_sequence", "base_hash", "signature"),
):
    """The ends of the hash chain of a device.

    ``sequence`` and ``hash`` are values of the last record in the chain. ``base_sequence`` and
    ``base_hash`` are values of the last record that was deleted because of its age. ``signature``
    is that of the conductor that wrote them, if it has a key.
    """


class CustodyLog(types.JsonObject):
    """A page of the custody log of a device; ``chain`` is null while the chain has no record."""

    custody = types.required([CustodyRecord])
    chain = types.optional(CustodyChain)
    custody_links = types.optional([types.Link])


CUSTODY = Collection("devices", "custody", read, CustodyRecord, since=(2, 5), key="custody")


class Controller(Resource):
    """The operations on custody logs."""

    @CUSTODY.operation(
        "GET devices/{uuid}/custody",
        "get_all",
        answer=CustodyLog,
        paged=True,
        query={"event": EVENTS},
    )
    def list_custody(
        self, request: RequestContext, uuid: str, page: PageRequest, event: str | None
    ) -> Any:
        """List the custody records of a device, also of a removed device."""
        with self.context.reader.connect() as connection:
            # Before the records, so that all records of the chain are in the list.
            chain = read.chain(connection, uuid)
            rows, marker = page.read(
                lambda window: read.find(connection, page=window, device_uuid=uuid, event=event)
            )
            if not rows and chain is None and not read.has_device(connection, uuid):
                raise NotFound(f"no device {uuid}")
        document = {
            "custody": [types.serialize(CustodyRecord, row) for row in rows],
            "chain": None if chain is None else types.serialize(CustodyChain, chain),
        }
        return request.add_next_link(document, f"devices/{uuid}/custody", "custody", marker)
