# SPDX-License-Identifier: Apache-2.0
"""Why providers are in no allocation candidate."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.explain import rejections
from cyborg.core.explain.explanation import GroupDemand, HandleCounts, ProviderState
from cyborg.core.explain.predicates import Failure, Predicate
from cyborg.core.explain.rejections import NOT_RETURNED, Rejection
from cyborg.core.explain.request_fit import evaluate_request

FPGA = GroupDemand(0, {"FPGA": 1})
NIC = GroupDemand(1, {"CUSTOM_NIC": 1})
CARD = ProviderState(
    "card", "compute-1", "d", "0000:3b:00.0", "FPGA", handles=HandleCounts(total=2)
)


def explain_rejections(
    demands: Sequence[GroupDemand],
    providers: Sequence[ProviderState],
    returned: Collection[str],
    reason: str | None = None,
    limit: int | None = None,
) -> list[Rejection]:
    """Return the rejections of providers that are all providers of their hosts."""
    fit = evaluate_request(demands, providers)
    return rejections.explain_rejections(fit, providers, returned, reason, limit=limit)


def test_explain_rejections_leaves_out_returned_providers() -> None:
    other = replace(CARD, uuid="other")
    (rejection,) = explain_rejections([FPGA], [CARD, other], {"card"})
    assert rejection.provider is other
    assert rejection.groups[0].failure is None
    assert rejection.groups[0].text == NOT_RETURNED


def test_explain_rejections_has_the_first_failure_of_each_group() -> None:
    taken = replace(CARD, handles=HandleCounts(total=2, taken=2))
    (rejection,) = explain_rejections([FPGA, NIC], [taken], ())
    failures = [group.failure.predicate for group in rejection.groups if group.failure]
    assert failures == [Predicate.TAKEN, Predicate.RESOURCE_CLASS]
    assert rejection.groups[0].text == "handle is taken (2 of 2 handles)"


def test_explain_rejections_names_the_group_that_no_provider_of_the_host_fits() -> None:
    elsewhere = replace(CARD, uuid="nic", host="compute-2", resource_class="CUSTOM_NIC")
    by_uuid = {
        rejection.provider.uuid: rejection
        for rejection in explain_rejections([FPGA, NIC], [CARD, elsewhere], ())
    }
    other = "the host cannot serve another group of the request: "
    assert by_uuid["card"].groups[0].failure == Failure(Predicate.OTHER_GROUP, f"{other}1")
    assert by_uuid["nic"].groups[1].failure == Failure(Predicate.OTHER_GROUP, f"{other}0")


def test_explain_rejections_has_the_message_of_placement_that_rejects_the_query() -> None:
    taken = replace(CARD, uuid="taken", handles=HandleCounts(total=2, taken=2))
    message = "No such trait(s): CUSTOM_NONE."
    fitting, other = explain_rejections([FPGA], [CARD, taken], (), message)
    assert fitting.groups[0].failure is None
    assert (
        fitting.groups[0].text == f"no predicate fails, but Placement rejects the query: {message}"
    )
    assert other.groups[0].text == "handle is taken (2 of 2 handles)"


def test_explain_rejections_of_equal_groups_names_each_group() -> None:
    many = [GroupDemand(number, {"FPGA": 3}) for number in range(2)]
    (rejection,) = explain_rejections(many, [CARD], ())
    assert [group.text for group in rejection.groups] == [
        "provider has too few handles: 2, group 0 requests 3",
        "provider has too few handles: 2, group 1 requests 3",
    ]


def test_explain_rejections_limits_the_number_of_providers() -> None:
    """A provider counts as far away for each of its equal groups."""
    nic = replace(CARD, uuid="nic", resource_class="CUSTOM_NIC")
    demands = [FPGA, replace(FPGA, number=2), NIC]
    found = explain_rejections(demands, [nic, CARD], (), limit=1)
    assert [rejection.provider.uuid for rejection in found] == ["card"]
    assert len(explain_rejections(demands, [nic, CARD], ())) == 2


def test_explain_rejections_says_which_groups_need_too_many_handles_together() -> None:
    nic = replace(CARD, uuid="nic", resource_class="CUSTOM_NIC")
    large = replace(CARD, uuid="large", host="compute-2", handles=HandleCounts(total=3))
    demands = [FPGA, NIC, GroupDemand(2, {"FPGA": 2})]
    providers = [CARD, nic, large, replace(nic, uuid="nic-2", host="compute-2")]
    found = {
        rejection.provider.uuid: [
            (group.failure and group.failure.predicate, group.text) for group in rejection.groups
        ]
        for rejection in explain_rejections(demands, providers, ())
    }
    together = (
        Predicate.TAKEN_IN_CALL,
        "groups 0 and 2 together need more handles than host compute-1 has",
    )
    other = (Predicate.RESOURCE_CLASS, "resource class differs: FPGA")
    assert found["card"] == [together, other, together]
    assert found["nic"][1] == (
        Predicate.OTHER_GROUP,
        "the host cannot serve another group of the request: 0 and 2",
    )
    assert found["large"] == [(None, NOT_RETURNED), other, (None, NOT_RETURNED)]
    message = explain_rejections(demands, providers, (), "bad trait")[0].groups[0]
    assert message.failure is None


def test_explain_rejections_puts_the_nearest_providers_first() -> None:
    other_class = replace(CARD, uuid="class", resource_class="GPU")
    taken = replace(CARD, uuid="taken", handles=HandleCounts(total=2, taken=2))
    found = explain_rejections([FPGA], [other_class, taken, CARD], ())
    assert [rejection.provider.uuid for rejection in found] == ["card", "taken", "class"]


PROVIDERS = st.builds(
    lambda host, resource_class, taken: replace(
        CARD,
        host=f"compute-{host}",
        resource_class=resource_class,
        handles=HandleCounts(total=2, taken=taken),
    ),
    st.integers(0, 5),
    st.sampled_from(["FPGA", "CUSTOM_NIC"]),
    st.integers(0, 2),
)


@given(st.lists(PROVIDERS, max_size=12), st.integers(1, 12))
def test_choose_hosts_returns_hosts_with_the_nearest_providers(
    providers: list[ProviderState], limit: int
) -> None:
    named = [replace(provider, uuid=f"p-{n}") for n, provider in enumerate(providers)]
    named.sort(key=lambda provider: provider.host)
    demands = [FPGA, NIC, replace(FPGA, number=2)]
    fit = evaluate_request(demands, named)
    hosts = rejections.choose_hosts(fit, limit)
    assert hosts == sorted(set(hosts))
    assert len(hosts) <= limit
    of_hosts = [provider for provider in named if provider.host in hosts]
    found, expected = (
        rejections.explain_rejections(fit, some, (), limit=limit) for some in (of_hosts, named)
    )
    assert found == expected
