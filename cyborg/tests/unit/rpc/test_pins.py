# SPDX-License-Identifier: Apache-2.0
"""RPC pins: calls that a former release may receive have its version, or are not sent."""

from pathlib import Path
from typing import Any

import pytest

from cyborg.conductor.service import ConductorService
from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.rpc.client import Client, make_agent_client, make_conductor_client, supports
from cyborg.rpc.contract import CONDUCTOR, CONTRACTS, Contract, Method, is_newer
from cyborg.tests.fixtures.bus.broker import Bus
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.wsgi import application

NEWER = Contract(
    "conductor",
    "1.10",
    {
        **CONDUCTOR.methods,
        "arq_create": Method(
            ("device_profile_name", "color"),
            frozenset({"color"}),
            argument_versions={"color": "1.9"},
        ),
        "arq_paint": Method(("uuid",), since="1.10"),
    },
)


class Echo:
    """Server of the newer release, which returns the arguments."""

    def __getattr__(self, name: str) -> Any:
        if name not in NEWER.methods:
            raise AttributeError(name)
        return lambda ctxt, **arguments: arguments


def make_client(bus: Bus, pin: str | None) -> Client:
    bus.conf.set_override("conductor", pin, group="upgrade_levels")
    return Client(NEWER, bus.transport, bus.conf)


@pytest.mark.parametrize(
    ("pin", "supported"),
    [
        (None, [True, True, True]),
        ("1.10", [True, True, True]),
        ("1.11", [True, True, True]),
        ("1.9", [True, True, False]),
        ("1.0", [True, False, False]),
    ],
)
def test_supports_compares_with_the_pin(
    memory_bus: Bus, pin: str | None, supported: list[bool]
) -> None:
    client = make_client(memory_bus, pin)
    calls: list[tuple[str, tuple[str, ...]]] = [
        ("arq_create", ("device_profile_name",)),
        ("arq_create", ("color",)),
        ("arq_paint", ()),
    ]
    assert [client.supports(*call) for call in calls] == supported


@pytest.mark.slow
def test_pinned_client_sends_no_newer_call(
    memory_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: Any = CONTRACTS
    monkeypatch.setitem(known, "conductor", NEWER)
    client = make_client(memory_bus, "1.0")
    with memory_bus.serving("conductor", Echo()):
        plain = {"device_profile_name": "p"}
        assert client.call("arq_create", **plain, color=None) == plain
        for method, arguments in (
            ("arq_create", {**plain, "color": "red"}),
            ("arq_paint", {"uuid": "u"}),
        ):
            with pytest.raises(Unavailable, match=r"\[upgrade_levels\] conductor is 1\.0"):
                client.call(method, **arguments)
        unpinned = make_client(memory_bus, None)
        assert unpinned.call("arq_paint", uuid="u") == {"uuid": "u"}


def test_supports_asks_the_client_of_an_api(memory_bus: Bus) -> None:
    conductor = make_conductor_client(memory_bus.transport, memory_bus.conf)
    agent = make_agent_client(memory_bus.transport, memory_bus.conf)
    assert supports(conductor, "arq_bind", "instance_project")
    assert supports(agent, "job")
    # An object that is called without RPC is of this release.
    other: Any = object()
    assert supports(other, "arq_paint")


@pytest.mark.parametrize(("contract", "pin"), [("conductor", "2.0"), ("agent", "0.9")])
def test_pin_of_another_major_version_is_refused(memory_bus: Bus, contract: str, pin: str) -> None:
    memory_bus.conf.set_override(contract, pin, group="upgrade_levels")
    make = make_conductor_client if contract == CONDUCTOR.name else make_agent_client
    with pytest.raises(Misconfigured, match=rf"\[upgrade_levels\] {contract} is {pin}"):
        make(memory_bus.transport, memory_bus.conf)


def test_versions_are_compared_as_numbers() -> None:
    assert is_newer("1.10", "1.9")
    assert not is_newer("1.9", "1.9")


@pytest.mark.parametrize("contract", ["agent", "conductor"])
def test_api_and_conductor_do_not_start_with_a_pin_of_another_major_version(
    contract: str, tmp_path: Path
) -> None:
    file = tmp_path / "cyborg.conf"
    file.write_text(
        "[DEFAULT]\nauth_strategy = noauth\ntransport_url = memory://\n"
        f"[database]\nconnection = sqlite:///{tmp_path}/c.db\n[upgrade_levels]\n{contract} = 2.0\n"
    )
    with pytest.raises(Misconfigured, match=rf"\[upgrade_levels\] {contract} is 2.0"):
        application.configure(["--config-file", str(file)])
    conf = make_conf(upgrade_levels={contract: "2.0"})
    with pytest.raises(Misconfigured, match=rf"\[upgrade_levels\] {contract} is 2.0"):
        ConductorService(conf).open()


def test_unknown_argument_is_a_mistake_of_the_caller(memory_bus: Bus) -> None:
    conductor = make_conductor_client(memory_bus.transport, memory_bus.conf)
    with pytest.raises(ValueError, match=r"arq_create has no arguments \['colour'\]"):
        supports(conductor, "arq_create", "colour")
