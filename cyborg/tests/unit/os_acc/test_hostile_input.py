# SPDX-License-Identifier: Apache-2.0
"""Hostile values in each field: no injection, and each refusal is Invalid with a field.

Each test changes a valid argument at some places. The functions either refuse it, or return exactly
what an independent computation in this module expects: the XML is parsed again, and compared with
the elements and attributes that its device has. Each input is random with its own seed, which a
failure shows: ten thousand examples of hypothesis would take minutes instead of seconds.
"""

import copy
import random
import re
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode
from xml.etree import ElementTree

import pytest

from cyborg import os_acc
from cyborg.core.address import MdevAddress, PciAddress
from cyborg.core.errors import Invalid
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.unit.os_acc import samples

COUNTS = sample([1000, 10_000], 1000, mark=pytest.mark.long)
ATTRIBUTES = {
    "PCI": {"mode": "subsystem", "type": "pci", "managed": "yes"},
    "VFIO": {"mode": "subsystem", "type": "pci", "managed": "no"},
    "TEST_PCI": {"mode": "subsystem", "type": "pci", "managed": "no"},
    "MDEV": {"mode": "subsystem", "type": "mdev", "managed": "no", "model": "vfio-pci"},
}
FIELDS = re.compile(
    r"arq|uuid|state|attach_handle_(type|uuid|info)|attach_handle_info\['\w+'\]|domain_xml|context"
    r"|hostname|instance_uuid|providers|port_uuid|(groups|arqs)(\[\d+\](\[.+\])?)?|mappings(\['.+'\])?",
    re.DOTALL,
)

FRAGMENTS = (
    *("'", '"', "<", ">", "&", "&amp;", "&#0;", "]]>", "<!--", "<?x?>", "\\", "%", "{}", "%s"),
    *("\x00", "\n", "\r", "\t", " ", "\x1b", "\ud800", "\ufffe", "\u2028", "\u0660", "\uff11"),
    *("'/><hostdev mode='capabilities'", "--><source/>", "<!DOCTYPE a>", "&b;", "xmlns:x='y'"),
    *("0x3d", "-1", "+1", "1_0", "1e3", "3d", "00", "0000", "1f", "7", "fFfF", "00000000"),
    *("PCI", "MDEV", "TEST_PCI", "VFIO", "pci", "Bound", "FPGA", "required", "nvidia-35", "ua-x"),
    *("resources:FPGA", "trait:CUSTOM_A", "accel:x", "CUSTOM_A&limit=1", "device_profile_0"),
    *("0" * 32, samples.ARQ, samples.PROVIDER.upper(), f"{{{samples.HANDLE}}}"),
)
# Python refuses to convert an integer of more than 4300 digits to text.
NUMBERS = (0, 1, -1, 2**31, 2**63, 10**5000, -(10**5000), 0.5, -1e300, float("nan"), float("inf"))


def make_text(chance: random.Random) -> str:
    """Return a fragment, several, a very long text, or characters of all planes of Unicode."""
    match chance.randrange(8):
        case 0:
            return chance.choice("x0<") * 70_000
        case 1 | 2 | 3:
            return chance.choice(FRAGMENTS)
        case 4 | 5:
            return "".join(chance.choices(FRAGMENTS, k=chance.randint(2, 4)))
        case _:
            last = chance.choice([127, 255, sys.maxunicode])
            return "".join(chr(chance.randint(0, last)) for _ in range(chance.randrange(20)))


