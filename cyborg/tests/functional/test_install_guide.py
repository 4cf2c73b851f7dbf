# SPDX-License-Identifier: Apache-2.0
"""Run the server commands and the configuration of the install guide."""

import configparser
import os
import re
import socket
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
import requests
from keystoneauth1 import loading
from keystonemiddleware import opts as keystone_opts
from oslo_config import cfg
from oslo_log import _options as log_opts
from oslo_log import log
from oslo_messaging import opts as messaging_opts
from oslo_middleware import opts as middleware_opts

from cyborg import conf as options
from cyborg import conf as own_options
from cyborg.drivers.generic import GenericDriver
from cyborg.tests.fixtures.clouds.web_servers import (
    PAGE,
    Server,
    code_block,
    gunicorn,
    serving,
    uwsgi,
)
from cyborg.tests.fixtures.machine.processes import ends_within, start_fork_server, wait_until
from cyborg.tests.fixtures.machine.tiers import sample

GETS = 400
CLIENTS = 8
RELOADS = 5


@pytest.fixture(scope="module", params=sample([gunicorn, uwsgi], gunicorn))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    make: Callable[[Path, Path], list[str]] = request.param
    folder = tmp_path_factory.mktemp(make.__name__)
    with serving(make, folder, {"body_timeout": 2}) as web_server:
        yield web_server


def statuses_during(server: Server, change: Callable[[], object]) -> Counter[object]:
    """Count the statuses, and the errors, of requests before, during and after a change."""
    outcomes: Counter[object] = Counter()
    lock = threading.Lock()
    stopped = threading.Event()

    def work() -> None:
        with requests.Session() as session:
            while not stopped.is_set():
                try:
                    status: object = session.get(f"{server.url}/v2/devices", timeout=60).status_code
                except requests.RequestException as exc:
                    status = f"{type(exc).__name__}: {exc}"
                with lock:
                    outcomes[status] += 1

    def wait_for_more() -> None:
        count = outcomes.total() + GETS
        wait_until("more requests are answered", lambda: outcomes.total() >= count)

    clients = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        wait_for_more()
        change()
        wait_for_more()
    finally:
        stopped.set()
        for client in clients:
            client.join()
    return outcomes


@pytest.mark.matrix
def test_server_restart_loses_no_keep_alive_request(server: Server) -> None:
    codes: list[int] = []

    def restart() -> None:
        codes.append(server.stop())
        server.start()

    assert statuses_during(server, restart).keys() == {200}
    assert codes == [0]


@pytest.mark.long
def test_server_reloads_lose_no_request(server: Server) -> None:
    def reload(log: TextIO) -> None:
        replaced = server.workers()
        is_uwsgi = "uWSGI" in log.read()
        server.hang_up()
        if is_uwsgi:  # it ignores signals before this line
            wait_until("the reload ends", lambda: "reloading complete" in log.read())
        wait_until("all workers are new", lambda: server.workers().isdisjoint(replaced))

    def reload_often() -> None:
        for _ in range(RELOADS):
            with server.log.open() as log:
                reload(log)

    assert statuses_during(server, reload_often).keys() == {200}


def test_query_of_400_uuids_is_accepted(server: Server) -> None:
    uuids = [str(uuid.uuid4()) for _ in range(400)]
    url = f"{server.url}/v2/accelerator_requests"
    # The last uuid is read: the error names it.
    spoilt = requests.delete(url, params={"arqs": ",".join([*uuids[:-1], "the-last"])}, timeout=60)
    assert spoilt.status_code == 400
    assert "'the-last' is not a uuid" in spoilt.text
    # There is no conductor: the call is sent and not answered.
    response = requests.delete(url, params={"arqs": ",".join(uuids)}, timeout=60)
    assert response.status_code == 504


def test_large_rejected_body_gets_a_response(server: Server) -> None:
    for _ in range(20):
        answer = requests.post(
            f"{server.url}/v2/device_profiles",
            data=b" " * 500_000,
            headers={"Host": "foreign.example"},
            timeout=60,
        )
        assert answer.status_code == 403


