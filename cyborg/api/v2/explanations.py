# SPDX-License-Identifier: Apache-2.0
"""/v2/device_profiles/{key}/explanation, or of a device context: why devices fit or not.

An administrator sees hosts, devices and owners. Other callers see counts of the whole cloud, and
only those owners that belong to their own project.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.api import types
from cyborg.api.controller import PageRequest, RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.core.binding.limits import UNLIMITED
from cyborg.core.binding.profile import hidden_profile_name, parse_groups
from cyborg.core.contexts import refusals
from cyborg.core.contexts.context import merge_config
from cyborg.core.contexts.states import OWNING
from cyborg.core.errors import Forbidden
from cyborg.core.explain import explanation as core
from cyborg.core.explain import rejections, request_fit
from cyborg.core.explain.predicates import Failure, Predicate
from cyborg.db.binding import project_units
from cyborg.db.contexts import read as device_contexts
from cyborg.db.explain import provider_counts, provider_states
from cyborg.db.profiles import read as device_profiles


class Reason(types.JsonObject):
    """A predicate, and how many providers and handles fail it first.

    ``remedy`` is null for a caller who is not an administrator.
    """

    code = types.required(str)
    reason = types.required(str)
    remedy = types.optional(str)
    providers = types.required(int)
    handles = types.required(int)


class GroupExplanation(types.JsonObject):
    """A group: how many providers can serve it now, and why the others cannot.

    ``resources`` are numbers of handles that a bind needs, ``free_handles`` the free handles of the
    fitting providers.
    """

    group = types.required(int)
    resources = types.required({str: int})
    fitting_providers = types.required(int)
    free_handles = types.required(int)
    reasons = types.required([Reason])


class ProviderGroup(types.JsonObject):
    """Why a provider cannot serve a group; code, reason and remedy are null if it can."""

    group = types.required(int)
    code = types.optional(str)
    reason = types.optional(str)
    remedy = types.optional(str)


class HandleOwner(
    types.JsonObject,
    row=core.Holder,
    names={"arq": "arq_uuid", "instance": "instance_uuid", "project": "project_id"},
):
    """The owner of a handle."""


class Provider(
    types.JsonObject,
    row=core.ProviderState,
    only=("uuid", "host", "device_uuid", "device", "resource_class"),
    names={"host": "hostname", "device": "address"},
):
    """A resource provider."""


class ProviderExplanation(Provider):
    """A resource provider, with the first failing predicate of each group.

    ``owners`` are the first owners of its handles.
    """

    handles = types.required(int)
    free_handles = types.required(int)
    groups = types.required([ProviderGroup])
    owners = types.required([HandleOwner])


class FailedGroup(types.JsonObject, row=refusals.FailedGroup):
    """A predicate that a resource provider failed for a group, and for how many of its handles.

    ``provider_uuid`` is null for a caller who is not an administrator.
    """

    provider = types.optional(types.Uuid(), name="provider_uuid")


class LastFailure(
    types.JsonObject, row=refusals.ContextFailure, without=("detail",), names={"job": "job_uuid"}
):
    """The last failure of a device context: a refused bind or reservation, or failed host work.

    ``code`` is the first predicate that failed; ``prepare_failed`` or ``clean_failed`` for the work
    of a host; ``refused`` for concurrent calls. ``groups`` are the reasons of a refusal.
    Only administrators get ``hostname``, ``job_uuid`` and the addresses in ``reason``.
    """

    # Stored as text, and shown as a time.
    at = types.required(datetime)


class RejectedProvider(Provider):
    """A resource provider that is in no allocation candidate, with the reason for each group.

    ``code`` is the first predicate that a bind would fail in Cyborg. The reason of Placement may be
    another one, such as the limit of the query or other resources of the host. ``code`` and
    ``remedy`` are null if the provider fails no predicate.
    """

    groups = types.required([ProviderGroup])


class Explanation(types.JsonObject):
    """Why devices are available, or not, for servers with a device profile or device context.

    ``name`` is the name of the profile, or of the hidden profile of the context. ``fitting_hosts``
    is the number of hosts that can serve all groups together. ``groups`` count all providers.
    ``providers`` is a page of the providers, for an administrator. ``last_failure`` is that of a
    context, until its next lease or bind; it is null otherwise.
    """

    uuid = types.required(types.Uuid())
    name = types.required(str)
    last_failure = types.optional(LastFailure)
    fitting_hosts = types.required(int)
    groups = types.required([GroupExplanation])
    providers = types.required([ProviderExplanation])
    providers_links = types.optional([types.Link])


EXPLANATIONS = Collection(
    "device_profiles", "device_profile", device_profiles, Explanation, since=(2, 6), scoped=True
)
CONTEXT_EXPLANATIONS = Collection(
    "device_contexts", "device_context", device_contexts, Explanation, since=(2, 6), scoped=True
)
# Maximum number of providers that are explained with allocation candidates.
MAX_REJECTED = 1000


class Controller(Resource):
    """The operations on explanations."""

    @EXPLANATIONS.operation(
        "GET device_profiles/{key}/explanation",
        answer=Explanation,
        query={"host": types.Text()},
        paged=True,
        takes_turns=True,
        raises=(Forbidden,),
    )
    def explain(
        self, request: RequestContext, key: str, host: str | None, page: PageRequest
    ) -> Any:
        """Explain which providers can serve the groups of a device profile, and why others cannot.

        The first failing predicate of each provider is shown, in a fixed order. Only an
        administrator sees the providers, or may select one host. For any other caller the quota of
        the caller's project counts too.
        """
        # Before the profile: a host is refused, whether the profile exists or not.
        elevated = check_host(request, host)
        profile, demands = read_demands(self, request, key)
        # The quota of an administrator's own project says nothing about that of the user.
        over_quota = not elevated and count_room(self, request.caller.project_id, demands) == 0
        head = {"uuid": profile["uuid"], "name": profile["name"], "last_failure": None}
        return self._explain(
            request, EXPLANATIONS.name, head, demands, over_quota=over_quota, host=host, page=page
        )

    @CONTEXT_EXPLANATIONS.operation(
        "GET device_contexts/{uuid}/explanation",
        "explain",
        answer=Explanation,
        query={"host": types.Text()},
        paged=True,
        takes_turns=True,
        raises=(Forbidden,),
    )
    def explain_context(
        self, request: RequestContext, uuid: str, host: str | None, page: PageRequest
    ) -> Any:
        """Explain which providers can serve the groups of a device context, and why others cannot.

        The explanation is like that of a device profile. The config data of the context counts as
        keys of its groups. For every caller, the quota is that of the context's project. It is
        compared with the bound units, since the accelerator requests of a context exist already.
        The last failure of the context is what failed then; the rest is what holds now.
        """
        elevated = check_host(request, host)
        context = CONTEXT_EXPLANATIONS.read_row(self, request, uuid)
        demands = context_demands(context)
        # The handles of a bound context are in the usage of the quota already.
        unbound = context["state"] not in OWNING
        over_quota = unbound and count_room(self, context["project_id"], demands, bound=True) == 0
        head = {
            "uuid": context["uuid"],
            "name": hidden_profile_name(context["uuid"]),
            "last_failure": _last_failure(context["failure"], elevated),
        }
        name = CONTEXT_EXPLANATIONS.name
        return self._explain(
            request, name, head, demands, over_quota=over_quota, host=host, page=page
        )

    def _explain(
        self,
        request: RequestContext,
        collection: str,
        head: Mapping[str, Any],
        demands: Sequence[core.GroupDemand],
        over_quota: bool,
        host: str | None,
        page: PageRequest,
    ) -> dict[str, Any]:
        """Return the explanation that begins with the fields of ``head``.

        An administrator gets a page of the providers with its links, others get none.
        """
        # A check after those of the core: no provider fits a project without room in its quota.
        check = core.fail_quota if over_quota else None
        elevated = request.caller.is_elevated
        with take_turn(self, host), self.context.reader.connect() as connection:
            counts = provider_counts.find(connection, demands, host=host)
            # The providers whose resource class no group requests are only counted.
            counts = provider_counts.add_others(connection, counts, host=host)
            fit = request_fit.evaluate_counts(demands, counts, check)
            summaries = fit.summarize()
            # By number of the group. An administrator sees the owners at the providers.
            owner_texts = {} if elevated else _visible_owners(connection, request, summaries, fit)
            document: dict[str, Any] = {
                **head,
                "providers": [],
                "fitting_hosts": len(fit.fitting_hosts),
                "groups": [
                    _group(summary, elevated, owner_texts.get(summary.demand.number, ""))
                    for summary in summaries
                ],
            }
            # Other callers get no providers, and so no links either.
            if not elevated:
                return document
            shown, marker = page.read(
                lambda window: provider_states.find_uuids(connection, window, host=host)
            )
            states = _read_states(connection, [row["uuid"] for row in shown], demands)
            taken = [state.uuid for state in states if state.handles.taken]
            # Only of providers of the page: a cloud may have many thousand owners.
            owners = provider_states.find_holders(connection, taken) if taken else {}
        document["providers"] = [
            _provider(state, fit, owners.get(state.uuid, ())) for state in states
        ]
        path = f"{collection}/{head['uuid']}/explanation"
        return request.add_next_link(document, path, "providers", marker)


def take_turn(resource: Resource, host: str | None) -> AbstractContextManager[None]:
    """Wait until no other request evaluates all hosts. Raise HTTPTooManyRequests.

    One ``host`` is no reason to wait.
    """
    return resource.context.evaluations.take() if host is None else nullcontext()


def _read_states(
    connection: sa.Connection, uuids: Sequence[str], demands: Sequence[core.GroupDemand]
) -> list[core.ProviderState]:
    """Return the states of providers in the order of ``uuids``."""
    if not uuids:
        return []
    targets = {demand.target for demand in demands}
    found = provider_states.find(connection, uuids=uuids, attach_targets=targets)
    by_uuid = {state.uuid: state for state in found}
    # A provider may have been removed after its page was read.
    return [by_uuid[uuid] for uuid in uuids if uuid in by_uuid]


def read_demands(
    resource: Resource, request: RequestContext, key: str
) -> tuple[Mapping[str, Any], Sequence[core.GroupDemand]]:
    """Return a device profile and its demands. Raise NotFound."""
    profile = EXPLANATIONS.read_row(resource, request, key)
    return profile, core.make_demands(parse_groups(profile["groups"]))


def count_room(
    resource: Resource,
    project: str | None,
    demands: Sequence[core.GroupDemand],
    *,
    bound: bool = False,
) -> int | None:
    """Return how many more servers the limits of a project allow; None without limit or project.

    With ``bound``, only bound units count as used, and the limit of ARQs does not apply.
    """
    # A token of the system has no project, and so no limits.
    if not project:
        return None
    limits = resource.context.conductor.limits_get(project)
    with resource.context.reader.connect() as connection:
        usage = project_units.usage(connection, project)
    used = {row["resource_class"]: row["bound" if bound else "used"] for row in usage}
    arq_limit = UNLIMITED if bound else limits["arqs"]
    return core.find_room(arq_limit, limits["units"], used).count_servers(demands)


def context_demands(context: device_contexts.ContextRow) -> tuple[core.GroupDemand, ...]:
    """Return the demands of the groups of a device context, with its config data."""
    return core.make_demands(merge_config(parse_groups(context["groups"]), context["config_data"]))


def explain_absent_providers(
    connection: sa.Connection,
    context: device_contexts.ContextRow,
    candidates: Iterable[Mapping[str, Any]],
    reason: str | None,
) -> list[dict[str, Any]]:
    """Return why providers are in no allocation candidate of a context, at most MAX_REJECTED.

    ``reason`` is the message of Placement if it rejected the whole query.
    """
    demands = context_demands(context)
    returned = {
        uuid
        for candidate in candidates
        for providers in candidate["mappings"].values()
        for uuid in providers
    }
    # Only the hosts of the nearest providers are read: a cloud has many thousand providers.
    fit = request_fit.evaluate_counts(demands, provider_counts.find(connection, demands))
    wanted = MAX_REJECTED + len(returned)
    classes = resource_classes_of(demands)
    states = provider_states.find(
        connection,
        hosts=rejections.choose_hosts(fit, wanted),
        resource_classes=classes,
        attach_targets={demand.target for demand in demands},
    )
    # The others fail each group at the first predicate: they are farther away than any of these.
    if (missing := wanted - len(states)) > 0:
        others = provider_states.find_other_uuids(connection, classes, missing)
        states += _read_states(connection, others, demands)
    explained = rejections.explain_rejections(fit, states, returned, reason, limit=MAX_REJECTED)
    return [_rejected(rejection) for rejection in explained]


def check_host(request: RequestContext, host: str | None) -> bool:
    """Return whether the caller is an administrator. If not, raise Forbidden for a host."""
    caller = request.caller
    if host is not None and not caller.is_elevated:
        raise Forbidden(f"host: only {caller.administrators} see hosts; omit it", field="host")
    return caller.is_elevated


def resource_classes_of(demands: Iterable[core.GroupDemand]) -> set[str]:
    """Return the resource classes of groups; skip groups with several resource classes."""
    return {demand.resource_class for demand in demands if demand.resource_class is not None}


def _visible_owners(
    connection: sa.Connection,
    request: RequestContext,
    summaries: Iterable[core.GroupSummary],
    fit: request_fit.RequestFit,
) -> dict[int, str]:
    """Return the owners of the taken handles of each group, as far as the caller may see them.

    They are a text for each number of a group that has taken handles. Only providers whose first
    failure is TAKEN are considered.
    """
    with_taken = [summary for summary in summaries if summary.taken]
    if not with_taken:
        return {}
    # A token without a project owns nothing: no project has an empty id.
    project = request.caller.project_id or ""
    classes = resource_classes_of(summary.demand for summary in with_taken)
    # The handles of the caller's project, with their owners, by provider uuid.
    own_holders = provider_states.find_own_holders(connection, project, classes)
    targets = {demand.target for demand in fit.demands}
    # Only the providers of which the project has handles: no other owners are named.
    states = provider_states.find(
        connection, resource_classes=classes, owner=project, attach_targets=targets
    )
    # The first failing predicates of each provider are in the order of the demands.
    own_predicates = [
        (
            own_holders[state.uuid],
            [failure and failure.predicate for failure in fit.failures(state)],
        )
        for state in states
        if state.uuid in own_holders
    ]
    numbers = [demand.number for demand in fit.demands]
    texts: dict[int, str] = {}
    for summary in with_taken:
        index = numbers.index(summary.demand.number)
        own_taken = [
            handles
            for handles, predicates in own_predicates
            if predicates[index] is Predicate.TAKEN
        ]
        taken_by_others = summary.taken > sum(handles.total for handles in own_taken)
        # One holder stands for all other projects. It is the first: a text names only the first
        # owners.
        holders = [core.Holder(arq="", instance=None, project=None)] if taken_by_others else []
        holders += [holder for handles in own_taken for holder in handles.first]
        texts[summary.demand.number] = core.describe_holders(holders, project)
    return texts


def describe_predicate(predicate: Predicate, elevated: bool) -> dict[str, str | None]:
    """Return code, reason and remedy; only an administrator gets the remedy."""
    return {
        "code": predicate.value,
        "reason": predicate.description,
        "remedy": predicate.remedy if elevated else None,
    }


def _group(summary: core.GroupSummary, elevated: bool, owners: str) -> dict[str, Any]:
    """Return a group as JSON; ``owners`` names the owners that the caller may see, or is empty."""
    reasons = []
    for predicate, count in summary.providers.most_common():
        reason = describe_predicate(predicate, elevated)
        # The remedy is the same for all owners; the reason names those that the caller may see.
        if predicate is Predicate.TAKEN and owners:
            reason["reason"] = f"handle is {owners}"
        reasons.append({**reason, "providers": count, "handles": summary.handles[predicate]})
    return {
        "group": summary.demand.number,
        "resources": dict(summary.demand.units),
        "fitting_providers": summary.fitting,
        "free_handles": summary.free,
        "reasons": reasons,
    }


def _last_failure(failure: Mapping[str, Any] | None, elevated: bool) -> dict[str, Any] | None:
    """Return the last failure of a context, as far as the caller may know it."""
    if failure is None:
        return None
    # Stored as JSON, with a time in UTC without an offset.
    shown: dict[str, Any] = {**failure, "at": f"{failure['at']}+00:00"}
    # The detail has addresses, which only administrators see.
    if elevated:
        shown["reason"] = failure.get("detail") or failure["reason"]
    else:
        groups = [{**group, "provider": None} for group in failure["groups"]]
        shown |= {"hostname": None, "job": None, "groups": groups}
    return types.serialize(LastFailure, shown)


def _rejected(rejection: rejections.Rejection) -> dict[str, Any]:
    groups = [_provider_group(g.demand.number, g.failure, g.text) for g in rejection.groups]
    return {**types.serialize(Provider, rejection.provider), "groups": groups}


def _provider(
    state: core.ProviderState, fit: request_fit.RequestFit, owners: Sequence[core.Holder]
) -> dict[str, Any]:
    failures = zip(fit.demands, fit.failures(state), strict=True)
    return {
        **types.serialize(Provider, state),
        "handles": state.handles.total,
        "free_handles": state.handles.free,
        "groups": [
            _provider_group(demand.number, failure, failure.text if failure else None)
            for demand, failure in failures
        ],
        "owners": [types.serialize(HandleOwner, owner) for owner in owners],
    }


def _provider_group(number: int, failure: Failure | None, text: str | None) -> dict[str, Any]:
    return {
        "group": number,
        "code": failure.predicate.value if failure else None,
        "reason": text,
        "remedy": failure.predicate.remedy if failure else None,
    }
