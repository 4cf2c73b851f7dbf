# SPDX-License-Identifier: Apache-2.0
"""The identity of a host with various resolvers and compute id files."""

import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from cyborg.agent.report.host_identity import HostIdentityProvider
from cyborg.core.errors import Misconfigured
from cyborg.core.hosts import Identity
from cyborg.tests.fixtures.machine.options import make_conf


def names(
    file: str | Path = "", provider: str | None = None, **arguments: Any
) -> HostIdentityProvider:
    conf = make_conf(agent={"compute_id_file": str(file), "resource_provider": provider})
    system: dict[str, Any] = {"hostname": lambda: "Cn1", "resolve": lambda: "cn1.example.com"}
    return HostIdentityProvider(conf, **system | arguments)


def test_identity_has_hostname_and_fqdn() -> None:
    assert names().identity() == Identity(names=("cn1", "cn1.example.com"))
    assert names(resolve=lambda: "localhost").identity() == Identity(names=("cn1",))
    assert names(provider=" cn1-nova ").identity().provider == "cn1-nova"
    assert names(hostname=lambda: "h" * 300).identity().names == ("cn1.example.com", "cn1")


def test_identity_compute_id_file_written_later_is_read(tmp_path: Path) -> None:
    file, uuid = tmp_path / "compute_id", str(uuid4())
    provider = names(file)
    assert provider.identity().compute_id is None
    file.write_text(f"{uuid.upper()}\n")
    assert provider.identity().compute_id == uuid


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe", b"x" * 5000])
def test_identity_invalid_compute_id_file_warns_once(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "compute_id"
    file.write_bytes(content)
    provider = names(file)
    for _ in range(3):
        assert provider.identity().compute_id is None
    assert len([r for r in caplog.records if "compute_id_file" in r.getMessage()]) == 1


def test_identity_unreadable_compute_id_file_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert names(tmp_path).identity().compute_id is None
    assert "searching the host's compute node by name" in caplog.text


def test_identity_resolver_hangs_returns_hostname() -> None:
    called_event, free = threading.Event(), threading.Event()

    def resolve() -> str:
        called_event.set()
        assert free.wait(120)
        return "cn1.example.com"

    slow = names(resolve=resolve, timeout=0.0)
    assert slow.identity().names == ("cn1",)
    assert called_event.wait(120)
    assert slow.identity().names == ("cn1",)
    free.set()
    (thread,) = [t for t in threading.enumerate() if t.name == "resolver"]
    thread.join(120)
    assert slow.identity().names == ("cn1", "cn1.example.com")


@pytest.mark.parametrize("error", [OSError("no net"), UnicodeError("label too long")])
def test_identity_resolver_fails_returns_hostname(error: Exception) -> None:
    def resolve() -> str:
        raise error

    assert names(resolve=resolve).identity().names == ("cn1",)


@pytest.mark.parametrize("provider", ["a\tb", "p" * 256], ids=ascii)
def test_provider_invalid_resource_provider_raises_misconfigured(provider: str) -> None:
    with pytest.raises(Misconfigured, match="resource_provider"):
        names(provider=provider)
