# SPDX-License-Identifier: Apache-2.0
"""Changes of the operator's policy file while the service runs."""

import os
from pathlib import Path

import pytest
from oslo_config import cfg

from cyborg.core.errors import Forbidden
from cyborg.policies.enforcer import RELOAD_INTERVAL, authorize, make_enforcer

RULE = "cyborg:device:get_all"
ADMIN = {"roles": ["admin"]}


def test_authorize_uses_changed_file_after_reload_interval(tmp_path: Path) -> None:
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
    now[0] += RELOAD_INTERVAL / 2
    authorize(enforcer, RULE, ADMIN, {})
    now[0] += RELOAD_INTERVAL
    with pytest.raises(Forbidden):
        authorize(enforcer, RULE, ADMIN, {})
