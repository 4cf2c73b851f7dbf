# SPDX-License-Identifier: Apache-2.0
"""Every policy rule with every kind of caller, against a table of allowed callers."""

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
from oslo_policy import policy

from cyborg.core.errors import Forbidden
from cyborg.policies.enforcer import authorize, get_enforcer, make_enforcer
from cyborg.policies.rules import list_rules
from cyborg.tests.fixtures.machine.options import make_conf

OWN, OTHER = "project-1", "project-2"


def credentials(*roles: str, project: str = OWN, **more: Any) -> dict[str, Any]:
    return {"roles": list(roles), "project_id": project, "service_token": False, **more}


PERSONAS: Mapping[str, Mapping[str, Any]] = {
    "no role": credentials(),
    "unknown role": credentials("swift_user"),
    "reader": credentials("reader"),
    "member": credentials("member", "reader"),
    "manager": credentials("manager", "member", "reader"),
    "admin": credentials("admin"),
    "accelerator_admin": credentials("accelerator_admin"),
    "service user": credentials("service"),
    "service token": credentials(service_token=True),
    "reader elsewhere": credentials("reader", project=OTHER),
    "member elsewhere": credentials("member", "reader", project=OTHER),
    "admin elsewhere": credentials("admin", project=OTHER),
    "system admin": credentials("admin", project="", system_scope="all"),
    "domain admin": credentials("admin", project="", domain_id="default"),
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
    "cyborg:attachment:get_all": READ,
    "cyborg:attachment:get_one": READ,
    "cyborg:attachment:create": ELEVATED | SERVICE,
    "cyborg:attachment:create_by_accelerator": ELEVATED | SERVICE,
    "cyborg:attachment:create_for_host": ELEVATED,
    "cyborg:attachment:delete_for_host": ELEVATED,
    "cyborg:attachment:delete": ELEVATED | SERVICE,
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
    "cyborg:custody:get_all": ELEVATED,
    "cyborg:layout:get_one": ELEVATED,
    "cyborg:layout:set": ELEVATED,
    "cyborg:device:get_all": ELEVATED,
    "cyborg:device:get_one": ELEVATED,
    "cyborg:device:enable": ELEVATED,
    "cyborg:device:disable": ELEVATED,
    "cyborg:device:maintain": ELEVATED,
    "cyborg:device_context:get_all": READ,
    "cyborg:device_context:get_one": READ,
    "cyborg:device_context:create": WRITE,
    "cyborg:device_context:update": WRITE,
    "cyborg:device_context:delete": WRITE,
    "cyborg:device_context:pre_bind": WRITE,
    "cyborg:device_context:bind": WRITE,
    "cyborg:device_context:unbind": WRITE,
    "cyborg:device_context:request_groups": READ,
    "cyborg:device_context:explain": READ,
    "cyborg:device_context:candidates": ELEVATED | SERVICE,
    "cyborg:device_profile:get_all": READ,
    "cyborg:device_profile:get_one": READ,
    "cyborg:device_profile:explain": READ,
    "cyborg:device_profile:capacity": READ,
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
    "cyborg:limits:get": READ,
    "cyborg:outbox:get_all": ELEVATED,
    "cyborg:outbox:retry": ELEVATED,
    "cyborg:outbox:delete": ELEVATED,
    "cyborg:service:get_all": ELEVATED,
    "cyborg:service:delete": ELEVATED,
    "cyborg:host:forget": ELEVATED,
    "cyborg:summary:get": ELEVATED,
}


@pytest.fixture(scope="module")
def enforcer() -> policy.Enforcer:
    return make_enforcer(make_conf())


def test_table_has_every_rule() -> None:
    rules = {rule.name for rule in list_rules() if isinstance(rule, policy.DocumentedRuleDefault)}
    assert rules == set(TABLE)


@pytest.mark.parametrize("rule", TABLE)
def test_rule_allows_expected_personas(enforcer: policy.Enforcer, rule: str) -> None:
    allowed = set()
    for name, persona in PERSONAS.items():
        with contextlib.suppress(Forbidden):
            authorize(enforcer, rule, persona, {"project_id": OWN})
            allowed.add(name)
    assert allowed == TABLE[rule]


def test_rules_have_project_scope_and_no_deprecation() -> None:
    for rule in list_rules():
        assert rule.deprecated_rule is None
        if isinstance(rule, policy.DocumentedRuleDefault):
            assert rule.scope_types == ["project"]


def test_policy_file_overrides_rule(tmp_path: Any) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text('"cyborg:device:get_all": "rule:elevated or role:manager"\n')
    conf = make_conf()
    make_enforcer(conf)  # registers the option
    conf.set_override("policy_file", str(file), group="oslo_policy")
    enforcer = make_enforcer(conf)
    authorize(enforcer, "cyborg:device:get_all", PERSONAS["manager"], {"project_id": OWN})
    with pytest.raises(Forbidden):
        authorize(enforcer, "cyborg:device:get_one", PERSONAS["manager"], {"project_id": OWN})


def test_entry_point_registers_every_rule() -> None:
    assert set(TABLE) <= set(get_enforcer().registered_rules)
