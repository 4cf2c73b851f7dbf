# SPDX-License-Identifier: Apache-2.0
"""The conversion of a configuration of OpenStack Cyborg."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.migration.config_conversion import Conversion, Settings, convert

KNOWN = {"DEFAULT": {"debug", "host"}, "api": {"host_ip", "port", "workers"}, "agent": {"x"}}


def run(settings: Settings) -> Conversion:
    return convert(settings, KNOWN)


def test_options_with_the_same_meaning_are_kept() -> None:
    kept: Settings = {
        "DEFAULT": {"debug": ["true"]},
        "api": {"port": ["6666"]},
        "keystone_authtoken": {"password": ["p"]},
        "placement": {"auth_url": ["http://keystone"]},
    }
    found = run(kept)
    assert found.settings == kept
    assert found.notes == []


def test_option_is_renamed() -> None:
    assert run({"api": {"api_workers": ["4"]}}).settings == {"api": {"workers": ["4"]}}


@pytest.mark.parametrize(
    ("section", "name", "reason"),
    [
        ("api", "enable_ssl_api", "a reverse proxy terminates TLS"),
        ("DEFAULT", "unheard_of", "this service has no such option"),
        ("other", "x", "this service has no such option"),
    ],
)
def test_option_without_counterpart_is_dropped_with_the_reason(
    section: str, name: str, reason: str
) -> None:
    found = run({section: {name: ["1"]}})
    assert found.settings == {}
    (note,) = found.notes
    assert note.startswith(f"[{section}] {name} is dropped: {reason}")


def test_drivers_have_other_names_and_rules() -> None:
    names = "nvidia_gpu_driver, xilinx_fpga_driver,intel_fpga_driver,nvmf_spdk_driver"
    found = run({"agent": {"enabled_drivers": [names]}})
    assert found.settings["agent"] == {"enabled_drivers": ["gpu,fpga"]}
    assert found.settings["gpu"] == {"devices": ["vendor=10de,class=03"]}
    assert any("nvmf_spdk_driver has no counterpart" in note for note in found.notes)
    assert any("[fpga] needs rules" in note for note in found.notes)


def test_list_of_pci_functions_becomes_rules() -> None:
    specs = [
        '{"vendor_id": "8086", "product_id": "0b2b", "tags": "x"}',
        '[{"address": "0000:0a:00.*"}]',
        '{"address": {"bus": "0a"}}',
        '{"vendor_id": "8086,action=skip"}',
        "{}",
        "no JSON",
    ]
    found = run({"pci": {"passthrough_whitelist": specs}})
    assert found.settings == {
        "generic": {"devices": ["vendor=8086,product=0b2b", "address=0000:0a:00.*"]}
    }
    assert len(found.notes) == 5
    assert "the keys tags are dropped" in found.notes[0]


def test_vgpu_types_become_rules() -> None:
    found = run(
        {
            "gpu_devices": {"enabled_vgpu_types": ["nvidia-35,nvidia-36"]},
            "vgpu_nvidia-35": {"device_addresses": ["0000:84:00.0,0000:85:00.0"]},
        }
    )
    assert found.settings["gpu"]["mdev_types"] == [
        "address=0000:84:00.0,type=nvidia-35",
        "address=0000:85:00.0,type=nvidia-35",
        "vendor=10de,type=nvidia-36",
    ]
    assert found.notes == []


def test_text_has_the_notes_and_begins_with_the_default_section() -> None:
    found = run({"api": {"port": ["1"], "x": ["2"]}, "DEFAULT": {"host": ["h"]}})
    assert found.render() == (
        "# [api] x is dropped: this service has no such option\n\n"
        "[DEFAULT]\nhost = h\n\n[api]\nport = 1\n"
    )


@given(
    st.dictionaries(
        st.sampled_from(["DEFAULT", "api", "agent", "pci", "gpu_devices", "vgpu_a", "nvme"]),
        st.dictionaries(
            st.sampled_from(["enabled_drivers", "passthrough_whitelist", "device_spec", "x"]),
            st.lists(st.text(max_size=20), min_size=1, max_size=2),
            max_size=3,
        ),
        max_size=3,
    )
)
def test_any_settings_are_converted_or_noted(settings: Settings) -> None:
    found = run(settings)
    assert isinstance(found.render(), str)
