# SPDX-License-Identifier: Apache-2.0
"""The conversion of a configuration of OpenStack Cyborg."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.migration.config_conversion import Conversion, Known, Settings, convert
from cyborg.core.migration.config_tables import Kind

KNOWN: Known = {
    "DEFAULT": dict.fromkeys(("debug", "host", "state_path", "transport_url"), str),
    "agent": {"resource_provider": str},
    "api": {"host_ip": str, "port": int, "workers": int},
    "database": {"connection": str},
    "glance": {
        **dict.fromkeys(("require_signature", "trusted_certificates", "valid_interfaces"), str),
        "retries": int,
    },
    "keystone_authtoken": dict.fromkeys(("auth_type", "password", "www_authenticate_uri"), str),
    "nova": dict.fromkeys(("auth_type", "auth_section"), str),
    "oslo_messaging_rabbit": {"conn_pool_ttl": int},
    "oslo_policy": {"policy_file": str},
    "placement": dict.fromkeys(
        ("auth_type", "auth_section", "auth_url", "interface", "valid_interfaces"), str
    ),
}


def run(settings: Settings) -> Conversion:
    return convert(settings, KNOWN)


def test_options_with_the_same_meaning_are_kept() -> None:
    kept: Settings = {
        "DEFAULT": {"debug": ["true"]},
        "api": {"port": ["6666"]},
        "keystone_authtoken": {"password": ["p"]},
        "placement": {"auth_url": ["http://keystone"], "valid_interfaces": ["internal"]},
    }
    found = run(kept)
    assert found.settings == kept
    assert found.notes == []
    assert found.counts[Kind.CONVERTED] == 5


@pytest.mark.parametrize(
    ("former", "new"),
    [
        ({}, {"valid_interfaces": ["internal,public"]}),
        ({"interface": ["public"]}, {"interface": ["public"]}),
        (
            {"interface": ["public"], "valid_interfaces": ["admin"]},
            {"valid_interfaces": ["admin"]},
        ),
    ],
)
def test_endpoints_are_those_of_the_former_service(
    former: dict[str, list[str]], new: dict[str, list[str]]
) -> None:
    login = {"auth_url": ["http://keystone"]}
    assert run({"placement": {**login, **former}}).settings == {"placement": {**login, **new}}


def test_sections_of_a_library_that_is_not_installed_are_kept() -> None:
    kept: Settings = {"oslo_middleware": {"enable_proxy_headers_parsing": ["true"]}}
    assert run(kept).settings == kept


@pytest.mark.parametrize(
    ("former", "new"),
    [
        (("api", "api_workers"), ("api", "workers")),
        (("API", "api_workers"), ("api", "workers")),
        (("DEFAULT", "conn_pool_ttl"), ("oslo_messaging_rabbit", "conn_pool_ttl")),
        (("keystone_authtoken", "auth_uri"), ("keystone_authtoken", "www_authenticate_uri")),
        (("agent", "resource_provider_name"), ("agent", "resource_provider")),
        (("glance", "num_retries"), ("glance", "retries")),
    ],
)
def test_option_is_renamed(former: tuple[str, str], new: tuple[str, str]) -> None:
    found = run({former[0]: {former[1]: ["4"]}})
    assert found.settings[new[0]][new[1]] == ["4"]
    assert [outcome.kind for outcome in found.outcomes] == [Kind.CONVERTED]


@pytest.mark.parametrize(
    ("section", "name", "kind", "note"),
    [
        ("DEFAULT", "bind_timeout", Kind.REPLACED, "write [conductor] prepare_timeout"),
        ("DEFAULT", "unheard_of", Kind.NOT_NEEDED, "neither service has such an option"),
        ("other", "x", Kind.NOT_NEEDED, "neither service has such an option"),
        ("placement", "x", Kind.NOT_NEEDED, "the installed library has no such option"),
        ("ssl", "cert_file", Kind.REPLACED, "a reverse proxy terminates TLS"),
        ("api", "port", Kind.BY_HAND, "write [api] port"),
        ("keystone_authtoken", "memcached_servers", Kind.REPLACED, "install python-memcached"),
        ("vgpu_a", "device_addresses", Kind.NOT_NEEDED, "enabled_vgpu_types does not name the"),
        ("x710_static", "device_addresses", Kind.NOT_NEEDED, "enabled_nic_types does not name"),
    ],
)
def test_option_without_counterpart_has_one_note(
    section: str, name: str, kind: Kind, note: str
) -> None:
    found = run({section: {name: ["many"]}})
    assert found.settings == {}
    (line,) = found.notes
    assert line.startswith(f"{kind}: [{section}] {name}: ")
    assert note in line


def test_options_of_a_section_share_a_note() -> None:
    found = run({"service_user": {"auth_type": ["password"], "password": ["secret"]}})
    (line,) = found.notes
    assert line.startswith("not needed: [service_user] auth_type, password: the services send no")
    assert len(found.outcomes) == 2


def test_note_has_no_part_of_a_password() -> None:
    found = run({"keystone_authtoken": {"password": ["top$ecret"]}})
    assert found.settings == {}
    assert "ecret" not in found.render()


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("state_path", "$pybasedir", False),
        ("host", "${nova.region_name}-1", False),
        ("host", "$debug", True),
        ("host", "${placement.auth_url}", True),
        ("host", "$$pybasedir", True),
    ],
)
def test_value_may_refer_to_options_of_this_service_only(name: str, value: str, kept: bool) -> None:
    found = run({"DEFAULT": {name: [value]}})
    assert bool(found.settings) == kept
    assert all(f"write [DEFAULT] {name}" in note for note in found.notes)


def test_drivers_have_other_names_and_rules() -> None:
    names = "nvidia_gpu_driver, xilinx_fpga_driver,intel_fpga_driver,nvmf_spdk_driver"
    found = run({"agent": {"enabled_drivers": ["pci_driver", names]}})
    assert found.settings["agent"] == {"enabled_drivers": ["gpu,fpga"]}
    assert found.settings["gpu"] == {"devices": ["vendor=10de,class=0300|0302,functions=whole"]}
    assert "vendor=8086,product=09c5,functions=vf" in found.settings["fpga"]["devices"]
    assert found.notes[0].startswith("by hand: [agent] enabled_drivers: nvmf_spdk_driver has no")


def test_fake_driver_is_allowed() -> None:
    found = run({"agent": {"enabled_drivers": ["fake_driver"]}})
    assert found.settings["agent"]["allow_reference_drivers"] == ["true"]


def test_lists_of_devices_become_rules() -> None:
    found = run(
        {
            "pci": {"passthrough_whitelist": ['{"vendor_id": "8086"}', "no JSON"]},
            "nvme": {"device_spec": ['{"vendor_id": "1c5f"}'], "cleanup_timeout": ["900"]},
        }
    )
    assert found.settings["generic"] == {"devices": ["vendor=8086,resource_class=CUSTOM_PCI"]}
    assert found.settings["nvme"]["erase_timeout"] == ["900"]
    assert found.counts == {
        Kind.CONVERTED: 2,
        Kind.REPLACED: 0,
        Kind.NOT_NEEDED: 0,
        Kind.BY_HAND: 1,
    }


def test_vgpu_types_become_rules_for_their_addresses_only() -> None:
    found = run(
        {
            "gpu_devices": {"enabled_vgpu_types": ["nvidia-35,nvidia-36,nvidia-37"]},
            "vgpu_nvidia-35": {"device_addresses": ["0000:84:00.0,0000:85:00.0"]},
            "vgpu_NVIDIA-36": {"device_addresses": ["0000:86:00.0"]},
        }
    )
    assert found.settings["gpu"]["mdev_types"] == [
        "address=0000:84:00.0,type=nvidia-35",
        "address=0000:85:00.0,type=nvidia-35",
        "address=0000:86:00.0,type=nvidia-36",
    ]
    (note,) = found.notes
    assert "nvidia-37 has no device_addresses: write [gpu] mdev_types" in note


@pytest.mark.parametrize(
    ("value", "kind"), [("true", Kind.CONVERTED), ("false", Kind.REPLACED), ("no", Kind.REPLACED)]
)
def test_virtual_functions_of_gpus_are_never_whole_cards(value: str, kind: Kind) -> None:
    found = run({"gpu_devices": {"filter_sriov_vfs": [value]}})
    assert [outcome.kind for outcome in found.outcomes] == [kind]
    assert found.settings == {}


def test_cards_of_the_nic_driver() -> None:
    former: dict[str, dict[str, list[str]]] = {
        "agent": {"enabled_drivers": ["intel_nic_driver"]},
        "nic_devices": {"enabled_nic_types": ["x710_static"]},
        "x710_static": {
            "physical_device_mappings": ["physnet1:eth2|eth3,physnet2:eth4"],
            "function_device_mappings": ["GTPv1:eth3"],
        },
    }
    every = run(former).settings["nic"]
    assert every == {
        "devices": [
            "vendor=8086,product=158a|158b|1572,functions=whole",
            "vendor=8086,product=154c|1571,functions=vf",
        ],
        "physical_networks": ["physnet1:eth2,physnet1:eth3,physnet2:eth4"],
    }
    former["x710_static"]["device_addresses"] = ["0000:05:00.0,x"]
    some = run(former)
    assert some.settings["nic"]["devices"] == ["vendor=8086,address=0000:05:00.0"]
    assert some.counts[Kind.BY_HAND] == 2


@pytest.mark.parametrize(
    ("former", "new"),
    [
        ("mysql://u:p@db/cyborg", "mysql+pymysql://u:p@db/cyborg"),
        ("mariadb+mysqldb://u:p@db/c?charset=utf8", "mysql+pymysql://u:p@db/c?charset=utf8"),
        ("mysql+pymysql://db/c?init_command=SET%20x&a=b", "mysql+pymysql://db/c?a=b"),
        ("mysql+pymysql://db/c?a=b&init_command=x", "mysql+pymysql://db/c?a=b"),
        ("postgresql://db/cyborg", "postgresql://db/cyborg"),
    ],
)
def test_connection_has_the_driver_of_this_service(former: str, new: str) -> None:
    found = run({"database": {"connection": [former]}, "DEFAULT": {"auth_strategy": ["noauth"]}})
    assert found.settings["database"] == {"connection": [new]}
    assert found.notes[0] == (
        "by hand: [database] connection: it names the database of OpenStack Cyborg: write "
        "[database] connection of the new, empty database"
    )


@pytest.mark.parametrize("section", ["DEFAULT", "oslo_messaging_notifications"])
def test_bus_other_than_rabbitmq_is_a_line_to_write(section: str) -> None:
    found = run({section: {"transport_url": ["kafka://user:secret@broker:9092"]}})
    assert found.settings == {}
    (note,) = found.notes
    assert "transport_url" in note
    assert "secret" not in found.render()


@pytest.mark.parametrize(
    ("options", "settings", "kind"),
    [
        ({"verify_glance_signatures": ["false"]}, {"require_signature": ["false"]}, None),
        ({"verify_glance_signatures": ["true"]}, None, Kind.BY_HAND),
        (
            {"verify_glance_signatures": ["true"], "default_trusted_certificate_ids": ["a"]},
            {"require_signature": ["true"], "trusted_certificates": ["a"]},
            Kind.CONVERTED,
        ),
        (
            {
                "verify_glance_signatures": ["$gone", "true"],
                "default_trusted_certificate_ids": ["a"],
            },
            {"trusted_certificates": ["a"]},
            Kind.BY_HAND,
        ),
    ],
)
def test_signatures_need_certificates(
    options: dict[str, list[str]], settings: dict[str, list[str]] | None, kind: Kind | None
) -> None:
    found = run({"glance": {"valid_interfaces": ["internal"], **options}})
    converted = {} if settings is None else settings
    assert found.settings["glance"] == {"valid_interfaces": ["internal"], **converted}
    assert [note.partition(":")[0] for note in found.notes] == ([] if kind is None else [kind])


def test_conductor_without_credentials_gets_those_of_the_service() -> None:
    found = run(
        {
            "database": {"connection": ["sqlite:///x"]},
            "keystone_authtoken": {"auth_type": ["password"]},
            "placement": {"auth_type": ["password"]},
        }
    )
    assert found.settings["nova"]["auth_section"] == ["keystone_authtoken"]
    assert "auth_section" not in found.settings["placement"]
    without = run({"database": {"connection": ["sqlite:///x"]}})
    lines = [note for note in without.notes if "auth_type" in note]
    assert [line.partition("write ")[2].split()[0] for line in lines] == [
        *("[placement]", "[nova]", "[keystone_authtoken]")
    ]


def test_text_has_the_notes_and_begins_with_the_default_section() -> None:
    found = run({"api": {"port": ["1"], "x": ["2"]}, "DEFAULT": {"host": ["h\nh"]}})
    assert found.render() == (
        "# not needed: [api] x: neither service has such an option: it had no effect\n\n"
        "[DEFAULT]\nhost = h\n    h\n\n[api]\nport = 1\n"
    )


@given(
    st.dictionaries(
        st.sampled_from(
            ["DEFAULT", "agent", "pci", "gpu_devices", "vgpu_a", "nvme", "x710_static", "database"]
        ),
        st.dictionaries(
            st.sampled_from(
                [
                    *("enabled_drivers", "passthrough_whitelist", "device_spec", "connection", "x"),
                    *("enabled_vgpu_types", "device_addresses", "function_device_mappings"),
                ]
            ),
            st.lists(st.text(max_size=20), min_size=1, max_size=2),
            max_size=3,
        ),
        max_size=3,
    )
)
def test_any_option_has_exactly_one_outcome(settings: Settings) -> None:
    found = run(settings)
    places = [(section, name) for section, options in settings.items() for name in options]
    assert sorted((outcome.section, outcome.name) for outcome in found.outcomes) == sorted(places)
    assert isinstance(found.render(), str)
