# SPDX-License-Identifier: Apache-2.0
"""The distribution of the functional tests to several workers.

The tests of a group run on one worker: those of a file, which share clouds and services, and those
of all files with the keystone cloud, which takes long to start. The lab tests are one group: a
guest is an emulated machine with two processors, and beside two guests other tests would exceed
their times.
"""

from pathlib import PurePath
from typing import Any

import pytest

KEYSTONE = frozenset(
    {
        "test_hardening",
        "test_clients",
        "test_console_keystone",
        "test_personas_real",
        "test_tempest",
    }
)
"""Files with the fixture ``keystone_cloud``."""

LONGEST = (
    "lab",
    "test_tutorial",
    "keystone",
    "test_nova",
    "test_chaos",
    "test_operators_day",
    "test_proxied_neighbours",
    "test_fuzz",
    "test_kill",
    "test_liveness",
    "test_prerequisites",
)
"""The groups that must start first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest groups first; the others stay in their order."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(group_of(item.path), len(ranks)))


# xdist's own groups (--dist loadgroup) have no effect with pytest 9.2, which ignores the change of
# the node ids that they depend on.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that distributes groups."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(PurePath(nodeid.partition("::")[0]))

    return GroupScheduling(config, log)


def group_of(path: PurePath) -> str:
    """Return the group of a test file."""
    if path.parent.name == "lab":
        return "lab"
    return "keystone" if path.stem in KEYSTONE else path.stem
