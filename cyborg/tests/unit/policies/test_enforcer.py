# SPDX-License-Identifier: Apache-2.0
"""Changes of the operator's policy file while the service runs."""

import os
from pathlib import Path
from typing import Any

import pytest
from oslo_config import cfg
from oslo_policy import policy

from cyborg.core.errors import Forbidden
from cyborg.policies.enforcer import (
    MAX_DECISIONS,
    RELOAD_INTERVAL,
    authorize,
    describe_roles,
    make_enforcer,
)
from cyborg.tests.fixtures.machine.options import make_conf

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


def test_authorize_distinguishes_callers_whose_decisions_are_kept() -> None:
    enforcer = make_enforcer(make_conf(), lambda: 100.0)
    for _ in range(2):
        authorize(enforcer, RULE, ADMIN, {})
        with pytest.raises(Forbidden):
            authorize(enforcer, RULE, {"roles": []}, {})
        assert enforcer.authorize("elevated", {}, ADMIN)
        assert not enforcer.authorize("elevated", {}, {"roles": ["member"]})


def test_authorize_distinguishes_targets_whose_decisions_are_kept() -> None:
    enforcer = make_enforcer(make_conf(), lambda: 100.0)
    enforcer.register_default(policy.RuleDefault("own", "project_id:%(project_id)s"))
    for _ in range(2):
        assert enforcer.authorize("own", {"project_id": "a"}, {"project_id": "a", "roles": []})
        assert not enforcer.authorize("own", {"project_id": "b"}, {"project_id": "a", "roles": []})


def test_authorize_keeps_a_bounded_number_of_decisions() -> None:
    enforcer: Any = make_enforcer(make_conf(), lambda: 100.0)
    for number in range(MAX_DECISIONS + 10):
        authorize(enforcer, RULE, ADMIN | {"user_id": str(number)}, {})
    assert len(enforcer._decisions) == MAX_DECISIONS


@pytest.mark.parametrize(
    ("check", "roles"),
    [
        ("rule:elevated", "one of the roles admin, accelerator_admin"),
        ("role:reader and project_id:%(project_id)s", "one of the roles reader"),
        ("rule:service", "one of the roles service or a service token"),
        ("service_token:True", "a service token"),
        ("role:a and (role:b or role:c) and not role:d", "one of the roles a and b, a and c"),
        ("user_id:secret or role:a or role:a", "one of the roles a"),
        ("user_id:secret", ""),
        ("!", ""),
        ("role:a and !", ""),
        ("rule:own or role:a", "one of the roles a"),
        ("rule:missing", ""),
        (" or ".join(f"role:r{n}" for n in range(12)), "r9, 2 more"),
    ],
)
def test_describe_roles_names_roles_and_no_other_condition(check: str, roles: str) -> None:
    enforcer = make_enforcer(make_conf(), lambda: 100.0)
    enforcer.register_default(policy.RuleDefault("own", check))
    enforcer.load_rules()
    found = describe_roles(enforcer, "own")
    assert found.endswith(roles) if "more" in roles else found == roles


def test_authorize_names_the_roles_that_are_allowed() -> None:
    enforcer = make_enforcer(make_conf(), lambda: 100.0)
    expected = f"allow {RULE} to this token, which needs one of the roles admin, accelerator_admin$"
    with pytest.raises(Forbidden, match=expected):
        authorize(enforcer, RULE, {"roles": ["member"]}, {})
