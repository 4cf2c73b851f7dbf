# SPDX-License-Identifier: Apache-2.0
"""The sign-in of the web console against a real keystone."""

from typing import Any

import pytest
import requests

from cyborg.tests.fixtures.clouds.keystone_cloud import KeystoneCloud
from cyborg.tests.fixtures.clouds.keystone_stack import LOGINS, PASSWORD

pytestmark = [pytest.mark.services, pytest.mark.matrix]


def sign_in(cloud: KeystoneCloud, user: str, **changes: str) -> requests.Response:
    """Return the answer to a sign-in in the project of the user."""
    body = {"user": user, "password": PASSWORD, "project": LOGINS[user].project, **changes}
    return requests.post(f"{cloud.endpoint}/ui/sign-in", json=body, timeout=60)


@pytest.mark.parametrize(
    ("user", "allowed", "refused"),
    [
        ("admin", "cyborg:driver:update", None),
        ("member", "cyborg:device_context:create", "cyborg:device:get_all"),
        ("reader", "cyborg:arq:get_all", "cyborg:device_context:create"),
    ],
)
def test_sign_in_gives_the_token_and_the_rules_of_the_role(
    keystone_cloud: KeystoneCloud, user: str, allowed: str, refused: str | None
) -> None:
    answer = sign_in(keystone_cloud, user)
    assert answer.status_code == 201, answer.text
    headers = {"X-Auth-Token": answer.json()["token"]}
    session: dict[str, Any] = requests.get(
        f"{keystone_cloud.endpoint}/ui/session", headers=headers, timeout=60
    ).json()
    assert (session["user"], session["project"]) == (user, LOGINS[user].project)
    assert user in session["roles"]
    assert allowed in session["rules"]
    assert refused not in session["rules"]


@pytest.mark.parametrize(
    "changes", [{"password": "wrong"}, {"project": "no-such"}, {"user_domain": "no-such"}]
)
def test_sign_in_that_keystone_rejects_is_401(
    keystone_cloud: KeystoneCloud, changes: dict[str, str]
) -> None:
    answer = sign_in(keystone_cloud, "reader", **changes)
    assert answer.status_code == 401, answer.text
    assert changes.get("password", "-") not in answer.text
