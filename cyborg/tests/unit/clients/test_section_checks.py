# SPDX-License-Identifier: Apache-2.0
"""Unusable credentials, TLS files and URLs of a section: errors at the start, without a request."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from cyborg.clients import nova, placement
from cyborg.conf.auth_options import check_url, load_auth
from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.tests.fixtures.machine.options import make_conf

URL = "https://127.0.0.1:1"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Paths of a self-signed certificate and its key."""
    folder = tmp_path_factory.mktemp("tls")
    paths = str(folder / "cert.pem"), str(folder / "key.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=test -days 1"
    subprocess.run(
        [*command.split(), "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True
    )
    return paths


@pytest.mark.parametrize(
    ("option", "others", "problem"),
    [
        ("cafile", {}, "No such file or directory: expected a readable file or folder"),
        ("certfile", {}, "No such file or directory: expected a readable file in PEM"),
        ("keyfile", {"certfile": "CERT"}, "No such file or directory: expected a readable file"),
        ("keyfile", {}, "set, but certfile is not"),
    ],
)
@pytest.mark.parametrize("make", [placement.make, nova.make])
def test_missing_file_names_section_option_path_and_remedy(
    tmp_path: Path,
    certificate: tuple[str, str],
    make: Any,
    option: str,
    others: dict[str, str],
    problem: str,
) -> None:
    section = make.__module__.rpartition(".")[2]
    path = tmp_path / "absent.pem"
    others = dict.fromkeys(others, certificate[0])
    conf = make_conf(**{section: {"endpoint_override": URL, option: str(path), **others}})
    with pytest.raises(Misconfigured) as raised:
        make(conf)
    start = f"[{section}] {option}: "
    expected = start + problem if problem.startswith("set") else f"{start}{path}: {problem}"
    assert raised.value.message.startswith(expected)
    assert raised.value.details["option"] == f"{section}.{option}"


def test_malformed_and_unreadable_files_are_rejected(
    tmp_path: Path, certificate: tuple[str, str]
) -> None:
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for values in (
        {"cafile": str(text)},
        {"certfile": str(text)},
        {"certfile": certificate[0], "keyfile": str(text)},
        {"certfile": str(tmp_path)},
        {"certfile": certificate[0]},  # without its key
    ):
        with pytest.raises(Misconfigured, match=r"^\[nova\] (ca|cert|key)file: /.*: expected a"):
            load_auth(make_conf(nova=values), "nova")


def test_usable_files_and_a_cafile_that_is_not_used_are_accepted(
    tmp_path: Path, certificate: tuple[str, str]
) -> None:
    certfile, keyfile = certificate
    for values in (
        {"cafile": certfile, "certfile": certfile, "keyfile": keyfile},
        {"cafile": str(tmp_path)},
        {"cafile": "/absent", "insecure": True},
    ):
        assert load_auth(make_conf(placement=values), "placement") is None


@pytest.mark.parametrize("url", ["controller:8778", "ftp://controller", "http://", "http://[::1"])
def test_invalid_url_names_section_and_option(url: str) -> None:
    expected = r"^\[placement\] endpoint_override: '.*: expected a URL"
    with pytest.raises(Misconfigured, match=expected):
        placement.make(make_conf(placement={"endpoint_override": url}))


def test_empty_url_counts_as_not_set() -> None:
    """As configuration tools write it."""
    check_url("placement", "endpoint_override", "")


def test_file_that_is_removed_later_makes_the_service_unavailable(
    tmp_path: Path, certificate: tuple[str, str]
) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(Path(certificate[0]).read_bytes())
    client = placement.make(make_conf(placement={"endpoint_override": URL, "cafile": str(path)}))
    path.unlink()
    with pytest.raises(Unavailable, match=rf"{path}; correct cafile, .* of \[placement\]"):
        client.find("host")
