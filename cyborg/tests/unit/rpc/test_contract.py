# SPDX-License-Identifier: Apache-2.0
"""The RPC contract, written a second time, so that no change is made by accident."""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.agent.endpoint import AgentEndpoint
from cyborg.conductor.manager import make_handlers
from cyborg.conductor.wiring import build_conductor
from cyborg.core.errors import Unavailable
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.agent_api import AgentAPI
from cyborg.rpc.client import Client, make_agent_client
from cyborg.rpc.contract import AGENT, CONDUCTOR, ConductorAPI, Contract, Method
from cyborg.tests.fixtures.bus.broker import Bus
from cyborg.tests.fixtures.machine.options import make_conf

GOLDEN = {
    "conductor": {
        "accelerator_update": "1.0 (uuid, label, project_scope)",
        "arq_create": "1.0 (device_profile_name, project_id, [context_scope])",
        "arq_delete": "1.0 (uuids, instance, project_scope, allow_bound)",
        "arq_bind": "1.0 (requests, project_scope, [instance_project])",
        "arq_unbind": "1.0 (requests, project_scope)",
        "attachment_create": "1.0 (request, project_scope)",
        "attachment_delete": (
            "1.0 (uuid, instance, project_scope, reboot, [accelerator], [hostname])"
        ),
        "attribute_create": "1.0 (deployable, key, value)",
        "attribute_delete": "1.0 (uuid)",
        "audit_create": "1.0 (host, repair)",
        "report_backend_outcomes": "1.0 (host, epoch, generation, outcomes)",
        "get_desired_backends": "1.0 (host, epoch)",
        "get_guest_devices": "1.0 (host, epoch)",
        "report_guest_devices": "1.0 (host, epoch, devices)",
        "find_function_owners": "1.0 (host, functions)",
        "report_active_partitions": "1.0 (host, epoch, partitions)",
        "deactivate_partitions": "1.0 (host, epoch, partitions)",
        "deployable_program": "1.0 (uuid, image_uuid)",
        "device_context_bind": "1.0 (uuid, target, project_scope)",
        "device_context_candidates": "1.0 (uuid, project_scope, limit)",
        "device_context_create": "1.0 (context, project_id)",
        "device_context_delete": "1.0 (uuid, project_scope, [allow_bound])",
        "device_context_pre_bind": "1.0 (uuid, reservation, project_scope)",
        "device_context_unbind": "1.0 (uuid, use, project_scope, elevated)",
        "device_context_update": "1.0 (uuid, changes, project_scope)",
        "device_profile_create": "1.0 (profile)",
        "device_profile_delete": "1.0 (keys)",
        "device_end_maintenance": "1.0 (uuid)",
        "device_maintain": "1.0 (request)",
        "device_set_layout": "1.0 (uuid, layout, drain)",
        "device_set_status": "1.0 (uuid, status)",
        "discovery_create": "1.0 ([host], [driver])",
        "discovery_done": "1.0 (discovery_id, host, drivers, [epoch])",
        "driver_install": "1.0 (driver, backend, hosts, config)",
        "driver_uninstall": "1.0 (driver, backend, hosts, drain, force)",
        "driver_update": "1.0 (driver, backend, hosts, config, status, reload)",
        "hardware_adopt": "1.0 (host, address, backend, force)",
        "hardware_release": "1.0 (uuid)",
        "hello": "1.0 (host, epoch, endpoint, status, drivers, digest, versions, "
        "[observed_generation], [boot_id])",
        "host_forget": "1.0 (host, force, [dry_run])",
        "limits_get": "1.0 (project_id)",
        "job_cancel": "1.0 (uuid)",
        "job_done": "1.0 (job, host, state, error, [epoch])",
        "outbox_delete": "1.0 (uuid)",
        "outbox_retry": "1.0 (uuid)",
        "report": "1.0 (report)",
        "service_delete": "1.0 (uuid)",
        "service_hello": "1.0 (binary, host, epoch, versions, [status])",
    },
    "agent": {
        "count_free_ports": "1.0 (instance)",
        "discovery": "1.0 ([driver], [discovery_id])",
        "hardware": "1.0 ([driver])",
        "find_driver": "1.0 (driver)",
        "job": "1.0 (job, kind, arguments, timeout)",
        "sync_backends": "1.0 (generation)",
    },
}


