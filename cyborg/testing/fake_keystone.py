# SPDX-License-Identifier: Apache-2.0
"""Test double of keystone that validates the tokens it has issued, over HTTP."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.message import Message
from typing import Any

from cyborg.testing.http_double import DoubleHandler, serve

# Later than any run of the tests.
EXPIRES = "2999-01-01T00:00:00.000000Z"


class FakeKeystone:
    """Double of keystone that accepts tokens of ``issue_token`` and users of ``add_user``."""

    def __init__(self) -> None:
        self.url = ""
        self._users: dict[tuple[str, str, str], Sequence[str]] = {}
        self._tokens: dict[str, Mapping[str, Any]] = {}

    def issue_token(
        self, roles: Sequence[str], project: str | None = "project-1", **fields: Any
    ) -> str:
        """Return a token of a user with these roles, scoped to a project or, if None, unscoped.

        ``fields`` are additional fields of the token, such as ``system``.
        """
        name = f"token-{len(self._tokens)}"
        self._tokens[name] = {
            "methods": ["password"],
            "user": self._user("user-1", "user"),
            "roles": [{"id": role, "name": role} for role in roles],
            "issued_at": "2020-01-01T00:00:00.000000Z",
            "expires_at": EXPIRES,
            **({"project": self._project(project)} if project else {}),
            **fields,
        }
        return name

    def add_user(self, name: str, password: str, roles: Sequence[str], project: str) -> None:
        """Add a user who gets a token with these roles for this password and project."""
        self._users[name, password, project] = roles

    def revoke_token(self, name: str) -> None:
        """Reject a token from now on."""
        del self._tokens[name]

    def sign_in(self, body: Any) -> tuple[int, dict[str, str], Any]:
        """Return the status, headers and body of the response to the authentication of a user."""
        try:
            user = body["auth"]["identity"]["password"]["user"]
            project = body["auth"]["scope"]["project"]["name"]
            roles = self._users[user["name"], user["password"], project]
        except (KeyError, TypeError):
            message = "The request you have made requires authentication."
            return 401, {}, {"error": {"code": 401, "title": "Unauthorized", "message": message}}
        token = self.issue_token(roles, project, user=self._user(user["name"], user["name"]))
        return 201, {"X-Subject-Token": token}, {"token": self._tokens[token]}

    def options(self) -> dict[str, str]:
        """Return the options of [keystone_authtoken] that connect to this double."""
        return {"auth_type": "admin_token", "endpoint": f"{self.url}/v3", "token": "the-api"}

    def answer(self, path: str, headers: Message) -> tuple[int, Any]:
        """Return the status and body of the response to a GET request."""
        if path.endswith("/auth/tokens"):
            token = self._tokens.get(headers.get("X-Subject-Token", ""))
            return (200, {"token": token}) if token else (404, {"error": {"code": 404}})
        # Any other path: clients first ask which versions there are.
        links = [{"rel": "self", "href": f"{self.url}/v3/"}]
        return 200, {"version": {"id": "v3.14", "status": "stable", "links": links}}

    @staticmethod
    def _user(uuid: str, name: str) -> dict[str, Any]:
        return {"id": uuid, "name": name, "domain": {"id": "default", "name": "D"}}

    @staticmethod
    def _project(project: str) -> dict[str, Any]:
        return {"id": project, "name": project, "domain": {"id": "default", "name": "D"}}


@contextmanager
def serve_keystone() -> Iterator[FakeKeystone]:
    """Serve a double on a free loopback port until the end of the block."""
    keystone = FakeKeystone()

    class Handler(DoubleHandler):
        def do_GET(self) -> None:
            self.respond(*keystone.answer(self.path.partition("?")[0], self.headers))

        def do_POST(self) -> None:
            """Answer an authentication; without ``add_user`` every password is rejected."""
            status, headers, body = keystone.sign_in(self.read_json())
            self.respond(status, body, headers)

    with serve(Handler) as url:
        keystone.url = url
        yield keystone
