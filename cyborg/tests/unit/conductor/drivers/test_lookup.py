# SPDX-License-Identifier: Apache-2.0
"""Install of a driver whose package was installed while the agents run."""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor.drivers.lookup import DriverLookup
from cyborg.conductor.drivers.service import Drivers
from cyborg.core.drivers.registry import DriverEntry, driver_uuid
from cyborg.core.errors import Conflict, NotFound, TimedOut
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.rollouts import FAKE, OTHER, Cloud
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.fixtures.machine.processes import ends_within

HOSTS = ["c1", "c2", "c3", "c4"]
ACME = DriverEntry("acme", "1.0")


class FakeAgents:
    """Fake of the agents' API; ``answers`` are their results, by host."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = dict(answers)
        self.queried_hosts: list[str] = []
        self.proceed = threading.Event()

    def find_driver(self, host: str, driver: str) -> Mapping[str, Any]:
        self.queried_hosts.append(host)
        entry = self.answers.get(host)
        if isinstance(entry, Exception):
            raise entry
        if entry == "hang":
            self.proceed.wait(60)
            entry = ACME
        return {"driver": entry.to_dict() if isinstance(entry, DriverEntry) else entry}


@pytest.fixture
def agents() -> Iterator[FakeAgents]:
    fake = FakeAgents({})
    yield fake
    fake.proceed.set()


def drivers(cloud: Cloud, agents: FakeAgents, timeout: float = 60) -> Drivers:
    cloud.conf.set_override("timeout", timeout, group="rpc")
    lookup = DriverLookup(cloud.conf, cloud.uow, agents)  # type: ignore[arg-type]
    return build(Drivers, cloud.uow, find=lookup.find, now=cloud.now)


def hosts_of(cloud: Cloud, job: str) -> list[str]:
    return sorted(cloud.job(job)[2])


@pytest.mark.parametrize("key", ["acme", driver_uuid("acme")])
def test_install_finds_a_newly_installed_driver(
    engine: sa.Engine, agents: FakeAgents, key: str
) -> None:
    cloud = Cloud(engine, HOSTS)
    agents.answers = {"c1": ACME, "c3": ACME}
    job = drivers(cloud, agents).install(key, None, None, None)["uuid"]
    assert hosts_of(cloud, job) == ["c1", "c3"]
    assert sorted(agents.queried_hosts) == HOSTS, "each agent is queried once"
    # The next report of each agent has its complete driver list, like the first report.
    (service,) = rows.read(engine, schema.services, host="c1")
    assert service["drivers_digest"] is None
    cloud.agents["c1"].host.drivers = (ACME,)
    cloud.send_report("c1")
    assert [r["name"] for r in rows.read(engine, schema.drivers, service_id=service["id"])] == [
        "acme"
    ]


def test_lookup_queries_only_up_hosts_without_the_driver(
    sqlite_engine: sa.Engine, agents: FakeAgents
) -> None:
    cloud = Cloud(sqlite_engine, HOSTS)
    service = drivers(cloud, agents)
    service.install("fake", None, None, None)
    assert agents.queried_hosts == []
    cloud.run()
    cloud.mark_down("c2")
    agents.answers = {"c1": ACME, "c2": ACME, "c3": ACME}
    job = service.install("acme", None, ["c1"], None)["uuid"]
    assert (hosts_of(cloud, job), agents.queried_hosts) == (["c1"], ["c1"])
    cloud.agents["c1"].host.drivers = (FAKE, OTHER, ACME)
    cloud.run()
    assert hosts_of(cloud, service.install("acme", "b", None, None)["uuid"]) == ["c1", "c3"]
    assert sorted(agents.queried_hosts) == ["c1", "c3", "c4"]


def test_install_of_an_unknown_driver_is_refused_with_similar_names(
    sqlite_engine: sa.Engine, agents: FakeAgents
) -> None:
    cloud = Cloud(sqlite_engine, HOSTS)
    service = drivers(cloud, agents)
    with pytest.raises(NotFound, match="no agent has a driver 'fkae'; did you mean fake"):
        service.install("fkae", None, None, None)
    with pytest.raises(NotFound, match="no agent on host 'c9'"):
        service.install("fake", None, ["c9"], None)
    assert sorted(agents.queried_hosts) == HOSTS


def test_lookup_ignores_failed_and_wrong_answers(
    sqlite_engine: sa.Engine, agents: FakeAgents, caplog: pytest.LogCaptureFixture
) -> None:
    cloud = Cloud(sqlite_engine, HOSTS)
    agents.answers = {
        "c1": TimedOut("no answer"),
        "c2": DriverEntry("other-name"),
        "c3": {"name": 7},
        "c4": DriverEntry("acme", error="ImportError: no module acme"),
    }
    with pytest.raises(Conflict, match="c4: ImportError: no module acme"):
        drivers(cloud, agents).install("acme", None, None, None)
    assert (
        "[driver=acme host=c2] Driver lookup: agent answered about driver other-name instead, "
        "answer ignored" in texts_of(caplog.records)
    )
    names = {row["name"] for row in rows.read(sqlite_engine, schema.drivers)}
    assert names == {"fake", "other", "acme"}


@pytest.mark.slow
def test_lookup_of_hanging_agents_times_out(
    sqlite_engine: sa.Engine, agents: FakeAgents, caplog: pytest.LogCaptureFixture
) -> None:
    cloud = Cloud(sqlite_engine, [f"h{n:02}" for n in range(30)])
    agents.answers = dict.fromkeys(cloud.agents, "hang")
    agents.answers["h00"] = ACME
    with ends_within(5):
        job = drivers(cloud, agents, timeout=0.4).install("acme", None, None, None)["uuid"]
    assert hosts_of(cloud, job) == ["h00"]
    assert "Driver lookup: 29 of 30 agents did not answer within 0.2 s" in caplog.text
    agents.proceed.set()
    assert len(agents.queried_hosts) < 30, "no agent is queried after the timeout"
