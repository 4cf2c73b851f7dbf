# SPDX-License-Identifier: Apache-2.0
"""Sphinx directives that generate the API reference from openapi.json and examples.json.

``api-operations`` describes the operations of some tags, ``api-summary`` lists all operations, and
``api-errors`` describes the errors.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docutils import nodes
from openapi_text import Lines, Reference
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).parents[1] / "api"
FILES = [FOLDER / "openapi.json", FOLDER / "examples.json"]


class _Generated(SphinxDirective):
    """A directive whose content is generated from the files."""

    def generate(self, describe: Callable[[Reference], Lines]) -> list[nodes.Node]:
        """Return the nodes of generated text."""
        for file in FILES:
            self.env.note_dependency(str(file))
        document, examples = (json.loads(file.read_text(encoding="utf-8")) for file in FILES)
        reference = Reference(document, examples, self.env.docname.rpartition("/")[2])
        text = "\n".join(describe(reference))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class Operations(_Generated):
    """The operations with the tags in the argument, and their objects."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        tags = self.arguments[0].split()
        return self.generate(lambda reference: reference.describe_tags(tags))


class Summary(_Generated):
    """A table of all operations."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        return self.generate(Reference.list_all)


class Errors(_Generated):
    """A table of the error statuses, with examples."""

    def run(self) -> list[nodes.Node]:
        """Return the table and the examples."""
        return self.generate(Reference.describe_errors)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("api-operations", Operations)
    app.add_directive("api-summary", Summary)
    app.add_directive("api-errors", Errors)
    return {"version": "1", "parallel_read_safe": True}
