# SPDX-License-Identifier: Apache-2.0
"""The documentation names what there is: a thing that is added and not told of fails here."""

import importlib.util
import re
from importlib import metadata
from pathlib import Path

import pytest
from oslo_config import cfg

import cyborg
import cyborg.conf
from cyborg.api import resource, routes, versions
from cyborg.conf import opts
from cyborg.core import errors, states
from cyborg.drivers.base import Driver
from cyborg.drivers.fake import FakeDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.rules import MATCHERS, RESULTS
from cyborg.policies import list_rules
from cyborg.rpc.contract import CONTRACTS

ROOT = Path(cyborg.__file__).parents[1]
DOC = ROOT / "doc" / "source"
PAGES = sorted(p for p in DOC.rglob("*.rst") if "_generated" not in p.parts)


def page(name: str) -> str:
    """Return the text of one page."""
    return (DOC / f"{name}.rst").read_text(encoding="utf-8")


def ours(group: str) -> list[str]:
    """Return the names of our own entry points of a group."""
    return sorted(e.name for e in metadata.distribution("cyborg").entry_points if e.group == group)


def test_every_registered_option_is_generated() -> None:
    """The configuration pages are made from list_opts; so that must have what register has."""
    conf = cfg.ConfigOpts()
    cyborg.conf.register(conf)
    told = {(g, o.dest) for g, options in opts.list_opts() for o in options}
    # What oslo.config has of its own, and what keystoneauth keeps for old files, is not for these.
    own = set(cfg.ConfigOpts()._opts) | {"shell_completion"}
    found = {("DEFAULT", name): info["opt"] for name, info in conf._opts.items() if name not in own}
    for group in conf._groups.values():
        found |= {(group.name, name): info["opt"] for name, info in group._opts.items()}
    registered = {key for key, option in found.items() if not option.deprecated_for_removal}
    assert sorted(registered - told) == []


def test_every_option_explains_itself() -> None:
    options = [(group, option) for group, found in opts.list_opts() for option in found]
    assert [f"[{group}] {option.name}" for group, option in options if not option.help] == []


@pytest.mark.parametrize("driver", [FakeDriver, GenericDriver], ids=lambda d: d.name)
def test_every_driver_and_its_options(driver: type[Driver]) -> None:
    text = page("admin/drivers")
    assert re.search(rf"^{driver.name}\n=+$", text, re.MULTILINE)
    for option in driver.OPTIONS:
        assert re.search(rf"^``{option.name}``", text, re.MULTILINE), option.name


def test_every_driver_of_the_package_is_known_here() -> None:
    assert ours("cyborg.accelerator.driver") == ["fake", "generic"]


@pytest.mark.parametrize("key", [*MATCHERS, *RESULTS])
def test_every_key_of_a_rule(key: str) -> None:
    assert re.search(rf"^``{key}`` ", page("admin/drivers"), re.MULTILINE)


@pytest.mark.parametrize("program", ours("console_scripts"))
def test_every_program(program: str) -> None:
    text = page("cli/daemons") if program != "cyborg" else page("cli/cyborg")
    assert re.search(rf"^{program}\n=+$", text, re.MULTILINE)


def test_commands_are_generated() -> None:
    assert ".. autoprogram-cliff:: cyborg.cli" in page("cli/cyborg")
    for name in ours("cyborg.cli"):
        (entry,) = metadata.entry_points(group="cyborg.cli", name=name)
        assert entry.load().__doc__, f"{name} has no description"


@pytest.mark.parametrize("code", sorted(errors.KINDS))
def test_every_error_kind(code: str) -> None:
    assert f"\n``{code}`` " in page("admin/failures")


