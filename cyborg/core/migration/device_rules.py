# SPDX-License-Identifier: Apache-2.0
"""Convert what OpenStack Cyborg selects, such as ``passthrough_whitelist``, to rules of drivers.

The sources of the facts are its drivers, in ``cyborg/accelerator/drivers`` of release 17:
``pci/devspec.py``, ``gpu/nvidia/sysinfo.py``, ``nic/intel/sysinfo.py``, ``fpga``, ``qat``, ``ssd``,
``aichip``.

Their drivers know a device by its address, and most do not tell a virtual function from a card. A
rule for whole cards has ``functions=whole``.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cyborg.core.naming import make_custom_name

# The devices that each driver selects by itself, as rules of its counterpart.
DRIVER_RULES: Mapping[str, tuple[str, ...]] = {
    # ``lspci`` calls the classes 0300 and 0302 VGA compatible and 3D controllers.
    "nvidia_gpu_driver": ("vendor=10de,class=0300|0302,functions=whole",),
    "intel_fpga_driver": (
        "vendor=8086,product=09c4,functions=whole",
        "vendor=8086,product=09c5,functions=vf",
    ),
    "inspur_fpga_driver": ("vendor=1bd4,class=12,type=FPGA,functions=whole",),
    "xilinx_fpga_driver": ("vendor=10ee,class=12,functions=whole",),
    "intel_qat_driver": (
        "vendor=8086,product=37c8,functions=whole,resource_class=CUSTOM_QAT",
        "vendor=8086,product=37c9,functions=vf,resource_class=CUSTOM_QAT",
    ),
    # The virtual functions of the series 700 of Intel have the same ids, whatever the card.
    "intel_nic_driver": (
        "vendor=8086,product=158a|158b|1572,functions=whole",
        "vendor=8086,product=154c|1571,functions=vf",
    ),
    "inspur_nvme_ssd_driver": ("vendor=1bd4,functions=whole,resource_class=CUSTOM_SSD",),
    "huawei_ascend_driver": ("vendor=19e5,product=d100,functions=whole",),
}

# The resource class that the other service gives to the devices of a list, by backend. Device
# profiles of the former cloud name these classes.
CLASSES: Mapping[str, str] = {"generic": "CUSTOM_PCI", "nvme": "CUSTOM_SSD"}

_WIDTHS = {"domain": 4, "bus": 2, "slot": 2, "function": 1}
_MAXIMA = {"domain": 0xFFFF, "bus": 0xFF, "slot": 0x1F, "function": 7}
_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_MDEV_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
# As the driver nic reads the option physical_networks.
_NETWORK = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_INTERFACE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
_MAX_PATTERNS = 16
_ERASE: Mapping[tuple[str, str], str | None] = {
    ("auto", "auto"): None,  # the strongest method that the drive supports
    ("auto", "crypto"): "crypto",
    ("auto", "block"): "block",
    ("sanitize", "auto"): "sanitize",
    ("sanitize", "crypto"): "crypto",
    ("sanitize", "block"): "block",
}


@dataclass(slots=True)
class Rules:
    """Rules, and lines that the operator must write because no rule has the same meaning."""

    rules: list[str] = field(default_factory=list)
    by_hand: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class _NoRuleError(Exception):
    """A device specification without a rule of the same meaning; the message is the remedy."""


def convert_specs(backend: str, values: Sequence[str]) -> Rules:
    """Convert JSON objects that select PCI functions: ``passthrough_whitelist``, ``device_spec``.

    ``backend`` is ``generic`` or ``nvme``.
    """
    result = Rules()
    for value in values:
        try:
            loaded = json.loads(value)
        except ValueError:
            result.by_hand.append(f"{value!r} is not JSON: write [{backend}] devices = RULE")
            continue
        for spec in loaded if isinstance(loaded, list) else [loaded]:
            try:
                result.rules.append(_make_rule(backend, spec, result.remarks))
            except _NoRuleError as exc:
                result.by_hand.append(f"{json.dumps(spec)} {exc}")
    return result


def _make_rule(backend: str, spec: Any, remarks: list[str]) -> str:
    """Return the rule for a [pci] device_spec; add what it cannot express to ``remarks``.

    Raise _NoRuleError.
    """
    if not isinstance(spec, dict):
        raise _NoRuleError(f"is not an object: write [{backend}] devices = RULE")
    if "devname" in spec:
        raise _NoRuleError(
            "names a network interface: write [nic] devices = address=ADDRESS with the PCI address "
            f"of {spec['devname']!r}"
        )
    ids = {
        key: _parse_id(spec[name], backend)
        for name, key in (("vendor_id", "vendor"), ("product_id", "product"))
        if str(spec.get(name, "*")).strip() != "*"
    }
    patterns = _address_patterns(spec.get("address") or "*:*:*.*", backend)
    if not ids and patterns == ["*"]:
        raise _NoRuleError(
            f"selects every PCI function: write [{backend}] devices = address=* if that is meant"
        )
    parts = [f"{key}={value}" for key, value in ids.items()]
    if patterns != ["*"]:
        parts.append(f"address={'|'.join(patterns)}")
    parts.append(f"resource_class={CLASSES[backend]}")
    known = {"vendor_id", "product_id", "address"}
    if backend == "nvme":
        known |= {"clear_action", "clear_strategy"}
        # A virtual function of a drive has the ids of the drive.
        parts += ["functions=whole", *_erase(spec)]
    if ignored := sorted(spec.keys() - known):
        remarks.append(f"{', '.join(ignored)} of {json.dumps(spec)} had no effect")
    return ",".join(parts)


def _parse_id(value: Any, backend: str) -> str:
    try:
        number = int(value.strip(), 16)
    except (AttributeError, ValueError):
        number = -1
    if not 0 <= number <= 0xFFFF:
        raise _NoRuleError(
            f"has the id {value!r}: write [{backend}] devices = RULE with four hexadecimal digits"
        )
    return f"{number:04x}"


def _erase(spec: Mapping[str, Any]) -> list[str]:
    methods = (spec.get("clear_action", "auto"), spec.get("clear_strategy", "auto"))
    if not all(isinstance(method, str) for method in methods) or methods not in _ERASE:
        raise _NoRuleError(
            "has a method of erasure without counterpart: write [nvme] devices = RULE, with "
            "erase=overwrite for zeros"
        )
    method = _ERASE[methods]
    return [] if method is None else [f"erase={method}"]


def _address_patterns(address: Any, backend: str) -> list[str]:
    """Return shell patterns for an address: text with ``*``, or regular expressions by field."""
    fields = None
    if isinstance(address, str):
        fields = _parse_glob(address)
    elif isinstance(address, dict) and address.keys() <= _WIDTHS.keys():
        fields = _parse_expressions(address)
    # An expression that matches no value of its field selects nothing: there is no pattern for it.
    if fields is not None and all(fields):
        domains, buses, slots, functions = fields
        if len(domains) * len(buses) * len(slots) <= _MAX_PATTERNS:
            function = functions[0] if len(functions) == 1 else f"[{''.join(functions)}]"
            patterns = [
                f"{domain}:{bus}:{slot}.{function}"
                for domain, bus, slot in itertools.product(domains, buses, slots)
            ]
            return ["*"] if patterns == ["*:*:*.*"] else patterns
    raise _NoRuleError(
        f"has an address without a pattern: write [{backend}] devices = address=PATTERN, such as "
        "address=0000:3d:00.*"
    )


def _parse_glob(text: str) -> list[list[str]] | None:
    """Return the values of the four fields, ``*`` for any; None if the text is invalid.

    Fields that are left out on the left, or empty, have any value.
    """
    rest, _, function = text.partition(".")
    fields = rest.split(":")
    if len(fields) > 3:
        return None
    parsed = []
    # ``3d:00.0`` has no domain and ``00.0`` no bus: they are filled up on the left.
    for name, part in zip(_WIDTHS, [*[""] * (3 - len(fields)), *fields, function], strict=True):
        value = part.strip()
        if value in ("", "*"):
            parsed.append(["*"])
            continue
        try:
            number = int(value, 16)
        except ValueError:
            return None
        if not 0 <= number <= _MAXIMA[name]:
            return None
        parsed.append([f"{number:0{_WIDTHS[name]}x}"])
    return parsed


def _parse_expressions(fields: Mapping[str, Any]) -> list[list[str]] | None:
    """Return the values of the four fields that regular expressions match, ``*`` for any.

    An expression matches at the beginning of a field. None if one is invalid.
    """
    parsed = []
    for name, width in _WIDTHS.items():
        try:
            expression = re.compile(fields.get(name, ".*"))
        except (re.error, TypeError):
            return None
        values = [f"{number:0{width}x}" for number in range(_MAXIMA[name] + 1)]
        # match and not fullmatch, as the former service does.
        matched = [value for value in values if expression.match(value)]
        parsed.append(["*"] if matched == values else matched)
    return parsed


def convert_mdev_type(mdev_type: str, addresses: Sequence[str], taken: set[str]) -> Rules:
    """Convert a type of ``enabled_vgpu_types`` and its ``device_addresses`` to ``mdev_types``.

    ``taken`` has the addresses of earlier types; the addresses of this type are added to it.
    """
    result = Rules()
    if not _MDEV_TYPE.fullmatch(mdev_type) or not addresses:
        result.by_hand.append(
            f"{mdev_type} has no device_addresses: write [gpu] mdev_types = "
            f"address=ADDRESS,type={mdev_type}"
        )
        return result
    for text in addresses:
        address = text.lower()
        if not _ADDRESS.fullmatch(address) or address in taken:
            result.by_hand.append(
                f"{text} is no PCI address, or has another type: write [gpu] mdev_types = "
                f"address=ADDRESS,type={mdev_type}"
            )
            continue
        taken.add(address)
        result.rules.append(f"address={address},type={mdev_type}")
    return result


def convert_nic_addresses(addresses: Sequence[str]) -> Rules:
    """Convert ``device_addresses`` of network cards and of virtual functions to rules."""
    result = Rules()
    for text in addresses:
        address = text.lower()
        if not _ADDRESS.fullmatch(address):
            result.by_hand.append(
                f"{text} is no PCI address: write [nic] devices = address=ADDRESS"
            )
            continue
        result.rules.append(f"vendor=8086,address={address}")
    if result.rules:
        result.by_hand.append(
            "if one is a card with virtual functions, which were all offered, write [nic] devices "
            "= address=PATTERN,functions=vf with their addresses"
        )
    return result


def convert_networks(values: Sequence[str]) -> Rules:
    """Convert ``physical_device_mappings``, such as ``physnet1:eth2|eth3``.

    The rule is the value of the option ``physical_networks``.
    """
    result = Rules()
    entries: list[str] = []
    # Two networks with one trait could not be told apart.
    network_of_trait: dict[str, str] = {}
    seen: set[str] = set()
    for network, interface in _pairs(values):
        # The driver nic would refuse other entries.
        valid = (
            _NETWORK.fullmatch(network)
            # Needed by ``make_custom_name`` below.
            and re.search(r"[A-Za-z0-9]", network)
            and _INTERFACE.fullmatch(interface)
            and interface not in {".", "..", *seen}
            and network_of_trait.setdefault(make_custom_name(network), network) == network
        )
        if not valid:
            result.by_hand.append(
                f"{network}:{interface} is invalid: write [nic] physical_networks = "
                "NETWORK:INTERFACE, each interface once"
            )
            continue
        seen.add(interface)
        entries.append(f"{network}:{interface}")
    result.rules += [",".join(entries)] if entries else []
    return result


def convert_functions(values: Sequence[str]) -> Rules:
    """Return the lines to write for ``function_device_mappings``, such as ``GTPv1:eth3|eth2``."""
    result = Rules()
    for name, interface in _pairs(values):
        trait = make_custom_name(name[:64]) if re.search(r"[A-Za-z0-9]", name) else "CUSTOM_NAME"
        result.by_hand.append(
            f"write [nic] devices = address=ADDRESS,traits={trait} before the other rules, with "
            f"the PCI address of {interface}, and a second line with those of its virtual functions"
        )
    return result


def _pairs(values: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for value in values:
        name, _, interfaces = value.partition(":")
        pairs += [(name.strip(), interface.strip()) for interface in interfaces.split("|")]
    return pairs
