# SPDX-License-Identifier: Apache-2.0
"""The documentation is complete: additions that are not documented fail here."""

import ast
import dataclasses
import functools
import importlib.util
import re
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from oslo_config import cfg

import cyborg
import cyborg.conf
from cyborg import conf as own_options
from cyborg.api import controller, routes, versions
from cyborg.core import errors
from cyborg.core.attachments.attachment import FLOWS
from cyborg.core.inventory import capability
from cyborg.core.inventory.device import AttachHandle, Deployable, Device
from cyborg.drivers.base import Driver
from cyborg.drivers.device_sets.driver import DeviceSetDriver
from cyborg.drivers.fake import FakeDriver
from cyborg.drivers.pci.rules import KEYS
from cyborg.policies.rules import list_rules
from cyborg.testing import captures
from cyborg.testing.conformance.kit import Outcome, run_rules
from cyborg.testing.sysfs_tree import SysfsTree
from cyborg.tests.fixtures.drivers import all_drivers

pytestmark = pytest.mark.static

ROOT = Path(cyborg.__file__).parents[1]
DOC = ROOT / "doc" / "source"
PAGES = sorted(p for p in DOC.rglob("*.rst") if "_generated" not in p.parts)


@functools.cache
def page(name: str) -> str:
    """Return the text of one page."""
    return (DOC / f"{name}.rst").read_text(encoding="utf-8")


def entry_points(group: str) -> list[str]:
    """Return the names of Cyborg's entry points of a group."""
    return sorted(e.name for e in metadata.distribution("cyborg").entry_points if e.group == group)


def test_list_opts_has_every_registered_option() -> None:
    """The configuration pages are generated from list_opts."""
    conf = cfg.ConfigOpts()
    cyborg.conf.register(conf)
    listed = {(g, o.dest) for g, options in own_options.list_opts() for o in options}
    # Options of oslo.config itself and deprecated options of keystoneauth are not documented.
    own = set(cfg.ConfigOpts()._opts) | {"shell_completion"}
    all_options = {
        ("DEFAULT", name): info["opt"] for name, info in conf._opts.items() if name not in own
    }
    for group in conf._groups.values():
        all_options |= {(group.name, name): info["opt"] for name, info in group._opts.items()}
    registered = {key for key, option in all_options.items() if not option.deprecated_for_removal}
    assert sorted(registered - listed) == []


def test_options_have_help() -> None:
    options = [
        (group, option)
        for group, group_options in own_options.list_opts()
        for option in group_options
    ]
    assert [f"[{group}] {option.name}" for group, option in options if not option.help] == []


def test_help_is_of_declared_options() -> None:
    declared = {
        (group.name, option.name) for group in own_options.GROUPS for option in group.options
    }
    texts = ConfigParser(interpolation=None, delimiters=("=",), default_section="every section")
    texts.read(ROOT / "cyborg" / "conf" / "help.ini", encoding="utf-8")
    described = {(name, key) for name in texts.sections() for key in texts[name]}
    described -= {(name, key) for name in texts.sections() for key in texts.defaults()}
    assert sorted(described - declared) == []


@pytest.mark.parametrize("driver", all_drivers().values(), ids=lambda d: d.name)
def test_docs_have_driver_and_its_options(driver: type[Driver]) -> None:
    text = page(f"admin/drivers/{driver.name}")
    assert re.search(rf"^{driver.name}\n=+$", text, re.MULTILINE)
    if driver is not FakeDriver:
        text += page("admin/drivers/generic")
    for option in driver.OPTIONS:
        assert re.search(rf"^``{option.name}``", text, re.MULTILINE), option.name


def test_entry_points_have_expected_drivers() -> None:
    """The other tests of all drivers follow the entry points, so that they notice no loss."""
    names = ["crypto", "fake", "fpga", "generic", "gpu", "nic", "nvme"]
    assert list(all_drivers()) == names
    assert [driver.name for driver in all_drivers().values()] == names


