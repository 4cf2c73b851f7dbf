# SPDX-License-Identifier: Apache-2.0
"""The internal contract, written down a second time: whoever changes it must mean it."""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.endpoint import Agent
from cyborg.conductor.endpoint import Conductor
from cyborg.core.errors import Unavailable
from cyborg.fixtures.broker import Bus
from cyborg.rpc.agent import AgentClient
from cyborg.rpc.client import Client
from cyborg.rpc.conductor import ConductorClient
from cyborg.rpc.contract import AGENT, CONDUCTOR, Contract, Method

GOLDEN = {
    "conductor": {
        "accelerator_update": "1.0 (uuid, label, scope)",
        "arq_create": "1.0 (device_profile_name, project_id)",
        "arq_delete": "1.0 (uuids, instance, scope, bound_too)",
        "arq_patch": "1.0 (wishes, verb, scope, [project])",
        "attribute_create": "1.0 (deployable, key, value)",
        "attribute_delete": "1.0 (uuid)",
        "audit_create": "1.0 (host, repair)",
        "backends_applied": "1.0 (host, epoch, revision, outcomes)",
        "backends_wanted": "1.0 (host, epoch)",
        "deployable_program": "1.0 (uuid, image_uuid)",
        "device_profile_create": "1.0 (profile)",
        "device_profile_delete": "1.0 (keys)",
        "device_set_status": "1.0 (uuid, status)",
        "discovery_create": "1.0 ([host], [driver])",
        "discovery_done": "1.0 (discovery_id, host, drivers)",
        "driver_install": "1.0 (driver, backend, hosts, config)",
        "driver_uninstall": "1.0 (driver, backend, hosts, drain, force)",
        "driver_update": "1.0 (driver, backend, hosts, config, wish, reload)",
        "hardware_adopt": "1.0 (host, address, backend)",
        "hardware_release": "1.0 (uuid)",
        "hello": "1.0 (host, epoch, endpoint, status, drivers, digest, versions, [wanted])",
        "job_cancel": "1.0 (uuid)",
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
        "wanted": "1.0 (revision)",
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


NEWER = Contract(
    "conductor",
    "1.2",
    {
        **CONDUCTOR.methods,
        "arq_create": Method(
            ("device_profile_name", "project_id", "color"),
            frozenset({"color"}),
            later={"color": "1.1"},
        ),
        "arq_paint": Method(("uuid",), since="1.2"),
    },
)


@pytest.mark.parametrize(
    ("method", "arguments", "version", "sent"),
    [
        ("device_set_status", {"uuid": "u", "status": "s"}, "1.0", ["uuid", "status"]),
        ("arq_create", {"project_id": None, "color": None}, "1.0", ["project_id"]),
        ("arq_create", {"project_id": None, "color": "red"}, "1.1", ["project_id", "color"]),
        ("arq_paint", {"uuid": "u"}, "1.2", ["uuid"]),
    ],
)
def test_a_call_carries_the_oldest_version_that_understands_it(
    method: str, arguments: dict[str, Any], version: str, sent: list[str]
) -> None:
    found, left = NEWER.needed(method, arguments)
    assert (found, list(left)) == (version, sent)
    assert Contract("x", "2.3", NEWER.methods).needed(method, arguments)[0] == "2.0"
    assert Contract("x", "1.10", {"m": Method((), since="1.10")}).needed("m", {})[0] == "1.10"


class Older:
    """Answers version 1.0 of one method."""

    def __getattr__(self, name: str) -> Any:
        if name not in CONDUCTOR.methods:
            raise AttributeError(name)
        return lambda ctxt, **arguments: arguments


def test_a_newer_side_is_served_by_an_older_one_in_what_both_know(memory_bus: Bus) -> None:
    newer = Client(NEWER, memory_bus.transport, memory_bus.conf)
    plain = {"device_profile_name": "p", "project_id": None}
    with memory_bus.serving("conductor", Older()):
        assert newer.call("arq_create", **plain, color=None) == plain
        with pytest.raises(Unavailable, match="UnsupportedVersion"):
            newer.call("arq_create", **plain, color="red")
        with pytest.raises(Unavailable, match="UnsupportedVersion"):
            newer.call("arq_paint", uuid="u")


def test_the_page_says_what_the_code_says() -> None:
    tool = Path(__file__).parents[4] / "tools" / "_rpc_reference.py"
    spec = importlib.util.spec_from_file_location("rpc_reference", tool)
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    page = reference.PAGE.read_text(encoding="utf-8")
    assert reference.written(page) == page, "run python tools/_rpc_reference.py"
    for contract, client, _ in SIDES:
        for name in contract.methods:
            assert getattr(client, name).__doc__, f"{name} says nothing"
            assert f"\n``{name}(" in page, name
