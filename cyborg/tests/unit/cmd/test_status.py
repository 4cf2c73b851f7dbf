# SPDX-License-Identifier: Apache-2.0
"""cyborg-status upgrade check, with and without a database and Placement."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg import conf as own_options
from cyborg.cmd import dbsync, status
from cyborg.db import migrate, schema
from cyborg.db.schema import outbox
from cyborg.tests.fixtures.databases import rows as table_rows
from cyborg.tests.fixtures.machine.processes import free_port, ini
from cyborg.tests.fixtures.upgrade.next_release import CONTRACTION, EXPANSION, add_migrations


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a configuration with an empty database and an unreachable Placement."""
    path = tmp_path / "cyborg.conf"
    endpoint = f"http://127.0.0.1:{free_port()}/"
    path.write_text(
        ini(
            {
                "database": {"connection": f"sqlite:///{tmp_path}/cyborg.db"},
                "placement": {"auth_type": "none", "endpoint_override": endpoint},
            }
        )
    )
    return path


def check(config: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit status and the checks by name."""
    capsys.readouterr()
    code = status.main(["--config-file", str(config), "upgrade", "check", "--json"])
    answer = json.loads(capsys.readouterr().out)
    return code, {row["check"]: row for row in answer["checks"]}


@pytest.mark.slow
def test_check_empty_database_is_failure(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = check(config, capsys)
    assert code == 2
    assert rows["Database schema"]["result"] == 2
    assert "cyborg-dbsync upgrade" in rows["Database schema"]["details"]
    assert rows["Unfinished work"]["result"] == 1


@pytest.mark.slow
def test_check_unreachable_placement_is_warning(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dbsync.main(["--config-file", str(config), "upgrade"])
    code, rows = check(config, capsys)
    assert code == 1
    # No keystone is configured.
    assert {name for name, row in rows.items() if row["result"]} == {"Placement", "Service tokens"}


@pytest.mark.slow
def test_check_dead_letters_are_warning(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dbsync.main(["--config-file", str(config), "upgrade"])
    engine = sa.create_engine(f"sqlite:///{config.parent}/cyborg.db")
    with engine.begin() as tx:
        tx.execute(
            sa.insert(outbox).values(uuid="u", kind="nova", subject="s", payload={}, state="dead")
        )
    engine.dispose()
    _, rows = check(config, capsys)
    assert rows["Unfinished work"]["result"] == 1
    assert rows["Unfinished work"]["details"].startswith("1 message(s)")


@pytest.mark.slow
def test_check_profile_with_a_trait_of_no_device_is_warning(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dbsync.main(["--config-file", str(config), "upgrade"])
    engine = sa.create_engine(f"sqlite:///{config.parent}/cyborg.db")
    group = {"resources:PGPU": "1", "trait:CUSTOM_NVIDIA_1EB8": "required"}
    table_rows.insert_profile(engine, groups=[group], name="t4")
    assert check(config, capsys)[1]["Device profiles"]["result"] == 0, "nothing was reported yet"
    table_rows.insert_card(engine)
    _, rows = check(config, capsys)
    engine.dispose()
    assert rows["Device profiles"]["result"] == 1
    details = " ".join(rows["Device profiles"]["details"].split())
    assert "t4: CUSTOM_NVIDIA_1EB8 (a name of OpenStack Cyborg: set [conductor]" in details
    assert "CUSTOM_PCI_PRODUCT_10DE_1EB8" in details


def test_check_missing_options_are_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.conf"
    path.write_text("[DEFAULT]\nauth_strategy = noauth\n")
    code, rows = check(path, capsys)
    assert code == 2
    assert "connection is not set" in rows["Database schema"]["details"]
    assert "auth_type is not set" in rows["Placement"]["details"]
    assert rows["Authentication"]["result"] == 1


def add_settings(config: Path, **sections: dict[str, Any]) -> None:
    with config.open("a") as file:
        file.write(ini(sections))


def check_one(
    config: Path, capsys: pytest.CaptureFixture[str], name: str
) -> tuple[int, str | None]:
    """Return the result and the details of one check."""
    _, found = check(config, capsys)
    return found[name]["result"], found[name]["details"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("binary", "version", "result", "text"),
    [
        ("cyborg-agent", "1.0", 0, None),
        ("cyborg-conductor", "1.0", 0, None),
        ("cyborg-agent", "1.9", 1, "newer release than this one: cyborg-agent of host compute-1"),
        ("cyborg-agent", "0.7", 2, "0.7: cyborg-agent of host compute-1"),
        ("cyborg-api", "2.0", 2, "2.0: cyborg-api of host compute-1"),
        ("cyborg-agent", "odd", 2, "odd: cyborg-agent of host compute-1"),
    ],
)
def test_check_compares_the_versions_of_daemons(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    binary: str,
    version: str,
    result: int,
    text: str | None,
) -> None:
    dbsync.main(["--config-file", str(config), "upgrade"])
    engine = sa.create_engine(f"sqlite:///{config.parent}/cyborg.db")
    row = table_rows.insert_agent(engine)
    table_rows.update(engine, schema.services, row, binary=binary, versions={"rpc": version})
    engine.dispose()
    found, details = check_one(config, capsys, "Daemons")
    assert found == result
    assert (text in details) if text and details else (details == text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pin", "version", "result", "text"),
    [
        (None, "1.0", 0, None),
        ("1.0", "1.0", 0, None),
        ("1.1", "1.0", 2, "[upgrade_levels] conductor is 1.1"),
        ("2.0", "1.0", 2, "[upgrade_levels] conductor is 2.0"),
        (None, "1.9", 0, None),
        (None, "odd", 0, None),
    ],
)
def test_check_compares_pins_with_the_versions_of_conductors(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    pin: str | None,
    version: str,
    result: int,
    text: str | None,
) -> None:
    dbsync.main(["--config-file", str(config), "upgrade"])
    engine = sa.create_engine(f"sqlite:///{config.parent}/cyborg.db")
    row = table_rows.insert_agent(engine)
    values = {"binary": "cyborg-conductor", "versions": {"rpc": version}}
    table_rows.update(engine, schema.services, row, **values)
    engine.dispose()
    if pin is not None:
        add_settings(config, upgrade_levels={"conductor": pin})
    found, details = check_one(config, capsys, "RPC pins")
    assert found == result
    # The command breaks lines.
    words = " ".join(details.split()) if details else None
    assert (text in words) if text and words else (words == text)


@pytest.mark.slow
def test_check_reminds_of_contract_migrations(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dbsync.main(["--config-file", str(config), "upgrade"])
    folder = config.parent / "migrations"
    shutil.copytree(migrate._SCRIPTS_DIR, folder)
    add_migrations(folder / "versions", schema.REVISION)
    monkeypatch.setattr(migrate, "_SCRIPTS_DIR", str(folder))
    assert check_one(config, capsys, "Database schema")[0] == 2
    assert dbsync.main(["--config-file", str(config), "upgrade"]) == 0
    result, details = check_one(config, capsys, "Database schema")
    assert result == 1
    assert "run 'cyborg-dbsync contract'" in " ".join(str(details).split())
    capsys.readouterr()
    assert dbsync.main(["--config-file", str(config), "version"]) == 0
    remain = f"{EXPANSION} (contract migrations remain, head is {CONTRACTION})\n"
    assert capsys.readouterr().out == remain
    # The other commands work before and after it.
    assert dbsync.main(["--config-file", str(config), "purge", "--older-than", "1"]) == 0
    engine = sa.create_engine(f"sqlite:///{config.parent}/cyborg.db")
    row = table_rows.insert_agent(engine)
    table_rows.update(engine, schema.services, row, binary="cyborg-api")
    engine.dispose()
    result, details = check_one(config, capsys, "Database schema")
    assert result == 1
    assert "cyborg-api of host compute-1" in " ".join(str(details).split())
    capsys.readouterr()
    assert dbsync.main(["--config-file", str(config), "contract"]) == 1
    assert "cyborg-api of host compute-1" in capsys.readouterr().err
    assert dbsync.main(["--config-file", str(config), "contract", "--offline"]) == 0
    assert check_one(config, capsys, "Database schema") == (0, None)


def test_check_without_database_does_not_know_the_daemons(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_one(config, capsys, "Daemons")[0] == 1


@pytest.mark.parametrize(
    ("options", "result", "text"),
    [
        ({}, 0, None),
        ({"service_token_roles": "nova"}, 0, None),
        ({"service_token_roles": ""}, 2, "service_token_roles is empty"),
        ({"service_token_roles_required": "false"}, 1, "service_token_roles_required is false"),
        ({"service_token_roles_required": "perhaps"}, 2, "[keystone_authtoken] cannot be used"),
    ],
)
def test_check_requires_roles_of_service_tokens(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, str],
    result: int,
    text: str | None,
) -> None:
    add_settings(config, keystone_authtoken={"auth_type": "none", **options})
    found, details = check_one(config, capsys, "Service tokens")
    assert found == result
    assert (text in details) if text and details else (details == text)


def test_check_names_unknown_rules(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config.parent / "policy.yaml"
    add_settings(config, oslo_policy={"policy_file": str(file)})
    file.write_text('"cyborg:device:enable": "role:operator"\n"operators": "role:operator"\n')
    assert check_one(config, capsys, "Policy rules") == (0, None)
    file.write_text('"cyborg:arq:steal": "@"\n')
    result, details = check_one(config, capsys, "Policy rules")
    assert result == 1
    assert details is not None
    assert "cyborg:arq:steal" in details
    file.write_text('"cyborg:device:enable": "rule:no_such_rule"\n')
    assert check_one(config, capsys, "Policy rules")[0] == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"cyborg:device:enable": "role:admin or !"', None),
        ('"cyborg:device:enable": [["role:admin"], ["role:operator"]]', None),
        ('"cyborg:device:enable": "!"', None),
        ("", None),
        ('"cyborg:device:enable": "role:admin of role:operator"', "cyborg:device:enable"),
        ('"cyborg:device:enable": "role:admin or operator"', "cyborg:device:enable"),
        ('"cyborg:device:enable": {"role": "admin"}', "cyborg:device:enable"),
        ('"cyborg:device:enable": [["admin"]]', "cyborg:device:enable"),
        ('"cyborg:device:enable": [["role:admin", "!"]]', None),
        ('"cyborg:device:enable": "not (! and !)"', None),
        ('"cyborg:device:enable": "! or operator"', "cyborg:device:enable"),
        ('"cyborg:device:enable": "role:admin of !"', "cyborg:device:enable"),
        ('"cyborg:device:enable":', "cyborg:device:enable"),
        ('"cyborg:device:enable": 5', "cyborg:device:enable"),
        ('"cyborg:device:enable": [5]', "cyborg:device:enable"),
        ('1: "role:admin"', "rules.yaml has rules that cannot be used: 1."),
        ("- cyborg:device:enable", "rules.yaml must have lines of the form"),
        ("cyborg", "rules.yaml must have lines of the form"),
        ("a: b: c", "rules.yaml cannot be read"),
    ],
)
def test_check_refuses_rules_that_cannot_be_parsed(
    config: Path, capsys: pytest.CaptureFixture[str], text: str, found: str | None
) -> None:
    folder = config.parent / "policy.d"
    folder.mkdir()
    add_settings(config, oslo_policy={"policy_dirs": str(folder)})
    (folder / "rules.yaml").write_text(text)
    result, details = check_one(config, capsys, "Policy rules")
    assert (result, details) == (0, None) if found is None else result == 2
    # The command breaks lines, even in long paths.
    assert found is None or "".join(found.split()) in "".join((details or "").split())


def test_check_refuses_a_policy_file_that_is_a_folder(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_settings(config, oslo_policy={"policy_file": str(config.parent)})
    code, found = check(config, capsys)
    assert code == 2
    assert found["Policy rules"]["result"] == 2
    assert str(config.parent) in "".join(found["Policy rules"]["details"].split())
    assert len(found) == len(status.Checks._upgrade_checks)


def test_check_refuses_a_missing_policy_file_unless_it_is_the_default(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_settings(config, oslo_policy={"policy_file": "policy.yaml"})
    assert check_one(config, capsys, "Policy rules") == (0, None)
    config.write_text(config.read_text().replace("policy.yaml", "rules.yaml"))
    result, details = check_one(config, capsys, "Policy rules")
    assert result == 2
    assert "rules.yaml" in "".join((details or "").split())


def test_check_does_not_wait_for_a_pipe_in_a_policy_directory(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config.parent / "policy.d"
    folder.mkdir()
    os.mkfifo(folder / "rules.yaml")
    (folder / ".hidden.yaml").write_text("cyborg")
    add_settings(config, oslo_policy={"policy_dirs": str(folder)})
    # A writer lets a reader that opens the pipe end.
    writer = os.open(folder / "rules.yaml", os.O_RDWR | os.O_NONBLOCK)
    threading.Timer(1, os.close, (writer,)).start()
    assert check_one(config, capsys, "Policy rules")[0] == 2


def test_check_names_broken_rules_that_another_file_replaces(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config.parent / "policy.d"
    folder.mkdir()
    (folder / "rules.yaml").write_text('"cyborg:device:enable": "role:admin"\n')
    (config.parent / "policy.yaml").write_text('"cyborg:device:enable": "admin"\n')
    add_settings(config, oslo_policy={"policy_dirs": str(folder)})
    result, details = check_one(config, capsys, "Policy rules")
    assert result == 2
    assert "cyborg:device:enable" in "".join((details or "").split())


def test_error_of_a_check_does_not_hide_the_others(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("unexpected")

    monkeypatch.setattr("cyborg.cmd.status_checks.check_options", fail)
    code, found = check(config, capsys)
    assert code == 2
    assert "LookupError: unexpected" in found["Options"]["details"]
    assert len(found) == len(status.Checks._upgrade_checks)


def test_check_reads_the_files_of_configuration_directories(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config.parent / "cyborg.conf.d"
    folder.mkdir()
    (folder / "10-api.conf").write_text(ini({"api": {"wrokers": "4"}}))
    (folder / "notes.txt").write_text("not a configuration file")
    capsys.readouterr()
    arguments = ["--config-file", str(config), "--config-dir", str(folder)]
    assert status.main([*arguments, "upgrade", "check", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    (row,) = (row for row in answer["checks"] if row["check"] == "Options")
    assert row["result"] == 1
    assert "[api] wrokers" in row["details"]


def test_check_reads_the_files_that_the_services_read(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library expands ``~``, and leaves out hidden files."""
    monkeypatch.setenv("HOME", str(config.parent))
    folder = config.parent / "cyborg.conf.d"
    folder.mkdir()
    (folder / "10-api.conf").write_text(ini({"api": {"wrokers": "4"}}))
    (folder / ".10-api.conf").write_text(ini({"api": {"hidden": "4"}}))
    capsys.readouterr()
    arguments = ["--config-file", "~/cyborg.conf", "--config-dir", "~/cyborg.conf.d"]
    assert status.main([*arguments, "upgrade", "check", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    (row,) = (row for row in answer["checks"] if row["check"] == "Options")
    assert row["result"] == 1
    assert "[api] wrokers" in row["details"]
    assert "hidden" not in row["details"]


@pytest.mark.slow
def test_check_names_renamed_and_unknown_options(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_settings(
        config,
        api={"api_workers": "4", "wrokers": "4"},
        nova={"auth_type": "password", "username": "cyborg"},
        nova_driver={"any": "value"},
    )
    result, details = check_one(config, capsys, "Options")
    assert result == 1
    assert details is not None
    assert "[api] api_workers is now [api] workers" in details
    assert "[api] wrokers" in details
    assert "nova" not in details


def test_check_names_the_counterpart_of_a_reference_driver(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_settings(config, agent={"enabled_drivers": "gpu, pci_driver"})
    result, details = check_one(config, capsys, "Options")
    assert result == 1
    assert details is not None
    assert details.startswith("[agent] enabled_drivers names pci_driver, which is a driver of Open")
    assert "is the driver 'generic' here" in details


def test_sample_configuration_has_no_unknown_option(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option of the service, in its own section, is a known one."""
    sections: dict[str, dict[str, Any]] = {}
    for group, options in own_options.list_opts():
        for option in options:
            if option.default is not None and isinstance(option.default, int | float):
                section = sections.setdefault(str(getattr(group, "name", group)), {})
                section[option.dest] = option.default
    assert len(sections) > 4
    for name in ("DEFAULT", "database", "placement"):
        sections.pop(name, None)
    add_settings(config, **sections)
    assert check_one(config, capsys, "Options") == (0, None)