def make_value(chance: random.Random, depth: int = 2) -> Any:
    """Return a value of any type that JSON has, with lists and objects up to a depth."""
    if depth and chance.random() < 0.3:
        items = [make_value(chance, depth - 1) for _ in range(chance.randrange(4))]
        return items if chance.random() < 0.5 else {make_text(chance): item for item in items}
    match chance.randrange(6):
        case 0:
            return chance.choice([None, True, False])
        case 1:
            return chance.choice(NUMBERS)
        case 2:
            return chance.randint(-(10 ** chance.randrange(1, 40)), 10**20)
        case _:
            return make_text(chance)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in nested lists and objects."""
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(child, (*path, key))


def change(chance: random.Random, value: Any) -> Any:
    """Return a copy of the value with one place removed, renamed, or replaced."""
    path = chance.choice(list(places(value)))
    if not path:
        # An argument that is no object at all is soon tested.
        return make_value(chance) if chance.random() < 0.1 else value
    changed = copy.deepcopy(value)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    verb = chance.choice(["replace", "replace", "mix", "remove", "rename"])
    old = parent[path[-1]]
    if verb == "mix" and isinstance(old, str):
        cut = chance.randint(0, len(old))
        parent[path[-1]] = old[:cut] + make_text(chance) + old[cut:]
    elif verb == "remove":
        del parent[path[-1]]
    elif verb == "rename" and isinstance(parent, dict):
        parent[make_text(chance)] = parent.pop(path[-1])
    else:
        parent[path[-1]] = make_value(chance)
    return changed


def make_hostile(chance: random.Random, value: Any) -> Any:
    """Return a value with up to three changes."""
    for _ in range(chance.choice([0, 1, 1, 2, 3])):
        if not isinstance(value, dict):
            break
        value = change(chance, value)
    return value


def make_uuid(chance: random.Random) -> str:
    """Return a random UUID."""
    return str(uuid.UUID(int=chance.getrandbits(128), version=4))


def make_arq(chance: random.Random) -> dict[str, Any]:
    """Return a valid ARQ of any type."""
    kind = chance.choice(["PCI", "TEST_PCI", "MDEV", "VFIO"])
    numbers = (chance.randrange(0x10000), chance.randrange(256), chance.randint(1, 31))
    card = PciAddress(*numbers, chance.randrange(8))
    if kind != "MDEV":
        return samples.make_arq(kind, uuid=make_uuid(chance), attach_handle_info=card.attach_info())
    address = MdevAddress(card, "nvidia-35", make_uuid(chance))
    info = chance.choice([address.attach_info(), {"parent": "mtty", "asked_type": "mtty-2"}])
    values = {"attach_handle_uuid": address.uuid, "attach_handle_info": info}
    return samples.make_arq(kind, uuid=make_uuid(chance), **values)


def make_arguments(chance: random.Random) -> dict[str, Any]:
    """Return valid arguments of ``parse``."""
    first, second, instance = (make_uuid(chance) for _ in range(3))
    return {
        "context": samples.make_context(),
        "hostname": chance.choice(["compute-1", "node-2.example.org"]),
        "instance_uuid": instance,
        "mappings": samples.make_mappings(device_profile_0=[first], device_profile_1=[second]),
        "providers": chance.choice([None, [first, second]]),
    }


class Tally:
    """Counts of accepted and refused inputs, which must both occur."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the result of a call, or None if it refuses an argument correctly."""
        try:
            result = function(*arguments, **options)
        except Invalid as exc:
            assert FIELDS.fullmatch(exc.details["field"]), exc.details
            assert 0 < len(exc.message) < 2000
            self.counts["refused"] += 1
            return None
        self.counts["accepted"] += 1
        return result

    def check(self, count: int) -> None:
        """Check that most inputs were tried, and that neither result is rare."""
        assert self.counts.total() > count / 2, self.counts
        assert min(self.counts.values()) > count / 25, self.counts


def flat(element: ElementTree.Element) -> list[tuple[int, str, dict[str, str], str]]:
    """Return each element with its depth, tag, attributes and text."""
    found: list[tuple[int, str, dict[str, str], str]] = []

    def visit(node: ElementTree.Element, depth: int) -> None:
        found.append((depth, node.tag, dict(node.attrib), (node.text or "") + (node.tail or "")))
        for child in node:
            visit(child, depth + 1)

    visit(element, 0)
    return found


def expected_device(arq: Any, alias: bool) -> list[tuple[int, str, dict[str, str], str]]:
    """Return what the XML of an accepted ARQ must have."""
    kind, info = arq["attach_handle_type"], arq["attach_handle_info"]
    if kind == "MDEV":
        address = {"uuid": str(uuid.UUID(arq["attach_handle_uuid"]))}
    else:
        widths = (("domain", "domain", 4), ("bus", "bus", 2), ("slot", "device", 2))
        address = {name: f"0x{int(info[key], 16):0{width}x}" for name, key, width in widths}
        if kind == "TEST_PCI":
            address["domain"] = f"0x{int(info['domain'], 16) | 1 << 31:08x}"
        address["function"] = f"0x{int(info['function'])}"
    device = [
        (0, "hostdev", ATTRIBUTES[kind], ""),
        (1, "source", {}, ""),
        (2, "address", address, ""),
    ]
    if alias:
        device.append((1, "alias", {"name": f"ua-cyborg-{uuid.UUID(arq['uuid'])}"}, ""))
    return device


def run(
    count: int, make: Callable[[random.Random], Any], check: Callable[[Tally, Any], None]
) -> None:
    """Check ``count`` random values."""
    tally = Tally()
    for seed in range(count):
        chance = random.Random(seed)
        value = make_hostile(chance, make(chance))
        try:
            check(tally, value)
        except BaseException as exc:
            exc.add_note(f"seed {seed}")
            raise
    tally.check(count)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", COUNTS)
