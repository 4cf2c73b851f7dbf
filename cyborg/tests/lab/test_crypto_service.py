# SPDX-License-Identifier: Apache-2.0
"""A virtio-crypto accelerator from the REST API to the device and back, on a real kernel."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest
from cyborg.tests.fixtures.machine.processes import BIN
from cyborg.tests.lab.cloud import HOST, Lab, running_lab

pytestmark = [pytest.mark.lab, pytest.mark.services, pytest.mark.matrix]

CRYPTO = "CUSTOM_CRYPTO"
ENGINE = "0000:01:00.0"
PLUGGED = "0000:02:00.0"
AES = {"CUSTOM_CRYPTO_SYM", "CUSTOM_CRYPTO_SYM_AES", "CUSTOM_CRYPTO_SYM_AES_CBC"}
FOLDER = f"/sys/bus/pci/devices/{ENGINE}"
# AF_ALG (38): a transform of the kernel, as the host's own disk encryption has it.
USE = (
    "import socket, time; line = socket.socket(38, socket.SOCK_SEQPACKET); "
    "line.bind(('skcipher', 'virtio_crypto_aes_cbc')); open('/io/used', 'w'); time.sleep(600)"
)
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "agent": {"enabled_drivers": "", "enabled_backends": "engines", "discovery_interval": 600},
    "engines": {"driver": "crypto", "devices": ["vendor=1af4"]},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Lab]:
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.CRYPTO, *guest.EMPTY_PORTS]
    folder = tmp_path_factory.mktemp("crypto")
    setup = "modprobe -a virtio_crypto algif_skcipher vfio-pci"
    with running_lab(folder, rabbit_url, devices, OPTIONS, setup, CRYPTO) as new_lab:
        yield new_lab


def traits(lab: Lab, provider: str) -> set[str]:
    """Return the traits of a provider in Placement."""
    answer = lab.cloud.placement.get(f"/resource_providers/{provider}/traits")
    return set(answer.json()["traits"])


def hardware(lab: Lab, address: str = ENGINE) -> Any:
    """Return an accelerator as the service shows it."""
    found = lab.call("GET", "/v2/hardware")["hardware"]
    (item,) = [item for item in found if (item["host"], item["address"]) == (HOST, address)]
    return item


def rebind(lab: Lab, kernel_driver: str) -> None:
    """Bind the accelerator to a kernel driver, as libvirt does for a server."""
    lab.guest.run(
        f"echo {ENGINE} >{FOLDER}/driver/unbind; echo {kernel_driver} >{FOLDER}/driver_override\n"
        f"echo {ENGINE} >/sys/bus/pci/drivers_probe\n"
        f'[ "$(busybox basename "$(readlink {FOLDER}/driver)")" = {kernel_driver} ]'
    )


def bound_driver(lab: Lab) -> str | None:
    """Return the kernel driver of the accelerator as the service shows it."""
    for deployable in lab.call("GET", "/v2/deployables")["deployables"]:
        attributes = deployable["attributes_list"]
        text = attributes if isinstance(attributes, str) else str(attributes)
        return next((name for name in ("vfio-pci", "virtio-pci") if name in text), None)
    return None


def test_capability_is_a_tree_traits_and_functions(lab: Lab, record_property: Any) -> None:
    (provider,) = lab.offered(CRYPTO)
    tree = hardware(lab)["acc_specs"]["acc_capability"]
    assert tree["sym"]["aes"]["cbc"] == 1
    assert traits(lab, provider) >= AES
    candidates = f"/resource_providers?resources={CRYPTO}:1&required=CUSTOM_CRYPTO_SYM_AES_CBC"
    answer = lab.cloud.placement.get(candidates).json()
    assert [found["uuid"] for found in answer["resource_providers"]] == [provider]
    services = lab.call("GET", "/v2/services?kind=backend")["services"]
    (backend,) = (backend for service in services for backend in service["backends"])
    totals = {found["function"]: found["total"] for found in backend["functions"]}
    assert totals["crypto"] == totals["crypto.sym.aes.cbc"] == 1
    record_property("summary", f"capability tree of virtio-crypto: {tree}")


def test_accelerator_is_bound_and_released_with_its_traits(lab: Lab) -> None:
    (provider,) = lab.offered(CRYPTO)
    before = traits(lab, provider)
    request, instance = lab.bind(provider)
    assert lab.holds(request) == ENGINE
    assert lab.offered(CRYPTO) == []

    rebind(lab, "vfio-pci")
    lab.guest.run("! grep -q virtio_crypto /proc/crypto")
    lab.until("the agent has seen it", lambda: bound_driver(lab) == "vfio-pci")
    assert traits(lab, provider) == before

    rebind(lab, "virtio-pci")
    lab.release(instance)
    lab.until("it is offered", lambda: lab.offered(CRYPTO) == [provider])
    lab.until("the agent has seen it", lambda: bound_driver(lab) == "virtio-pci")
    assert traits(lab, provider) == before


def test_driver_passes_the_conformance_rules_on_a_real_kernel(lab: Lab) -> None:
    # On a busy machine the first discovery of the emulated guest took longer than 10 s.
    kit = f"{BIN}/python -m cyborg.testing.conformance crypto --limit 60 -o devices=vendor=1af4"
    output = lab.guest.run(f"{kit} -o health=aer,link,bus", 240)
    assert " 0 failed, 0 blocked" in output.splitlines()[-1]


def test_hot_plugged_accelerator_is_offered_until_it_is_unplugged(lab: Lab) -> None:
    backend = {"qom-type": "cryptodev-backend-builtin", "id": "engine1"}
    lab.guest.monitor.execute("object-add", **backend)
    lab.plug("rp1", "virtio-crypto-pci", cryptodev="engine1")
    (first,) = lab.offered(CRYPTO)
    lab.until("both are offered", lambda: len(lab.offered(CRYPTO)) == 2)
    (second,) = set(lab.offered(CRYPTO)) - {first}
    lab.until("its traits are there", lambda: traits(lab, second) >= AES)
    assert hardware(lab, PLUGGED)["acc_specs"]["num"] == 1
    lab.unplug("rp1")
    lab.until("one is offered", lambda: lab.offered(CRYPTO) == [first])


def test_accelerator_that_the_kernel_uses_is_reserved(lab: Lab) -> None:
    (provider,) = lab.offered(CRYPTO)
    lab.guest.run(f'{BIN}/python -I -S -c "{USE}" & echo $! >/io/user; sleep 1')
    lab.until("it is used", (lab.guest.share / "used").exists)
    assert "refcnt       : 2" in lab.guest.run("grep -A3 virtio_crypto_aes_cbc /proc/crypto")
    lab.guest.run(f"echo change >{FOLDER}/uevent")
    lab.until("it is not offered", lambda: lab.offered(CRYPTO) == [])
    assert lab.inventory(provider) == (1, 1)
    assert traits(lab, provider) >= AES
    reasons = [d.get("undeliverable_reason") for d in lab.call("GET", "/v2/devices")["devices"]]
    assert any("uses algorithms of virtio_crypto" in str(reason) for reason in reasons)

    # For five minutes after the last use, only another kernel driver makes it available.
    lab.guest.run("kill $(cat /io/user); sleep 1")
    rebind(lab, "vfio-pci")
    lab.until("it is offered", lambda: lab.offered(CRYPTO) == [provider])
    assert traits(lab, provider) >= AES
