# SPDX-License-Identifier: Apache-2.0
"""No public function of a module of ``db`` returns a row without declared keys."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborg import db

MODULES = sorted(
    path
    for path in Path(db.__path__[0]).glob("*/*.py")
    if path.parent.name not in ("migrations", "reference")
)
UNTYPED = {"Any", "Row", "RowMapping"}


def _public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        body = node.body if isinstance(node, ast.ClassDef) else [node]
        for item in body:
            if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                yield item


def _names(annotation: ast.expr) -> set[str]:
    """Return the names in an annotation, without their modules."""
    nodes = list(ast.walk(annotation))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.static
@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_public_functions_return_typed_rows(path: Path) -> None:
    untyped = {
        f"{path.parent.name}/{path.name}:{function.name}"
        for function in _public_functions(ast.parse(path.read_text()))
        if function.returns is not None and _names(function.returns) & UNTYPED
    }
    assert untyped == set()
