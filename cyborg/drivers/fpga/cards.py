# SPDX-License-Identifier: Apache-2.0
"""FPGA cards: their families, their regions, and the PCI functions and deployables of each.

Sources in Linux: ``Documentation/ABI/testing/sysfs-class-fpga-manager``,
``sysfs-class-fpga-region``, ``sysfs-platform-dfl-fme`` and ``sysfs-platform-dfl-port``, and
``Documentation/fpga/dfl.rst``. A DFL card has a base region with the folders ``dfl-fme.N`` (the
FPGA management engine) and ``dfl-port.N``; below the engine it has one region for each port that
can be reconfigured. Sysfs does not show the port of a region. ``pr_mgmt_init`` of
``drivers/fpga/dfl-fme-pr.c`` creates the regions in the order of the ports. So the port of a region
is known only if each port has a region.

The PCI ids are those of ``drivers/fpga/dfl-pci.c`` of Linux for Intel, and of ``pci.classes`` for
AMD. For AWS, ``src/runtime_src/core/pcie/driver/linux/xocl/devices.h`` of XRT has 1042, 9048, f010
and f011, and ``hdk/cl/examples`` of aws-fpga the others.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from cyborg.core.inventory.device import Deployable, Device
from cyborg.drivers.pci import classes
from cyborg.drivers.sysfs import PCI_DEVICES, PciFunction, Sysfs, functions_on

REGIONS, MANAGERS = Path("class/fpga_region"), Path("class/fpga_manager")
_REGION = re.compile(r"region([0-9]{1,6})")
_MANAGER = re.compile(r"fpga[0-9]{1,6}")
_FME = re.compile(r"dfl-fme\.[0-9]{1,6}")
_PORT = re.compile(r"dfl-port\.[0-9]{1,6}")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a card.

    ``interface_id`` is the ``compat_id`` of the region, which an image must fit. ``function_id`` is
    the ``afu_id`` of its port. Both are 32 hexadecimal digits, or None if the kernel does not show
    them. ``manager`` is the name of the FPGA manager that loads images into it, and
    ``has_firmware`` says whether the manager has the attribute ``firmware``. ``fme`` is the name of
    the management engine of a DFL card and ``port`` the number of its port. A port that is
    ``in_reset`` cannot be used: ``afu_id_show`` of ``drivers/fpga/dfl-afu-main.c`` answers EBUSY.
    ``identity`` changes when the kernel creates the region again.
    """

    name: str
    interface_id: str | None = None
    function_id: str | None = None
    manager: str | None = None
    has_firmware: bool = False
    fme: str | None = None
    port: int | None = None
    in_reset: bool = False
    identity: int | None = None

    @property
    def obstacle(self) -> str | None:
        """Return why the region cannot be used; None if it can."""
        if not self.in_reset:
            return None
        return (
            f"port {self.port} of {self.fme} is in reset, as after a failed reconfiguration: bind "
            "the physical function to its kernel driver again"
        )


@dataclass(frozen=True, slots=True)
class CardRegions:
    """Regions of a card in a constant order; ``info`` describes the static part of the card."""

    regions: tuple[Region, ...] = ()
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Folder:
    """An entry of a sysfs class: its name, device folder and the address of its PCI function."""

    name: str
    path: Path
    function: str


def read_regions(sysfs: Sysfs, functions: Iterable[PciFunction]) -> dict[str, CardRegions]:
    """Return the regions of all cards, by the address of the physical function."""
    physical = {f.address: f.physfn or f.address for f in functions}
    folders = _entries(sysfs, REGIONS, _REGION)
    managers = _entries(sysfs, MANAGERS, _MANAGER)
    by_card: dict[str, list[_Folder]] = {}
    for folder in folders:
        card = physical.get(folder.function, folder.function)
        by_card.setdefault(card, []).append(folder)
    regions: dict[str, CardRegions] = {}
    for card, card_folders in sorted(by_card.items()):
        # A virtual function has a base region with its port: it counts for the function ids below,
        # and is no region of the card.
        own_folders = [folder for folder in card_folders if folder.function == card]
        if own_folders:
            own_managers = [manager for manager in managers if manager.function == card]
            function_ids = _read_ports(sysfs, card_folders)
            regions[card] = _read_card(sysfs, own_folders, own_managers, function_ids)
    return regions


