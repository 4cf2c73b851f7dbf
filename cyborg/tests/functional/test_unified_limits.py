# SPDX-License-Identifier: Apache-2.0
"""Limits in a real keystone: registered limits and limits of projects."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa
from keystoneauth1 import adapter
from oslo_config import cfg

from cyborg import conf as options
from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.limits import RETRY_DELAY, make_source
from cyborg.core.errors import Misconfigured, OverLimit, Unavailable
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.clouds.keystone_stack import OTHER, OWN, REGION, Keystone
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine.processes import Daemon, ini, wait_until

REGISTERED, FOR_OTHER = 2, 3
MakeArqs = Callable[..., Arqs]
# openstacksdk warns about calls of its own.
pytestmark = pytest.mark.filterwarnings("ignore::openstack.warnings.RemovedInSDK50Warning")


class LimitsOfKeystone:
    """A keystone with a registered limit, and another limit of one project."""

    def __init__(self, folder: Path) -> None:
        self.keystone = Keystone(folder / "keystone")
        self.keystone.prepare()
        command, env = self.keystone.command, self.keystone.env
        self.daemon = Daemon("keystone", command, folder, env)
        self.client = adapter.Adapter(
            self.keystone.session(), service_type="identity", interface="public"
        )

    def start(self) -> None:
        self.daemon.start()
        wait_until("keystone answers", self._answers)

    def fill(self) -> None:
        self.keystone.fill({"accelerator": ("cyborg", "http://127.0.0.1:1/v2")})
        (service,) = self._list("services?type=accelerator")
        self.projects = {row["name"]: row["id"] for row in self._list("projects")}
        self.scope = {"service_id": service["id"], "region_id": REGION}
        self._post("registered_limits", default_limit=REGISTERED)
        self.limit = self._post("limits", resource_limit=FOR_OTHER, project_id=self.projects[OTHER])

    def set_limit(self, units: int) -> None:
        """Change the limit of the project OTHER."""
        self.client.patch(f"/limits/{self.limit}", json={"limit": {"resource_limit": units}})

    def _answers(self) -> bool:
        try:
            return requests.get(self.keystone.url, timeout=60).ok
        except requests.ConnectionError:
            return False

    def _list(self, path: str) -> list[dict[str, Any]]:
        return list(self.client.get(f"/{path}").json()[path.partition("?")[0]])

    def _post(self, nouns: str, **facts: Any) -> str:
        body = {**self.scope, "resource_name": "class:FPGA", **facts}
        return str(self.client.post(f"/{nouns}", json={nouns: [body]}).json()[nouns][0]["id"])


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LimitsOfKeystone]:
    limits = LimitsOfKeystone(tmp_path_factory.mktemp("limits"))
    try:
        limits.start()
        limits.fill()
        yield limits
    finally:
        limits.daemon.kill()


@pytest.fixture
def make_arqs(
    identity: LimitsOfKeystone, sqlite_engine: sa.Engine, tmp_path: Path
) -> Callable[..., Arqs]:
    """Return a function that makes the ARQs of a conductor with options of both sections."""
    rows.insert_profile(sqlite_engine)
    rows.insert_profile(sqlite_engine, "gpu", [{"resources:PGPU": "1"}])

    def make(quota: dict[str, Any] | None = None, **section: Any) -> Arqs:
        login = {**identity.keystone.options("cyborg"), "endpoint_region_name": REGION}
        conf = read_conf(tmp_path, quota or {}, {**login, **section})
        uow, source = UnitOfWork(sqlite_engine), make_source(conf)
        assert source is not None
        return Arqs(conf, uow, limit_source=source)

    return make


def read_conf(folder: Path, quota: dict[str, Any], section: dict[str, Any]) -> cfg.ConfigOpts:
    path = folder / "cyborg.conf"
    sections = {
        "quota": {"driver": "unified", "cache_time": 0, **quota},
        "oslo_limit": section,
    }
    path.write_text(ini(sections))
    conf = cfg.ConfigOpts()
    options.register(conf)
    conf([], project="cyborg", default_config_files=[str(path)], default_config_dirs=[])
    return conf


def create(arqs: Arqs, project: str, profile: str = "fpga") -> int:
    """Create ARQs until one is refused; return how many were created, at most 9."""
    for count in range(9):
        try:
            arqs.create(profile, project, project)
        except OverLimit:
            return count
    return 9


@pytest.mark.requires("keystone")
def test_limits_of_keystone_are_enforced(identity: LimitsOfKeystone, make_arqs: MakeArqs) -> None:
    arqs = make_arqs()
    assert create(arqs, identity.projects[OWN]) == REGISTERED
    assert create(arqs, identity.projects[OTHER]) == FOR_OTHER
    # No limit is registered for PGPU.
    assert create(arqs, identity.projects[OWN], "gpu") == 9
    identity.set_limit(FOR_OTHER + 1)
    try:
        assert create(arqs, identity.projects[OTHER]) == 1
        assert create(arqs, identity.projects[OWN]) == 0
    finally:
        identity.set_limit(FOR_OTHER)


@pytest.mark.requires("keystone")
def test_changed_limit_is_used_after_the_cache_time(
    identity: LimitsOfKeystone, make_arqs: MakeArqs
) -> None:
    arqs = make_arqs({"cache_time": 600, "default_limits": "PGPU:1"})
    assert create(arqs, identity.projects[OTHER]) == FOR_OTHER
    identity.set_limit(9)
    try:
        assert create(arqs, identity.projects[OTHER]) == 0
        assert create(make_arqs(), identity.projects[OTHER]) == 9 - FOR_OTHER
    finally:
        identity.set_limit(FOR_OTHER)
    # The option is for classes without a registered limit.
    assert create(arqs, identity.projects[OWN], "gpu") == 1


@pytest.mark.requires("keystone")
def test_limits_during_an_outage_of_keystone(
    identity: LimitsOfKeystone, make_arqs: MakeArqs
) -> None:
    arqs, without_cache = make_arqs(), make_arqs({"max_cache_age": 0})
    project = identity.projects[OTHER]
    arqs.create("fpga", project, project)
    without_cache.create("fpga", project, project)
    identity.daemon.kill()
    try:
        # The last known limits are still enforced.
        assert create(arqs, project) == FOR_OTHER - 2
        with pytest.raises(Unavailable, match="cannot read the limits of project"):
            without_cache.create("fpga", project, project)
        with pytest.raises(Unavailable):
            make_arqs().create("fpga", project, project)
    finally:
        identity.start()

    def is_over_limit() -> bool:
        try:
            without_cache.create("fpga", project, project)
        except Unavailable:
            return False  # until RETRY_DELAY has passed since the last failure
        except OverLimit:
            return True
        return False

    wait_until("the limits are read again", is_over_limit, RETRY_DELAY + 20)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"password": "wrong"}, "user 'cyborg' of \\[oslo_limit\\]"),
        ({"endpoint_service_type": "unknown"}, "Service not found"),
        ({"endpoint_region_name": "unknown"}, "Region not found"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.requires("keystone")
def test_unusable_section_makes_limits_unavailable(
    identity: LimitsOfKeystone, make_arqs: MakeArqs, section: dict[str, str], message: str
) -> None:
    project = identity.projects[OWN]
    with pytest.raises(Unavailable, match=message):
        make_arqs(**section).create("fpga", project, project)


def test_missing_credentials_are_misconfigured(tmp_path: Path) -> None:
    # Without a keystone, whose start takes ten seconds of CPU time: nothing is sent to it.
    conf = read_conf(tmp_path, {}, {"endpoint_region_name": REGION, "auth_type": ""})
    with pytest.raises(Misconfigured, match=r"\[oslo_limit\] auth_type is not set"):
        make_source(conf)
