# SPDX-License-Identifier: Apache-2.0
"""Providers that the database counts by kind are evaluated as those that it lists."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core.binding.profile import AttachTarget
from cyborg.core.explain.capacity import compute_capacity, count_capacity
from cyborg.core.explain.explanation import GroupDemand, ProviderState
from cyborg.core.explain.predicates import Predicate
from cyborg.core.explain.provider_counts import ProviderCounts
from cyborg.core.explain.request_fit import evaluate_counts, evaluate_request
from cyborg.core.jobs.job import JobState
from cyborg.db import schema
from cyborg.db.explain import provider_counts, provider_states
from cyborg.db.paging import Page
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.machine.tiers import pick_points

LAYOUTS = [
    {"name": "whole", "offers": {"PGPU": 1}, "traits": ["CUSTOM_WHOLE"]},
    {"name": "two", "offers": {"VGPU": 2}, "traits": ["CUSTOM_HALF"]},
    {"name": "four", "offers": {"VGPU": 4}, "traits": ["CUSTOM_HALF"]},
]
# What a card can be, drawn for each one.
CLASSES: Sequence[Mapping[str, Any]] = (
    *({"resource_class": "FPGA"},) * 4,
    {"resource_class": "FPGA", "traits": [rows.TRAIT, "CUSTOM_B"]},
    {"resource_class": "FPGA", "numa_node": 1},
    {"resource_class": "CUSTOM_NIC", "traits": []},
    {"resource_class": "PGPU", "layout": "whole", "layouts": LAYOUTS, "traits": ["CUSTOM_WHOLE"]},
    {"resource_class": "VGPU", "layout": "two", "layouts": LAYOUTS, "traits": ["CUSTOM_HALF"]},
    {"resource_class": "PGPU", "layout": "whole", "layouts": LAYOUTS[:1]},
)
CONDITIONS: Sequence[Mapping[str, Any]] = (
    *({},) * 8,
    {"health": "unhealthy", "health_reason": "hot"},
    {"health": "unknown"},
    {"status": "maintaining"},
    {"cordoned": True},
    {"deliverable": False},
    {"setup_required": True},
    {"reboot_required": True},
    {"failing": True},
    {"draining": True},
)
USES: Sequence[Mapping[str, Any]] = (
    *({},) * 3,
    {"needs_cleaning": True},
    {"draining": True},
    {"info": {"physical_network": "physnet1"}},
    {"arq_id": True},
    {"arq_id": True, "draining": True},
    {"arq_id": True, "needs_cleaning": True},
    {"draining": True, "needs_cleaning": True},
)
TRAIT = frozenset({rows.TRAIT})
REQUESTS: Mapping[str, Sequence[GroupDemand]] = {
    "one": [GroupDemand(0, {"FPGA": 1})],
    "traits": [GroupDemand(0, {"FPGA": 2}, TRAIT, frozenset({"CUSTOM_B"}))],
    "numa": [GroupDemand(0, {"FPGA": 1}, frozenset({"CUSTOM_NUMA_NODE_1"}))],
    "many traits": [
        GroupDemand(0, {"FPGA": 1}, TRAIT, frozenset(f"CUSTOM_{n}" for n in range(70)))
    ],
    "two groups": [GroupDemand(0, {"FPGA": 3}, TRAIT), GroupDemand(1, {"FPGA": 2})],
    "two classes": [GroupDemand(0, {"FPGA": 1}), GroupDemand(1, {"CUSTOM_NIC": 1})],
    "port": [
        GroupDemand(0, {"FPGA": 1}, target=AttachTarget.PORT),
        GroupDemand(1, {"FPGA": 1}),
    ],
    "unknown target": [GroupDemand(0, {"FPGA": 1}, target=None)],
    "layouts": [GroupDemand(0, {"VGPU": 2}, frozenset({"CUSTOM_HALF"}))],
    "whole or half": [GroupDemand(0, {"VGPU": 1}), GroupDemand(1, {"PGPU": 1})],
    "pair of a set": [GroupDemand(0, {"CUSTOM_SET": 2})],
    "single of a set": [GroupDemand(0, {"CUSTOM_SET": 1})],
    "several classes": [GroupDemand(0, {"FPGA": 1, "PGPU": 1}), GroupDemand(1, {"FPGA": 1})],
    "nothing has it": [GroupDemand(0, {"CUSTOM_NONE": 1})],
}


class Cloud:
    """A cloud whose devices differ in all that an evaluation considers."""

    def __init__(self, engine: sa.Engine, hosts: int = 10) -> None:
        self.engine = engine
        self.random = random.Random(7)
        self.profile = rows.insert_profile(engine)
        for number in range(hosts):
            self._add_host(f"host-{number}")
        self._add_sets("host-0")
        self._add_second_deployable()
        self._add_layouts()

    def _add_host(self, host: str) -> None:
        agent = rows.insert_agent(self.engine, host)
        if host == "host-3":
            rows.update(self.engine, schema.services, agent, down_since=timeutils.utcnow())
        for number in range(self.random.randint(1, 4)):
            self._add_card(host, f"0000:0{number}:00.0")

    def _add_card(self, host: str, address: str) -> None:
        choose = self.random.choice
        count = self.random.randint(0, 4)
        values = {**choose(CLASSES), **choose(CONDITIONS), "handles": count}
        card = rows.insert_card(self.engine, host, address, **values)
        uses = [choose(USES) for _ in range(count)]
        self._use(card, uses)
        change = choose(("", "", "", "", "publish", "programming", "restore", "no provider"))
        (provider,) = rows.read(self.engine, schema.providers, uuid=card.provider)
        if change == "publish":
            rows.update(self.engine, schema.providers, provider["id"], published_revision=0)
        elif change == "no provider":
            with self.engine.begin() as tx:
                tx.execute(
                    sa.delete(schema.providers).where(schema.providers.c.id == provider["id"])
                )
        elif change:
            job = {"kind": "program", "host": host, "subject": "s", "arguments": {}}
            if change == "restore":
                job |= {"kind": "restore", "state": JobState.OPEN, "error": "no power"}
            id_ = rows.insert(self.engine, schema.jobs, **job)
            if change == "restore":
                rows.insert_arq(self.engine, self.profile, device_rp_uuid=card.provider, job_id=id_)
            else:
                rows.update(self.engine, schema.deployables, card.deployable_id, job_id=id_)

    def _use(self, card: rows.Card, uses: Sequence[Mapping[str, Any]]) -> None:
        found = rows.read(self.engine, schema.attach_handles, deployable_id=card.deployable_id)
        for handle, use in zip(found, uses, strict=False):
            values = dict(use)
            if "arq_id" in values:
                uuid = rows.insert_arq(
                    self.engine, self.profile, state="Bound", device_rp_uuid=card.provider
                )
                (arq,) = rows.read(self.engine, schema.arqs, uuid=uuid)
                values["arq_id"] = arq["id"]
            if values:
                rows.update(self.engine, schema.attach_handles, handle["id"], **values)

    def _add_sets(self, host: str) -> None:
        """Add sets of two cards: one that is offered, and one that is withheld."""
        names = {"resource_class": "CUSTOM_SET"}
        cards = [
            rows.insert_card(
                self.engine, host, f"0000:9{n}:00.0", handles=2 if n == 2 else 1, **names
            )
            for n in range(3)
        ]
        handles = [
            rows.read(self.engine, schema.attach_handles, deployable_id=card.deployable_id)[0]
            for card in cards
        ]
        self._use(cards[1], [{"needs_cleaning": True}])
        for number, (offer, members) in enumerate((("offered", (0, 1)), ("withheld", (1, 2)))):
            card = rows.insert_card(self.engine, host, f"set:{number}", handles=0, **names)
            rows.update(
                self.engine, schema.deployables, card.deployable_id, set_size=2, offer=offer
            )
            with self.engine.begin() as tx:
                tx.execute(
                    sa.insert(schema.set_members),
                    [
                        {"deployable_id": card.deployable_id, "handle_id": handles[n]["id"]}
                        for n in members
                    ],
                )

    def _add_second_deployable(self) -> None:
        """Move the deployables of two cards with layouts to one device, which is idle."""
        values: dict[str, Any] = {
            "layout": "two",
            "layouts": LAYOUTS,
            "resource_class": "VGPU",
            "handles": 1,
        }
        first, second = (
            rows.insert_card(self.engine, "host-1", f"0000:8{n}:00.0", **values) for n in (0, 1)
        )
        rows.update(
            self.engine, schema.deployables, second.deployable_id, device_id=first.device_id
        )

    def _add_layouts(self) -> None:
        """Add cards that differ in their possible layouts alone."""
        whole: dict[str, Any] = {"layout": "whole", "resource_class": "PGPU", "handles": 1}
        for number, layouts in enumerate((LAYOUTS, LAYOUTS[:1], LAYOUTS[:2])):
            rows.insert_card(
                self.engine, "host-2", f"0000:7{number}:00.0", layouts=layouts, **whole
            )


def list_states(
    connection: sa.Connection, demands: Sequence[GroupDemand], **filters: Any
) -> list[ProviderState]:
    targets = {demand.target for demand in demands}
    return provider_states.find(connection, attach_targets=targets, **filters)


def find_counts(
    connection: sa.Connection, demands: Sequence[GroupDemand], host: str | None
) -> ProviderCounts:
    counts = provider_counts.find(connection, demands, host=host)
    return provider_counts.add_others(connection, counts, host=host)


def assert_agreement(
    connection: sa.Connection, demands: Sequence[GroupDemand], host: str | None
) -> None:
    states = list_states(connection, demands, host=host)
    counts = find_counts(connection, demands, host)
    listed, counted = evaluate_request(demands, states), evaluate_counts(demands, counts)
    assert counted.summarize() == listed.summarize()
    assert counted.fitting_hosts == listed.fitting_hosts
    for state in states:
        assert counted.failures(state) == listed.failures(state), state
    classes = {demand.resource_class for demand in demands if demand.resource_class}
    of_classes = list_states(connection, demands, host=host, resource_classes=classes)
    capacities = compute_capacity(demands, of_classes)
    assert count_capacity(demands, counts) == capacities


def test_counted_providers_are_evaluated_as_listed_ones(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cloud(engine)
    hosts = ("host-0", "host-1", "host-3", "nowhere")
    # In this order every fourth one has each request once, and every eighth one each host.
    of_hosts = [
        (demands, hosts[(number // 2 + shift) % len(hosts)])
        for number, demands in enumerate(REQUESTS.values())
        for shift in range(len(hosts))
    ]
    with engine.connect() as connection:
        for size in (None, 3):
            if size is not None:
                monkeypatch.setattr(provider_counts, "MAX_PROVIDERS", size)
                monkeypatch.setattr(provider_counts, "MAX_DEVICES", size - 1)
            for demands in REQUESTS.values():
                assert_agreement(connection, demands, None)
            for point in pick_points(len(of_hosts)):
                assert_agreement(connection, *of_hosts[point])


def test_cloud_of_this_test_has_each_predicate(sqlite_engine: sa.Engine) -> None:
    """The comparison above is worth as much as the predicates that occur in it."""
    Cloud(sqlite_engine, hosts=60)
    seen = Counter[Predicate]()
    with sqlite_engine.connect() as connection:
        for demands in REQUESTS.values():
            assert_agreement(connection, demands, None)
            for summary in evaluate_counts(
                demands, find_counts(connection, demands, None)
            ).summarize():
                seen += summary.providers
    # Neither is one of the providers of a list.
    assert set(Predicate) - seen.keys() == {Predicate.IN_DEVICE_SETS, Predicate.QUOTA}


def test_equal_hosts_have_one_composition(engine: sa.Engine) -> None:
    for n in range(6):
        rows.insert_agent(engine, f"host-{n}")
        for address in ("0000:01:00.0", "0000:02:00.0"):
            rows.insert_card(engine, f"host-{n}", address, handles=1 + n % 2)
    with engine.connect() as connection, count_statements(engine) as statements:
        counts = provider_counts.find(connection, REQUESTS["one"])
    assert len(statements) == 2
    assert len(counts.kinds) == len(set(counts.hosts.values())) == 2
    assert {number for kinds in counts.hosts.values() for _, number in kinds} == {2}


def test_pages_of_uuids_have_each_listed_provider_once(engine: sa.Engine) -> None:
    Cloud(engine)
    with engine.connect() as connection:
        expected = [state.uuid for state in provider_states.find(connection)]
        assert [row["uuid"] for row in provider_states.find_uuids(connection)] == expected
        for key, direction in (
            (None, "asc"),
            (None, "desc"),
            ("hostname", "desc"),
            ("uuid", "asc"),
        ):
            found: list[str] = []
            while True:
                page = Page(5, found[-1] if found else None, key, direction)
                rows_of_page = provider_states.find_uuids(connection, page)
                if not rows_of_page:
                    break
                found += [row["uuid"] for row in rows_of_page]
            order = sorted(expected) if key == "uuid" else expected
            assert found == (order if direction == "asc" else order[::-1])
        of_host = [state.uuid for state in provider_states.find(connection, host="host-0")]
        listed = provider_states.find_uuids(connection, host="host-0")
        assert [row["uuid"] for row in listed] == of_host
