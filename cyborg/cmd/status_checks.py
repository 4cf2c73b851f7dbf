# SPDX-License-Identifier: Apache-2.0
"""Checks of ``cyborg-status upgrade check`` on the daemons, the policy and the options."""

import re
import string
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import sqlalchemy as sa
from oslo_config import cfg, iniparser
from oslo_policy import policy
from oslo_upgradecheck.upgradecheck import Code, Result

from cyborg import conf as own_options
from cyborg.cmd.status_convert import Parser
from cyborg.conf.options import reference_release
from cyborg.core.binding.profile import parse_groups
from cyborg.core.drivers.registry import describe_counterpart
from cyborg.core.errors import Misconfigured
from cyborg.core.hosts import AGENT as AGENT_BINARY
from cyborg.core.hosts import CONDUCTOR as CONDUCTOR_BINARY
from cyborg.core.migration import import_plan
from cyborg.core.migration.import_plan import find_unserved_names
from cyborg.core.text import join_limited
from cyborg.core.upgrade import check_pin, find_lowest, parse_version
from cyborg.db import migrate
from cyborg.db.deployables import read as deployables
from cyborg.db.profiles import read as device_profiles
from cyborg.policies.enforcer import make_enforcer
from cyborg.policies.rules import list_rules
from cyborg.rpc.contract import AGENT, CONDUCTOR

MAX_NAMED = 5  # objects that one result names
MAX_PROFILES = 50  # each of them needs a change
# Prefix of the policy rules of this service; others are those of the operator.
PREFIX = "cyborg:"
# Default of ``[oslo_policy] policy_file``, a file that need not exist.
DEFAULT_POLICY_FILE = "policy.yaml"
_DELIMITERS = "()[],'\"" + string.whitespace
# A denial in a rule, or in a list of the former syntax.
_DENIAL = re.compile(rf"(?<![^{re.escape(_DELIMITERS)}])!(?![^{re.escape(_DELIMITERS)}])")


def check_daemons(connection: sa.Connection) -> Result:
    """Compare the RPC versions of all daemons with that of this release.

    Conductors serve daemons of the same major version; a daemon with a newer minor version is
    served, too, but may call methods that this release does not know.
    """
    other_major = defaultdict[str, list[str]](list)
    newer: list[str] = []
    for daemon in migrate.read_daemons(connection):
        release = AGENT.version if daemon.binary == AGENT_BINARY else CONDUCTOR.version
        # Nothing is known of a daemon that sends no version, so that it is not reported.
        version = daemon.rpc or release
        ours, theirs = parse_version(release), parse_version(version)
        if theirs is None or ours is None or theirs[0] != ours[0]:
            other_major[version].append(str(daemon))
        elif theirs > ours:
            newer.append(str(daemon))
    if other_major:
        others = "; ".join(
            f"{version}: {join_limited(names, MAX_NAMED)}" for version, names in other_major.items()
        )
        return Result(
            Code.FAILURE,
            f"This release has RPC version {CONDUCTOR.version} and serves daemons with the same "
            f"major version only, but there are others ({others}). Upgrade them to a release "
            "between the two first, or remove hosts that left with 'cyborg host-forget'.",
        )
    if newer:
        return Result(
            Code.WARNING,
            f"Daemons of a newer release than this one: {join_limited(newer, MAX_NAMED)}. Upgrade "
            "the conductors first.",
        )
    return Result(Code.SUCCESS)


def check_pins(connection: sa.Connection, conf: cfg.ConfigOpts) -> Result:
    """Compare [upgrade_levels] with the RPC versions of the daemons that are called."""
    daemons = migrate.read_daemons(connection)
    problems = []
    for contract, binary in ((AGENT, AGENT_BINARY), (CONDUCTOR, CONDUCTOR_BINARY)):
        lowest = find_lowest(daemon.rpc for daemon in daemons if daemon.binary == binary)
        pin = conf.upgrade_levels[contract.name]
        problems.append(check_pin(contract.name, contract.version, pin, lowest))
    found = [problem for problem in problems if problem is not None]
    if not found:
        return Result(Code.SUCCESS)
    is_failure = any(problem.is_failure for problem in found)
    code = Code.FAILURE if is_failure else Code.WARNING
    return Result(code, " ".join(problem.text for problem in found))


def check_contracts(pending: migrate.Pending) -> Result:
    """Remind of contract migrations, and name the daemons because of which they cannot run yet."""
    if not pending.contracts:
        return Result(Code.SUCCESS)
    remain = f"{len(pending.contracts)} contract migration(s) remain"
    if not pending.blockers:
        return Result(Code.WARNING, f"{remain}: run 'cyborg-dbsync contract'.")
    names = join_limited(list(map(str, pending.blockers)), MAX_NAMED)
    return Result(
        Code.WARNING,
        f"{remain}: run 'cyborg-dbsync contract' when these daemons are upgraded, or removed with "
        f"'cyborg service-delete': {names}.",
    )


