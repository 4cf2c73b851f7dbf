# SPDX-License-Identifier: Apache-2.0
"""Request groups for a query to Placement, and the parameters of a bind from its answer."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cyborg.core.binding import profile, request_groups
from cyborg.core.binding.arqs import MAX_ARQS
from cyborg.core.errors import Invalid
from cyborg.core.validation import check_integer, check_text, parse_uuid


def to_request_groups(
    context: Any, port_uuid: str | None = None
) -> tuple[request_groups.RequestGroup, ...]:
    """Return the request groups of a device context or a device profile, in the order of groups.

    ``context`` is the object that the REST API shows; its field ``groups`` is used. Nova names the
    groups ``device_profile_<number>``, and for a profile of a Neutron port
    ``device_profile_<number><port uuid>``. Each group also requires OWNER_CYBORG, because only a
    provider of Cyborg can be bound. Raise Invalid with the field.
    """
    return request_groups.make_request_groups(read_groups(context), parse_port(port_uuid))


def build_query(groups: Iterable[request_groups.RequestGroup]) -> dict[str, str]:
    """Return the parameters of GET /allocation_candidates, at microversion 1.34 or later."""
    return request_groups.build_parameters(groups)


def read_groups(context: Any) -> tuple[profile.Group, ...]:
    """Return the groups of a device context or a device profile. Raise Invalid with the field."""
    if not isinstance(context, Mapping):
        raise Invalid(
            "context: expected a device context or device profile of the REST API, found "
            f"{type(context).__name__}",
            field="context",
        )
    return profile.parse_groups(context.get("groups"))


def parse_port(port_uuid: Any) -> str:
    """Return the end of the names of the groups for a Neutron port; None stands for no port."""
    return "" if port_uuid is None else parse_uuid(port_uuid, "port_uuid")


@dataclass(frozen=True, slots=True)
class BindParameters:
    """Where one ARQ is bound, and for which instance."""

    arq_uuid: str
    hostname: str
    device_rp_uuid: str
    instance_uuid: str


def parse(
    context: Any,
    hostname: Any,
    instance_uuid: Any,
    mappings: Any,
    *,
    arqs: Any = None,
    port_uuid: str | None = None,
    providers: Collection[str] | None = None,
) -> tuple[BindParameters, ...]:
    """Return the parameters of the bind for each ARQ of a context, in the order of its ARQs.

    ``context`` is a device context as GET /v2/device_contexts/{uuid} shows it, or a device profile.
    Its fields ``groups`` and ``arqs`` are used. The argument ``arqs`` replaces the field: the ARQs
    that POST /v2/accelerator_requests has returned for the profile, or for the hidden profile of
    the context, whose former ARQs they replace. A device profile has no such field. ``mappings``
    has the provider of each request group, as Placement answers: a list of one uuid by name of the
    group. The number of a group may stand for its name, as in the allocation candidates of a
    context. ``port_uuid`` is that of ``to_request_groups``. ``providers`` are the uuids of the
    devices of the host, if the caller knows them; another provider is refused. Raise Invalid with
    the field, also for a mapping of a group that the context does not have, and if the ARQs are not
    exactly those that the groups request.
    """
    # All arguments are parsed before they are compared, so that an error names the wrong one.
    port = parse_port(port_uuid)
    groups = read_groups(context)
    names = [request_groups.make_group_name(number, port) for number in range(len(groups))]
    host = check_text("hostname", hostname)
    instance = parse_uuid(instance_uuid, "instance_uuid")
    device_rps = request_groups.parse_mappings(names, mappings, _parse_providers(providers))
    group_numbers = _parse_arqs(len(groups), context.get("arqs") if arqs is None else arqs)
    _check_complete(groups, group_numbers.values())
    return tuple(
        BindParameters(
            arq_uuid=uuid,
            hostname=host,
            device_rp_uuid=device_rps[names[number]],
            instance_uuid=instance,
        )
        for uuid, number in group_numbers.items()
    )


def build_patch(parameters: Iterable[BindParameters]) -> dict[str, list[dict[str, str]]]:
    """Return the body of PATCH /v2/accelerator_requests that binds the ARQs."""
    return {
        item.arq_uuid: [
            {"path": "/hostname", "op": "add", "value": item.hostname},
            {"path": "/device_rp_uuid", "op": "add", "value": item.device_rp_uuid},
            {"path": "/instance_uuid", "op": "add", "value": item.instance_uuid},
        ]
        for item in parameters
    }


def _parse_providers(providers: Collection[str] | None) -> frozenset[str] | None:
    if providers is None:
        return None
    if isinstance(providers, str) or not isinstance(providers, Collection):
        raise Invalid("providers: expected a list of uuids", field="providers")
    return frozenset(parse_uuid(value, "providers") for value in providers)


def _parse_arqs(num_groups: int, arqs: Any) -> dict[str, int]:
    """Return the number of the group of each ARQ, by uuid."""
    # A text is a sequence too, whose elements would be refused one by one with a worse message.
    if not isinstance(arqs, Sequence) or isinstance(arqs, str | bytes) or not arqs:
        raise Invalid("arqs: expected a list of at least one ARQ", field="arqs")
    if len(arqs) > MAX_ARQS:
        raise Invalid(
            f"arqs: found {len(arqs)} ARQs, at most {MAX_ARQS} can be bound", field="arqs"
        )
    parsed: dict[str, int] = {}
    for index, arq in enumerate(arqs):
        where = f"arqs[{index}]"
        if not isinstance(arq, Mapping):
            raise Invalid(f"{where}: expected an ARQ, found {type(arq).__name__}", field=where)
        uuid = parse_uuid(arq.get("uuid"), f"{where}['uuid']")
        # Twice in the list, an ARQ would stand for a second one that stays unbound.
        if uuid in parsed:
            raise Invalid(f"{where}['uuid']: duplicate ARQ {uuid}", field=f"{where}['uuid']")
        parsed[uuid] = check_integer(
            f"{where}['device_profile_group_id']",
            arq.get("device_profile_group_id"),
            num_groups - 1,
        )
    return parsed


def _check_complete(groups: Sequence[profile.Group], numbers: Iterable[int]) -> None:
    """Raise Invalid unless each group has as many ARQs as it asks for."""
    # Nova attaches all devices of an instance together: a missing one would never be attached.
    found = Counter(numbers)
    expected = Counter(slot.group_id for slot in profile.expand_slots(groups))
    for number in range(len(groups)):
        if found[number] != expected[number]:
            raise Invalid(
                f"arqs: found {found[number]} ARQs of group {number}, which asks for "
                f"{expected[number]}; pass all ARQs of this context or profile, and no others",
                field="arqs",
            )