def test_tree_of_pages_has_each_driver() -> None:
    pages = re.findall(r"^   drivers/(\w+)$", page("admin/drivers"), re.MULTILINE)
    assert sorted(pages) == list(all_drivers())


def test_page_of_device_sets_has_each_option() -> None:
    documented = re.findall(r"^``(\w+)``$", page("admin/device_sets"), re.MULTILINE)
    assert documented == [option.name for option in DeviceSetDriver.OPTIONS]


def hardware_table() -> dict[str, str]:
    """Return what the table of supported hardware says about proofs, by driver."""
    _, _, body = page("admin/hardware").partition(".. list-table::")
    rows = [re.split(r"^     - ", row, flags=re.MULTILINE) for row in body.split("\n   * - ")[2:]]
    assert {len(cells) for cells in rows} == {4}
    return {cells[0].strip().strip("`"): " ".join(cells[2].split()) for cells in rows}


def test_docs_of_hardware_have_each_driver_with_its_proofs() -> None:
    table = hardware_table()
    assert set(table) == {"all", *all_drivers()}
    reference = {"fake"}  # it drives no hardware
    assert {driver for driver, proofs in table.items() if "guest: " not in proofs} == reference


def test_docs_of_hardware_name_tests_in_the_guest_that_exist() -> None:
    tests = {path.name for path in (ROOT / "cyborg/tests/lab").glob("test_*.py")}
    for driver, proofs in hardware_table().items():
        for claim in re.findall(r"guest: (.*?)(?= Capture: |$)", proofs):
            named = re.findall(r"``(test_\w+\.py)``", claim)
            assert named, f"{driver}: no test is named for: {claim}"
            assert sorted(set(named) - tests) == []


def test_docs_of_hardware_name_each_capture() -> None:
    names = r"Capture: ((?:``[\w-]+``(?:, )?)+)"
    found = [re.findall(names, proofs) for proofs in hardware_table().values()]
    captured = {name for texts in found for text in texts for name in re.findall(r"[\w-]+", text)}
    assert sorted(captured) == captures.capture_names()


@pytest.mark.parametrize("key", KEYS)
def test_docs_have_rule_key(key: str) -> None:
    assert re.search(rf"^``{key}`` ", page("admin/drivers/generic"), re.MULTILINE)


@pytest.mark.parametrize("program", entry_points("console_scripts"))
def test_docs_have_command(program: str) -> None:
    text = page(f"cli/{program}")
    for title in (program, "Synopsis", "Description", "Options"):
        assert re.search(rf"^{title}\n=+$", text, re.MULTILINE), title


@pytest.mark.slow
def test_docs_of_client_commands_are_generated() -> None:
    assert ".. autoprogram-cliff:: cyborg.cli" in page("cli/cyborg")
    for name in entry_points("cyborg.cli"):
        (entry,) = metadata.entry_points(group="cyborg.cli", name=name)
        assert entry.load().__doc__, f"{name} has no description"


@pytest.mark.parametrize("code", sorted(errors.KINDS))
def test_docs_have_error_code(code: str) -> None:
    assert f"\n``{code}`` " in page("admin/failures")


@pytest.mark.parametrize("key", ["arq", "device-context", "attachment", "job"])
def test_docs_draw_life_cycle_with_each_state_and_event(key: str) -> None:
    assert f"\n.. life-cycle:: {key}\n" in page("contributor/architecture")
    pytest.importorskip("sphinx", reason="what builds the documentation is not installed")
    extension = load_module("life_cycles", DOC / "_ext" / "life_cycles.py")
    life_cycle = extension.LIFE_CYCLES[key]
    chart = ElementTree.fromstring(extension.chart(life_cycle))
    texts = {element.text for element in chart.findall(".//{*}text")}
    assert texts >= {*life_cycle.states, *(found.event for found in life_cycle.transitions)}
    tables = extension.tables(life_cycle)
    for state in life_cycle.states:
        assert f"``{state}``\n" in tables
        assert getattr(state, "description", "") in tables


