# SPDX-License-Identifier: Apache-2.0
"""Facts of rtnetlink: in a tree, as a pure function, and of the kernel in a network namespace."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cyborg.drivers.host_use import networks
from cyborg.drivers.host_use.networks import Link, NetworkFacts, Route, summarize
from cyborg.drivers.replay.recorder import Recorder
from cyborg.drivers.sysfs import LOCAL_ROOT, observed_by

MAIN = 254
LINKS = [Link(1, "lo"), Link(2, "eth0"), Link(3, "eth1"), Link(4, "gre1", 3), Link(5, "veth0", 5)]

# Bridges, since each kernel has them; the routes go through networks that do not exist.
PROGRAM = """
import dataclasses, json, socket
from pathlib import Path
from pyroute2 import IPRoute
from cyborg.drivers.host_use import networks

with IPRoute() as netlink:
    def add(name, address=None):
        netlink.link("add", ifname=name, kind="bridge")
        (number,) = netlink.link_lookup(ifname=name)
        netlink.link("set", index=number, state="up")
        if address:
            netlink.addr("add", index=number, address=address, prefixlen=24)
        return number

    add("idle")
    add("one", "192.0.2.1")
    two, three = add("two", "198.51.100.1"), add("three", "203.0.113.1")
    six, policy = add("six"), add("policy")
    netlink.addr("add", index=six, address="2001:db8::1", prefixlen=128)
    hops = [{"gateway": "198.51.100.9"}, {"gateway": "203.0.113.9"}]
    netlink.route("add", family=socket.AF_INET, dst="default", multipath=hops)
    netlink.route("add", dst="10.0.0.0/8", oif=policy, table=1001, scope="link")
print(json.dumps(dataclasses.asdict(networks.read_network_facts(Path("/sys")))))
"""


def test_summarize_names_the_most_important_use_of_each_interface() -> None:
    routes = [
        Route((2,), 100, is_default=False),
        Route((2, 3), 100, is_default=True),
        Route((3,), MAIN, is_default=True),
        Route((2,), MAIN, is_default=False),
        Route((1, 9), MAIN, is_default=True),
    ]
    facts = summarize(LINKS, routes, [1, 2, 5])
    assert facts.reasons == {
        "eth0": "has the default route in table 100",
        "eth1": "has the default route",
        "veth0": "has an address of the host",
    }
    assert facts.lower == {"gre1": "eth1"}
    assert facts.error is None


def test_read_tree_without_facts_has_none(tmp_path: Path) -> None:
    assert networks.read_network_facts(tmp_path / "sys") == NetworkFacts()


@pytest.mark.parametrize("content", ["", "[]", '{"routes": []}'])
def test_read_malformed_facts_of_a_tree_are_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / networks.FILE
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert (networks.read_network_facts(tmp_path / "sys").error or "").startswith(networks.FILE)


@pytest.mark.slow
def test_read_kernel_is_recorded_as_a_file_of_the_capture(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with observed_by(recorder):
        facts = networks.read_network_facts(LOCAL_ROOT)
    assert facts.error is None
    content = recorder.folders["proc/self/net"].files["rtnetlink.json"]
    path = tmp_path / networks.FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(content or b"")
    assert networks.read_network_facts(tmp_path / "sys") == facts


@pytest.mark.slow
def test_read_kernel_has_each_table_family_and_next_hop() -> None:
    namespace = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not create a network namespace")
    done = subprocess.run(
        [*namespace, sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "reasons": {
            "one": "has a route",
            "policy": "has a route in table 1001",
            "six": "has a route",
            "three": "has the default route",
            "two": "has the default route",
        },
        "lower": {},
        "error": None,
    }
