# SPDX-License-Identifier: Apache-2.0
"""The cache of the limits of keystone."""

import threading
from collections.abc import Mapping

import pytest

from cyborg.conductor.binding import limits
from cyborg.conductor.binding.limits import RETRY_DELAY, UnifiedLimits
from cyborg.core.errors import Unavailable
from cyborg.tests.fixtures.machine.options import make_conf

CACHE_TIME, MAX_AGE = 60.0, 3600.0


class Keystone:
    """A keystone that can be away; ``calls`` has the projects of all requests."""

    def __init__(self) -> None:
        self.limits: dict[str, int] = {"FPGA": 5}
        self.calls: list[str] = []
        self.away = False

    def read(self, project: str) -> Mapping[str, int]:
        self.calls.append(project)
        if self.away:
            raise Unavailable("keystone does not answer")
        return dict(self.limits)


class Env:
    def __init__(self, **default: int) -> None:
        self.now = 1000.0
        self.keystone = Keystone()
        conf = make_conf(quota={"cache_time": CACHE_TIME, "max_cache_age": MAX_AGE})
        self.limits = UnifiedLimits(conf, self.keystone, default, clock=lambda: self.now)

    def limit(self, project: str = "p") -> int:
        return self.limits.find(project).limit("FPGA")


@pytest.fixture
def env() -> Env:
    return Env()


def test_limits_are_read_once_in_the_cache_time(env: Env) -> None:
    assert env.limits.known("p") is None
    assert env.limit() == 5
    env.keystone.limits = {"FPGA": 7}
    env.now += CACHE_TIME - 1
    known = env.limits.known("p")
    assert known is not None
    assert (env.limit(), known.limit("FPGA")) == (5, 5)
    assert env.keystone.calls == ["p"]
    env.now += 1
    assert env.limits.known("p") is None
    assert env.limit() == 7
    assert env.keystone.calls == ["p", "p"]


def test_projects_are_cached_separately(env: Env) -> None:
    assert (env.limit("a"), env.limit("b"), env.limit("a")) == (5, 5, 5)
    assert env.keystone.calls == ["a", "b"]


def test_default_limits_apply_to_classes_without_limit_in_keystone() -> None:
    env = Env(FPGA=1, PGPU=2)
    assert env.limits.find("p").units == {"FPGA": 5, "PGPU": 2}


def test_last_limits_are_used_while_keystone_is_away(env: Env) -> None:
    assert env.limit() == 5
    env.keystone.away = True
    env.now += CACHE_TIME
    assert env.limit() == 5
    env.now += RETRY_DELAY - 1
    assert env.limit() == 5
    # A request waits for keystone once in RETRY_DELAY.
    assert len(env.keystone.calls) == 2
    env.now += 1
    env.keystone.away, env.keystone.limits = False, {"FPGA": 9}
    assert env.limit() == 9


def test_old_limits_are_not_used_after_max_age(env: Env) -> None:
    assert env.limit() == 5
    env.keystone.away = True
    env.now += MAX_AGE
    assert env.limit() == 5
    env.now += RETRY_DELAY
    with pytest.raises(Unavailable, match="keystone does not answer"):
        env.limit()


def test_unknown_limits_are_unavailable(env: Env) -> None:
    """While keystone is away, one call in RETRY_DELAY waits for it, for all projects."""
    env.keystone.away = True
    for project in ("p", "p", "other"):
        with pytest.raises(Unavailable, match="keystone does not answer"):
            env.limit(project)
    assert env.keystone.calls == ["p"]
    env.now += RETRY_DELAY
    env.keystone.away = False
    assert (env.limit("other"), env.limit("p")) == (5, 5)


def test_one_thread_reads_while_others_use_the_old_limits(env: Env) -> None:
    assert env.limit() == 5
    env.now += CACHE_TIME
    reading, go_on = threading.Event(), threading.Event()
    read = env.keystone.read

    def wait(project: str) -> Mapping[str, int]:
        reading.set()
        assert go_on.wait(120)
        return read(project)

    env.keystone.read = wait  # type: ignore[method-assign]
    env.keystone.limits = {"FPGA": 6}
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.append(env.limit()))
    reader.start()
    assert reading.wait(120)
    assert env.limit() == 5
    go_on.set()
    reader.join(120)
    assert (found, env.limit()) == ([6], 6)


def test_cache_has_a_maximum_size(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROJECTS", 2)
    for project in ("a", "b", "a", "c"):
        env.limit(project)
    assert env.limits.known("b") is None
    assert env.limits.known("a") is not None
    assert env.keystone.calls == ["a", "b", "c"]