def test_docs_have_attachment_steps() -> None:
    assert "\n.. attachment-steps::\n" in page("contributor/architecture")
    pytest.importorskip("sphinx", reason="what builds the documentation is not installed")
    table = load_module("life_cycles", DOC / "_ext" / "life_cycles.py").steps()
    for mode, flow in FLOWS.items():
        assert f"``{mode}``\n" in table
        for step in (*flow.attach, *flow.detach):
            assert f"``{step}``" in table


def test_docs_have_api_routes() -> None:
    text = page("api/index")
    plain = re.sub(r"\{uuid or name\}|\{uuid\}|\{host\}|[0-9a-f]{8}-[0-9a-f-]{27}", "*", text)
    documented = {
        (method, path.split("?")[0])
        for method, path in re.findall(
            r"(GET|POST|PUT|PATCH|DELETE) /v2/([a-z_/*]+\S*?)[`\s]", plain
        )
    }
    table = routes.build_routes(controller.ApiContext.__new__(controller.ApiContext))
    missing = {(m, path) for path, methods in table.items() for m in methods} - documented
    assert sorted(missing) == []


@pytest.mark.parametrize("version", versions.VERSIONS)
def test_docs_have_microversion(version: str) -> None:
    assert re.search(rf"^{version} ", page("api/index"), re.MULTILINE)


def test_policy_rules_have_descriptions() -> None:
    assert ".. show-policy::" in page("configuration/policy")
    assert [rule.name for rule in list_rules() if not rule.description] == []


