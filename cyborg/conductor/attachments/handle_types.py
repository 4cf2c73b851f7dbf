# SPDX-License-Identifier: Apache-2.0
"""Check that the handles of an attachment can be detached in its mode.

A request is refused if only unsuitable handles can serve it. The step ``allocate`` leaves out
resource providers with unsuitable handles. The steps ``bind`` and ``expose`` decide about the
claimed handles, in the transactions that claim them and that let Nova find them.
"""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from cyborg.conductor.attachments.leased import LeasedAttachment
from cyborg.core.attachments.attachment import Mode
from cyborg.core.attachments.mediated import check_mode, is_kept
from cyborg.core.attachments.selector import ACCELERATOR, Selector
from cyborg.core.attachments.server import Server
from cyborg.core.binding.profile import parse_groups
from cyborg.db.attachments import handles
from cyborg.db.profiles import write as device_profiles


def check_selected(tx: sa.Connection, selector: Selector, server: Server, mode: Mode) -> None:
    """Raise Conflict if all handles for a group, on the host of a server, are unsuitable.

    The host is known here by its names in Nova alone: an agent may use another one.
    """
    if mode is not Mode.NEXT_BOOT:
        return
    if selector.field == ACCELERATOR:
        check_mode(handles.of_accelerator(tx, selector.value), mode, selector.describe())
        return
    profile = device_profiles.by_name(tx, selector.key)
    if profile is None:
        return
    classes = {name for group in parse_groups(profile["groups"]) for name in group.resources}
    hosts = {name for name in (server.host, server.node) if name is not None}
    for types in handles.of_hosts(tx, hosts, classes).values():
        if all(is_kept({type_}) for type_ in types):
            check_mode(types, mode, selector.describe())


def select_candidates(
    tx: sa.Connection, work: LeasedAttachment, found: Sequence[Mapping[str, str]]
) -> list[Mapping[str, str]]:
    """Return the allocation candidates with suitable handles. Raise Conflict if there is none."""
    if work.mode is not Mode.NEXT_BOOT:
        return list(found)
    types = handles.of_providers(tx, {uuid for mapping in found for uuid in mapping.values()})
    unsuitable = {provider for provider in types if is_kept(types[provider])}
    selected = [mapping for mapping in found if unsuitable.isdisjoint(mapping.values())]
    if found and not selected:
        check_mode(set().union(*types.values()), work.mode, work.selected)
    return selected


def check_claimed(tx: sa.Connection, work: LeasedAttachment) -> None:
    """Raise Conflict if a handle that the attachment owns is unsuitable."""
    id_ = work.row["id"]
    check_mode(handles.of_attachments(tx, [id_]).get(id_, ()), work.mode, work.selected)