def check_profiles(connection: sa.Connection, conf: cfg.ConfigOpts) -> Result:
    """Look for device profiles with a trait or resource class that no device has."""
    names = deployables.read_names(connection, imported=import_plan.BACKEND)
    # Before the first report no device is known: all profiles would be reported.
    if not any(names):
        return Result(Code.SUCCESS)
    release = reference_release(conf)
    unserved: list[str] = []
    for row in device_profiles.find(connection):
        groups = parse_groups(row["groups"])
        if missing := find_unserved_names(groups, names.imported, names.reported, release):
            remedies = (f"{name} ({remedy})" for name, remedy in missing.items())
            unserved.append(f"{row['name']}: {'; '.join(remedies)}")
    if not unserved:
        return Result(Code.SUCCESS)
    return Result(
        Code.WARNING,
        "Device profiles with a trait or resource class that no device has, whose servers end in "
        f"'No valid host': {join_limited(unserved, MAX_PROFILES, separator='. ')}.",
    )


def check_service_tokens(conf: cfg.ConfigOpts) -> Result:
    """Check that only the services of the cloud can bind and delete bound requests.

    Without the libraries of the API on this host, the options are not known here.
    """
    if conf.auth_strategy != "keystone":
        return Result(Code.SUCCESS)
    try:
        # A late import: a host without the API may lack keystonemiddleware.
        from cyborg.api.auth import check_config

        check_config(conf)
        section = conf.keystone_authtoken
        required, roles = section.service_token_roles_required, section.service_token_roles
    except ImportError:
        return Result(Code.SUCCESS, "Not checked: the API is not installed here.")
    except Misconfigured as exc:
        return Result(Code.WARNING, f"{exc.message}. If no API runs on this host, ignore this.")
    except (cfg.Error, ValueError) as exc:
        return Result(Code.FAILURE, f"[keystone_authtoken] cannot be used: {exc}")
    if not required:
        return Result(
            Code.WARNING,
            "[keystone_authtoken] service_token_roles_required is false: a token with any role is "
            "accepted as a service token, so that a user could delete bound requests. Set it to "
            "true.",
        )
    if not roles:
        return Result(
            Code.FAILURE,
            "[keystone_authtoken] service_token_roles is empty: no service can bind. Set it to a "
            "role that only the user of Nova has, such as 'service'.",
        )
    return Result(Code.SUCCESS)


def check_policy_rules(conf: cfg.ConfigOpts) -> Result:
    """Check that each rule of the policy files can be parsed and exists in this release.

    oslo.policy ignores files that it cannot open, and denies what it cannot parse; it writes only
    a log line about it.
    """
    enforcer = make_enforcer(conf)
    try:
        for file in _policy_files(conf):
            if problem := _find_problem(file):
                return Result(Code.FAILURE, f"The policy file {file} {problem}")
        # The problems above are those that oslo.policy only logs; these are those that it raises.
        enforcer.load_rules(force_reload=True)
        enforcer.check_rules(raise_on_violation=True)
    except (policy.InvalidDefinitionError, cfg.Error, ValueError, OSError) as exc:
        return Result(Code.FAILURE, f"The policy files cannot be used: {exc}")
    known = {rule.name for rule in list_rules()}
    names = sorted(map(str, enforcer.file_rules))
    unknown = [name for name in names if name.startswith(PREFIX) and name not in known]
    if not unknown:
        return Result(Code.SUCCESS)
    return Result(
        Code.WARNING,
        "The policy files have rules that this release does not know: "
        f"{join_limited(unknown, MAX_NAMED)}. They have no effect; 'oslopolicy-policy-generator "
        "--namespace cyborg' lists the rules in effect.",
    )


def _policy_files(conf: cfg.ConfigOpts) -> Iterator[Path]:
    """Yield the policy files in the order in which oslo.policy reads them.

    A missing file is yielded, too, if the operator has set its name.
    """
    section = conf.oslo_policy
    file = conf.find_file(section.policy_file)
    is_set = section.policy_file != DEFAULT_POLICY_FILE
    if file or is_set:
        yield Path(file or section.policy_file)
    for name in section.policy_dirs:
        if folder := conf.find_file(name):
            for path in sorted(Path(folder).iterdir()):
                if not path.name.startswith(".") and not path.is_dir():
                    yield path


