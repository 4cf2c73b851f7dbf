# SPDX-License-Identifier: Apache-2.0
"""Queries to Nova about instances: the cache, the limits and the warnings."""

import itertools
from uuid import uuid4

import pytest

from cyborg.clients.nova import Nova
from cyborg.conductor.orphans.release import InstanceQuery
from cyborg.core.orphans.orphans import Presence
from cyborg.testing.fake_nova import FakeNova


@pytest.mark.parametrize("hosts", list(itertools.permutations(["old", "new"])))
def test_server_with_arqs_on_two_hosts_is_classified_for_each(
    fake_nova: FakeNova, hosts: tuple[str, str]
) -> None:
    server = str(uuid4())
    fake_nova.add_server(server, "new")
    query = InstanceQuery(Nova(fake_nova.adapter(), 5.0), limit=10)
    answers = {host: query.get_presence(server, host) for host in hosts}
    assert answers == {"old": Presence.ELSEWHERE, "new": Presence.ON_HOST}
    assert len(fake_nova.requested_paths) == 1


def test_failures_up_to_the_limit_stop_no_other_query(fake_nova: FakeNova) -> None:
    query = InstanceQuery(Nova(fake_nova.adapter(), 5.0), limit=10, max_failures=2)
    servers = [str(uuid4()) for _ in range(3)]
    fake_nova.status = 500
    assert [query.get_presence(server, "host") for server in servers] == [Presence.UNKNOWN] * 3
    assert [query.was_skipped(server) for server in servers] == [False, False, True]
    assert len(fake_nova.requested_paths) == 2


def test_each_kind_of_warning_has_its_own_log(fake_nova: FakeNova) -> None:
    failed: list[str] = []
    forbidden: list[str] = []
    query = InstanceQuery(
        Nova(fake_nova.adapter(), 5.0),
        limit=10,
        warn=lambda text, *args, **fields: failed.append(text),
        warn_forbidden=forbidden.append,
    )
    fake_nova.is_admin = False
    query.get_presence(str(uuid4()), "host")
    fake_nova.status = 500
    query.get_presence(str(uuid4()), "host")
    assert [len(failed), len(forbidden)] == [1, 1]
    assert "checked again later" in failed[0]
