# SPDX-License-Identifier: Apache-2.0
"""Read the device sets of deployables: their members, who owns them, and whether they are offered.

``core.inventory.device_set`` has the values that the agent reports. A reported member that is not
present on the host has no row.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypedDict

import sqlalchemy as sa

from cyborg.core.inventory.device_set import DeviceSet, OfferMode, OfferState, SetKind, SetMember
from cyborg.db import joins
from cyborg.db.paging import id_in
from cyborg.db.schema import arqs, deployables, devices, set_members
from cyborg.db.schema import attach_handles as handles

# The offer of a set. A new one has none yet: it is not offered.
OFFER: sa.ColumnElement[str] = sa.func.coalesce(deployables.c.offer, OfferState.WITHHELD)


class MemberRow(TypedDict):
    """A member of a set by its addresses.

    The uuids are None if its host does not have it; ``arq_uuid`` is the ARQ that claimed it through
    the set, or None.
    """

    device: str
    deployable: str
    handle: str
    device_uuid: str | None
    accelerator_uuid: str | None
    arq_uuid: str | None


class DeviceSetRow(TypedDict):
    """A device set, with its members in the order of the fabric, and its owner.

    ``instance_uuid`` and ``project_id`` are those of the ARQs of the members. A device context may
    have no instance.
    """

    kind: SetKind
    size: int
    members: list[MemberRow]
    mode: OfferMode
    group: str | None
    wanted: Mapping[str, int]
    offer: OfferState
    offer_reason: str | None
    instance_uuid: str | None
    project_id: str | None


class Member(NamedTuple):
    """A member that is present on the host; without an owner, the last three are None."""

    device_uuid: str
    accelerator_uuid: str
    arq_uuid: str | None
    instance_uuid: str | None
    project_id: str | None


Members = Mapping[SetMember, Member]


def is_offered_as(offers: Collection[str]) -> sa.ColumnElement[bool]:
    """Return the condition that a deployable is a device set whose offer is one of these."""
    return sa.and_(deployables.c.set_size.is_not(None), OFFER.in_(sorted(offers)))


def has_member(device_uuid: str) -> sa.ColumnElement[bool]:
    """Return the condition that a deployable is a device set with handles of a device."""
    member = deployables.alias("member_deployables")
    sets = (
        sa.select(set_members.c.deployable_id)
        .join(handles, handles.c.id == set_members.c.handle_id)
        .join(member, member.c.id == handles.c.deployable_id)
        .join(devices, devices.c.id == member.c.device_id)
        .where(devices.c.uuid == device_uuid)
    )
    return deployables.c.id.in_(sets)


def find_members(connection: sa.Connection, ids: Collection[int]) -> dict[int, Members]:
    """Return the present members of device sets by row id, in one statement, in none without ids.

    A set without a present member has no entry.
    """
    if not ids:
        return {}
    # Only an owner that has claimed the handle through this set, and not through another one.
    owner = sa.and_(arqs.c.id == handles.c.arq_id, handles.c.set_id == set_members.c.deployable_id)
    query = (
        sa.select(
            set_members.c.deployable_id,
            *(joins.ADDRESSES[name].label(name) for name in ("device", "deployable")),
            handles.c.address,
            devices.c.uuid.label("device_uuid"),
            handles.c.uuid.label("accelerator_uuid"),
            arqs.c.uuid.label("arq_uuid"),
            arqs.c.instance_uuid,
            arqs.c.project_id,
        )
        .select_from(
            joins.HANDLES.join(set_members, set_members.c.handle_id == handles.c.id).outerjoin(
                arqs, owner
            )
        )
        .where(id_in(set_members.c.deployable_id, ids))
    )
    members_by_set = defaultdict[int, dict[SetMember, Member]](dict)
    # The last columns are the fields of Member.
    for set_id, device, deployable, handle, *fields in connection.execute(query):
        members_by_set[set_id][SetMember(device, deployable, handle)] = Member(*fields)
    return dict(members_by_set)


def make_row(
    reported: Mapping[str, Any], offer: str, reason: str | None, members: Members
) -> DeviceSetRow:
    """Return a device set from its columns and its present members."""
    device_set = DeviceSet.from_dict(reported)
    # All members have one owner, or none.
    owner = next((member for member in members.values() if member.arq_uuid is not None), None)
    return DeviceSetRow(
        kind=device_set.kind,
        size=device_set.size,
        members=[_make_member(member, members.get(member)) for member in device_set.members],
        mode=device_set.mode,
        group=device_set.group or None,
        wanted=device_set.wanted,
        offer=OfferState(offer),
        offer_reason=reason,
        instance_uuid=owner.instance_uuid if owner else None,
        project_id=owner.project_id if owner else None,
    )


def _make_member(member: SetMember, present: Member | None) -> MemberRow:
    return MemberRow(
        device=member.device,
        deployable=member.deployable,
        handle=member.handle,
        device_uuid=present.device_uuid if present else None,
        accelerator_uuid=present.accelerator_uuid if present else None,
        arq_uuid=present.arq_uuid if present else None,
    )