def test_docs_have_tox_environments() -> None:
    names = re.findall(r"^\[testenv:(\w+)\]", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    for name in [*names, "py3"]:
        assert name == "venv" or f"``{name}``" in page("contributor/testing")


@pytest.mark.slow
def test_docs_have_environment_variables() -> None:
    sources = [*(ROOT / "cyborg").rglob("*.py"), *(ROOT / "tools").glob("[a-z]*")]
    variables = {
        name
        for path in sources
        if path.is_file() and path.name != "test_docs.py"
        for name in re.findall(r"\bCYBORG_[A-Z_]+\b", path.read_text(encoding="utf-8"))
    }
    # Between processes of the tests only.
    variables -= {"CYBORG_TEST_GUESTS", "CYBORG_TEST_RECORD", "CYBORG_TEST_RUN"}
    text = page("contributor/testing") + page("install/index")
    text += (ROOT / "devstack" / "README.rst").read_text(encoding="utf-8")
    assert sorted(name for name in variables if name not in text) == []


def test_docs_file_references_exist() -> None:
    pattern = re.compile(r"``((?:cyborg|tools|etc|doc|devstack|releasenotes)/[\w./-]+)``")
    generated = {
        "doc/build/html",
        "releasenotes/build/html",
        "etc/cyborg/cyborg.conf.sample",
        "etc/cyborg/policy.yaml.sample",
    }
    others = [ROOT / "README.rst", ROOT / "CONTRIBUTING.rst", ROOT / "devstack" / "README.rst"]
    references = {
        (path.name, name)
        for path in [*PAGES, *others]
        for name in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert (
        sorted(f for f in references if f[1] not in generated and not (ROOT / f[1]).exists()) == []
    )


@pytest.mark.slow
def test_docs_function_references_exist() -> None:
    """A page names a function of a file as ``cyborg/x.py:function`` or ``:Class.method``."""
    pattern = re.compile(r"``(cyborg/[\w/]+\.py):([\w.]+)``")
    references = {m for path in PAGES for m in pattern.findall(path.read_text(encoding="utf-8"))}
    assert references
    missing = [
        f"{name}:{function}"
        for name, function in sorted(references)
        if not (ROOT / name).exists() or function not in defined_names(ROOT / name)
    ]
    assert missing == []


def test_docstrings_name_modules_and_files_that_exist() -> None:
    """Of ``cyborg.a.b.name`` the module must exist, of ``cyborg/a/b.py`` the file."""
    missing = []
    for path in sorted((ROOT / "cyborg").rglob("*.py")):
        text = path.read_text(encoding="utf-8") if "tests" not in path.parts else ""
        names = re.findall(r"``(cyborg(?:/\w+)+\.\w+)", text)
        missing += [f"{path.name}: {name}" for name in names if not (ROOT / name).exists()]
        names = re.findall(r"``(cyborg(?:\.[a-z_0-9]+)+(?:\.\w+)?)", text)
        missing += [f"{path.name}: {name}" for name in names if not names_code(name)]
    # The groups of entry points of drivers.
    assert [item for item in missing if "cyborg.accelerator." not in item] == []


def names_code(dotted: str) -> bool:
    """Return whether a dotted name is a package, a module, or a name that a module contains."""
    path = ROOT.joinpath(*dotted.split("."))
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    modules = (path.parent.with_suffix(".py"), path.parent / "__init__.py")
    return any(m.exists() and path.name in m.read_text(encoding="utf-8") for m in modules)


def defined_names(path: Path) -> set[str]:
    """Return the functions and classes of a file, and the methods as ``Class.method``."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    tops = [n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, kinds)]
    methods = {f"{top.name}.{n.name}" for top in tops for n in top.body if isinstance(n, kinds)}
    return {top.name for top in tops} | methods


def test_docs_page_references_exist() -> None:
    """Sphinx checks them too; this test needs no build."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r":doc:`(?:[^`<]*<)?([^`>]+)>?`", text):
            base = DOC if target.startswith("/") else path.parent
            assert (base / f"{target.lstrip('/')}.rst").resolve() in PAGES, (path.name, target)
        for block in re.findall(r"\.\. toctree::\n((?:   .*\n|\n)+)", text):
            for entry in re.findall(r"^   ([a-z][\w/-]*)$", block, re.MULTILINE):
                assert (path.parent / f"{entry}.rst") in PAGES, (path.name, entry)


def load_module(name: str, path: Path) -> Any:
    """Import a file of the documentation."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docs_example_driver_works() -> None:
    package = DOC / "contributor" / "example_package" / "src" / "acme_accelerator"
    module = load_module("acme_driver", package / "driver.py")
    driver = module.AcmeDriver("cards", {"count": 2})
    assert [d.address for d in driver.discover()] == ["0000:5e:00.0", "0000:5f:00.0"]
    with pytest.raises(errors.Misconfigured, match=r"\[cards\] count: found 99; expected 1 to 16"):
        module.AcmeDriver("cards", {"count": 99})


@pytest.mark.parametrize("value", [Device, Deployable, AttachHandle], ids=lambda v: v.__name__)
def test_docs_have_fields_of_driver_values(value: type[Any]) -> None:
    text = page("contributor/drivers")
    table = rf"^{value.__name__}\n\n=+  =+\n(.*?)\n\n"
    (table,) = re.findall(table, text, re.MULTILINE | re.DOTALL)
    documented = re.findall(r"^``(\w+)``", table, re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(value)]


def test_docs_example_card_passes_conformance(tmp_path: Path) -> None:
    module = load_module("portcard", DOC / "contributor" / "example_card" / "card.py")
    tree = SysfsTree(tmp_path / "sys")
    for function in (0, 1):
        tree.add_function(f"0000:3d:00.{function}", "1d6a", "0001", "108000")
    results = run_rules(module.PortCardDriver, {}, sysfs_root=tree.root)
    assert [r for r in results if r.outcome in (Outcome.FAILED, Outcome.BLOCKED)] == []
    (card,) = module.PortCardDriver("b", {}, tree.root).discover()
    assert [deployable.address for deployable in card.deployables] == [
        "0000:3d:00.0",
        "0000:3d:00.1",
    ]
    assert capability.from_board_info(card.vendor_board_info) == module.TREE
    traits = card.deployables[1].traits
    assert {"CUSTOM_CRYPTO_IPSEC_AES_GCM", "CUSTOM_PORTCARD_PORT_1"} <= traits
