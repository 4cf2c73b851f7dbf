# SPDX-License-Identifier: Apache-2.0
"""Lookup of projects in keystone."""

import argparse
import json
from typing import Any

import pytest
import requests

from cyborg.cli.common.rest import CommandError, RestClient
from cyborg.cli.limits import find_project

PROJECTS = {"a1": "web", "a2": "db", "a3": "db"}


class Cloud(RestClient):
    """A cloud whose keystone shows PROJECTS; ``status`` replaces its answers.

    ``unknown`` is the status of an answer about an id that is not in PROJECTS.
    """

    endpoint_override = None

    def __init__(self, status: int | None = None, unknown: int = 404) -> None:
        super().__init__(argparse.Namespace())
        self.status, self.unknown = status, unknown

    def connect(self, service: str) -> tuple[Any, str]:
        assert service == "identity"
        return self, ""

    def get(self, path: str, *, raise_exc: bool) -> requests.Response:
        """Answer a request to keystone."""
        answer = requests.Response()
        uuid, _, name = path.removeprefix("/projects").lstrip("/").partition("?name=")
        found = [{"id": key} for key, value in PROJECTS.items() if value == name]
        answer.status_code = self.status or (self.unknown if uuid and uuid not in PROJECTS else 200)
        answer._content = json.dumps({"projects": found}).encode()
        return answer


class Standalone(RestClient):
    """A service without keystone."""

    def connect(self, service: str) -> tuple[Any, str]:
        raise CommandError("the catalog of this cloud has no identity service")


def test_project_is_found_by_id_and_by_unique_name() -> None:
    assert [find_project(Cloud(), text) for text in ("a2", "web")] == ["a2", "a1"]


@pytest.mark.parametrize(
    ("text", "message"), [("none", "no project 'none'"), ("db", "2 projects have the name 'db'")]
)
def test_unknown_and_ambiguous_projects_are_errors(text: str, message: str) -> None:
    with pytest.raises(CommandError, match=f"^{message} in keystone: give the id"):
        find_project(Cloud(), text)


def test_reader_of_a_domain_may_give_a_name() -> None:
    domain = Cloud(unknown=403)
    assert [find_project(domain, text) for text in ("web", "none")] == ["a1", "none"]
    with pytest.raises(CommandError, match="2 projects have the name 'db'"):
        find_project(domain, "db")


def test_project_is_unchanged_if_keystone_does_not_show_it() -> None:
    assert find_project(Cloud(403), "none") == "none"
    assert find_project(Standalone(argparse.Namespace()), "none") == "none"
