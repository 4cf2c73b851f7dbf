# SPDX-License-Identifier: Apache-2.0
"""A 401 for the service's own credentials names the user and the configuration section."""

from collections.abc import Iterator
from typing import Any

import pytest

from cyborg.clients import nova, placement
from cyborg.core.errors import Unavailable
from cyborg.testing.fake_keystone import FakeKeystone, serve_keystone
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.machine.options import make_conf

PASSWORD = "s3cret-of-cyborg"


@pytest.fixture
def keystone() -> Iterator[FakeKeystone]:
    with serve_keystone() as keystone:
        yield keystone


def options(keystone: FakeKeystone, section: str, **overrides: str) -> Any:
    conf = make_conf(**{section: {"auth_type": "password"}})
    from keystoneauth1 import loading

    conf.register_opts(loading.get_auth_plugin_conf_options("password"), group=section)
    values = {
        "auth_url": f"{keystone.url}/v3",
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
    conf = options(keystone, section)
    call: Any = placement.make(conf).find if section == "placement" else nova.make(conf).get_server
    with pytest.raises(Unavailable) as raised:
        call("host")
    message = raised.value.message
    assert message.startswith(f"keystone refused user 'cyborg' of [{section}] (401)")
    assert "correct the user, the password" in message
    assert PASSWORD not in message
    assert raised.value.details == {"status": 401}


def test_token_rejected_by_nova_names_the_section(fake_nova: FakeNova) -> None:
    fake_nova.status, fake_nova.body = 401, {}
    with pytest.raises(Unavailable, match=r"Nova refused user 'cyborg' of \[nova\] \(401\)"):
        nova.Nova(fake_nova.adapter(), credentials="user 'cyborg' of [nova]").send([])