def _read_card(
    sysfs: Sysfs, folders: list[_Folder], managers: list[_Folder], ids: Mapping[int, str | None]
) -> CardRegions:
    """Return the regions of a card; ``ids`` has the function id of each port by port number.

    The id is None for a port that does not show it.
    """
    base = [folder for folder in folders if _children(sysfs, folder, _FME)]
    parts = [folder for folder in folders if folder not in base]
    info: dict[str, str] = {}
    ports_num: int | None = None
    for folder in base:
        engine = folder.path / _children(sysfs, folder, _FME)[0]
        names = {"static_region_id": "bitstream_id", "static_region_metadata": "bitstream_metadata"}
        values = {key: sysfs.read_text(engine / name) for key, name in names.items()}
        ports_num = sysfs.read_int(engine / "ports_num")
        info = {key: value for key, value in values.items() if value}
        if ports_num is not None:
            info["ports"] = str(ports_num)
    regions: list[Region] = []
    # A DFL card without a port that can be reconfigured has its base region only.
    for number, folder in enumerate(parts or base):
        fme = next((part for part in folder.path.parts if _FME.fullmatch(part)), None)
        # The order says which port a region has only if each port has one. A wrong port would
        # reconfigure the region of another server.
        port = number if fme is not None and len(parts) == ports_num else None
        manager = _nearest(folder, managers)
        regions.append(
            Region(
                name=folder.name,
                interface_id=_read_id(sysfs, folder.path / "compat_id"),
                function_id=None if port is None else ids.get(port),
                manager=None if manager is None else manager.name,
                has_firmware=manager is not None and "firmware" in sysfs.list_names(manager.path),
                fme=fme,
                port=port,
                in_reset=port is not None and port in ids and ids[port] is None,  # see ``Region``
                identity=sysfs.identity(folder.path),
            )
        )
    return CardRegions(tuple(regions), info)


def _read_ports(sysfs: Sysfs, folders: Iterable[_Folder]) -> dict[int, str | None]:
    """Return the function ids in these base regions by port number; None if a port shows none."""
    # A port that is assigned to a virtual function is in the base region of that function.
    function_ids: dict[int, str | None] = {}
    for folder in folders:
        for name in _children(sysfs, folder, _PORT):
            number = sysfs.read_int(folder.path / name / "id")
            if number is not None:
                function_ids[number] = _read_id(sysfs, folder.path / name / "afu_id")
    return function_ids


def _nearest(region: _Folder, managers: Iterable[_Folder]) -> _Folder | None:
    """Return the manager whose path has most folders in common with a region; None for a tie."""
    ranked: dict[int, list[_Folder]] = {}
    for manager in managers:
        shared = 0
        for one, other in zip(region.path.parts, manager.path.parts, strict=False):
            if one != other:
                break
            shared += 1
        ranked.setdefault(shared, []).append(manager)
    best = ranked[max(ranked)] if ranked else []
    return best[0] if len(best) == 1 else None


def _entries(sysfs: Sysfs, folder: Path, form: re.Pattern[str]) -> list[_Folder]:
    """Return the entries of a sysfs class that belong to PCI functions, ordered by number."""
    found: list[_Folder] = []
    for name in sysfs.list_names(folder):
        path = sysfs.resolve(folder / name, strict=True)
        if form.fullmatch(name) and path is not None and (functions := functions_on(path)):
            found.append(_Folder(name, path, functions[0]))
    # By number: as text, region10 is before region2.
    return sorted(found, key=lambda entry: (len(entry.name), entry.name))


def _children(sysfs: Sysfs, folder: _Folder, form: re.Pattern[str]) -> list[str]:
    return [name for name in sysfs.list_names(folder.path) if form.fullmatch(name)]


def _read_id(sysfs: Sysfs, path: Path) -> str | None:
    text = (sysfs.read_text(path) or "").lower()
    return text if _ID.fullmatch(text) else None


INTEL = "8086"
AWS = "1d0f"


class ProgrammerName(StrEnum):
    """Ways to load an image; ``images`` has a class for each except AUTO and NONE."""

    AUTO = "auto"
    FIRMWARE = "firmware"  # attribute "firmware" of the FPGA manager
    DFL = "dfl"  # ioctl of the FPGA management engine
    FPGASUPDATE = "fpgasupdate"
    FPGACONF = "fpgaconf"
    XBMGMT = "xbmgmt"
    XBUTIL = "xbutil"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Family:
    """Cards of one kind; ``programmer`` is the way to load images unless an option sets another.

    The user function of an Alveo card has the id of its management function plus one.
    """

    name: str
    programmer: ProgrammerName
    has_management: bool = False


def _intel(name: str, programmer: ProgrammerName, *products: str) -> dict[tuple[str, str], Family]:
    family = Family(name, programmer)
    return {(INTEL, product): family for product in products}