@pytest.mark.parametrize("contract", [CONDUCTOR, AGENT], ids=lambda c: c.name)
def test_contract_is_unchanged(contract: Contract) -> None:
    table = {
        name: f"{method.since} ("
        + ", ".join(f"[{a}]" if a in method.optional else a for a in method.arguments)
        + ")"
        for name, method in contract.methods.items()
    }
    assert table == GOLDEN[contract.name]
    assert contract.version == "1.0"


def _check_parameters(handler: Any, expected: list[str], method: Method) -> None:
    parameters = inspect.signature(handler).parameters
    assert list(parameters) == expected, handler
    for argument in method.optional:
        assert parameters[argument].default is None, handler


def test_each_conductor_method_has_a_handler(sqlite_engine: sa.Engine) -> None:
    unused: Any = None
    conf = make_conf(nova={"send_events": False})
    conductor = build_conductor(conf, UnitOfWork(sqlite_engine), unused, unused, unused)
    handlers = make_handlers(conductor)
    assert set(handlers) == set(CONDUCTOR.methods)
    for name, method in CONDUCTOR.methods.items():
        _check_parameters(handlers[name], list(method.arguments), method)


def test_each_agent_method_has_a_handler() -> None:
    for name, method in AGENT.methods.items():
        handler = getattr(AgentEndpoint, name)
        _check_parameters(handler, ["self", "ctxt", *method.arguments], method)


def test_client_methods_check_their_arguments(memory_bus: Bus) -> None:
    agent = make_agent_client(memory_bus.transport, memory_bus.conf)
    conductor = memory_bus.conductor()
    for call, arguments in (
        (agent.hardware, ()),
        (agent.hardware, ("host", "driver", "more")),
        (conductor.job_cancel, ()),
    ):
        with pytest.raises(TypeError):
            call(*arguments)
    assert not hasattr(conductor, "wanted")


def test_only_report_has_the_large_size_limit() -> None:
    large = [n for c in (CONDUCTOR, AGENT) for n, m in c.methods.items() if m.is_report]
    assert large == ["report"]


NEWER = Contract(
    "conductor",
    "1.2",
    {
        **CONDUCTOR.methods,
        "arq_create": Method(
            ("device_profile_name", "project_id", "color"),
            frozenset({"color"}),
            argument_versions={"color": "1.1"},
        ),
        "arq_paint": Method(("uuid",), since="1.2"),
    },
)


@pytest.mark.parametrize(
    ("method", "names", "version", "omitted"),
    [
        ("device_set_status", {"uuid", "status"}, "1.0", set()),
        ("arq_create", {"project_id"}, "1.0", {"color"}),
        ("arq_create", {"project_id", "color"}, "1.1", set()),
        ("arq_paint", {"uuid"}, "1.2", set()),
    ],
)
def test_minimal_call_returns_the_oldest_sufficient_version(
    method: str, names: set[str], version: str, omitted: set[str]
) -> None:
    assert NEWER.minimal_call(method, names) == (version, frozenset(omitted))
    assert Contract("x", "2.3", NEWER.methods).minimal_call(method, names)[0] == "2.0"
    assert Contract("x", "1.10", {"m": Method((), since="1.10")}).minimal_call("m", ())[0] == "1.10"


class Older:
    """Stub of a server of version 1.0, which returns the arguments."""

    def __getattr__(self, name: str) -> Any:
        if name not in CONDUCTOR.methods:
            raise AttributeError(name)
        return lambda ctxt, **arguments: arguments


@pytest.mark.slow
def test_older_server_serves_the_known_calls_of_a_newer_client(memory_bus: Bus) -> None:
    newer = Client(NEWER, memory_bus.transport, memory_bus.conf)
    plain = {"device_profile_name": "p", "project_id": None}
    with memory_bus.serving("conductor", Older()):
        assert newer.call("arq_create", **plain, color=None) == plain
        with pytest.raises(Unavailable, match="UnsupportedVersion"):
            newer.call("arq_create", **plain, color="red")
        with pytest.raises(Unavailable, match="UnsupportedVersion"):
            newer.call("arq_paint", uuid="u")


@pytest.mark.static
@pytest.mark.slow
def test_documentation_is_generated_from_docstrings() -> None:
    extension = Path(__file__).parents[4] / "doc" / "source" / "_ext" / "rpc_reference.py"
    spec = importlib.util.spec_from_file_location("rpc_reference", extension)
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert set(reference.CALLERS) <= set(CONDUCTOR.methods)
    for contract, api in ((CONDUCTOR, ConductorAPI), (AGENT, AgentAPI)):
        for name in contract.methods:
            assert getattr(api, name).__doc__, f"{name} has no docstring"
            assert f"\n``{name}(" in reference.text()
