# SPDX-License-Identifier: Apache-2.0
"""Read the types of attach handles, which decide in which mode they can be attached."""

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from cyborg.db.schema import arqs, attach_handles, deployables, devices


def of_accelerator(tx: sa.Connection, uuid: str) -> set[str]:
    """Return the type of an accelerator, nothing if it does not exist."""
    query = sa.select(attach_handles.c.type).where(attach_handles.c.uuid == uuid)
    return set(tx.scalars(query))


def of_hosts(
    tx: sa.Connection, hosts: Collection[str], classes: Collection[str]
) -> dict[str, set[str]]:
    """Return the types of the handles of hosts, by resource class."""
    query = (
        sa.select(deployables.c.resource_class, attach_handles.c.type)
        .join(devices, devices.c.id == deployables.c.device_id)
        .join(attach_handles, attach_handles.c.deployable_id == deployables.c.id)
        .where(devices.c.host.in_(sorted(hosts)), deployables.c.resource_class.in_(sorted(classes)))
        .distinct()
    )
    return _group(tx, query)


def of_providers(tx: sa.Connection, providers: Collection[str]) -> dict[str, set[str]]:
    """Return the types of the handles of resource providers, by the uuid of the provider."""
    query = (
        sa.select(deployables.c.rp_uuid, attach_handles.c.type)
        .join(attach_handles, attach_handles.c.deployable_id == deployables.c.id)
        .where(deployables.c.rp_uuid.in_(sorted(providers)))
        .distinct()
    )
    return _group(tx, query)


def of_arqs(tx: sa.Connection, ids: Collection[int]) -> set[str]:
    """Return the types of the handles that ARQs own, by row id."""
    query = sa.select(attach_handles.c.type).where(attach_handles.c.arq_id.in_(sorted(ids)))
    return set(tx.scalars(query.distinct()))


def of_attachments(tx: sa.Connection, ids: Collection[int]) -> dict[int, set[str]]:
    """Return the types of the handles that the ARQs of attachments own, by row id."""
    query = (
        sa.select(arqs.c.attachment_id, attach_handles.c.type)
        .join(attach_handles, attach_handles.c.arq_id == arqs.c.id)
        .where(arqs.c.attachment_id.in_(sorted(ids)))
        .distinct()
    )
    return _group(tx, query)


def _group(tx: sa.Connection, query: sa.Select[Any]) -> dict[Any, set[str]]:
    """Return the types that a query selects, by its first column."""
    found: dict[Any, set[str]] = {}
    for key, type_ in tx.execute(query).all():
        found.setdefault(key, set()).add(type_)
    return found
