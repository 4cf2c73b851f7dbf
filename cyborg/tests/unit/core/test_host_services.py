# SPDX-License-Identifier: Apache-2.0
"""Facts about the daemons of a host."""

import pytest

from cyborg.core.hosts import RESULT_EPOCHS, is_current_epoch

NEW = {RESULT_EPOCHS: True}


@pytest.mark.parametrize(
    ("epoch", "current", "versions", "expected"),
    [
        ("e1", "e1", NEW, True),
        ("e1", "e2", NEW, False),
        ("e1", None, {}, False),
        # The conductor was upgraded first, or the agent has just been upgraded or replaced.
        (None, "e1", {"rpc": "1.0"}, True),
        (None, None, {}, True),
        (None, "e1", NEW, False),
        ("e1", "e2", {}, False),
    ],
)
def test_is_current_epoch_accepts_only_the_agent_of_the_last_heartbeat(
    epoch: str | None, current: str | None, versions: dict[str, object], expected: bool
) -> None:
    assert is_current_epoch(epoch, current, versions) is expected