def test_no_arq_injects_xml(count: int) -> None:
    def check(tally: Tally, arq: Any) -> None:
        xml = tally.call(os_acc.attach, arq)
        if xml is not None:
            assert arq["state"] == "Bound"
            assert flat(ElementTree.fromstring(xml)) == expected_device(arq, alias=True)
        config = tally.call(os_acc.get_config, arq)
        xml = tally.call(os_acc.detach, arq)
        assert (config is None) == (xml is None)
        if xml is not None:
            assert flat(ElementTree.fromstring(xml)) == expected_device(arq, alias=False)
            words = [value for value in config.values() if not re.fullmatch(r"[\w.:-]+", value)]
            assert words == []

    run(count, make_arq, check)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", COUNTS)
def test_no_context_injects_parameters_of_the_query(count: int) -> None:
    def check(tally: Tally, context: Any) -> None:
        groups = tally.call(os_acc.to_request_groups, context)
        if groups is None:
            return
        names = [f"device_profile_{number}" for number in range(len(context["groups"]))]
        assert [group.name for group in groups] == names
        query = dict(parse_qsl(urlencode(os_acc.build_query(groups)), strict_parsing=True))
        keys = {f"{kind}{name}" for name in names for kind in ("resources", "required")}
        assert set(query) - {"group_policy"} == keys
        for name, body in zip(names, context["groups"], strict=True):
            stripped = {key.strip(): value for key, value in body.items()}
            resources = {
                key.removeprefix("resources:"): int(value)
                for key, value in stripped.items()
                if key.startswith("resources:")
            }
            required = {k[6:] for k, v in stripped.items() if k[:6] == "trait:" and v[0] == "r"}
            forbidden = {k[6:] for k, v in stripped.items() if k[:6] == "trait:" and v[0] == "f"}
            parts = (part.split(":") for part in query[f"resources{name}"].split(","))
            assert {key: int(units) for key, units in parts} == resources
            traits = required | {"OWNER_CYBORG"} | {f"!{trait}" for trait in forbidden}
            assert set(query[f"required{name}"].split(",")) == traits
            assert re.fullmatch(r"[A-Z0-9_:,!]+", query[f"resources{name}"])

    run(count, lambda _: samples.make_context(), check)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", COUNTS)
def test_no_argument_of_parse_binds_another_provider(count: int) -> None:
    names = ("context", "hostname", "instance_uuid", "mappings", "providers")

    def check(tally: Tally, changed: Any) -> None:
        if not isinstance(changed, dict) or not set(changed) <= set(names):
            return
        complete = {**dict.fromkeys(names), **changed}
        parameters = tally.call(os_acc.parse, **complete)
        if parameters is None:
            return
        mappings = complete["mappings"]
        numbers = Counter(arq["device_profile_group_id"] for arq in complete["context"]["arqs"])
        for number, group in enumerate(complete["context"]["groups"]):
            units = (int(v) for k, v in group.items() if k.strip().startswith("resources:"))
            assert numbers[number] == sum(units)
        assert len(parameters) == len(complete["context"]["arqs"])
        for item, arq in zip(parameters, complete["context"]["arqs"], strict=True):
            number = arq["device_profile_group_id"]
            key = f"device_profile_{number}"
            (provider,) = mappings[key] if key in mappings else mappings[str(number)]
            assert item.device_rp_uuid == str(uuid.UUID(provider))
            known = complete["providers"]
            assert known is None or item.device_rp_uuid in map(str, map(uuid.UUID, known))
            assert item.arq_uuid == str(uuid.UUID(arq["uuid"]))
            assert item.instance_uuid == str(uuid.UUID(complete["instance_uuid"]))
            assert item.hostname == complete["hostname"]
            assert item.hostname.isprintable()
        assert len(os_acc.build_patch(parameters)) == len(parameters)

    run(count, make_arguments, check)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", COUNTS)
def test_no_domain_fails_the_search_for_a_device(count: int) -> None:
    arq = samples.make_arq()
    device = re.split(r"(?<=[ >\"])", os_acc.attach(arq))
    pieces = ["<domain", ">", "<devices>", "<disk/>", *device, "</devices>", "</domain>"]

    def check(tally: Tally, changed: Any) -> None:
        if not isinstance(changed, dict):
            return
        xml = "".join(piece for piece in changed.values() if isinstance(piece, str))
        alias = tally.call(os_acc.find_alias, arq, xml)
        assert alias is None or isinstance(alias, str)

    run(count, lambda _: dict(enumerate(pieces)), check)