def exchange(server: Server, request: bytes) -> bytes:
    """Send bytes and return everything received until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


HEAD = b"POST /v2/device_profiles HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("body", [b"zz\r\n{}\r\n0\r\n\r\n", b"2\r\n{}XX0\r\n\r\n", b"-1\r\n\r\n"])
def test_malformed_chunk_gets_400(server: Server, body: bytes) -> None:
    before = server.log.stat().st_size
    answer = exchange(
        server, HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    )
    assert re.match(rb"HTTP/1.1 4(00|11) ", answer), answer
    assert b"error_message" in answer
    assert b"Traceback" not in server.log.read_bytes()[before:]


@pytest.mark.parametrize("head", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked"])
def test_slow_body_does_not_block_a_thread(server: Server, head: bytes) -> None:
    body = b"" if head.endswith(b"{") else b"\r\n\r\n5\r\n{"
    with ends_within(28):  # less than the default of body_timeout
        answer = exchange(server, HEAD + head + body)
    # uWSGI closes without an answer after its own timeout, and accepts no chunks.
    assert not answer or re.match(rb"HTTP/1.1 4(08|11) ", answer), answer
    assert b"Traceback" not in server.log.read_bytes()


def known_options() -> dict[str, set[str]]:
    """Return the names of all options by section, as the daemons register them."""
    declared = [
        *own_options.list_opts(),
        *(
            (group or "DEFAULT", group_options)
            for group, group_options in messaging_opts.list_opts()
        ),
        *((group or "DEFAULT", group_options) for group, group_options in log_opts.list_opts()),
        *(
            (group or "DEFAULT", group_options)
            for group, group_options in middleware_opts.list_opts_http_proxy_to_wsgi()
        ),
        *keystone_opts.list_auth_token_opts(),
        ("keystone_authtoken", loading.get_auth_plugin_conf_options("password")),
        ("gpus", [cfg.StrOpt("driver"), *(cfg.StrOpt(o.name) for o in GenericDriver.OPTIONS)]),
    ]
    options: dict[str, set[str]] = {}
    for group, group_options in declared:
        options.setdefault(str(group), set()).update(option.dest for option in group_options)
    return options


def test_starter_configuration_has_only_known_options() -> None:
    parser = configparser.RawConfigParser(default_section="")
    parser.read_string(code_block("/etc/cyborg/cyborg.conf"))
    options = known_options()
    unknown = {
        f"[{section}] {name}"
        for section in parser.sections()
        for name in parser[section]
        if name not in options.get(section, ())
    }
    assert unknown == set()
    assert parser["agent"]["enabled_backends"] == "gpus"


def test_starter_configuration_is_accepted_by_the_services(tmp_path: Path) -> None:
    file = tmp_path / "cyborg.conf"
    text = code_block("/etc/cyborg/cyborg.conf")
    file.write_text(re.sub("^log_dir.*\n", "", text, flags=re.MULTILINE))
    script = """
import os
from cyborg.wsgi.application import configure
from cyborg.wsgi.application import config_arguments
conf = configure(config_arguments(os.environ))
assert conf.auth_strategy == "keystone"
assert conf.keystone_authtoken.auth_type == "password"
"""
    environment = {**os.environ, "OS_CYBORG_CONFIG_FILES": str(file)}
    process = start_fork_server().run([sys.executable, "-c", script], environment)
    assert process.returncode == 0, process.stderr
    conf = cfg.ConfigOpts()
    options.register(conf)
    log.register_options(conf)
    conf(["--config-file", str(file)], project="cyborg")
    options.check(conf)
    assert conf.agent.enabled_backends == ["gpus"]
    parser = configparser.RawConfigParser(default_section="")
    parser.read_string(text)
    backend = dict(parser["gpus"])
    assert backend.pop("driver") == GenericDriver.name
    # Raises for a rule that cannot be read.
    GenericDriver("gpus", {"devices": [backend.pop("devices")]})
    assert backend == {}


def test_each_command_of_the_page_names_the_configuration() -> None:
    text = PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"^   [#$] .*\b(cyborg-(?:dbsync|status) .*)$", text, re.MULTILINE)
    assert len(commands) >= 2
    assert [c for c in commands if "--config-file /etc/cyborg/cyborg.conf" not in c] == []
