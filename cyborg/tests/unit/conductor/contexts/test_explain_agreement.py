# SPDX-License-Identifier: Apache-2.0
"""An explanation, pre_bind and bind agree: on whether a context fits, and on the predicate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from oslo_utils import timeutils

from cyborg.core.errors import NoHandle
from cyborg.db import schema
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.context_work import PROJECT, ContextEnv
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.tiers import scale

OTHER_TRAIT = "CUSTOM_OTHER"
# Codes of an explanation for a provider that can serve a group, if it is asked for no other.
JOINT = (None, "taken_in_call", "other_group")


@dataclass(frozen=True)
class Provider:
    """A provider of the host: what its device is, its condition, and its handles."""

    resource_class: str = "FPGA"
    traits: tuple[str, ...] = (rows.TRAIT,)
    numa_node: int | None = 0
    handles: int = 4
    taken: int = 0
    dirty: int = 0
    published: bool = True
    condition: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Group:
    """A group of the context."""

    units: int = 1
    resource_class: str = "FPGA"
    traits: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, str]:
        """Return the group as the API gets it."""
        required = {f"trait:{name}": "required" for name in self.traits}
        return {f"resources:{self.resource_class}": str(self.units)} | required


class Cloud:
    """Hosts with providers, and a context that is explained and reserved there."""

    def __init__(self, engine: sa.Engine) -> None:
        conf = make_conf()
        conf.set_override("auth_strategy", "noauth")
        self.api = ApiEnv(conf, engine)
        self.env = ContextEnv(engine)
        self.hosts = 0

    def add_host(self, providers: Sequence[Provider], *, down: bool = False) -> list[rows.Card]:
        """Insert a host with these providers."""
        self.hosts += 1
        host = f"host-{self.hosts}"
        cards = [
            self._add_card(host, f"0000:{number:02x}:00.0", provider)
            for number, provider in enumerate(providers)
        ]
        if down:
            (agent,) = rows.read(self.env.engine, schema.services, host=host)
            now = timeutils.utcnow()
            rows.update(self.env.engine, schema.services, agent["id"], down_since=now)
        return cards

    def _add_card(self, host: str, address: str, provider: Provider) -> rows.Card:
        engine, node = self.env.engine, provider.numa_node
        traits = list(provider.traits) + ([] if node is None else [f"CUSTOM_NUMA_NODE_{node}"])
        card = self.env.add_card(
            host=host,
            address=address,
            handles=provider.handles,
            resource_class=provider.resource_class,
            traits=traits,
            numa_node=node,
            abilities=[],
            **(provider.condition or {}),
        )
        found = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)
        for handle in found[: provider.taken]:
            uuid = rows.insert_arq(
                engine,
                self.env.profile,
                state="Bound",
                instance_uuid=str(uuid4()),
                instance_slot=0,
                device_rp_uuid=card.provider,
            )
            (arq,) = rows.read(engine, schema.arqs, uuid=uuid)
            rows.update(engine, schema.attach_handles, handle["id"], arq_id=arq["id"])
        for handle in found[provider.taken : provider.taken + provider.dirty]:
            rows.update(engine, schema.attach_handles, handle["id"], needs_cleaning=True)
        if not provider.published:
            (row,) = rows.read(engine, schema.providers, uuid=card.provider)
            rows.update(engine, schema.providers, row["id"], published_revision=0)
        return card

    def create(self, groups: Sequence[Group]) -> str:
        """Create a context of these groups."""
        bodies = [group.to_dict() for group in groups]
        return str(self.env.contexts.create({"groups": bodies}, PROJECT)["uuid"])

    def explain(self, context: str, host: str) -> tuple[bool, dict[str, list[str | None]]]:
        """Return whether a host fits, and the code of each provider, by group."""
        found = self.api.get(f"/v2/device_contexts/{context}/explanation?host={host}")
        assert found["fitting_hosts"] in (0, 1)
        return bool(found["fitting_hosts"]), {
            row["uuid"]: [group["code"] for group in row["groups"]] for row in found["providers"]
        }

    def reserve(self, context: str, host: str, chosen: Sequence[str]) -> dict[int, str]:
        """Reserve a context; return the first code of each refused group, none if it fits."""
        mappings = {str(number): [provider] for number, provider in enumerate(chosen)}
        body = {"hostname": host, "mappings": mappings}
        codes = self._codes(lambda: self.env.leases.pre_bind(context, body, PROJECT))
        if not codes:
            self.env.unbind_lease(context)
        return codes

    def bind(self, context: str, host: str, chosen: Sequence[str]) -> dict[int, str]:
        """Bind a context without a lease, as ``reserve`` does."""
        mappings = {str(number): [provider] for number, provider in enumerate(chosen)}
        body = {"hostname": host, "mappings": mappings, "instance_uuid": str(uuid4())}
        codes = self._codes(lambda: self.env.leases.bind(context, body, PROJECT))
        if not codes:
            self.env.unbind_lease(context)
        return codes

    def _codes(self, work: Callable[[], object]) -> dict[int, str]:
        try:
            work()
        except NoHandle as exc:
            first = [rejected[0] for rejected in exc.details["reasons"].values()]
            codes = {(reason["group"], reason["code"]) for reason in first}
            assert len(codes) == len(dict(codes))  # the ARQs of a group have one first failure
            return dict(codes)
        return {}


def assert_agreement(cloud: Cloud, groups: Sequence[Group], host: str) -> None:
    """Reserve and bind a context in every possible way, and compare this with its explanation."""
    context = cloud.create(groups)
    fits, codes = cloud.explain(context, host)
    reserved = []
    for chosen in product(codes, repeat=len(groups)):
        explained = [codes[provider][number] for number, provider in enumerate(chosen)]
        refused = cloud.reserve(context, host, chosen)
        reserved.append(not refused)
        for number, code in enumerate(explained):
            if code not in JOINT:
                assert refused[number] == code
            else:
                # Another mapping of the groups may fit.
                assert refused.get(number, "taken_in_call") == "taken_in_call"
        assert cloud.bind(context, host, chosen) == refused
    assert fits == any(reserved)
    assert fits == all(
        any(found[number] is None for found in codes.values()) for number in range(len(groups))
    )
    cloud.env.contexts.delete(context, PROJECT)


conditions = st.sampled_from(
    [
        *[None] * 6,
        {"cordoned": True},
        {"status": "maintaining"},
        {"health": "unhealthy"},
        {"deliverable": False},
        {"draining": True},
    ]
)
provider_values = st.builds(
    Provider,
    resource_class=st.sampled_from(["FPGA", "FPGA", "FPGA", "CUSTOM_NIC"]),
    traits=st.sampled_from([(rows.TRAIT,), (rows.TRAIT,), (rows.TRAIT, OTHER_TRAIT), ()]),
    numa_node=st.sampled_from([0, 0, 1, None]),
    handles=st.integers(0, 5),
    taken=st.integers(0, 2),
    dirty=st.integers(0, 1),
    published=st.sampled_from([True] * 5 + [False]),
    condition=conditions,
)
group_values = st.builds(
    Group,
    units=st.integers(1, 3),
    resource_class=st.sampled_from(["FPGA", "FPGA", "FPGA", "CUSTOM_NIC"]),
    traits=st.sampled_from(
        [
            (),
            (),
            (rows.TRAIT,),
            (OTHER_TRAIT,),
            ("CUSTOM_NUMA_NODE_0",),
            (rows.TRAIT, "CUSTOM_NUMA_NODE_1"),
        ]
    ),
)


@pytest.mark.matrix
def test_explanation_agrees_with_pre_bind_and_bind(sqlite_engine: sa.Engine) -> None:
    cloud = Cloud(sqlite_engine)

    @settings(max_examples=scale(80), report_multiple_bugs=False)
    @given(
        st.lists(provider_values, min_size=1, max_size=2),
        st.lists(group_values, min_size=1, max_size=3),
        st.sampled_from([False] * 7 + [True]),
    )
    def compare(providers: list[Provider], groups: list[Group], down: bool) -> None:
        cards = cloud.add_host(providers, down=down)
        assert_agreement(cloud, groups, cards[0].host)

    compare()


FULL = Provider(handles=16)
NIC = Provider("CUSTOM_NIC")


CASES: list[tuple[list[Group], list[Provider], bool, str | None]] = [
    ([Group(2)], [FULL], False, None),
    ([Group(17)], [FULL], False, "too_few_handles"),
    ([Group(9), Group(9)], [FULL], False, "taken_in_call"),
    ([Group(9), Group(9)], [FULL, FULL], False, None),
    ([Group(3)], [Provider(taken=1, dirty=1)], False, "cleaning"),
    # The first group takes the handle that would fit the second.
    ([Group(2), Group(1)], [Provider(handles=3, dirty=2)], False, "cleaning"),
    ([Group(2)], [Provider(taken=3)], False, "taken"),
    ([Group(), Group(1, "CUSTOM_NIC")], [FULL], False, "other_group"),
    ([Group(), Group(1, "CUSTOM_NIC")], [FULL, NIC], False, None),
    ([Group()], [FULL], True, "host_down"),
    ([Group(1, traits=("CUSTOM_NONE",))], [FULL], True, "trait_missing"),
    ([Group()], [Provider(published=False)], False, "unpublished"),
    ([Group(1, traits=("CUSTOM_NUMA_NODE_1",))], [FULL], False, "numa_node"),
    ([Group()], [Provider(condition={"health": "unhealthy"})], False, "unhealthy"),
]


def test_explanation_agrees_on_each_database(engine: sa.Engine) -> None:
    cloud = Cloud(engine)
    for groups, providers, down, code in CASES:
        cards = cloud.add_host(providers, down=down)
        context = cloud.create(groups)
        fits, codes = cloud.explain(context, cards[0].host)
        assert (fits, codes[cards[0].provider][0]) == (code is None, code)
        assert_agreement(cloud, groups, cards[0].host)
