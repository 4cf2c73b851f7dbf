# SPDX-License-Identifier: Apache-2.0
"""Clients of others return all rows of a list that has more rows than the API gives at once."""

import json
import os
import sys
from collections.abc import Iterator

import openstack
import pytest
from keystoneauth1 import session, token_endpoint
from openstack.accelerator.v2._proxy import Proxy

from cyborg.api.app import make_app
from cyborg.standalone.http import HttpServer
from cyborg.tests.fixtures.clouds import osc
from cyborg.tests.fixtures.clouds.served_api import Site, fill
from cyborg.tests.fixtures.clouds.standalone import running
from cyborg.tests.fixtures.machine import tiers
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import start_fork_server

# openstacksdk warns of calls that it makes itself.
pytestmark = pytest.mark.filterwarnings("ignore::openstack.warnings.RemovedInSDK50Warning")
# Rows of each list; the API gives two at once.
ROWS = 3
LISTS = ("devices", "deployables", "device_profiles", "accelerator_requests", "attributes")
COMMANDS = {
    "python-openstackclient": ("device", "deployable", "device profile", "arq"),
    "python-cyborgclient": ("device", "deployable", "device profile", "arq"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield a client of an API that gives two rows at once."""
    folder = tmp_path_factory.mktemp("pages")
    with running(folder, devices=ROWS, handles=1) as stack:
        fill(Site(stack.endpoint))
        conf = make_conf(api={"max_limit": 2})
        conf.set_override("auth_strategy", "noauth")
        server = HttpServer("127.0.0.1", 0, "pages")
        server.start(make_app(conf, stack.conductor, stack.reader))
        api = Site(server.url)
        try:
            yield api
        finally:
            api.session.close()
            server.stop()


@pytest.mark.parametrize("name", LISTS)
def test_openstacksdk_follows_the_links_of_a_list(site: Site, name: str) -> None:
    key = "arqs" if name == "accelerator_requests" else name
    assert len(site.get(f"/v2/{name}")[key]) < ROWS
    auth = token_endpoint.Token(f"{site.root}/v2", "token")
    with openstack.connection.Connection(
        session=session.Session(auth=auth), accelerator_endpoint_override=f"{site.root}/v2"
    ) as connection:
        proxy = connection.accelerator
        assert isinstance(proxy, Proxy)
        uuids = [row.id or row.uuid for row in getattr(proxy, name)()]
    assert len(uuids) == len(set(uuids)) == ROWS


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("distribution", "noun"),
    tiers.sample(
        [(name, noun) for name, nouns in COMMANDS.items() for noun in nouns],
        *((name, "device") for name in COMMANDS),
        mark=pytest.mark.long,
    ),
)
def test_openstack_command_lists_all_rows(site: Site, distribution: str, noun: str) -> None:
    command = [sys.executable, "-m", osc.__name__, distribution]
    connection = ["--os-auth-type", "none", "--os-endpoint", f"{site.root}/v2"]
    arguments = ["accelerator", *noun.split(), "list", "-f", "json"]
    done = start_fork_server().run([*command, *connection, *arguments], os.environ, osc.IMPORTED)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == ROWS
