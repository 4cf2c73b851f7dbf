# SPDX-License-Identifier: Apache-2.0
"""Each change of a custody log by SQL is found by the audit and by the command, or is not provable.

The data table is ``tampering.TAMPERINGS``.
"""

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlencode

import pytest
import sqlalchemy as sa

from cyborg.cli.common.rest import CommandError, RestClient
from cyborg.cli.custody import verify_log
from cyborg.conductor.custody.check import ChainChecker
from cyborg.core.audit.sources import Kind
from cyborg.core.custody import NO_KEYS, Link
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.unit.conductor.audit.tampering import (
    HOST,
    TAMPERINGS,
    VICTIM,
    VictimEnv,
    head,
    make_env,
)
from cyborg.tests.unit.conductor.custody.test_sealer import KEYS


class Rest:
    """A REST client whose service is an API in this process."""

    def __init__(self, engine: sa.Engine) -> None:
        conf = make_conf()
        conf.set_override("auth_strategy", "noauth")
        self._api = ApiEnv(conf, engine)

    def call(self, method: str, path: str, *, params: Mapping[str, Any]) -> Any:
        version = {"OpenStack-API-Version": "accelerator latest"}
        answer = self._api.call(method, f"/v2{path}?{urlencode(params)}", headers=version)
        if answer.status_int != 200:
            raise CommandError(answer.text)
        return answer.json

    def list_all(self, path: str, key: str) -> Any:
        page = self.call("GET", path, params={})
        assert f"{key}_links" not in page
        return page[key]


def find_by_audit(env: VictimEnv) -> bool:
    findings = ChainChecker(make_conf(), env.uow, now=lambda: env.time).check(HOST, lambda: None)
    assert all(finding.kind is Kind.CUSTODY_BROKEN for finding in findings), findings
    return f"device {VICTIM}" in {finding.object for finding in findings}


def find_by_command(env: VictimEnv, *, keyed: bool, anchor: Link | None = None) -> bool:
    rest = cast(RestClient, Rest(env.engine))
    try:
        verify_log(rest, VICTIM, KEYS if keyed else NO_KEYS, anchor)
    except CommandError:
        return True
    return False


# Without a key, the first change with each set of proofs.
FIRST = {tampering.proofs: name for name, tampering in reversed(list(TAMPERINGS.items()))}
CASES = [(name, keyed) for name in TAMPERINGS for keyed in (True, False)]
CHOSEN = [(name, keyed) for name, keyed in CASES if keyed or name in FIRST.values()]


@pytest.mark.parametrize(("name", "keyed"), sample(CASES, *CHOSEN, mark=pytest.mark.long))
def test_change_is_found_by_audit_and_command(engine: sa.Engine, name: str, keyed: bool) -> None:
    env = make_env(engine, keyed=keyed)
    anchor = Link(head(env)["sequence"], head(env)["hash"])
    assert not find_by_audit(env)
    assert not find_by_command(env, keyed=keyed, anchor=anchor)
    TAMPERINGS[name].change(env)
    env.sealer.run_once()  # the conductor does not make it its own
    proofs = TAMPERINGS[name].proofs
    expected = "hash" in proofs or (keyed and "key" in proofs)
    with_anchor = find_by_command(env, keyed=keyed, anchor=anchor)
    assert with_anchor == (expected or "anchor" in proofs)
    if name != "chain of a removed device deleted":  # there is nothing to give to the command
        assert find_by_command(env, keyed=keyed) == expected
    for _ in range(2):  # it is reported until it is repaired
        assert find_by_audit(env) == expected
