# SPDX-License-Identifier: Apache-2.0
"""Simulated accelerators: sysfs trees and /proc/crypto of each family, and a QAT device.

The files were written by hand, after the kernel documents ``sysfs-driver-qat`` and
``sysfs-driver-ccp`` and after ``crypto/proc.c``; the algorithms after
``drivers/crypto/intel/qat/qat_common/qat_algs.c``, ``qat_asym_algs.c``,
``drivers/crypto/virtio/virtio_crypto_skcipher_algs.c`` and ``drivers/crypto/ccp/ccp-crypto-*.c``.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cyborg.drivers.crypto.driver import CryptoDriver
from cyborg.drivers.kernel.crypto import QAT_LAYOUTS
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.privileged import qat
from cyborg.testing.machine import HostTree

QAT, OLD_QAT, VIRTIO, CCP, PSP = (f"0000:0{n}:00.0" for n in range(1, 6))

QAT_ALGORITHMS = (
    ("cbc(aes)", "qat_aes_cbc", "intel_qat", "skcipher"),
    ("authenc(hmac(sha256),cbc(aes))", "qat_aes_cbc_hmac_sha256", "intel_qat", "aead"),
    ("rsa", "qat-rsa", "intel_qat", "akcipher"),
    ("dh", "qat-dh", "intel_qat", "kpp"),
    ("deflate", "qat_deflate", "intel_qat", "acomp"),
)
VIRTIO_ALGORITHMS = (("cbc(aes)", "virtio_crypto_aes_cbc", "virtio_crypto", "skcipher"),)
CCP_ALGORITHMS = (
    ("sha256", "sha256-ccp", "ccp_crypto", "ahash"),
    ("hmac(sha256)", "hmac-sha256-ccp", "ccp_crypto", "ahash"),
    ("rfc3686(ctr(aes))", "rfc3686-ctr-aes-ccp", "ccp_crypto", "skcipher"),
)


def make_record(
    name: str, driver: str, module: str, kind: str, refcnt: int | str = 1, selftest: str = "passed"
) -> str:
    """Return a record of /proc/crypto."""
    fields = {
        "name": name,
        "driver": driver,
        "module": module,
        "priority": "150",
        "refcnt": str(refcnt),
        "selftest": selftest,
        "internal": "no",
        "type": kind,
        "min keysize": "16",
    }
    return "".join(f"{key:13}: {value}\n" for key, value in fields.items()) + "\n"


def write_algorithms(
    tree: HostTree, algorithms: Sequence[tuple[str, str, str, str]], users: Mapping[str, int] = {}
) -> None:
    """Write /proc/crypto; ``users`` are numbers of transforms, by the name of the driver."""
    records = [make_record(*found, refcnt=1 + users.get(found[1], 0)) for found in algorithms]
    (tree.proc / "crypto").write_text("".join(records))


def add_attributes(folder: Path, values: Mapping[str, str]) -> None:
    """Write attributes of a device."""
    for name, value in values.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{value}\n")


def make_host(folder: Path) -> HostTree:
    """Return a host with an accelerator of each family; the kernel computes with none of them."""
    tree = HostTree(folder)
    fourth = tree.add_function(QAT, "8086", "4940", kernel_driver="4xxx", totalvfs=16)
    values = {"qat/state": "up", "qat/cfg_services": "sym;asym", "qat/num_rps": "64"}
    add_attributes(fourth, values)
    tree.add_function(OLD_QAT, "8086", "37c8", kernel_driver="c6xx", totalvfs=16)
    virtio = tree.add_function(VIRTIO, "1af4", "1054", "00ff00", kernel_driver="virtio-pci")
    (virtio / "virtio0").mkdir()
    (virtio / "virtio0/driver").symlink_to("../../../../bus/virtio/drivers/virtio_crypto")
    tree.add_function(CCP, "1022", "1468", "108000", kernel_driver="ccp")
    psp = tree.add_function(PSP, "1022", "1486", "108000", kernel_driver="ccp")
    add_attributes(
        psp, {"fused_part": "1", "tsme_status": "0", "bootloader_version": "00.2d.00.78"}
    )
    write_algorithms(tree, (*QAT_ALGORITHMS, *VIRTIO_ALGORITHMS, *CCP_ALGORITHMS))
    return tree


class SimulatedDevice(qat.Attributes):
    """A QAT device that behaves like ``adf_sysfs.c``, with faults; ``writes`` are its journal.

    ``busy``: it cannot be stopped. ``accepted``: the values of ``cfg_services`` that the kernel
    knows. ``broken``: the services with which it does not start; ``stuck``: it never starts again.
    ``functions_after``: the number of writes after which it has virtual functions.
    """

    def __init__(self, value: str = "sym;asym", state: str = "up") -> None:
        self.values = {"cfg_services": value, "state": state}
        self.writes: list[tuple[str, str]] = []
        self.accepted = frozenset(QAT_LAYOUTS.values())
        self.busy = self.stuck = False
        self.broken: frozenset[str] = frozenset()
        self.functions_after: int | None = None

    def read(self, name: str) -> str | None:
        return self.values.get(name)

    def has_virtual_functions(self) -> bool:
        return self.functions_after is not None and len(self.writes) >= self.functions_after

    def write(self, name: str, value: str) -> None:
        self.writes.append((name, value))
        if name == "state":
            if self.busy:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            if value == "up" and (self.stuck or self.values["cfg_services"] in self.broken):
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        elif self.values["state"] == "up" or value not in self.accepted:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.values[name] = value


class SimulatedCryptoDriver(CryptoDriver):
    """The crypto driver, which changes the services in the files of a tree."""

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        """Create the driver."""
        root = Path(sysfs_root)

        def set_services(address: str, layout: str) -> None:
            path = root / "bus/pci/devices" / address / "qat/cfg_services"
            # Not by a name: the conformance kit detects it as a write of the driver.
            path.write_text(f"{QAT_LAYOUTS[layout]}\n")

        access = replace(HostAccess.of(root), set_services=set_services)
        super().__init__(backend, options, sysfs_root, access)
