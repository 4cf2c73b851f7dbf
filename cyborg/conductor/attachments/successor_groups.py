# SPDX-License-Identifier: Apache-2.0
"""The groups that a successor must satisfy: the groups of its context on the old device."""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from cyborg.conductor.attachments.leased import LeasedAttachment
from cyborg.core.attachments.mediated import check_exchangeable
from cyborg.core.attachments.successor import describe_missing
from cyborg.core.binding.profile import Group, parse_group
from cyborg.core.errors import NoHandle, NotFound
from cyborg.core.explain.explanation import make_demands
from cyborg.db.attachments import handles, successors
from cyborg.db.attachments.write import AttachmentRow
from cyborg.db.binding.write import ArqRow
from cyborg.db.explain import provider_states
from cyborg.db.unit_of_work import UnitOfWork


def is_successor(row: AttachmentRow) -> bool:
    """Return whether an attachment replaces devices of a device context."""
    return row["maintained_device"] is not None


def names(row: AttachmentRow) -> tuple[str, str]:
    """Return the uuids of the context and of the old device of a successor."""
    assert row["successor_of"] is not None
    assert row["maintained_device"] is not None
    return row["successor_of"], row["maintained_device"]


def groups_of(rows: Sequence[ArqRow]) -> dict[int, Group]:
    """Return the groups of the ARQs of a context, by number, in the order of the numbers."""
    copies = {row["device_profile_group_id"]: row["group"] for row in rows}
    return {number: parse_group(copies[number], "group") for number in sorted(copies)}


class SuccessorGroups:
    """Reads the groups of successors, and explains why no device satisfies them."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    def groups(self, work: LeasedAttachment) -> tuple[Group, ...]:
        """Return the groups to satisfy.

        Raise NotFound if the context has left the device, Conflict if its handles cannot be
        replaced.
        """
        context, device = names(work.row)

        def read(tx: sa.Connection) -> tuple[list[ArqRow], set[str]]:
            rows = successors.lock_replaced(tx, context, device)
            return rows, handles.of_arqs(tx, [row["id"] for row in rows])

        rows, types = self._uow.run(read)
        if not rows:
            raise NotFound(f"device context {context} has no handle of device {device} any more")
        check_exchangeable(types, context)
        return tuple(groups_of(rows).values())

    def select(
        self,
        work: LeasedAttachment,
        groups: Sequence[Group],
        found: Sequence[Mapping[str, str]],
    ) -> list[Mapping[str, str]]:
        """Return the candidates, except the old device. Raise NoHandle with the reasons."""
        _, device = names(work.row)
        closed = self._uow.run(lambda tx: successors.providers_of(tx, device))
        selected = [mapping for mapping in found if closed.isdisjoint(mapping.values())]
        if not selected:
            demands = make_demands(groups)
            classes = {name for demand in demands for name in demand.units}
            targets = {demand.target for demand in demands}

            def explain(tx: sa.Connection) -> str:
                host = successors.host_of(tx, device)
                states = provider_states.find(
                    tx, resource_classes=classes, host=host, attach_targets=targets
                )
                return describe_missing(demands, states, device)

            raise NoHandle(f"no device of the host can be the successor: {self._uow.run(explain)}")
        return selected
