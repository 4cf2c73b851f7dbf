# SPDX-License-Identifier: Apache-2.0
"""The operator's policy file, which may change while the service runs."""

import os
from pathlib import Path

import pytest
from oslo_config import cfg

from cyborg.core.errors import Forbidden
from cyborg.policies.enforcer import READ_AGAIN, authorize, make_enforcer

RULE = "cyborg:device:get_all"
ADMIN = {"roles": ["admin"]}


def test_a_changed_file_counts_after_a_second(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("{}\n")
    settings = tmp_path / "cyborg.conf"
    settings.write_text(f"[oslo_policy]\npolicy_file = {path}\n")
    conf = cfg.ConfigOpts()
    conf(["--config-file", str(settings)])
    now = [100.0]
    enforcer = make_enforcer(conf, lambda: now[0])
    authorize(enforcer, RULE, ADMIN, {})
    path.write_text(f'"{RULE}": "!"\n')
    os.utime(path, (2e9, 2e9))
    now[0] += READ_AGAIN / 2
    authorize(enforcer, RULE, ADMIN, {})
    now[0] += READ_AGAIN
    with pytest.raises(Forbidden):
        authorize(enforcer, RULE, ADMIN, {})
