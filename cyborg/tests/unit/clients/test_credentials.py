# SPDX-License-Identifier: Apache-2.0
"""Requests for a token with the service's own credentials: a 401, and a silent keystone."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.clients import nova, placement
from cyborg.clients.service_client import load_adapter
from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.testing.fake_keystone import FakeKeystone, serve_keystone
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import ends_within

PASSWORD = "s3cret-of-cyborg"


@pytest.fixture
def keystone() -> Iterator[FakeKeystone]:
    with serve_keystone() as keystone:
        yield keystone


@pytest.fixture
def silent_url() -> Iterator[str]:
    """URL of a keystone that completes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v3"


def options(url: str, section: str, **overrides: Any) -> Any:
    conf = make_conf(**{section: {"auth_type": "password"}})
    from keystoneauth1 import loading

    conf.register_opts(loading.get_auth_plugin_conf_options("password"), group=section)
    values = {
        "auth_url": url,
        "username": "cyborg",
        "password": PASSWORD,
        "user_domain_name": "Default",
        "project_name": "service",
        "project_domain_name": "Default",
    }
    for name, value in {**values, **overrides}.items():
        conf.set_override(name, value, group=section)
    return conf


@pytest.mark.parametrize("section", ["placement", "nova"])
def test_password_rejected_by_keystone_names_user_and_section(
    keystone: FakeKeystone, section: str
) -> None:
    conf = options(f"{keystone.url}/v3", section)
    call: Any = placement.make(conf).find if section == "placement" else nova.make(conf).get_server
    with pytest.raises(Unavailable) as raised:
        call("host")
    message = raised.value.message
    assert message.startswith(f"keystone refused user 'cyborg' of [{section}] (401)")
    assert "correct the user, the password" in message
    assert PASSWORD not in message
    assert raised.value.details == {"status": 401}


def test_credentials_of_another_section(keystone: FakeKeystone, tmp_path: Path) -> None:
    file = tmp_path / "cyborg.conf"
    login = "username = cyborg\npassword = x\nuser_domain_name = Default\n"
    file.write_text(
        f"[keystone_authtoken]\nauth_type = password\nauth_url = {keystone.url}/v3\n{login}"
        "[nova]\nauth_section = keystone_authtoken\n"
    )
    conf = make_conf()
    conf(["--config-file", str(file)], project="cyborg", default_config_dirs=[])
    with pytest.raises(
        Unavailable, match=r"refused user 'cyborg' of \[keystone_authtoken\] \(401\)"
    ):
        nova.make(conf).get_server("host")


def test_invalid_interface_names_the_section() -> None:
    with pytest.raises(Misconfigured, match=r"\[nova\]: 'x' is not a valid value for valid_in"):
        nova.make(make_conf(nova={"valid_interfaces": ["x"]}))


def test_token_rejected_by_nova_names_the_section(fake_nova: FakeNova) -> None:
    fake_nova.status, fake_nova.body = 401, {}
    with pytest.raises(Unavailable, match=r"Nova refused user 'cyborg' of \[nova\] \(401\)"):
        nova.Nova(fake_nova.adapter(), credentials="user 'cyborg' of [nova]").send([])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "call"),
    [
        ("placement", lambda conf: placement.make(conf).find("host")),
        ("nova", lambda conf: nova.make(conf).get_server("server")),
        ("nova", lambda conf: nova.make(conf).own_user()),
    ],
)
def test_token_request_to_a_silent_keystone_ends_after_the_timeout(
    silent_url: str, section: str, call: Callable[[Any], Any]
) -> None:
    conf = options(silent_url, section, request_timeout=0.2)
    start = time.monotonic()
    # The plug-in asks keystone for its versions first, and then for a token.
    with ends_within(5), pytest.raises(Unavailable, match=f"{silent_url}.* timed out"):
        call(conf)
    assert time.monotonic() - start > 0.2


def test_timeout_of_the_section_is_kept_for_token_requests() -> None:
    conf = options("http://127.0.0.1:1/v3", "nova", timeout=7)
    assert load_adapter(conf, "nova").session.timeout == 7