def _find_problem(file: Path) -> str | None:
    """Return the end of a sentence about the first problem of a policy file, or None."""
    if not file.is_file():
        return "is missing or not a regular file. Correct [oslo_policy], or provide the file."
    try:
        rules: object = policy.parse_file_contents(file.read_bytes())
    except (OSError, ValueError) as exc:
        return f"cannot be read: {exc}"
    if not isinstance(rules, dict):
        return 'must have lines of the form "NAME": "RULE".'
    broken = sorted(str(name) for name, rule in rules.items() if not _is_understood(name, rule))
    if not broken:
        return None
    return (
        f"has rules that cannot be used: {join_limited(broken, MAX_NAMED)}. A part that cannot be "
        "parsed denies everything, an empty value allows everything. Write names and rules as "
        "texts, with '!' to deny and '@' to allow."
    )


def _is_understood(name: Any, rule: Any) -> bool:
    """Return whether oslo.policy parses a rule completely."""
    # A list is the former syntax; oslo.policy iterates over anything else as if it was one.
    if not isinstance(name, str) or not isinstance(rule, str | list):
        return False
    try:
        # Alone, so that the denials are those of this rule.
        parsed = str(policy.Rules.from_dict({name: cast(str, rule)})[name])
    except (TypeError, AttributeError):
        return False
    # oslo.policy puts a denial in place of what it cannot parse, possibly of the whole rule: a
    # denial that the text does not have shows such a part.
    text = str(rule)
    if parsed == "!":
        return text.strip(_DELIMITERS) == "!"
    return len(_DENIAL.findall(parsed)) <= len(_DENIAL.findall(text))


def check_options(files: Sequence[str]) -> Result:
    """Look for renamed and unknown options in the sections of this service."""
    declared = _declared_options()
    known = {section: {option.dest for option in options} for section, options in declared.items()}
    renamed = _renamed_options(declared)
    # Libraries have options of their own in [DEFAULT], auth plugins in the sections of services.
    fully_known = {name for name in known if name != "DEFAULT" and "auth_type" not in known[name]}
    old: list[str] = []
    unknown: list[str] = []
    foreign: list[str] = []  # drivers of OpenStack Cyborg
    for file in files:
        try:
            settings = _read_settings(file)
        except (OSError, UnicodeDecodeError, iniparser.ParseError) as exc:
            return Result(Code.FAILURE, f"{file} cannot be read: {exc}")
        drivers = settings.get("agent", {}).get("enabled_drivers", ())
        for name in ",".join(drivers).split(","):
            if (counterpart := describe_counterpart(name.strip())) is not None:
                foreign.append(f"[agent] enabled_drivers names {name.strip()}, {counterpart}.")
        for section, names in settings.items():
            for name in names:
                if (new := renamed.get((section, name))) is not None:
                    old.append(f"[{section}] {name} is now {new}")
                elif section in fully_known and name not in known[section]:
                    unknown.append(f"[{section}] {name}")
    texts = foreign
    if old:
        texts.append(f"Renamed options: {join_limited(sorted(set(old)), MAX_NAMED)}.")
    if unknown:
        texts.append(
            "Unknown options, which have no effect: "
            f"{join_limited(sorted(set(unknown)), MAX_NAMED)}."
        )
    return Result(Code.WARNING, " ".join(texts)) if texts else Result(Code.SUCCESS)


def configuration_files(conf: cfg.ConfigOpts) -> list[str]:
    """Return the configuration files in the order in which oslo.config reads them."""
    # The attributes are those of the options --config-file and --config-dir.
    files = list(conf.config_file or ())
    for directory in conf.config_dirs:
        files += map(str, sorted(Path(directory).expanduser().glob("[!.]*.conf")))
    return list(dict.fromkeys(files))


def _read_settings(file: str) -> Mapping[str, Mapping[str, Any]]:
    parser = Parser()
    text = Path(file).expanduser().read_text(encoding="utf-8")
    parser.parse(text.splitlines(keepends=True))
    return parser.settings


def _declared_options() -> dict[str, list[cfg.Opt]]:
    """Return the options of this service by section, with those that are read only when needed."""
    declared = defaultdict[str, list[cfg.Opt]](list)
    for group, options in own_options.list_opts():
        declared[str(getattr(group, "name", group) or "DEFAULT")] += options
    return declared


def _renamed_options(declared: Mapping[str, Iterable[cfg.Opt]]) -> dict[tuple[str, str], str]:
    """Return the present names of options by their former section and name."""
    renamed: dict[tuple[str, str], str] = {}
    for section, options in declared.items():
        for option in options:
            for former in option.deprecated_opts:
                # Without a former section or name, the present one has not changed. oslo.config
                # finds an option by its destination, which has underscores.
                place = (former.group or section, (former.name or option.name).replace("-", "_"))
                renamed[place] = f"[{section}] {option.dest}"
    return renamed
