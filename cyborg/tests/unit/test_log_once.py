# SPDX-License-Identifier: Apache-2.0
"""No log message contains the text of an exception twice.

oslo.log appends the exception in progress to each message of level WARNING or above. The loggers of
``core.log.get_logger`` prevent that, so that they may be used in an except block. A message of any
other logger that quotes the exception must be logged after the block. ``LOG.exception`` and
``exc_info`` log a traceback, so that their messages need not quote the exception.
"""

import ast
import functools
import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from oslo_config import cfg
from oslo_log import formatters, log

import cyborg
from cyborg.core.errors import Unavailable
from cyborg.threads.periodic import PeriodicTask

ROOT = Path(cyborg.__file__).parent
LEVELS = {"warning", "warn", "error", "critical"}
# Methods that log a warning and are called from other modules.
METHODS = {"warn"}

# How a module makes its logger; ``core.log.FieldLogger`` ends the cause of each message.
FIELD_LOGGERS = ("LOG = get_logger(__name__)", "LOG = log.get_logger(__name__)")

LOG_OR_EXCEPT = re.compile(r"\b(?:LOG|log|logger)\.|\bexcept\b")
Functions = dict[str, ast.FunctionDef]


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules that log or handle an exception: others need no parser."""
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        if relative.parts[0] not in ("tests", "fixtures"):
            source = path.read_text()
            if LOG_OR_EXCEPT.search(source):
                yield str(relative), ast.parse(source)


@functools.cache
def walk(node: ast.AST) -> list[ast.AST]:
    """Return the nodes below one: each is visited for several questions."""
    return list(ast.walk(node))


def is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and is_name(node.value, "LOG", "log", "logger")


def is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def log_lines(node: ast.AST) -> Iterator[int]:
    """Yield the lines where a message is logged without traceback, aliases included."""
    traced = {
        id(call.func)
        for call in walk(node)
        if isinstance(call, ast.Call)
        and any(keyword.arg == "exc_info" for keyword in call.keywords)
    }
    for item in walk(node):
        if not isinstance(item, ast.Attribute) or not is_log(item) or id(item) in traced:
            continue
        if item.attr in LEVELS or item.attr == "log":
            yield item.lineno


def called_functions(node: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield line, name, and whether it is local to the module or ``self``, of each call."""
    for call in walk(node):
        if not isinstance(call, ast.Call):
            continue
        if isinstance(call.func, ast.Name):
            yield call.lineno, call.func.id, True
        elif isinstance(call.func, ast.Attribute):
            yield call.lineno, call.func.attr, is_name(call.func.value, "self", "cls")


def logging_functions(tree: ast.Module) -> set[str]:
    """Return the functions of a module that log, directly or through others of the module."""
    functions = {f.name: f for f in walk(tree) if isinstance(f, ast.FunctionDef)}
    functions_that_log = {name for name, function in functions.items() if any(log_lines(function))}
    while True:
        more = {
            name
            for name, function in functions.items()
            if name not in functions_that_log
            and any(
                local and to in functions_that_log for _, to, local in called_functions(function)
            )
        }
        if not more:
            return functions_that_log
        functions_that_log |= more


def handler_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    for handler in walk(tree):
        if isinstance(handler, ast.ExceptHandler):
            yield from handler.body


def quoting_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the lines where LOG.exception quotes the exception, which it shows anyway."""
    for handler in walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        for call in ast.walk(handler):
            if isinstance(call, ast.Call) and is_log(call.func):
                is_exception = call.func.attr == "exception"  # type: ignore[attr-defined]
                quoted = (node for argument in call.args for node in ast.walk(argument))
                names = {node.id for node in quoted if isinstance(node, ast.Name)}
                if is_exception and handler.name in names:
                    yield call.lineno


def has_field_logger(tree: ast.Module) -> bool:
    return any(ast.unparse(statement) in FIELD_LOGGERS for statement in tree.body)


def found_in(tree: ast.Module, elsewhere: set[str]) -> set[int]:
    """Return the lines of except blocks at which an exception would be shown twice."""
    statements = list(handler_statements(tree))
    lines = set(quoting_lines(tree))
    if not statements or has_field_logger(tree):
        return lines
    local_functions = logging_functions(tree)
    for statement in statements:
        lines |= set(log_lines(statement))
        lines |= {
            line
            for line, name, local in called_functions(statement)
            if (local and name in local_functions) or (not local and name in elsewhere)
        }
    return lines


@pytest.mark.slow
@pytest.mark.static
def test_messages_are_not_logged_within_except_blocks() -> None:
    trees = dict(sources())
    functions = {
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any(log_lines(node)) and not has_field_logger(tree)
    }
    findings = {
        f"{module}:{line}"
        for module, tree in trees.items()
        for line in found_in(tree, functions | METHODS)
    }
    walk.cache_clear()  # or all nodes stay in memory
    assert sorted(findings) == [], "log after the except block"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("LOG.warning('%s', exc)", True),
        ("LOG.log(level, '%s', exc)", True),
        ("level = LOG.warning", True),
        ("self.report(exc)", True),
        ("self.indirect(exc)", True),
        ("limited_log.warn(exc)", True),
        ("LOG.exception('%s', exc)", True),
        ("LOG.exception('it failed')", False),
        ("LOG.error('it failed', exc_info=True)", False),
        ("LOG.info('%s', exc)", False),
        ("error = exc", False),
    ],
)
def test_found_in_detects_violations(body: str, expected: bool) -> None:
    text = (
        "class A:\n"
        "    def report(self, exc):\n        LOG.warning('%s', exc)\n"
        "    def indirect(self, exc):\n        self.report(exc)\n"
        "    def work(self):\n"
        "        try:\n            work()\n"
        f"        except ValueError as exc:\n            {body}\n"
    )
    assert bool(found_in(ast.parse(text), METHODS)) is expected
    with_fields = ast.parse(f"{FIELD_LOGGERS[0]}\n{text}")
    assert bool(found_in(with_fields, METHODS)) is (body == "LOG.exception('%s', exc)")


def test_periodic_task_failure_logs_error_text_once() -> None:
    def fail() -> None:
        raise Unavailable("the database is unavailable")

    conf = cfg.ConfigOpts()
    log.register_options(conf)
    conf([])
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatters.ContextFormatter(config=conf))
    logger = logging.getLogger("cyborg.threads.periodic")
    logger.addHandler(handler)
    try:
        PeriodicTask("publisher", 60, fail).run_once()
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue().count("the database is unavailable") == 1
