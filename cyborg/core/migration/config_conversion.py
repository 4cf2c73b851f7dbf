# SPDX-License-Identifier: Apache-2.0
"""Convert the configuration of OpenStack Cyborg, releases 12 to 17.

Each option of the former file has one outcome: it is converted, or a note says what to write
instead, why it is not needed, or which line the operator must write by hand.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from cyborg.core.drivers.registry import COUNTERPARTS
from cyborg.core.migration import device_rules
from cyborg.core.migration.config_tables import (
    LIBRARIES,
    LOG_OPTIONS,
    NOT_NEEDED,
    RENAMED,
    REPLACED,
    SECTIONS,
    SERVICES,
    TLS_OF_API,
    Kind,
)
from cyborg.core.migration.device_rules import Rules

# The values of each option by section and name; an option that is repeated has several, of which
# oslo.config takes the last one unless the option is a MultiOpt.
Settings = Mapping[str, Mapping[str, Sequence[str]]]

# The options of this service and of its libraries, by section and name.
#
# Each has the function that parses a value, and raises ValueError for an invalid one.
Known = Mapping[str, Mapping[str, Callable[[str], object]]]

_DEFAULT = "DEFAULT"
_GPU, _NIC, _VGPU = "gpu_devices", "x710_static", "vgpu_"
_UNKNOWN = "neither service has such an option: it had no effect"
# As oslo.config replaces them: $name, ${name} and ${section.name}; $$ is a dollar sign.
_REFERENCE = re.compile(r"\$(?:(\$)|\{?(?:([A-Za-z_]\w*)\.)?([A-Za-z_]\w*)\}?)")
_BUS_SCHEMES = ("rabbit", "kombu+memory")
_TRUE = ("true", "1", "yes", "on")  # as oslo.config parses a BoolOpt
_INTERFACES = "valid_interfaces"
_CREDENTIALS = ("auth_type", "auth_section", "auth_plugin")


class Result(NamedTuple):
    """What becomes of an option; ``note`` is empty if there is nothing to say."""

    kind: Kind
    note: str = ""


_CONVERTED = Result(Kind.CONVERTED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an option of the former file, or of an option that is added.

    No note has the value of an option that may hold a password.
    """

    kind: Kind
    section: str
    name: str
    note: str = ""


