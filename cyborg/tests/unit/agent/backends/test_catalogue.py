# SPDX-License-Identifier: Apache-2.0
"""The catalogue of installed drivers."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cyborg.agent.backends.catalogue import NAMESPACE, DriverCatalogue
from cyborg.core.drivers import registry
from cyborg.core.drivers.registry import Support
from cyborg.core.errors import DriverFailed, NotFound
from cyborg.drivers.fake import FakeDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.tests.fixtures.drivers import all_drivers
from cyborg.tests.fixtures.hosts.scripted_driver import LONG
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.fixtures.machine.processes import ends_within, wait_until

Install = Callable[..., None]

HEAD = "from cyborg.drivers.base import Driver, Option\n"
BODY = """
class Made(Driver):
    name, version = "made", "3"
    OPTIONS = (Option("one", "int", 1, "One."),)
    def discover(self):
        return []
    def setup(self):
        pass
    def measure(self, devices):
        return {}
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a driver where it can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name: str, code: str | None, thing: str = "Made", *, version: str = "1.0") -> None:
        module = f"cyborg_test_{name}_{tmp_path.name}".replace("-", "_")
        package = tmp_path / f"{name}-1.0.dist-info"
        package.mkdir(exist_ok=True)
        (package / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        (package / "entry_points.txt").write_text(f"[{NAMESPACE}]\n{name} = {module}:{thing}\n")
        if code is not None:
            (tmp_path / f"{module}.py").write_text(code)

    return put


def test_catalogue_has_installed_drivers() -> None:
    catalogue = DriverCatalogue()
    entries = {entry.name: entry for entry in catalogue.entries}
    assert set(entries) == set(all_drivers())
    fake = entries["fake"]
    assert (fake.version, fake.type, fake.support) == ("1.0", "FPGA", Support.REFERENCE)
    assert {"prepares", "programs", "measures"} <= set(fake.abilities)
    assert {option.name for option in fake.options} >= {"num_devices", "adopt", "release"}
    assert (entries["generic"].type, entries["generic"].support) == (None, Support.SUPPORTED)
    assert catalogue.driver("fake") is FakeDriver
    assert catalogue.driver("generic") is GenericDriver
    assert registry.fingerprint(catalogue.entries) == registry.fingerprint(
        DriverCatalogue().entries
    )


def test_scan_finds_newly_installed_driver(install: Install) -> None:
    catalogue = DriverCatalogue()
    with pytest.raises(
        NotFound, match=r"found 'mad'; expected one of the drivers of .*: crypto, fake, "
    ):
        catalogue.driver("mad")
    install("made", HEAD + BODY)
    catalogue.scan()
    (new_entry,) = [entry for entry in catalogue.entries if entry.name == "made"]
    assert (new_entry.version, new_entry.support, new_entry.abilities) == (
        "3",
        Support.UNKNOWN,
        ("measures",),
    )
    assert catalogue.driver("made").name == "made"
    with pytest.raises(NotFound, match=r"found 'mad' \(did you mean made\?\)"):
        catalogue.driver("mad")


BROKEN: Sequence[tuple[str | None, str]] = (
    (None, "ModuleNotFoundError: No module named"),
    ("import nothing_like_it_anywhere", "ModuleNotFoundError: No module named 'nothing_like"),
    ("import sys; sys.exit(3)", "SystemExit: 3"),
    ("assert False, 'not on this host'", "AssertionError: not on this host"),
    ("def", "SyntaxError: "),
    ("Made = 7", "TypeError: 7 is not a subclass of cyborg.drivers.base.Driver"),
    (HEAD + BODY.replace('"int", 1', '"int", object()'), "TypeError: Object of type object"),
    (HEAD + BODY.replace('"int"', '"real"'), "ValueError: unknown kind of option 'real'"),
    (HEAD + BODY.replace("version", "vision"), "AttributeError: "),
    (
        HEAD + BODY.replace('"made", "3"', '"made", 3'),
        "TypeError: version 3 of its class is",
    ),
    (HEAD + BODY.replace('"made", "3"', '"mad", "3"'), "ValueError: its class has the name"),
    (
        HEAD + BODY + '    UEVENT_SUBSYSTEMS = "pci"\n',
        "TypeError: its UEVENT_SUBSYSTEMS 'pci' is not a frozenset",
    ),
    (HEAD + BODY.replace('"int", 1', '"float", 1e999'), "ValueError: Out of range float"),
    (HEAD + BODY.replace('"One."', '"\\ud800"'), "UnicodeEncodeError: "),
    (HEAD + BODY.replace('"One."', '"x" * 40_000'), "ValueError: its metadata has 4"),
)


@pytest.mark.slow
def test_scan_broken_driver_does_not_affect_others(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    errors = {}
    for number, (code, error) in enumerate(BROKEN):
        name = f"made{number}"
        install(name, code and code.replace('"made"', f'"{name}"'))
        errors[name] = error
    catalogue = DriverCatalogue()
    entries = {entry.name: entry for entry in catalogue.entries}
    assert set(entries) == {*errors, *all_drivers()}
    for name, error in errors.items():
        assert str(entries[name].error).startswith(error), name
        assert entries[name].version is None
        with pytest.raises(DriverFailed, match=f"driver {name} cannot be loaded: "):
            catalogue.driver(name)
    catalogue.scan()
    loaded = [text for text in texts_of(caplog.records) if "Driver cannot be loaded" in text]
    said = [text.partition(" ")[0] for text in loaded]
    assert sorted(said) == sorted(f"[driver={name}]" for name in errors), "said once"
    assert registry.load(registry.dump(catalogue.entries)) == catalogue.entries


@pytest.mark.slow
def test_scan_repaired_driver_is_loaded(install: Install) -> None:
    install("made", "import nothing_like_it_anywhere")
    catalogue = DriverCatalogue()
    install("made", HEAD + BODY, version="1.1")
    catalogue.scan()
    assert catalogue.driver("made").version == "3"
    catalogue.check_code("made")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("upgrade", "error"),
    [
        ({"version": "1.1"}, "version 1.1 of its package is installed, version 1.0 is loaded"),
        ({"code": HEAD + BODY.replace("return []", "return [1]")}, "the installed file /"),
        ({"code": "import nothing_like_it_anywhere"}, "differs from the loaded code"),
    ],
)
def test_check_code_after_an_upgrade_names_the_restart(
    install: Install, upgrade: dict[str, str], error: str
) -> None:
    install("made", HEAD + BODY)
    catalogue = DriverCatalogue()
    install("made", HEAD + BODY)
    catalogue.scan()
    catalogue.check_code("made")  # the same code, installed again
    install("made", **{"code": HEAD + BODY, **upgrade})
    catalogue.scan()
    with pytest.raises(DriverFailed, match="only a restart of cyborg-agent on this host") as raised:
        catalogue.check_code("made")
    assert error in raised.value.message
    catalogue.check_code("generic")
    assert catalogue.driver("made").version == "3", "the loaded code still releases handles"
    install("made", HEAD + BODY)
    catalogue.scan()
    catalogue.check_code("made")


@pytest.mark.slow
def test_scan_import_hangs_sets_error(install: Install, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    hang = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n"
    install("made", hang + HEAD + BODY)
    catalogue = DriverCatalogue(import_timeout=1.0)
    assert {entry.name for entry in catalogue.entries} == {"made", *all_drivers()}
    with pytest.raises(DriverFailed, match=r"importing cyborg_test_made_\w+ takes longer than 1"):
        catalogue.driver("made")
    threads = threading.active_count()
    catalogue._import_timeout = 2 * LONG
    with ends_within(LONG / 4):  # it is waited for once
        for _ in range(3):
            catalogue.scan()
    # A thread of an earlier test may have ended meanwhile.
    assert threading.active_count() <= threads, "the same thread still imports it"
    gate.touch()

    def is_imported() -> bool:
        catalogue.scan()
        return not any(entry.error for entry in catalogue.entries if entry.name == "made")

    wait_until("it is imported", is_imported)
    assert catalogue.driver("made").version == "3"


def test_scan_duplicate_name_sets_error(install: Install, tmp_path: Path) -> None:
    install("made", HEAD + BODY)
    package = tmp_path / "again-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: again\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[{NAMESPACE}]\nmade = elsewhere:Made\n")
    with pytest.raises(
        DriverFailed, match="several packages have a driver of this name: cyborg_test"
    ):
        DriverCatalogue().driver("made")


@pytest.mark.slow
@pytest.mark.matrix
def test_entries_too_many_drivers_are_truncated(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_drivers = len(DriverCatalogue().names)
    install("made", HEAD + BODY)
    (module,) = tmp_path.glob("cyborg_test_made*.py")
    names = [f"m{number:03}" for number in range(300)]
    with module.open("a") as file:
        file.write(
            f"for one in {names!r}:\n    globals()[one] = type(one, (Made,), dict(name=one))\n"
        )
    lines = "".join(f"{name} = {module.stem}:{name}\n" for name in names)
    (tmp_path / "made-1.0.dist-info" / "entry_points.txt").write_text(f"[{NAMESPACE}]\n{lines}")
    catalogue = DriverCatalogue()
    assert len(catalogue.entries) == registry.MAX_ENTRIES
    assert catalogue.driver("m299").name == "m299", "told or not, it can be configured"
    catalogue.scan()
    error = f"{own_drivers + 300} drivers are installed, only the first 256 by name are"
    assert caplog.text.count(error) == 1
