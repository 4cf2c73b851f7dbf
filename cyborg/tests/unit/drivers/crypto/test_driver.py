# SPDX-License-Identifier: Apache-2.0
"""The crypto driver on simulated hosts; the lab has virtio-crypto on a real kernel."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory import capability
from cyborg.core.inventory.device import NOT_OFFERED, Ability, Device, DeviceType, Health
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.crypto.driver import KERNEL_USE_HOLD, CryptoDriver
from cyborg.drivers.kernel.crypto import FAMILIES, QAT_CONFIGURABLE
from cyborg.drivers.pci.access import HostAccess
from cyborg.testing.conformance.kit import Outcome, run_rules
from cyborg.testing.machine import HostTree
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.unit.drivers.crypto.simulated_qat import (
    CCP,
    CCP_ALGORITHMS,
    OLD_QAT,
    PSP,
    QAT,
    QAT_ALGORITHMS,
    VIRTIO,
    VIRTIO_ALGORITHMS,
    SimulatedCryptoDriver,
    add_attributes,
    make_host,
    write_algorithms,
)

ALL = {"devices": ["address=*"]}
ALGORITHMS = (*QAT_ALGORITHMS, *VIRTIO_ALGORITHMS, *CCP_ALGORITHMS)


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    return make_host(tmp_path)


def discover(host: HostTree, driver: CryptoDriver | None = None) -> dict[str, Device]:
    found = (driver or CryptoDriver("c", ALL, host.root)).discover()
    return {device.address: device for device in found}


def tree_of(device: Device) -> dict[str, Any]:
    return capability.from_board_info(device.vendor_board_info)


def traits_of(device: Device) -> set[str]:
    return {trait for deployable in device.deployables for trait in deployable.traits}


def rebind(host: HostTree, address: str, kernel_driver: str) -> None:
    """Bind a function to another kernel driver, as libvirt does for a server."""
    link = host.bus / address / "driver"
    link.unlink()
    link.symlink_to(f"../../../bus/pci/drivers/{kernel_driver}")


def test_discover_offers_only_crypto_accelerators(host: HostTree) -> None:
    host.add_function("0000:09:00.0", "144d", "a80a", "010802")
    found = discover(host)
    assert {address: device.type for address, device in found.items()} == {
        QAT: DeviceType.QAT,
        OLD_QAT: DeviceType.QAT,
        VIRTIO: DeviceType.CRYPTO,
        CCP: DeviceType.CRYPTO,
        PSP: DeviceType.CRYPTO,
    }
    classes = {d.resource_class for device in found.values() for d in device.deployables}
    assert classes == {"CUSTOM_CRYPTO"}


@pytest.mark.parametrize(("vendor", "product"), sorted(FAMILIES))
def test_discover_knows_each_id(tmp_path: Path, vendor: str, product: str) -> None:
    tree = HostTree(tmp_path)
    tree.add_function(QAT, vendor, product, "0b4000")
    assert list(discover(tree)) == [QAT]


def test_discover_capability_is_tree_traits_and_services(host: HostTree) -> None:
    device = discover(host)[VIRTIO]
    assert tree_of(device) == {"sym": {"aes": {"cbc": 1}}}
    assert traits_of(device) == {
        *("CUSTOM_PCI_VENDOR_1AF4", "CUSTOM_PCI_PRODUCT_1AF4_1054", "CUSTOM_PCIE_ROOT_0000_00"),
        *("CUSTOM_CRYPTO_SYM", "CUSTOM_CRYPTO_SYM_AES", "CUSTOM_CRYPTO_SYM_AES_CBC"),
    }


def test_discover_traits_begin_with_the_resource_class(host: HostTree) -> None:
    """A function of a backend and the trait of it have the same name."""
    driver = CryptoDriver("c", {"devices": ["address=*,resource_class=CUSTOM_QAT"]}, host.root)
    assert "CUSTOM_QAT_SYM_AES" in traits_of(discover(host, driver)[VIRTIO])


def test_discover_qat_has_the_configured_services_only(host: HostTree) -> None:
    device = discover(host)[QAT]
    aes = {"aes": {"cbc": 1, "cbc_hmac_sha256": 1}}
    assert tree_of(device) == {"sym": aes, "asym": {"rsa": 1, "dh": 1}}
    assert "CUSTOM_CRYPTO_SERVICES_ASYM_SYM" in traits_of(device)
    assert "CUSTOM_CRYPTO_DC" not in traits_of(device)
    assert device.std_board_info["services"] == "sym;asym"
    assert device.std_board_info["ring_pairs"] == "64"

    add_attributes(host.bus / QAT, {"qat/cfg_services": "dcc"})
    assert tree_of(discover(host)[QAT]) == {"dc": {"deflate": 1}, "dcc": 1}


def test_discover_qat_without_algorithms_has_the_names_of_its_services(host: HostTree) -> None:
    (host.proc / "crypto").unlink()
    assert tree_of(discover(host)[QAT]) == {"sym": 1, "asym": 1}


def test_discover_older_qat_has_all_algorithms(host: HostTree) -> None:
    assert set(tree_of(discover(host)[OLD_QAT])) == {"sym", "asym", "dc"}


def test_discover_accelerator_of_a_server_keeps_its_capability(host: HostTree) -> None:
    """The kernel has no algorithm of it while a server uses it, and none before it has started."""
    driver = CryptoDriver("c", ALL, host.root)
    before = discover(host, driver)[VIRTIO]
    rebind(host, VIRTIO, "vfio-pci")
    write_algorithms(host, (*QAT_ALGORITHMS, *CCP_ALGORITHMS))
    after = discover(host, driver)[VIRTIO]
    assert traits_of(after) == traits_of(before)
    assert tree_of(after) == tree_of(before)
    assert tree_of(discover(host)[VIRTIO]) == {}  # another agent process


def test_discover_qat_device_of_a_server_keeps_its_services(host: HostTree) -> None:
    driver = CryptoDriver("c", ALL, host.root)
    before = discover(host, driver)[QAT]
    for path in (host.bus / QAT / "qat").iterdir():
        path.unlink()
    rebind(host, QAT, "vfio-pci")
    after = discover(host, driver)[QAT]
    assert traits_of(after) == traits_of(before)
    assert tree_of(after) == tree_of(before)
    assert "services" not in after.std_board_info
    layouts = driver.layouts(after)
    assert [found.name for found in layouts if found.matches(after)] == ["asym;sym"]


def test_discover_another_device_at_the_address_has_its_own_capability(host: HostTree) -> None:
    driver = CryptoDriver("c", ALL, host.root)
    assert tree_of(discover(host, driver)[QAT])
    (host.bus / QAT / "device").write_text("0x0435\n")
    (host.bus / QAT / "qat/cfg_services").unlink()
    rebind(host, QAT, "vfio-pci")
    assert tree_of(discover(host, driver)[QAT]) == {}


def test_discover_virtio_device_without_driver_has_no_capability(host: HostTree) -> None:
    (host.bus / VIRTIO / "virtio0/driver").unlink()
    assert tree_of(discover(host)[VIRTIO]) == {}


def test_discover_virtual_functions_have_the_services_of_their_device(host: HostTree) -> None:
    addresses = host.enable_virtual_functions(QAT, 3, "4941")
    device = discover(host)[QAT]
    assert [h.address for d in device.deployables for h in d.handles] == addresses
    assert "CUSTOM_CRYPTO_SYM" in traits_of(device)


@pytest.mark.parametrize(
    ("driver", "used"),
    [
        ("virtio_crypto_aes_cbc", {VIRTIO}),
        ("qat-rsa", {QAT, OLD_QAT}),
        ("sha256-ccp", {CCP}),
    ],
)
def test_discover_accelerator_that_the_kernel_computes_with_is_not_deliverable(
    host: HostTree, driver: str, used: set[str]
) -> None:
    before = discover(host)
    write_algorithms(host, ALGORITHMS, {driver: 1})
    found = discover(host)
    reasons = {
        address: device.undeliverable_reason
        for address, device in found.items()
        if not device.deliverable and address != PSP
    }
    assert set(reasons) == used
    assert all("the kernel of the host uses algorithms of" in str(r) for r in reasons.values())
    assert len(set(reasons.values())) == 1
    # The providers, their traits and their handles stay.
    assert {a: d.deployables for a, d in found.items()} == {
        a: d.deployables for a, d in before.items()
    }


def test_discover_accelerator_stays_undeliverable_after_the_last_use(host: HostTree) -> None:
    """Any user can use an algorithm from time to time: nothing must change each time."""
    now = 1000.0
    access = replace(HostAccess.of(host.root), clock=lambda: now)
    driver = CryptoDriver("c", ALL, host.root, access)

    def reason(users: int, algorithm: str = "virtio_crypto_aes_cbc") -> str | None:
        write_algorithms(host, ALGORITHMS, {algorithm: users})
        return discover(host, driver)[VIRTIO].undeliverable_reason

    assert reason(0) is None
    assert (first := reason(1)) is not None
    now += 2 * KERNEL_USE_HOLD
    assert reason(2) == first
    now += KERNEL_USE_HOLD - 1
    assert reason(0) == first
    assert reason(1, "qat-rsa") == first
    now += 1
    assert reason(1, "qat-rsa") is None
    assert reason(0) is None


def test_discover_accelerator_of_a_server_is_not_used_by_the_kernel(host: HostTree) -> None:
    rebind(host, VIRTIO, "vfio-pci")
    write_algorithms(host, ALGORITHMS, {"virtio_crypto_aes_cbc": 1})
    assert discover(host)[VIRTIO].deliverable


def test_discover_card_whose_virtual_function_the_kernel_uses_is_not_deliverable(
    host: HostTree,
) -> None:
    """The free function stays as it is: withheld handles would come and go with each use."""
    free, used = host.enable_virtual_functions(OLD_QAT, 2, "37c9")
    (host.bus / used / "driver").symlink_to("../../../bus/pci/drivers/c6xxvf")
    (host.bus / free / "driver").symlink_to("../../../bus/pci/drivers/vfio-pci")
    write_algorithms(host, ALGORITHMS, {"qat_aes_cbc": 2})
    device = discover(host)[OLD_QAT]
    assert [h.address for d in device.deployables for h in d.handles] == [free, used]
    assert not device.deliverable
    assert NOT_OFFERED not in device.vendor_board_info
    rebind(host, used, "vfio-pci")
    assert discover(host)[OLD_QAT].deliverable


def test_discover_security_processor_is_never_offered(host: HostTree) -> None:
    device = discover(host)[PSP]
    assert device.deployables == ()
    assert "security processor" in device.vendor_board_info[NOT_OFFERED]
    assert device.std_board_info["fused_part"] == "1"
    assert device.std_board_info["bootloader_version"] == "00.2d.00.78"
    with pytest.raises(DriverFailed, match="security processor"):
        CryptoDriver("c", {}, host.root).check_adoption([PSP])


def test_check_adoption_refuses_accelerator_that_the_kernel_uses(host: HostTree) -> None:
    driver = CryptoDriver("c", {}, host.root)
    driver.check_adoption([VIRTIO])
    write_algorithms(host, ALGORITHMS, {"virtio_crypto_aes_cbc": 1})
    with pytest.raises(DriverFailed, match="the kernel of the host uses algorithms"):
        driver.check_adoption([VIRTIO])


def test_measure_stopped_qat_device_is_unhealthy(host: HostTree) -> None:
    driver = CryptoDriver("c", ALL, host.root)
    devices = driver.discover()
    assert driver.measure(devices)[QAT].health is Health.OK
    add_attributes(host.bus / QAT, {"qat/state": "down"})
    measured = driver.measure(devices)
    assert measured[QAT].health is Health.UNHEALTHY
    assert measured[QAT].reason == "the QAT device is stopped: qat/state is down"
    assert measured[OLD_QAT].health is Health.OK


def test_measure_qat_device_of_a_server_is_healthy(host: HostTree) -> None:
    """The kernel removes the attributes when its driver is unbound."""
    driver = CryptoDriver("c", ALL, host.root)
    for path in (host.bus / QAT / "qat").iterdir():
        path.unlink()
    rebind(host, QAT, "vfio-pci")
    assert driver.measure(driver.discover())[QAT].health is Health.OK


def test_measure_device_whose_services_are_being_changed_is_omitted(host: HostTree) -> None:
    measured: list[bool] = []

    def set_services(address: str, layout: str) -> None:
        add_attributes(host.bus / QAT, {"qat/state": "down"})
        measured.append(QAT in driver.measure(devices))

    access = replace(HostAccess.of(host.root), set_services=set_services)
    driver = CryptoDriver("c", ALL, host.root, access)
    devices = driver.discover()
    driver.partition(WorkItem("c", QAT, ""), "dc")
    assert measured == [False]
    assert driver.measure(devices)[QAT].health is Health.UNHEALTHY


def test_layouts_of_qat_device_are_the_sets_of_services(host: HostTree) -> None:
    driver = CryptoDriver("c", ALL, host.root)
    device = discover(host, driver)[QAT]
    layouts = driver.layouts(device)
    names = ["asym", "asym;dc", "asym;sym", "dc", "dc;sym", "dcc", "sym"]
    assert [layout.name for layout in layouts] == names
    assert [layout.name for layout in layouts if layout.matches(device)] == ["asym;sym"]


def test_layouts_are_those_of_the_last_discovery(host: HostTree) -> None:
    """Another process changes the services between the discovery and the call."""
    driver = CryptoDriver("c", ALL, host.root)
    add_attributes(host.bus / QAT, {"qat/cfg_services": "sym;decomp;dc"})
    device = discover(host, driver)[QAT]
    add_attributes(host.bus / QAT, {"qat/cfg_services": "dc"})
    current = [found.name for found in driver.layouts(device) if found.matches(device)]
    assert current == ["dc;decomp;sym"]


def test_layouts_of_qat_device_include_unknown_current_set(host: HostTree) -> None:
    add_attributes(host.bus / QAT, {"qat/cfg_services": "sym;decomp;dc"})
    driver = CryptoDriver("c", ALL, host.root)
    device = discover(host, driver)[QAT]
    current = [found.name for found in driver.layouts(device) if found.matches(device)]
    assert current == ["dc;decomp;sym"]


def test_layouts_of_other_device_are_fixed(host: HostTree) -> None:
    driver = CryptoDriver("c", ALL, host.root)
    device = discover(host, driver)[OLD_QAT]
    (layout,) = driver.layouts(device)
    assert layout.name == "fixed"
    assert layout.matches(device)
    driver.partition(WorkItem("c", OLD_QAT, ""), "fixed")
    with pytest.raises(DriverFailed, match="no readable attribute"):
        driver.partition(WorkItem("c", OLD_QAT, ""), "dc")


def test_partition_changes_traits_and_functions(host: HostTree) -> None:
    driver = SimulatedCryptoDriver("c", ALL, host.root)
    assert Ability.PARTITIONS in driver.abilities
    driver.partition(WorkItem("c", QAT, ""), "dc")
    traits = traits_of(discover(host)[QAT])
    assert {"CUSTOM_CRYPTO_DC_DEFLATE", "CUSTOM_CRYPTO_SERVICES_DC"} <= traits
    assert "CUSTOM_CRYPTO_SYM" not in traits


@pytest.mark.parametrize("layout", ["", "dc;dc", "sym;asym", "dcc;sym", "dc\n", "fixed", "../x"])
def test_partition_unknown_layout_is_refused(host: HostTree, layout: str) -> None:
    driver = SimulatedCryptoDriver("c", ALL, host.root)
    with pytest.raises(DriverFailed, match="has no layout"):
        driver.partition(WorkItem("c", QAT, ""), layout)
    assert (host.bus / QAT / "qat/cfg_services").read_text() == "sym;asym\n"


def test_partition_of_a_device_that_a_domain_has_is_refused(host: HostTree) -> None:
    driver = SimulatedCryptoDriver("c", ALL, host.root)
    host.give_to_domain(QAT, "guest1")
    with pytest.raises(DriverFailed, match="it is used by the domain guest1 of libvirt"):
        driver.partition(WorkItem("c", QAT, ""), "dc")
    assert (host.bus / QAT / "qat/cfg_services").read_text() == "sym;asym\n"


@pytest.mark.parametrize("address", ["0000:0f:00.0", "qat0", "../x"])
def test_partition_missing_device_fails(host: HostTree, address: str) -> None:
    with pytest.raises(DriverFailed):
        SimulatedCryptoDriver("c", ALL, host.root).partition(WorkItem("c", address, ""), "dc")


def test_partition_on_another_sysfs_never_changes_a_device_of_this_host(host: HostTree) -> None:
    with pytest.raises(DriverFailed, match="it is not a device of this host"):
        CryptoDriver("c", ALL, host.root).partition(WorkItem("c", QAT, ""), "dc")


def test_measure_device_whose_services_change_meanwhile_is_omitted(
    host: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change ends after its device was read and before the result."""
    access = replace(HostAccess.of(host.root), set_services=lambda address, layout: measure())
    driver = CryptoDriver("c", ALL, host.root, access)
    devices = driver.discover()
    read, measured = driver._sysfs.read_text, list[bool]()

    def read_text(path: str | Path) -> str | None:
        if str(path).endswith(f"{QAT}/qat/state"):
            driver._changing.discard(QAT)
            return "down"
        return read(path)

    def measure() -> None:
        monkeypatch.setattr(driver._sysfs, "read_text", read_text)
        measured.append(QAT in driver.measure(devices))

    driver.partition(WorkItem("c", QAT, ""), "dc")
    assert measured == [False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selected", "vfs"),
    sample(product(["8086", "1af4", "1022"], [0, 3]), ("8086", 3)),
)
def test_driver_passes_all_rules_on_each_family(tmp_path: Path, selected: str, vfs: int) -> None:
    tree = make_host(tmp_path)
    if vfs:
        tree.enable_virtual_functions(QAT, vfs, "4941")
    results = run_rules(
        SimulatedCryptoDriver,
        {"devices": (f"vendor={selected}",)},
        sysfs_root=tree.root,
        work=True,
        allow=[str(tree.root)],
        entry_point="crypto",
    )
    failed = (Outcome.FAILED, Outcome.BLOCKED)
    assert {r.rule.name: r.reason for r in results if r.outcome in failed} == {}
    passed = {r.rule.name for r in results if r.outcome is Outcome.PASSED}
    assert {"partition_is_discovered", "layouts_include_current", "measure_is_in_time"} <= passed


def test_gen4_ids_are_known() -> None:
    assert {("8086", product) for product in QAT_CONFIGURABLE} <= set(FAMILIES)
