# SPDX-License-Identifier: Apache-2.0
"""The reasons why providers cannot serve request groups: the first predicate that each one fails.

The functions need only groups and the states of providers, so that they serve device profiles,
device contexts and any other request that has groups.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cyborg.core.binding import profile
from cyborg.core.errors import Conflict
from cyborg.core.explain import predicates
from cyborg.core.explain.predicates import Failure, Predicate, fail
from cyborg.core.inventory.device import Layout
from cyborg.core.inventory.device_state import READY, DeviceFacts
from cyborg.core.inventory.reference_names import find_counterpart
from cyborg.core.text import join_limited

# Owners of handles that a text names.
MAX_HOLDERS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class GroupDemand:
    """What a server requests from one provider: the units of each resource class of one group.

    ``units`` are numbers of handles, as a bind claims them. ``target`` is None if the profile has
    an unknown value of ``accel:attach_target``.
    """

    number: int
    units: Mapping[str, int]
    required: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()
    target: profile.AttachTarget | None = profile.AttachTarget.INSTANCE

    @property
    def resource_class(self) -> str | None:
        """Return the resource class; None if the group has several: no provider can serve it."""
        return next(iter(self.units)) if len(self.units) == 1 else None

    @property
    def count(self) -> int:
        """Return the number of handles."""
        return sum(self.units.values())

    @property
    def kind(self) -> tuple[object, ...]:
        """Return a key that is equal for demands that differ only in their group number."""
        return (*sorted(self.units.items()), self.required, self.forbidden, self.target)


@dataclass(frozen=True, slots=True)
class HandleCounts:
    """Numbers of handles of a provider; each handle is counted in the first number that applies.

    ``draining`` are no longer reported, ``taken`` have an owner, ``cleaning`` have none and are
    dirty. The other handles are free; ``without_info`` of them lack the info of the attach target
    ``port``.
    """

    total: int = 0
    draining: int = 0
    taken: int = 0
    cleaning: int = 0
    without_info: int = 0

    @property
    def free(self) -> int:
        """Return the number of free handles."""
        return self.total - self.draining - self.taken - self.cleaning

    def fitting(self, target: profile.AttachTarget | None) -> int:
        """Return the number of free handles that can be attached to a target."""
        if target is None:
            return 0
        return self.free - (self.without_info if profile.REQUIRED_INFO[target] else 0)


_NO_HANDLES = HandleCounts()


@dataclass(frozen=True, slots=True)
class ProviderState:
    """A deployable of a device: the values that decide whether it can serve a group.

    ``device`` is the address of the device, and ``numa_node`` its NUMA node if it is known.
    ``layouts`` are the possible layouts of the device, ``layout`` is the name of the current one.
    ``remarks`` are details of conditions, such as the reason of the health. ``published`` is
    whether Placement has the provider. ``set_size`` is the number of devices of a device set, whose
    handles are those of its devices; ``device`` is then the address of the set. With ``in_sets``
    all handles belong to device sets, and are not counted here.
    """

    uuid: str
    host: str
    device_uuid: str
    device: str
    resource_class: str
    traits: frozenset[str] = frozenset()
    facts: DeviceFacts = READY
    handles: HandleCounts = _NO_HANDLES
    published: bool = True
    layout: str | None = None
    layouts: tuple[Layout, ...] = ()
    remarks: Mapping[Predicate, str] = field(default_factory=dict)
    numa_node: int | None = None
    set_size: int | None = None
    in_sets: bool = False

    def other_layouts(self, resource_class: str) -> list[Layout]:
        """Return the layouts other than the current one that have handles of a resource class."""
        return [
            layout
            for layout in self.layouts
            if layout.name != self.layout and layout.offers.get(resource_class)
        ]

    def traits_in(self, layout: Layout) -> frozenset[str]:
        """Return the traits in another layout: its own, and present traits that no layout has."""
        return self.traits.difference(*(other.traits for other in self.layouts)) | layout.traits


@dataclass(frozen=True, slots=True)
class Holder:
    """The owner of a handle."""

    arq: str
    instance: str | None
    project: str | None


@dataclass(slots=True)
class GroupSummary:
    """The providers that fit a group, and the counts of those that do not, by first failure.

    ``free`` are the usable handles of the fitting providers, ``handles`` all handles of the others.
    ``taken`` are the taken handles of the providers whose first failure is TAKEN.
    """

    demand: GroupDemand
    fitting: int = 0
    free: int = 0
    providers: Counter[Predicate] = field(default_factory=Counter)
    handles: Counter[Predicate] = field(default_factory=Counter)
    taken: int = 0

    def count(self, provider: ProviderState, failure: Failure | None, number: int = 1) -> None:
        """Count equal providers with their first failure; None if they fit."""
        if failure is None:
            self.fitting += number
            self.free += number * provider.handles.fitting(self.demand.target)
            return
        self.providers[failure.predicate] += number
        self.handles[failure.predicate] += number * provider.handles.total
        if failure.predicate is Predicate.TAKEN:
            self.taken += number * provider.handles.taken


# A predicate of the caller that is evaluated last, such as the quota of its project.
#
# It does not depend on the number of the group.
Check = Callable[[GroupDemand, ProviderState], Failure | None]


@dataclass(frozen=True, slots=True)
class ProjectRoom:
    """The ARQs, and the units of each resource class, that a project may still have.

    ``arqs`` is None without a limit; a resource class without an entry has no limit.
    """

    arqs: int | None = None
    units: Mapping[str, int] = field(default_factory=dict)

    def count_servers(self, demands: Iterable[GroupDemand]) -> int | None:
        """Return for how many servers with these groups ARQs can be created; None: no limit."""
        needed = Counter[str]()
        for demand in demands:
            needed.update(demand.units)
        rooms = [self.units[name] // needed[name] for name in needed if name in self.units]
        if self.arqs is not None and needed:
            rooms.append(self.arqs // needed.total())
        return max(0, min(rooms)) if rooms else None


def find_room(arq_limit: int, limits: Mapping[str, int], used: Mapping[str, int]) -> ProjectRoom:
    """Return the room of a project from its limits and from its ARQs by resource class.

    A negative limit means no limit.
    """
    return ProjectRoom(
        arqs=None if arq_limit < 0 else arq_limit - sum(used.values()),
        units={name: limit - used.get(name, 0) for name, limit in limits.items() if limit >= 0},
    )


def fail_quota(demand: GroupDemand, provider: ProviderState) -> Failure:
    """Return the failure QUOTA for any provider: the ``Check`` for a project at its limit."""
    return fail(Predicate.QUOTA)


def make_demands(groups: Sequence[profile.Group]) -> tuple[GroupDemand, ...]:
    """Return the demands of the groups of a profile or of a device context."""
    units: dict[int, Counter[str]] = {}
    for slot in profile.expand_slots(groups):
        units.setdefault(slot.group_id, Counter())[slot.resource_class] += 1
    return tuple(
        GroupDemand(number, units[number], group.required, group.forbidden, _target(group))
        for number, group in enumerate(groups)
    )


def find_first_failure(
    demand: GroupDemand, provider: ProviderState, check: Check | None = None
) -> Failure | None:
    """Return the first predicate that a provider fails for a group; None if it can serve it now."""
    # The caller's check comes last: a quota does not matter to a provider that cannot serve anyway.
    failure = find_device_failure(demand, provider) or _find_handle_failure(demand, provider)
    return failure or (check(demand, provider) if check is not None else None)


def find_first_equals(demands: Sequence[GroupDemand]) -> tuple[int, ...]:
    """Return for each demand the index of the first demand with the same ``kind``."""
    # Many requests have equal groups, such as eight times one GPU: each kind is evaluated once.
    firsts: dict[tuple[object, ...], int] = {}
    return tuple(firsts.setdefault(demand.kind, index) for index, demand in enumerate(demands))


def find_failures(
    demands: Sequence[GroupDemand],
    firsts: Sequence[int],
    provider: ProviderState,
    check: Check | None = None,
) -> list[Failure | None]:
    """Return the first failure of a provider for each demand.

    ``firsts`` is the result of ``find_first_equals``: equal demands are evaluated once.
    """
    by_first = {
        first: find_first_failure(demands[first], provider, check)
        for first in dict.fromkeys(firsts)
    }
    failures = []
    for index, (demand, first) in enumerate(zip(demands, firsts, strict=True)):
        failure = by_first[first]
        # A text with the number of a group is valid for this group only.
        if index != first and _names_group(demand, failure):
            failure = find_first_failure(demand, provider, check)
        failures.append(failure)
    return failures


def find_device_failure(demand: GroupDemand, provider: ProviderState) -> Failure | None:
    """Return the first failure that excludes all handles of a provider; None if there is none."""
    return next(_device_failures(demand, provider), None)


def describe_holders(holders: Sequence[Holder], project: str | None) -> str:
    """Return a text with the owners that a caller may see; empty without holders.

    ``project`` is the project of the caller; None means an administrator, who may see all owners.
    """
    if project is None:
        texts = [
            f"taken by ARQ {holder.arq}, {_instance(holder)}, project {holder.project}"
            for holder in holders
        ]
    else:
        texts = [
            f"taken by your project: {_instance(holder)}"
            if holder.project == project
            else "taken by another project"
            for holder in holders
        ]
    # Each text once: an owner may have several handles of the provider.
    return join_limited(list(dict.fromkeys(texts)), MAX_HOLDERS_SHOWN, separator="; ")


def _instance(holder: Holder) -> str:
    if holder.instance is None:
        return f"ARQ {holder.arq} without an instance"
    return f"instance {holder.instance}"


def _device_failures(demand: GroupDemand, provider: ProviderState) -> Iterator[Failure]:
    """Yield the failures that exclude all handles of a provider, in order; only one for traits."""
    requested = demand.resource_class
    # A provider of this service has one class, so nothing else needs to be looked at.
    if requested is None:
        classes = join_limited(sorted(demand.units), 3)
        yield fail(
            Predicate.RESOURCE_CLASS,
            f"group {demand.number} requests several classes of one provider: {classes}",
        )
        return
    if provider.resource_class != requested:
        if layouts := _suitable_layouts(demand, provider, requested):
            names = join_limited(
                [f"{layout.name} has {layout.offers[requested]}" for layout in layouts], 2
            )
            yield fail(Predicate.OTHER_LAYOUT, f"of {requested}, {names}")
        else:
            is_same = find_counterpart(requested) == provider.resource_class
            remark = f" ({requested} of OpenStack Cyborg)" if is_same else ""
            yield fail(Predicate.RESOURCE_CLASS, f"{provider.resource_class}{remark}")
    if failure := predicates.find_trait_failure(
        demand.required, demand.forbidden, provider.traits, provider.numa_node
    ):
        yield failure
    if provider.set_size is not None:
        # Placement allocates all units of a set: they are its step, its minimum and its maximum.
        if provider.set_size != demand.count:
            yield fail(
                Predicate.SET_SIZE,
                f"{provider.set_size}, group {demand.number} requests {demand.count}",
            )
    elif provider.in_sets:
        yield fail(Predicate.IN_DEVICE_SETS)
    elif provider.handles.total < demand.count:
        yield fail(
            Predicate.TOO_FEW_HANDLES,
            f"{provider.handles.total}, group {demand.number} requests {demand.count}",
        )
    for predicate in predicates.device_failures(provider.facts):
        yield fail(predicate, provider.remarks.get(predicate, ""))
    if not provider.published:
        remark = provider.remarks.get(Predicate.UNPUBLISHED, "")
        yield fail(Predicate.UNPUBLISHED, remark)


def _names_group(demand: GroupDemand, failure: Failure | None) -> bool:
    """Return whether the text of a failure has the number of the group."""
    return failure is not None and (
        demand.resource_class is None
        or failure.predicate in (Predicate.SET_SIZE, Predicate.TOO_FEW_HANDLES)
    )


def _suitable_layouts(
    demand: GroupDemand, provider: ProviderState, resource_class: str
) -> list[Layout]:
    """Return the other layouts of the device that have enough handles and the traits of a group."""
    return [
        layout
        for layout in provider.other_layouts(resource_class)
        if layout.offers[resource_class] >= demand.count
        and predicates.find_trait_failure(
            demand.required, demand.forbidden, provider.traits_in(layout)
        )
        is None
    ]


def _find_handle_failure(demand: GroupDemand, provider: ProviderState) -> Failure | None:
    """Return the first predicate that leaves too few handles; None if enough handles fit.

    The handles that fail a predicate are subtracted in the order of the predicates.
    """
    handles = provider.handles
    left = handles.total
    for predicate, count in (
        (Predicate.DRAINING, handles.draining),
        (Predicate.TAKEN, handles.taken),
        (Predicate.CLEANING, handles.cleaning),
        (Predicate.ATTACH_TARGET, handles.free - handles.fitting(demand.target)),
    ):
        left -= count
        if left < demand.count:
            text = f"{predicate.description} ({count} of {handles.total} handles)"
            return Failure(predicate, text)
    return None


def _target(group: profile.Group) -> profile.AttachTarget | None:
    # An unknown value is no error here: the explanation shows it as a failure of each handle.
    try:
        return profile.find_target(group, "")
    except Conflict:
        return None
