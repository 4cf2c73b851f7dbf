# SPDX-License-Identifier: Apache-2.0
"""Every rule against every kind of caller: the table of who may do what."""

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
from oslo_policy import policy

from cyborg.core.errors import Forbidden
from cyborg.fixtures.options import make_conf
from cyborg.policies import list_rules
from cyborg.policies.enforcer import authorize, get_enforcer, make_enforcer

OWN, OTHER = "project-1", "project-2"


def who(*roles: str, project: str = OWN, **more: Any) -> dict[str, Any]:
    return {"roles": list(roles), "project_id": project, "service_token": False, **more}


PERSONAS: Mapping[str, Mapping[str, Any]] = {
    "no role": who(),
    "unknown role": who("swift_user"),
    "reader": who("reader"),
    "member": who("member", "reader"),
    "manager": who("manager", "member", "reader"),
    "admin": who("admin"),
    "accelerator_admin": who("accelerator_admin"),
    "service user": who("service"),
    "service token": who(service_token=True),
    "reader elsewhere": who("reader", project=OTHER),
    "member elsewhere": who("member", "reader", project=OTHER),
    "admin elsewhere": who("admin", project=OTHER),
    "system admin": who("admin", project="", system_scope="all"),
    "domain admin": who("admin", project="", domain_id="default"),
}
ELEVATED = {"admin", "accelerator_admin", "admin elsewhere"}
SERVICE = {"service user", "service token"}
READ = ELEVATED | SERVICE | {"reader", "member", "manager"}
WRITE = ELEVATED | SERVICE | {"member", "manager"}

TABLE: Mapping[str, set[str]] = {
    "cyborg:accelerator:get_all": READ,
    "cyborg:accelerator:get_one": READ,
    "cyborg:accelerator:update": WRITE,
    "cyborg:arq:get_all": READ,
    "cyborg:arq:get_one": READ,
    "cyborg:arq:create": WRITE,
    "cyborg:arq:update": WRITE,
    "cyborg:arq:delete": WRITE,
    "cyborg:attribute:get_all": ELEVATED,
    "cyborg:attribute:get_one": ELEVATED,
    "cyborg:attribute:create": ELEVATED,
    "cyborg:attribute:delete": ELEVATED,
    "cyborg:audit:get_all": ELEVATED,
    "cyborg:audit:get_one": ELEVATED,
    "cyborg:audit:create": ELEVATED,
    "cyborg:deployable:get_all": ELEVATED,
    "cyborg:deployable:get_one": ELEVATED,
    "cyborg:deployable:program": ELEVATED,
    "cyborg:device:get_all": ELEVATED,
    "cyborg:device:get_one": ELEVATED,
    "cyborg:device:enable": ELEVATED,
    "cyborg:device:disable": ELEVATED,
    "cyborg:device_profile:get_all": READ,
    "cyborg:device_profile:get_one": READ,
    "cyborg:device_profile:create": ELEVATED,
    "cyborg:device_profile:delete": ELEVATED,
    "cyborg:discovery:create": ELEVATED,
    "cyborg:discovery:get_all": ELEVATED,
    "cyborg:discovery:get_one": ELEVATED,
    "cyborg:driver:get_all": ELEVATED,
    "cyborg:driver:get_one": ELEVATED,
    "cyborg:driver:install": ELEVATED,
    "cyborg:driver:update": ELEVATED,
    "cyborg:driver:uninstall": ELEVATED,
    "cyborg:hardware:get_all": ELEVATED,
    "cyborg:hardware:adopt": ELEVATED,
    "cyborg:hardware:release": ELEVATED,
    "cyborg:job:get_all": ELEVATED,
    "cyborg:job:get_one": ELEVATED,
    "cyborg:job:cancel": ELEVATED,
    "cyborg:outbox:get_all": ELEVATED,
    "cyborg:outbox:retry": ELEVATED,
    "cyborg:outbox:delete": ELEVATED,
    "cyborg:service:get_all": ELEVATED,
}


@pytest.fixture(scope="module")
def enforcer() -> policy.Enforcer:
    return make_enforcer(make_conf())


def test_the_table_names_every_rule() -> None:
    rules = {rule.name for rule in list_rules() if isinstance(rule, policy.DocumentedRuleDefault)}
    assert rules == set(TABLE)


@pytest.mark.parametrize("rule", TABLE)
def test_rule(enforcer: policy.Enforcer, rule: str) -> None:
    allowed = set()
    for name, persona in PERSONAS.items():
        with contextlib.suppress(Forbidden):
            authorize(enforcer, rule, persona, {"project_id": OWN})
            allowed.add(name)
    assert allowed == TABLE[rule]


def test_rules_do_not_deprecate_and_scope_is_the_project() -> None:
    for rule in list_rules():
        assert rule.deprecated_rule is None
        if isinstance(rule, policy.DocumentedRuleDefault):
            assert rule.scope_types == ["project"]


def test_an_operator_may_change_a_rule(tmp_path: Any) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text('"cyborg:device:get_all": "rule:elevated or role:manager"\n')
    conf = make_conf()
    make_enforcer(conf)  # registers the option
    conf.set_override("policy_file", str(file), group="oslo_policy")
    enforcer = make_enforcer(conf)
    authorize(enforcer, "cyborg:device:get_all", PERSONAS["manager"], {"project_id": OWN})
    with pytest.raises(Forbidden):
        authorize(enforcer, "cyborg:device:get_one", PERSONAS["manager"], {"project_id": OWN})


def test_the_entry_point_gives_every_rule() -> None:
    assert set(TABLE) <= set(get_enforcer().registered_rules)