# Families by vendor and product id of the functions that are offered.
FAMILIES: Mapping[tuple[str, str], Family] = {
    # The physical function, then the virtual ones.
    **_intel("Intel PAC Arria 10", ProgrammerName.DFL, "09c4", "09c5"),
    **_intel("Intel PAC D5005", ProgrammerName.DFL, "0b2b", "0b2c"),
    # fpgasupdate writes the flash of an N3000: the new function needs a restart of the card
    # (doc/src/fpga_tools/fpgasupdate/fpgasupdate.md of OPAE).
    **_intel("Intel PAC N3000", ProgrammerName.NONE, "0b30"),
    **_intel("Intel DFL N6000", ProgrammerName.DFL, "bcce", "bccf"),
    **_intel("Intel integrated FPGA", ProgrammerName.DFL, "bcbd", "bcbf", "bcc0", "bcc1"),
    **{
        (classes.VENDOR, product): Family(name, ProgrammerName.XBMGMT, has_management=True)
        for product, name in classes.USER_FUNCTIONS.items()
    },
    # Its tools, ami_tool and v80-smi, write the flash of the card.
    **{
        (classes.VENDOR, product): Family(classes.V80, ProgrammerName.NONE)
        for product in classes.V80_USER_FUNCTIONS
    },
    # The function of an image that is cleared, and those of Amazon's examples. AWS loads images by
    # their names, not from files.
    **{(AWS, product): Family("AWS F1", ProgrammerName.NONE) for product in ("1042",)},
    **{(AWS, product): Family("AWS F2", ProgrammerName.NONE) for product in ("9048",)},
    **{
        (AWS, product): Family("AWS image", ProgrammerName.NONE)
        for product in ("f000", "f001", "f002", "f004", "f010", "f011")
    },
}


def find_family(vendor: str, product: str) -> Family | None:
    """Return the family of a PCI function with these ids; None if the ids are unknown."""
    return FAMILIES.get((vendor, product))


_SUFFIX = "-region"


def list_regions(sysfs: Sysfs, card: PciFunction, found: CardRegions | None) -> list[Region]:
    """Return the regions of a card; ``found`` are the regions that the kernel shows.

    The kernel shows no region of an Alveo card. Such a card has one region, with the identity of
    the sysfs folder of its user function; a function that is removed and added again has a new
    identity.
    """
    if found is not None and found.regions:
        return list(found.regions)
    family = find_family(card.vendor, card.product)
    if family is None or not family.has_management:
        return []
    return [Region("", identity=sysfs.identity(PCI_DEVICES / card.address))]


def find_management(card: PciFunction, functions: Mapping[str, PciFunction]) -> str | None:
    """Return the address of the management PCI function of an Alveo card, or None."""
    family = find_family(card.vendor, card.product)
    if family is None or not family.has_management:
        return None
    slot, product = card.address.rpartition(".")[0], classes.management_product(card.product)
    for other in functions.values():
        if other.address.rpartition(".")[0] == slot and other.product == product:
            return other.address
    return None


def split(
    sysfs: Sysfs, card: Device, function: PciFunction, count: int
) -> list[tuple[int, Deployable]]:
    """Return the deployables of a card, each with the number of its region.

    ``count`` is the number of regions. Return an empty list if it is not known which PCI function
    uses which region. If there are as many as ports, virtual function ``n`` is taken to have port
    ``n``: Linux does not say it.
    """
    # A virtual function has one port (``Documentation/fpga/dfl.rst``, "FPGA virtualization";
    # ``dfl_fpga_cdev_config_ports_vf`` of ``drivers/fpga/dfl.c``).
    if count == 1:
        return [(0, deployable) for deployable in card.deployables]
    if not count or len(card.deployables) != 1 or function.numvfs != count:
        return []
    whole = card.deployables[0]
    handles = {handle.address: handle for handle in whole.handles}
    parts: list[tuple[int, Deployable]] = []
    for number in range(count):
        virtual = sysfs.read_link(PCI_DEVICES / card.address / f"virtfn{number}")
        if virtual is None or virtual not in handles:
            continue
        address = card.address if number == 0 else f"{card.address}{_SUFFIX}{number}"
        parts.append((number, replace(whole, address=address, handles=(handles[virtual],))))
    # A handle that belongs to no region would no longer be offered.
    return parts if len(parts) == len(handles) else []


def parse_region(card: str, deployable: str, count: int) -> int | None:
    """Return the number of the region of a deployable; None if the deployable has no region.

    ``count`` is the number of regions of the card. If it is 1, all deployables have region 0.
    """
    if deployable == card or (count == 1 and deployable.startswith(f"{card}-")):
        return 0
    prefix, _, number = deployable.rpartition(_SUFFIX)
    if prefix != card or not (number.isascii() and number.isdigit()):
        return None
    return int(number) if int(number) < count else None