@dataclass(slots=True)
class Conversion:
    """The new settings, the outcome of each option, and ``added``: options without a former one."""

    settings: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    added: list[Outcome] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Return the notes, what is to be done by hand first.

        The options of a section with the same note share one.
        """
        names_of: dict[tuple[Kind, str, str], list[str]] = {}
        for outcome in (*self.outcomes, *self.added):
            if outcome.note:
                place = (outcome.kind, outcome.section, outcome.note)
                names_of.setdefault(place, []).append(outcome.name)
        return [
            f"{kind}: [{section}] {', '.join(names)}: {note}"
            for kind in (Kind.BY_HAND, Kind.REPLACED, Kind.NOT_NEEDED, Kind.CONVERTED)
            for (kind_of_note, section, note), names in names_of.items()
            if kind_of_note is kind
        ]

    @property
    def counts(self) -> dict[Kind, int]:
        """Return how many options of the former file have an outcome of each kind."""
        kinds = [outcome.kind for outcome in self.outcomes]
        return {kind: kinds.count(kind) for kind in Kind}

    def set(self, section: str, name: str, values: Sequence[str]) -> None:
        """Add values of an option."""
        self.settings.setdefault(section, {}).setdefault(name, []).extend(values)

    def render(self) -> str:
        """Return the text of a configuration file; the notes are comments at its beginning."""
        # A line break in a value would end a comment.
        lines = [f"# {' '.join(note.split())}" for note in self.notes]
        # DEFAULT first, as in the sample file.
        for section in sorted(self.settings, key=lambda name: (name != _DEFAULT, name)):
            lines += ["", f"[{section}]"]
            # oslo.config continues a value on indented lines.
            for name, values in sorted(self.settings[section].items()):
                lines += [f"{name} = {value}".replace("\n", "\n    ") for value in values]
        return "\n".join(lines).lstrip("\n") + "\n"


def convert(settings: Settings, known: Known) -> Conversion:
    """Return the converted configuration."""
    return _Converter(settings, known).run()


class _Converter:
    """Conversion of one configuration; ``run`` converts each of its options once."""

    def __init__(self, settings: Settings, known: Known) -> None:
        self._known = known
        self._result = Conversion()
        # oslo.config finds a section, except DEFAULT, in lower case.
        self._former: dict[str, dict[str, list[str]]] = {}
        for section, options in settings.items():
            lower = section if section == _DEFAULT else section.lower()
            for name, values in options.items():
                self._former.setdefault(lower, {}).setdefault(name, []).extend(values)
        self._addresses: set[str] = set()  # of cards with a type of mediated devices
        # These options have values to convert, and not only a name.
        self._special: Mapping[tuple[str, str], Callable[[Sequence[str]], Result]] = {
            (_DEFAULT, "transport_url"): self._convert_bus,
            ("oslo_messaging_notifications", "transport_url"): self._convert_notifications,
            ("database", "connection"): partial(self._convert_database, "connection"),
            ("database", "slave_connection"): partial(self._convert_database, "slave_connection"),
            ("oslo_policy", "policy_file"): self._convert_policy,
            ("api", "enable_ssl_api"): self._convert_tls,
            ("agent", "enabled_drivers"): self._convert_drivers,
            ("pci", "passthrough_whitelist"): partial(self._convert_specs, "generic"),
            ("nvme", "erase_timeout"): self._convert_erase_timeout,
            ("nvme", "device_spec"): partial(self._convert_specs, "nvme"),
            (_GPU, "enabled_vgpu_types"): self._convert_mdev_types,
            (_GPU, "filter_sriov_vfs"): self._convert_filter,
            (_NIC, "physical_device_mappings"): partial(
                self._convert_nic, device_rules.convert_networks, "physical_networks"
            ),
            (_NIC, "function_device_mappings"): partial(
                self._convert_nic, device_rules.convert_functions, "devices"
            ),
            (_NIC, "device_addresses"): partial(
                self._convert_nic, device_rules.convert_nic_addresses, "devices"
            ),
            ("glance", "verify_glance_signatures"): self._convert_signatures,
        }

    def run(self) -> Conversion:
        for section, options in self._former.items():
            for name, values in options.items():
                result = self._convert(section, name, values)
                self._result.outcomes.append(Outcome(result.kind, section, name, result.note))
        self._add_credentials()
        self._add_interfaces()
        return self._result

    def _convert(self, section: str, name: str, values: Sequence[str]) -> Result:
        """Convert one option; the first rule that knows it decides."""
        place = (section, name)
        # The order decides: a renamed option may be a special one, and a special one may be in a
        # section that has no counterpart otherwise.
        if place in RENAMED:
            place = RENAMED[place]
            section, name = place
        if (special := self._special.get(place)) is not None:
            return special(values)
        if section.startswith(_VGPU) and name == "device_addresses":
            return self._convert_mdev_addresses(section)
        if place in NOT_NEEDED:
            return Result(Kind.NOT_NEEDED, NOT_NEEDED[place])
        if section in SERVICES and name == "interface" and _INTERFACES in self._former[section]:
            return Result(Kind.NOT_NEEDED, f"{_INTERFACES} has the interfaces")
        if section in SECTIONS:
            kind, note = SECTIONS[section]
            return Result(kind, note)
        # A library knows some options of DEFAULT, such as rpc_response_timeout, but this service
        # has its own instead. An option of another section works if the library knows it.
        if place in REPLACED and (section == _DEFAULT or not self._is_known(section, name)):
            return Result(Kind.REPLACED, REPLACED[place])
        if self._is_known(section, name):
            return self._keep(section, name, values)
        if section in LIBRARIES | SERVICES or place in LOG_OPTIONS:
            return Result(Kind.NOT_NEEDED, "the installed library has no such option")
        return Result(Kind.NOT_NEEDED, _UNKNOWN)

    def _is_known(self, section: str, name: str) -> bool:
        """Return whether the service or a library has an option.

        A host without a library, such as that of an agent, does not know its options: all are kept.
        """
        if section not in self._known:
            return section in LIBRARIES
        return name in self._known[section]

    def _keep(self, section: str, name: str, values: Sequence[str]) -> Result:
        """Keep the values of an option, unless this service would not start with them."""
        for value in values:
            if self._has_unknown_reference(section, value):
                # The state path has a default, and nothing of the former service there is used.
                kind = Kind.REPLACED if name == "state_path" else Kind.BY_HAND
                return Result(
                    kind,
                    "its value refers, after a $, to an option that this service does not have: "
                    f"write [{section}] {name}, with $$ for a dollar sign",
                )
            parse = self._known.get(section, {}).get(name)
            # A value with a reference has its type only after oslo.config has replaced the
            # reference.
            if parse is None or "$" in value:
                continue
            try:
                parse(value)
            except ValueError as exc:
                return Result(Kind.BY_HAND, f"{exc}: write [{section}] {name}")
        self._result.set(section, name, values)
        return _CONVERTED

    def _has_unknown_reference(self, section: str, value: str) -> bool:
        """Return whether a value refers, as ``$name``, to an option that does not exist."""
        for escaped, group, name in _REFERENCE.findall(value):
            sections = [group] if group else [section, _DEFAULT]
            if not escaped and not any(name in self._known.get(found, ()) for found in sections):
                return True
        return False

    def _convert_bus(self, values: Sequence[str]) -> Result:
        if not values[-1].startswith(_BUS_SCHEMES):
            return Result(
                Kind.BY_HAND,
                "the message broker is RabbitMQ: write [DEFAULT] transport_url = "
                "rabbit://USER:PASSWORD@HOST:5672/",
            )
        return self._keep(_DEFAULT, "transport_url", values)

    def _convert_notifications(self, values: Sequence[str]) -> Result:
        section, name = "oslo_messaging_notifications", "transport_url"
        if values[-1] and not values[-1].startswith(_BUS_SCHEMES):
            return Result(
                Kind.BY_HAND,
                "notifications go to [DEFAULT] transport_url; for another message broker install "
                f"the library of its driver, then write [{section}] {name} as before",
            )
        return self._keep(section, name, values)

    def _convert_database(self, name: str, values: Sequence[str]) -> Result:
        """Keep a URL with the driver of this service; the operator must name another database."""
        url = values[-1]
        # The services need this driver, and set init_command themselves.
        url = re.sub(r"^(mysql|mariadb)(\+\w+)?:", "mysql+pymysql:", url)
        url = re.sub(r"([?&])init_command=[^&]*&?", r"\1", url).rstrip("?&")
        kept = self._keep("database", name, [url])
        if kept.kind is not Kind.CONVERTED:
            return kept
        return Result(
            Kind.BY_HAND,
            "it names the database of OpenStack Cyborg: write "
            f"[database] {name} of the new, empty database",
        )

    def _convert_policy(self, values: Sequence[str]) -> Result:
        kept = self._keep("oslo_policy", "policy_file", values)
        return Result(kept.kind, kept.note or "check the file by cyborg-status upgrade check")

    def _convert_tls(self, values: Sequence[str]) -> Result:
        return Result(Kind.BY_HAND if _is_true(values) else Kind.NOT_NEEDED, TLS_OF_API)

    def _convert_drivers(self, values: Sequence[str]) -> Result:
        """Convert the enabled drivers into backends and their rules."""
        backends: list[str] = []
        by_hand: list[str] = []
        for name in _split(values[-1:]):
            backend = COUNTERPARTS.get(name)
            if backend is None:
                by_hand.append(
                    f"{name} has no counterpart: to offer its devices without host work, write "
                    "[generic] devices = RULE"
                )
                continue
            if backend not in backends:
                backends.append(backend)
            rules = device_rules.DRIVER_RULES.get(name, ())
            has_addresses = self._has_nic_section() and self._entries(_NIC, "device_addresses")
            # With addresses, the former driver offers these cards only.
            if rules and not (backend == "nic" and has_addresses):
                self._result.set(backend, "devices", rules)
        if backends:
            self._result.set("agent", "enabled_drivers", [",".join(backends)])
        if "fake" in backends:
            self._result.set("agent", "allow_reference_drivers", ["true"])
        return _by_hand(by_hand)

    def _convert_specs(self, backend: str, values: Sequence[str]) -> Result:
        return self._add_rules(backend, device_rules.convert_specs(backend, values), "devices")

    def _add_rules(self, backend: str, rules: Rules, name: str) -> Result:
        if rules.rules:
            self._result.set(backend, name, rules.rules)
        return _by_hand(rules.by_hand, rules.remarks)

    def _convert_erase_timeout(self, values: Sequence[str]) -> Result:
        if not re.fullmatch(r"[0-9]{2,5}", values[-1]) or not 30 <= int(values[-1]) <= 86400:
            return Result(Kind.BY_HAND, "write [nvme] erase_timeout = SECONDS, from 30 to 86400")
        self._result.set("nvme", "erase_timeout", values[-1:])
        return _CONVERTED

    def _entries(self, section: str, name: str) -> list[str]:
        """Return the entries of an option whose last value is a list with commas."""
        return _split(self._former.get(section, {}).get(name, ())[-1:])

    def _mdev_types(self) -> list[str]:
        return self._entries(_GPU, "enabled_vgpu_types")

    def _convert_mdev_types(self, values: Sequence[str]) -> Result:
        by_hand: list[str] = []
        for mdev_type in self._mdev_types():
            addresses = self._entries(f"{_VGPU}{mdev_type}".lower(), "device_addresses")
            found = device_rules.convert_mdev_type(mdev_type, addresses, self._addresses)
            self._add_rules("gpu", found, "mdev_types")
            by_hand += found.by_hand
        return _by_hand(by_hand)

    def _convert_mdev_addresses(self, section: str) -> Result:
        if section in {f"{_VGPU}{mdev_type}".lower() for mdev_type in self._mdev_types()}:
            return _CONVERTED
        return Result(Kind.NOT_NEEDED, "[gpu_devices] enabled_vgpu_types does not name the type")

    def _convert_filter(self, values: Sequence[str]) -> Result:
        if _is_true(values):
            return _CONVERTED
        return Result(
            Kind.REPLACED,
            "virtual functions are not offered as whole GPUs; to offer them as CUSTOM_GPU_VF, "
            "write [gpu] devices = vendor=10de,class=0300|0302,functions=vf",
        )

    def _has_nic_section(self) -> bool:
        return _NIC in self._entries("nic_devices", "enabled_nic_types")

    def _convert_nic(
        self, convert: Callable[[Sequence[str]], Rules], name: str, values: Sequence[str]
    ) -> Result:
        """Convert an option of the section of the network cards to an option of [nic]."""
        if not self._has_nic_section():
            return Result(Kind.NOT_NEEDED, f"[nic_devices] enabled_nic_types does not name {_NIC}")
        return self._add_rules("nic", convert(_split(values[-1:])), name)

    def _convert_signatures(self, values: Sequence[str]) -> Result:
        """Convert whether images must be signed; without certificates it cannot be true."""
        if not _is_true(values):
            return self._keep("glance", "require_signature", values)
        if not self._entries("glance", "default_trusted_certificate_ids"):
            return Result(
                Kind.BY_HAND,
                "write [glance] require_signature = true and [glance] trusted_certificates, the "
                "uuids of the certificates of the signers",
            )
        kept = self._keep("glance", "require_signature", values)
        if kept.kind is not Kind.CONVERTED:
            return kept
        return Result(Kind.CONVERTED, "it needs the extra signatures")

    def _add_credentials(self) -> None:
        """Use the credentials of the service for Placement and Nova if these sections have none.

        The conductor would not start without them.
        """
        if "connection" not in self._former.get("database", {}):
            return  # the file of an agent
        service_options = self._former.get("keystone_authtoken", {})
        has_service_credentials = any(name in service_options for name in _CREDENTIALS)
        for section in ("placement", "nova"):
            options = self._former.get(section, {})
            # With an endpoint_override the conductor starts without credentials.
            if any(name in options for name in (*_CREDENTIALS, "endpoint_override")):
                continue
            if has_service_credentials:
                self._result.set(section, "auth_section", ["keystone_authtoken"])
                kind, note = Kind.CONVERTED, "added: the credentials of [keystone_authtoken]"
            else:
                kind, note = Kind.BY_HAND, f"write [{section}] auth_type and its credentials"
            self._result.added.append(Outcome(kind, section, "auth_section", note))
        strategy = self._former.get(_DEFAULT, {}).get("auth_strategy", ["keystone"])[-1]
        if not has_service_credentials and strategy == "keystone":
            note = "write [keystone_authtoken] auth_type and the credentials of the service"
            self._result.added.append(
                Outcome(Kind.BY_HAND, "keystone_authtoken", "auth_type", note)
            )

    def _add_interfaces(self) -> None:
        """Use the endpoints that the other service uses by default; here these are the public."""
        for section in sorted(SERVICES & self._result.settings.keys()):
            options = self._result.settings[section]
            if not {_INTERFACES, "interface", "endpoint_override"} & options.keys():
                self._result.set(section, _INTERFACES, ["internal,public"])
                note = "added: the former default"
                self._result.added.append(Outcome(Kind.CONVERTED, section, _INTERFACES, note))


def _by_hand(lines: Sequence[str], remarks: Sequence[str] = ()) -> Result:
    """Return the result of an option of which some lines must be written by hand."""
    return Result(Kind.BY_HAND if lines else Kind.CONVERTED, "; ".join([*lines, *remarks]))


def _split(values: Sequence[str]) -> list[str]:
    return [item.strip() for value in values for item in value.split(",") if item.strip()]


def _is_true(values: Sequence[str]) -> bool:
    return values[-1].strip().lower() in _TRUE
