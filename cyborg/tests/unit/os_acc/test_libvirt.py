# SPDX-License-Identifier: Apache-2.0
"""libvirt's schema and parser accept the XML of each device, and keep its values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg import os_acc
from cyborg.tests.fixtures.machine import libvirt
from cyborg.tests.unit.os_acc import samples

pytestmark = pytest.mark.requires("libvirt")

Arq = dict[str, object]


def source_of(arq: Arq) -> str:
    """Return what identifies a device in libvirt."""
    return os_acc.detach(arq)


@given(samples.arqs)
def test_attach_is_what_libvirt_writes(arq: Arq) -> None:
    """The parser drops or changes nothing, the alias included."""
    xml = os_acc.attach(arq)
    defined = libvirt.define([xml])
    assert libvirt.hostdevs(defined) == [libvirt.canonical(xml)]
    assert os_acc.find_alias(arq, defined) == os_acc.get_config(arq)["alias"]


@given(samples.arqs)
def test_detach_is_valid_and_has_the_source(arq: Arq) -> None:
    defined = libvirt.define([os_acc.detach(arq)])
    assert libvirt.hostdevs(defined) == [libvirt.canonical(os_acc.detach(arq))]
    assert os_acc.find_alias(arq, defined) == ""


@given(st.lists(samples.arqs, min_size=2, max_size=8, unique_by=(source_of, lambda a: a["uuid"])))
def test_devices_of_one_guest_are_valid_together(arqs: list[Arq]) -> None:
    defined = libvirt.define(map(os_acc.attach, arqs))
    assert [os_acc.find_alias(arq, defined) for arq in arqs] == [
        f"ua-cyborg-{arq['uuid']}" for arq in arqs
    ]


def test_device_with_another_alias_is_the_same_device() -> None:
    """libvirt finds a device by its source, so ``detach`` needs no alias."""
    xml = os_acc.attach(samples.make_arq())
    with pytest.raises(libvirt.Rejected, match="already exists in the domain configuration"):
        libvirt.define([xml, xml.replace("ua-cyborg-", "ua-other-")])


@pytest.mark.parametrize(
    ("old", "new"),
    [('mode="subsystem"', 'mode="sub"'), ('slot="0x01"', 'slot="0x20"'), ("<alias ", "<unknown ")],
)
def test_invalid_device_is_rejected_by_the_schema(old: str, new: str) -> None:
    """Without this the tests above could pass because libvirt checks nothing."""
    xml = os_acc.attach(samples.make_arq())
    assert old in xml
    with pytest.raises(libvirt.Rejected, match="failed to validate against schema"):
        libvirt.define([xml.replace(old, new)])
