# SPDX-License-Identifier: Apache-2.0
"""Generator of the sources of the API reference: the OpenAPI document and recorded examples.

``tools/dev reference`` runs it. It starts a stand-alone service and sends a request to each
operation. Two runs write the same files. Tests fail if the files differ from the service.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from cyborg.api.controller import ApiContext
from cyborg.api.openapi.document import OpenApiDocument
from cyborg.api.routes import build_routes
from cyborg.tests.fixtures.reference.recorder import PUBLIC_URL
from cyborg.tests.fixtures.reference.scenario import record_examples

FOLDER = Path(__file__).parents[1] / "doc" / "source" / "api"
DOCUMENT = FOLDER / "openapi.json"
EXAMPLES = FOLDER / "examples.json"


def make_document() -> dict[str, Any]:
    """Return the OpenAPI document that the service serves, with the URL of the examples."""
    routes = build_routes(ApiContext(None, None, None))  # type: ignore[arg-type]
    return dict(OpenApiDocument(routes).document(PUBLIC_URL))


def format_json(value: Any) -> str:
    """Return the text of a file."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write both files."""
    document = make_document()
    DOCUMENT.write_text(format_json(document), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        examples = record_examples(Path(folder), document)
    EXAMPLES.write_text(format_json(examples), encoding="utf-8")


if __name__ == "__main__":
    main()
