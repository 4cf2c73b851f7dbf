# SPDX-License-Identifier: Apache-2.0
"""Which drivers are installed, and what is known of each."""

from collections.abc import Callable
from pathlib import Path

import pytest
from stevedore import _cache

from cyborg.agent.catalogue import NAMESPACE, Catalogue
from cyborg.core import catalogue
from cyborg.core.catalogue import Support
from cyborg.core.errors import DriverFailed, NotFound
from cyborg.drivers.fake import FakeDriver
from cyborg.drivers.generic import GenericDriver

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
    # stevedore keeps what it found in a file: that may not know of this.
    monkeypatch.setattr(_cache._c, "_disable_caching", True)

    def put(name: str, code: str | None, thing: str = "Made") -> None:
        module = f"cyborg_test_{name}_{tmp_path.name}".replace("-", "_")
        package = tmp_path / f"{name}-1.0.dist-info"
        package.mkdir(exist_ok=True)
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text(f"[{NAMESPACE}]\n{name} = {module}:{thing}\n")
        if code is not None:
            (tmp_path / f"{module}.py").write_text(code)
        # What stevedore found for these paths stands in its memory, too.
        monkeypatch.setattr(_cache._c, "_internal", {})

    return put


def test_what_is_installed() -> None:
    found = Catalogue()
    entries = {entry.name: entry for entry in found.entries}
    assert set(entries) == {"fake", "generic"}
    fake = entries["fake"]
    assert (fake.version, fake.type, fake.support) == ("1.0", "FPGA", Support.REFERENCE)
    assert {"prepares", "programs", "measures"} <= set(fake.abilities)
    assert {option.name for option in fake.options} >= {"num_devices", "adopt", "release"}
    assert (entries["generic"].type, entries["generic"].support) == (None, Support.SUPPORTED)
    assert found.driver("fake") is FakeDriver
    assert found.driver("generic") is GenericDriver
    assert catalogue.fingerprint(found.entries) == catalogue.fingerprint(Catalogue().entries)


def test_one_that_was_installed_since(install: Install) -> None:
    found = Catalogue()
    with pytest.raises(NotFound, match=r"found 'mad'; expected one of the drivers of .*: fake, "):
        found.driver("mad")
    install("made", HEAD + BODY)
    found.scan()
    (made,) = [entry for entry in found.entries if entry.name == "made"]
    assert (made.version, made.support, made.abilities) == ("3", Support.UNKNOWN, ("measures",))
    assert found.driver("made").name == "made"
    with pytest.raises(NotFound, match=r"found 'mad' \(did you mean made\?\)"):
        found.driver("mad")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (None, "ModuleNotFoundError: No module named"),
        ("import nothing_like_it_anywhere", "ModuleNotFoundError: No module named 'nothing_like"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("assert False, 'not on this host'", "AssertionError: not on this host"),
        ("def", "SyntaxError: "),
        ("Made = 7", "TypeError: 7 is not a class made from cyborg.drivers.base.Driver"),
        (HEAD + BODY.replace('"int", 1', '"int", object()'), "TypeError: Object of type object"),
        (HEAD + BODY.replace('"int"', '"real"'), "ValueError: unknown kind of option 'real'"),
        (HEAD + BODY.replace("version", "vision"), "AttributeError: "),
    ],
)
def test_one_that_cannot_be_loaded_costs_the_others_nothing(
    install: Install, code: str | None, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    install("made", code)
    found = Catalogue()
    entries = {entry.name: entry for entry in found.entries}
    assert set(entries) == {"fake", "generic", "made"}
    assert str(entries["made"].error).startswith(error)
    assert entries["made"].version is None
    with pytest.raises(DriverFailed, match="driver made cannot be loaded: "):
        found.driver("made")
    found.scan()
    assert caplog.text.count("Driver made cannot be loaded") == 1, "said once"
    assert catalogue.load(catalogue.dump(found.entries)) == found.entries


def test_one_that_is_repaired(install: Install) -> None:
    install("made", "import nothing_like_it_anywhere")
    found = Catalogue()
    install("made", HEAD + BODY)
    found.scan()
    assert found.driver("made").version == "3"