@pytest.mark.parametrize("state", states.RequestState)
def test_every_state_with_its_sentence(state: states.RequestState) -> None:
    sentence = re.escape(states.SENTENCES[state])
    text = page("contributor/architecture")
    assert re.search(rf"^``{state}`` +{sentence}$", text, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_every_message_of_the_bus(name: str) -> None:
    contract, text = CONTRACTS[name], page("contributor/rpc")
    assert f"\n{name} {contract.version}\n" in text
    for method, its in contract.methods.items():
        assert f"\n``{method}({', '.join(its.arguments)})``\n" in text


def test_every_route_of_the_api() -> None:
    text = page("api/index")
    plain = re.sub(r"\{uuid or name\}|\{uuid\}|[0-9a-f]{8}-[0-9a-f-]{27}", "*", text)
    known = {
        (method, path.split("?")[0])
        for method, path in re.findall(r"(GET|POST|PATCH|DELETE) /v2/([a-z_/*]+\S*?)[`\s]", plain)
    }
    table = routes.table(resource.Desk.__new__(resource.Desk))
    missing = {(m, path) for path, methods in table.items() for m in methods} - known
    assert sorted(missing) == []


@pytest.mark.parametrize("version", versions.VERSIONS)
def test_every_microversion(version: str) -> None:
    assert re.search(rf"^{version} ", page("api/index"), re.MULTILINE)


def test_every_policy_rule_says_what_it_is_for() -> None:
    assert ".. show-policy::" in page("configuration/policy")
    assert [rule.name for rule in list_rules() if not rule.description] == []


def test_every_environment_of_tox() -> None:
    names = re.findall(r"^\[testenv:(\w+)\]", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    for name in [*names, "py3"]:
        assert name == "venv" or f"``{name}``" in page("contributor/testing")


def test_every_variable_that_tests_read() -> None:
    sources = [*(ROOT / "cyborg").rglob("*.py"), *(ROOT / "tools").glob("[a-z]*")]
    used = {
        name
        for path in sources
        if path.is_file() and path.name != "test_docs.py"
        for name in re.findall(r"\bCYBORG_[A-Z_]+\b", path.read_text(encoding="utf-8"))
    }
    told = page("contributor/testing") + page("install/index")
    assert (
        sorted(n for n in used - {"CYBORG_TEST_RUN", "CYBORG_TEST_RECORD"} if n not in told) == []
    )


def test_links_to_files_of_the_source_lead_somewhere() -> None:
    form = re.compile(r"``((?:cyborg|tools|etc|doc|devstack|releasenotes)/[\w./-]+)``")
    made = {"doc/build/html", "etc/cyborg/cyborg.conf.sample", "etc/cyborg/policy.yaml.sample"}
    others = [ROOT / "README.rst", ROOT / "CONTRIBUTING.rst", ROOT / "devstack" / "README.rst"]
    found = {
        (path.name, name)
        for path in [*PAGES, *others]
        for name in form.findall(path.read_text(encoding="utf-8"))
    }
    assert sorted(f for f in found if f[1] not in made and not (ROOT / f[1]).exists()) == []


def test_links_to_pages_lead_somewhere() -> None:
    """Sphinx checks them too; this one is there while nobody builds."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r":doc:`(?:[^`<]*<)?([^`>]+)>?`", text):
            base = DOC if target.startswith("/") else path.parent
            assert (base / f"{target.lstrip('/')}.rst").resolve() in PAGES, (path.name, target)
        for block in re.findall(r"\.\. toctree::\n((?:   .*\n|\n)+)", text):
            for entry in re.findall(r"^   ([a-z][\w/-]*)$", block, re.MULTILINE):
                assert (path.parent / f"{entry}.rst") in PAGES, (path.name, entry)


def test_the_driver_of_the_guide_works() -> None:
    spec = importlib.util.spec_from_file_location(
        "acme_driver",
        DOC / "contributor" / "example_package" / "src" / "acme_accelerator" / "driver.py",
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    driver = module.AcmeDriver("cards", {"count": 2})
    assert [d.address for d in driver.discover()] == ["0000:5e:00.0", "0000:5f:00.0"]
    with pytest.raises(errors.Misconfigured, match=r"\[cards\] count: found 99; expected 1 to 16"):
        module.AcmeDriver("cards", {"count": 99})
