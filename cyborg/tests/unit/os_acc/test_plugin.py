# SPDX-License-Identifier: Apache-2.0
"""Loading of plugins: those of this package, and defective ones of others."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from xml.etree.ElementTree import Element

import pytest
from stevedore import ExtensionManager

from cyborg import os_acc
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.inventory.device import HandleType
from cyborg.os_acc import plugin
from cyborg.os_acc.plugin import PciPlugin
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.unit.os_acc.samples import CARD, make_arq

USB = """
from xml.etree.ElementTree import Element

from cyborg.os_acc.plugin import Plugin


class UsbPlugin(Plugin):
    def get_config(self, arq):
        return {"port": "1"}

    def build_hostdev(self, config):
        return Element("hostdev", {"type": "usb", "port": config["port"] + "'/>"})


class Incomplete(Plugin):
    pass
"""
ENTRY_POINTS = """
[cyborg.os_acc.plugin]
usb = acme_os_acc:UsbPlugin
broken = acme_os_acc:Missing
abstract = acme_os_acc:Incomplete
foreign = xml.etree.ElementTree:TreeBuilder
mdev = acme_os_acc:UsbPlugin
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with a plugin for USB, and with defective ones."""
    (tmp_path / "acme_os_acc.py").write_text(USB)
    info = tmp_path / "acme_os_acc-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-os-acc\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ExtensionManager, "ENTRY_POINT_CACHE", {})
    plugin._load_all.cache_clear()
    yield
    sys.modules.pop("acme_os_acc", None)
    plugin._load_all.cache_clear()


def test_each_handle_type_has_a_plugin() -> None:
    entries = metadata.distribution("cyborg").entry_points.select(group=plugin.NAMESPACE)
    assert {entry.name.upper() for entry in entries} == set(HandleType)
    assert all(isinstance(plugin.load_plugin(kind), plugin.Plugin) for kind in HandleType)


def test_unknown_type_names_the_installed_ones() -> None:
    with pytest.raises(Invalid, match=r"no plugin for 'USB', .* are for MDEV, PCI, TEST_PCI, VFIO"):
        os_acc.attach(make_arq("USB"))


@pytest.mark.slow
@pytest.mark.usefixtures("acme")
def test_plugin_of_another_package_is_used_and_its_values_are_escaped() -> None:
    arq = make_arq("USB", attach_handle_info={})
    assert os_acc.get_config(arq)["port"] == "1"
    assert os_acc.detach(arq) == '<hostdev type="usb" port="1\'/&gt;" />'


@pytest.mark.slow
@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("handle_type", "reason"),
    sample(
        [
            ("BROKEN", "Missing"),
            ("ABSTRACT", "TypeError"),
            ("FOREIGN", "xml.etree.ElementTree:TreeBuilder is no subclass of Plugin"),
            ("MDEV", "several packages have a plugin of this name"),
        ],
        ("BROKEN", "Missing"),
    ),
)
def test_defective_plugin_fails_only_its_type(handle_type: str, reason: str) -> None:
    with pytest.raises(DriverFailed, match=reason):
        os_acc.attach(make_arq(handle_type))
    assert "hostdev" in os_acc.attach(make_arq("PCI"))


def test_element_of_a_plugin_is_new_at_each_call() -> None:
    """The alias is added to the element."""
    config = CARD.attach_info()
    first, second = PciPlugin().build_hostdev(config), PciPlugin().build_hostdev(config)
    assert isinstance(first, Element)
    assert first is not second


@pytest.mark.slow
def test_import_needs_only_core_and_stevedore() -> None:
    code = (
        "import sys; from cyborg import os_acc; "
        f"print(os_acc.attach({make_arq()!r})); "
        "print(*sorted({n.split('.')[1] for n in sys.modules if n.startswith('cyborg.')})); "
        "print(*sorted({n.split('.')[0] for n in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    xml, packages, libraries = done.stdout.splitlines()
    assert xml.startswith("<hostdev ")
    assert packages.split() == ["core", "os_acc"]
    forbidden = {"nova", "oslo_config", "oslo_log", "oslo_messaging", "pecan", "sqlalchemy"}
    assert {"os_traits", "stevedore"} <= set(libraries.split())
    assert not forbidden & set(libraries.split())
