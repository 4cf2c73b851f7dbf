# SPDX-License-Identifier: Apache-2.0
"""``cyborg-dbsync sign-custody``, and conductors whose logs have another key, or none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from cyborg.cmd import dbsync
from cyborg.conductor.custody.check import ChainChecker
from cyborg.core.custody import Keys, parse_keys
from cyborg.db import schema
from cyborg.db.custody import write as custody_keys
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.unit.conductor.custody.test_sealer import DEVICES, Env

OLD, NEW = "ab" * 32, "cd" * 32


class Site:
    """A database, and commands with a key file."""

    def __init__(self, folder: Path, engine: sa.Engine) -> None:
        self.engine = engine
        self.key_file = folder / "custody.key"
        self._config = folder / "cyborg.conf"
        url = engine.url.render_as_string(hide_password=False)
        text = f"[database]\nconnection = {url}\n[conductor]\ncustody_key_file = {self.key_file}\n"
        self._config.write_text(text)

    def env(self, keys: str = "") -> Env:
        """Return the custody logs as a conductor with these keys has them."""
        parsed = parse_keys(keys) if keys else Keys()
        return Env(custody_keys.attach(self.engine, parsed))

    def remove(self) -> int:
        """Remove the signatures without a key file, and return the exit status."""
        self._config.write_text(self._config.read_text().partition("custody_key_file")[0])
        return dbsync.main(["--config-file", str(self._config), "sign-custody", "--remove"])

    def sign(self, keys: str, *options: str) -> int:
        """Run the command with a key file, and return its exit status."""
        self.key_file.write_text(keys)
        return dbsync.main(["--config-file", str(self._config), "sign-custody", *options])


@pytest.fixture
def site(tmp_path: Path, sqlite_engine: sa.Engine) -> Iterator[Site]:
    return Site(tmp_path, sqlite_engine)  # type: ignore[return-value]


def find(env: Env) -> list[str]:
    checker = ChainChecker(make_conf(), env.uow, now=lambda: env.time)
    return [finding.explanation for finding in checker.check("compute-1", lambda: None)]


def test_logs_of_conductors_without_a_key_are_signed_once(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    old = site.env()
    old.add(*DEVICES, DEVICES[0])
    assert old.sealer.run_once() == 3
    old.add(DEVICES[0])
    new = site.env(NEW)
    assert new.sealer.run_once() == 0
    assert len(find(new)) == 3
    assert all("it has no signature" in text for text in find(new))
    assert site.sign(NEW) == 0
    assert capsys.readouterr().out == "signed 2 chains and 1 new records\n"
    assert new.sealer.run_once() == 1
    assert find(new) == []
    assert site.sign(NEW) == 0
    assert capsys.readouterr().out == "signed 0 chains and 0 new records\n"


def test_conductor_without_the_key_changes_no_signed_chain(site: Site) -> None:
    keyed = site.env(OLD)
    keyed.add(DEVICES[0])
    assert keyed.sealer.run_once() == 1
    keyless = site.env()
    keyless.add(DEVICES[0])
    assert keyless.sealer.run_once() == 0
    keyless.time = keyed.time.replace(year=2036)
    assert keyless.sealer.sweep() == 0
    assert "is not in the key file" in find(keyless)[0]


def test_key_is_replaced_in_two_steps(site: Site) -> None:
    first = site.env(OLD)
    first.add(DEVICES[0], DEVICES[0])
    first.sealer.run_once()
    # Each conductor learns the new key before the first one signs with it.
    second = site.env(f"{OLD}\n{NEW}")
    third = site.env(f"{NEW}  # 2026\n{OLD}")
    for env in (second, third, second, third):
        env.add(DEVICES[0])
        assert env.sealer.run_once() == 1
    assert find(second) == find(third) == []
    assert "is not in the key file" in find(first)[0]
    assert find(site.env(NEW)) == []


def test_chain_with_a_lost_key_is_signed_on_demand_only(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    old = site.env(OLD)
    old.add(DEVICES[0])
    old.sealer.run_once()
    old.add(DEVICES[0])
    assert site.sign(NEW) == 1
    output = capsys.readouterr()
    assert "2 chains or records were not signed" in output.err
    assert output.out.count("(see --replace)") == 2
    assert site.sign(NEW, "--replace") == 0
    new = site.env(NEW)
    assert new.sealer.run_once() == 1
    assert find(new) == []


def test_chain_whose_hashes_do_not_fit_is_not_signed(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    old = site.env()
    old.add(DEVICES[0], DEVICES[0])
    old.sealer.run_once()
    first = rows.read(site.engine, schema.custody_records, sequence=1)[0]
    rows.update(site.engine, schema.custody_records, first["id"], host="elsewhere")
    assert site.sign(NEW, "--replace") == 1
    assert f"not signed: device {DEVICES[0]}: the stored hash of record 1" in (
        capsys.readouterr().out
    )


def test_conductors_without_the_key_continue_logs_whose_signatures_were_removed(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    keyed = site.env(NEW)
    keyed.add(*DEVICES)
    assert keyed.sealer.run_once() == 2
    keyed.add(DEVICES[0])
    assert site.sign(NEW, "--remove") == 1
    assert "custody_key_file is set, expected none" in capsys.readouterr().err
    assert site.remove() == 0
    assert "of 2 chains and 1 new records" in capsys.readouterr().out
    keyless = site.env()
    assert keyless.sealer.run_once() == 3
    assert find(keyless) == []
    assert [sealed.record.event for sealed in keyless.chain(DEVICES[0])] == [
        "device_added",
        "claimed",
        "signatures_removed",
    ]
    assert site.remove() == 0
    assert "of 0 chains and 0 new records" in capsys.readouterr().out
    assert keyless.unsealed() == 0


@pytest.mark.parametrize("text", ["", "# none\n", "abcd\n", "zz" * 32])
def test_key_file_without_a_key_is_named(
    site: Site, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.sign(text) == 1
    error = capsys.readouterr().err
    assert f"custody_key_file: cannot read the keys of {site.key_file}" in error
    assert "zz" not in error
