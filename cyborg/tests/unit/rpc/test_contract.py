# SPDX-License-Identifier: Apache-2.0
"""The internal contract, written down a second time: whoever changes it must mean it."""

import inspect
from typing import Any

import pytest

from cyborg.agent.endpoint import Agent
from cyborg.conductor.endpoint import Conductor
from cyborg.rpc.agent import AgentClient
from cyborg.rpc.conductor import ConductorClient
from cyborg.rpc.contract import AGENT, CONDUCTOR, Contract

GOLDEN = {
    "conductor": {
        "accelerator_update": "1.0 (uuid, label, scope)",
        "arq_create": "1.0 (device_profile_name, project_id)",
        "arq_delete": "1.0 (uuids, instance, scope, bound_too)",
        "arq_patch": "1.0 (wishes, verb, scope, [project])",
        "attribute_create": "1.0 (deployable, key, value)",
        "attribute_delete": "1.0 (uuid)",
        "audit_create": "1.0 (host, repair)",
        "deployable_program": "1.0 (uuid, image_uuid)",
        "device_profile_create": "1.0 (profile)",
        "device_profile_delete": "1.0 (keys)",
        "device_set_status": "1.0 (uuid, status)",
        "discovery_create": "1.0 ([host], [driver])",
        "discovery_done": "1.0 (discovery_id, host, drivers)",
        "hello": "1.0 (host, epoch, endpoint, status, drivers, digest, versions)",
        "job_done": "1.0 (job, host, state, error)",
        "outbox_delete": "1.0 (uuid)",
        "outbox_retry": "1.0 (uuid)",
        "report": "1.0 (report)",
        "service_hello": "1.0 (binary, host, epoch, versions)",
    },
    "agent": {
        "discovery": "1.0 ([driver], [discovery_id])",
        "hardware": "1.0 ([driver])",
        "job": "1.0 (job, kind, arguments, seconds)",
    },
}
SIDES = [
    (CONDUCTOR, ConductorClient, Conductor),
    (AGENT, AgentClient, Agent),
]


def _parameters(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)[1:]


@pytest.mark.parametrize("contract", [CONDUCTOR, AGENT], ids=lambda c: c.name)
def test_the_table_is_what_it_was(contract: Contract) -> None:
    shown = {
        name: f"{method.since} ("
        + ", ".join(f"[{a}]" if a in method.optional else a for a in method.arguments)
        + ")"
        for name, method in contract.methods.items()
    }
    assert shown == GOLDEN[contract.name]
    assert contract.version == "1.0"


@pytest.mark.parametrize(("contract", "client", "endpoint"), SIDES, ids=["conductor", "agent"])
def test_both_sides_speak_it(contract: Contract, client: type, endpoint: type) -> None:
    for name, method in contract.methods.items():
        assert _parameters(getattr(endpoint, name)) == ["ctxt", *method.arguments], name
        sent = [p for p in _parameters(getattr(client, name)) if (contract, p) != (AGENT, "host")]
        assert sent == list(method.arguments), name
        for argument in method.optional:
            parameter = inspect.signature(getattr(endpoint, name)).parameters[argument]
            assert parameter.default is None, name


def test_only_reports_may_be_large() -> None:
    large = [n for c in (CONDUCTOR, AGENT) for n, m in c.methods.items() if m.report]
    assert large == ["report"]
