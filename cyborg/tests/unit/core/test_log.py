# SPDX-License-Identifier: Apache-2.0
"""Fields of log lines, as the formatters of oslo.log show them."""

import ast
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oslo_config import cfg
from oslo_context import context
from oslo_log import formatters, log

import cyborg
from cyborg.core.log import FIELDS, MAX_LENGTH, MAX_VALUES, drop_tracebacks, get_logger, log_fields

LOG = get_logger("cyborg.tests.log")
VALUES: dict[str, Any] = {name: f"{name}-1" for name in FIELDS}
ONE_LINE = f"{__name__}.Outage: the broker is away"
ROOT = Path(cyborg.__file__).parent


class Lines:
    """The lines that a handler with one formatter has written."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self._stream = io.StringIO()
        self.handler = logging.StreamHandler(self._stream)
        self.handler.setFormatter(formatter)

    def text(self) -> str:
        return self._stream.getvalue()

    def last(self) -> str:
        return self.text().splitlines()[-1]

    def extra(self) -> Any:
        return json.loads(self.last())["extra"]


@pytest.fixture
def outputs() -> Iterator[tuple[Lines, Lines]]:
    conf = cfg.ConfigOpts()
    log.register_options(conf)
    conf([])
    outputs = (Lines(formatters.ContextFormatter(config=conf)), Lines(formatters.JSONFormatter()))
    for lines in outputs:
        LOG.logger.addHandler(lines.handler)
    LOG.setLevel(logging.DEBUG)
    yield outputs
    for lines in outputs:
        LOG.logger.removeHandler(lines.handler)


def test_each_field_reaches_text_and_json(outputs: tuple[Lines, Lines]) -> None:
    text, json_lines = outputs
    LOG.warning("%d%% done", 5, **VALUES)
    rendered = " ".join(f"{name}={name}-1" for name in FIELDS)
    assert " WARNING cyborg.tests.log [" in text.last()
    assert text.last().endswith(f"] [{rendered}] 5% done")
    assert json_lines.extra() == VALUES
    line = json.loads(json_lines.last())
    assert (line["message"], line["msg"]) == ("5% done", "%d%% done")


def test_line_names_its_own_place(outputs: tuple[Lines, Lines]) -> None:
    LOG.info("done", job="j")
    line = json.loads(outputs[1].last())
    assert (line["filename"], line["funcname"]) == ("test_log.py", "test_line_names_its_own_place")


def test_line_without_fields_has_no_brackets(outputs: tuple[Lines, Lines]) -> None:
    LOG.info("done", job=None)
    assert outputs[0].last().endswith("] done")
    assert "job=" not in outputs[0].last()
    assert outputs[1].extra() == {}


def test_field_with_several_values_is_repeated(outputs: tuple[Lines, Lines]) -> None:
    LOG.info("done", arq=["a", "b"], instance="i")
    assert "[arq=a arq=b instance=i] done" in outputs[0].last()
    assert outputs[1].extra() == {"arq": ["a", "b"], "instance": "i"}
    LOG.info("done", host={f"h{number}" for number in range(MAX_VALUES + 9)})
    assert outputs[0].last().count("host=") == MAX_VALUES


def test_value_cannot_end_its_field_or_line(outputs: tuple[Lines, Lines]) -> None:
    LOG.info("done", host="h]\nERROR x job=1\x1b[31m" + "y" * 999)
    assert "[host=h??ERROR?x?job=1??31m" in outputs[0].last()
    # Not the whole line, which also has the request of this thread, if there is one.
    assert 200 < outputs[0].last().count("y") < MAX_LENGTH
    assert "\n" not in outputs[1].last()


def test_scope_adds_fields_until_its_end(outputs: tuple[Lines, Lines]) -> None:
    with log_fields(job="j", host="h"):
        with log_fields(host="g"):
            LOG.info("inner", backend="b")
            assert outputs[1].extra() == {"job": "j", "host": "g", "backend": "b"}
        LOG.info("outer", job=None)
        assert outputs[1].extra() == {"host": "h"}
    LOG.info("after")
    assert outputs[1].extra() == {}


def test_extra_is_shown_in_json_only(outputs: tuple[Lines, Lines]) -> None:
    LOG.info("done", extra={"status": 200})
    assert outputs[0].last().endswith("] done")
    assert outputs[1].extra() == {"status": 200}


def test_context_replaces_that_of_the_thread(outputs: tuple[Lines, Lines]) -> None:
    ctxt = context.RequestContext(overwrite=False)
    LOG.info("done", context=ctxt, job="j")
    assert f"[None {ctxt.request_id} - - - - - -] [job=j] done" in outputs[0].last()
    assert json.loads(outputs[1].last())["context"]["request_id"] == ctxt.request_id


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(ROOT.rglob("*.py")):
        if "tests" not in path.relative_to(ROOT).parts:
            source = path.read_text()
            for node in ast.walk(ast.parse(source)) if "LOG." in source else ():
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and ast.unparse(node.func.value) == "LOG"
                ):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


@pytest.mark.slow
@pytest.mark.static
def test_all_fields_of_the_package_are_known() -> None:
    allowed = {*FIELDS, "exc_info", "extra", "context", None}  # None is **fields
    unknown = {
        f"{place}: {keyword.arg}"
        for place, call in log_calls()
        for keyword in call.keywords
        if keyword.arg not in allowed
    }
    assert unknown == set()


@pytest.mark.static
def test_all_modules_have_a_logger_with_fields() -> None:
    modules = {
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.rglob("*.py"))
        if "tests" not in path.relative_to(ROOT).parts
        and path.relative_to(ROOT).parts[0] != "cli"
        and re.search(r"LOG = log\w*\.getLogger", path.read_text())
    }
    assert modules == set()


class Outage(Exception):
    """An error of a neighbour."""


def test_traceback_of_an_outage_is_one_line(outputs: tuple[Lines, Lines]) -> None:
    drop_tracebacks(["cyborg.tests.log"], (Outage,))
    drop_tracebacks(["cyborg.tests.log"], (Outage,))
    assert len(LOG.logger.filters) == 1
    try:
        for error in (Outage("the broker is away"), ZeroDivisionError("a bug")):
            try:
                raise error
            except Exception:
                LOG.exception("Can not send reply")
            if isinstance(error, Outage):
                assert outputs[0].last().endswith("Can not send reply: " + ONE_LINE)
                assert "Traceback" not in outputs[0].text()
                assert json.loads(outputs[1].last())["error_summary"] == ONE_LINE
    finally:
        LOG.logger.filters.clear()
    assert "Traceback" in outputs[0].text()


def test_message_in_an_except_block_shows_its_cause_once(outputs: tuple[Lines, Lines]) -> None:
    for number, write in enumerate((LOG.warning, LOG.error, LOG.critical)):
        try:
            raise OSError(f"disk {number} is full")
        except OSError as exc:
            write("Saving failed: %s", exc, job="j-1")
        assert outputs[0].last().count(f"disk {number} is full") == 1
        assert json.loads(outputs[1].last())["error_summary"] == ""


def test_message_in_an_except_block_names_its_own_place(outputs: tuple[Lines, Lines]) -> None:
    try:
        raise OSError("disk is full")
    except OSError:
        LOG.warning("Saving failed")
    record = json.loads(outputs[1].last())
    assert record["funcname"] == "test_message_in_an_except_block_names_its_own_place"
    assert "disk is full" not in outputs[1].last()


@pytest.mark.static
def test_all_fields_are_documented() -> None:
    page = ROOT.parent / "doc" / "source" / "admin" / "logs.rst"
    if not page.exists():
        pytest.skip("the documentation is not installed")
    documented = set(re.findall(r"^``(\w+)`` {2,}\S", page.read_text(), re.MULTILINE))
    assert documented == set(FIELDS)


def test_long_value_is_cut_in_text_and_json(outputs: tuple[Lines, Lines]) -> None:
    text, json_lines = outputs
    LOG.warning("a peer chose the host", host="x" * 5000)
    assert json_lines.extra()["host"] == "x" * MAX_LENGTH
    assert "x" * MAX_LENGTH in text.last()
    assert "x" * (MAX_LENGTH + 1) not in text.last()
