# SPDX-License-Identifier: Apache-2.0
"""Each command of the documentation is run by a test or marked as not run, and can be parsed.

``pytest -rP -k test_each_command_is_run_or_marked`` prints how many commands tests run.
"""

import ast
import functools
import re
import sys
from importlib import metadata
from typing import Any

import pytest
from oslo_config import cfg

from cyborg import conf as options
from cyborg.cli import app
from cyborg.cmd import dbsync, status_convert, status_pending
from cyborg.tests.fixtures.pages.console_blocks import DOC, ROOT, Block, find_calls, read_blocks

pytestmark = pytest.mark.static

PAGES = sorted(path for path in DOC.rglob("*.rst") if "_generated" not in path.parts)
CALL = re.compile(r"``cyborg\s+(\w[^`]*)``")
EXAMPLE = """\
.. run-by: a.py

Title
=====

.. code-block:: console

   $ one \\
       two
   output

.. not-run: needs a card

.. code-block:: console

   # three

.. code-block:: console

   $ four
"""


@functools.cache
def blocks() -> list[Block]:
    """Return the blocks of all pages."""
    return [
        block
        for path in PAGES
        for block in read_blocks(str(path.relative_to(DOC)), path.read_text(encoding="utf-8"))
    ]


def sources(test: str) -> str:
    """Return the text of a test or script, and of the fixtures that it imports."""
    text = (ROOT / test).read_text(encoding="utf-8")
    if not test.endswith(".py"):
        return text
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    paths = [ROOT / f"{(node.module or '').replace('.', '/')}.py" for node in imports]
    fixtures = [path for path in paths if "fixtures" in path.parts and path.exists()]
    return "\n".join([text, *(path.read_text(encoding="utf-8") for path in fixtures)])


def test_each_command_is_run_or_marked() -> None:
    unmarked = [f"{b.page}:{b.line}: {b.commands[0]}" for b in blocks() if not b.kind]
    text = "write '.. run-by: PATH OF TEST' or '.. not-run: REASON' before the block"
    assert not unmarked, "\n".join([text, *unmarked])
    run = sum(len(block.commands) for block in blocks() if block.kind == "run-by")
    total = sum(len(block.commands) for block in blocks())
    sys.stdout.write(f"commands that tests run: {run} of {total}\n")
    assert run > total / 2


@pytest.mark.parametrize(
    ("page", "test"), sorted({(b.page, b.mark) for b in blocks() if b.kind == "run-by"})
)
def test_page_is_named_by_the_test_that_runs_it(page: str, test: str) -> None:
    assert page.removesuffix(".rst") in sources(test)


def parse_client_call(program: str, arguments: list[str]) -> None:
    """Parse a call of ``cyborg`` or ``openstack``. Raise SystemExit or ValueError if wrong."""
    client = app.CyborgApp([])
    if program == "openstack":
        if arguments[:1] != ["accelerator"]:
            return
        found = [
            (count, entry)
            for group in ("openstack.cyborg.v2", "openstack.accelerator.v2")
            for count in range(len(arguments), 0, -1)
            for entry in metadata.entry_points(
                group=group, name="_".join(arguments[:count]).replace("-", "_")
            )
        ]
        if not found:
            raise ValueError(f"unknown command: openstack {' '.join(arguments)}")
        count, entry = max(found, key=lambda pair: pair[0])
        if not entry.value.startswith("cyborg."):
            return  # of python-openstackclient
        command, rest = entry.load(), arguments[count:]
    else:
        _, remaining = client.parser.parse_known_args(arguments)
        command, _, rest = client.command_manager.find_command(remaining)
        command = getattr(command, "load", lambda: command)()
    command(client, None).get_parser(program).parse_args(rest)


def parse_configured_call(program: str, arguments: list[str]) -> None:
    """Parse a call of ``cyborg-dbsync`` or ``cyborg-status``. Raise SystemExit if it is wrong."""
    if program == "cyborg-status" and arguments[0] == status_convert.VERB:
        # A correct call fails, because there is no such file.
        assert status_convert.main(arguments) == 1
        return
    conf = cfg.ConfigOpts()
    options.register(conf, options.DBSYNC_GROUPS)
    verbs = dbsync._verbs if program == "cyborg-dbsync" else status_pending._verbs
    own = [dbsync.WAIT] if program == "cyborg-dbsync" else []
    conf.register_cli_opts([*own, cfg.SubCommandOpt("verb", handler=verbs)])
    if arguments[0] == "--config-file":
        arguments = arguments[2:]
    if program == "cyborg-status" and arguments[0] == "upgrade":
        assert arguments == ["upgrade", "check"]
        return
    conf(arguments, project="cyborg", default_config_files=[], default_config_dirs=[])


def parse_call(program: str, arguments: list[str]) -> None:
    """Parse a call of one of our programs. Raise SystemExit or ValueError if it is wrong."""
    configured = program in ("cyborg-dbsync", "cyborg-status")
    (parse_configured_call if configured else parse_client_call)(program, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({b.page for b in blocks() if b.kind == "not-run"}))
def test_commands_that_no_test_runs_can_be_parsed(page: str) -> None:
    wrong = []
    for block in blocks():
        if block.page != page or block.kind != "not-run":
            continue
        for line in block.commands:
            for program, arguments in find_calls(line):
                try:
                    parse_call(program, arguments)
                except (SystemExit, ValueError):
                    wrong.append(f"{page}:{block.line}: {line}")
    assert wrong == []


def test_commands_in_sentences_exist_with_their_options() -> None:
    client = app.CyborgApp([])
    parsers: dict[str, Any] = {}
    wrong = []
    for path in PAGES:
        for call in CALL.findall(path.read_text(encoding="utf-8")):
            arguments = call.split()
            try:
                command, name, rest = client.command_manager.find_command(arguments)
            except ValueError:
                wrong.append(f"{path.relative_to(DOC)}: cyborg {call}")
                continue
            if name not in parsers:
                loaded = getattr(command, "load", lambda command=command: command)()
                parsers[name] = loaded(client, None).get_parser(name)
            known = {o for parser in (parsers[name], client.parser) for o in strings(parser)}
            named = {word.strip("[].,").partition("=")[0] for word in rest if word[:2] == "--"}
            named |= {word[1:].partition("=")[0] for word in rest if word[:3] == "[--"}
            if named - known:
                wrong.append(f"{path.relative_to(DOC)}: cyborg {call}: {sorted(named - known)}")
    assert len(parsers) > 20
    assert wrong == []


def strings(parser: Any) -> set[str]:
    """Return the names of the options of a parser."""
    return {option for action in parser._actions for option in action.option_strings}


def test_read_blocks_returns_commands_with_their_marks() -> None:
    found = [(b.line, b.commands, b.kind, b.mark) for b in read_blocks("page.rst", EXAMPLE)]
    assert found == [
        (6, ("one two",), "run-by", "a.py"),
        (14, ("three",), "not-run", "needs a card"),
        (18, ("four",), "run-by", "a.py"),
    ]
    _, _, without = EXAMPLE.partition("\n\n")
    assert [b.kind for b in read_blocks("page.rst", without)] == ["", "not-run", ""]


@pytest.mark.parametrize(
    ("line", "calls"),
    [
        ("cyborg device-list -c 'A b' | grep x", [("cyborg", ["device-list", "-c", "A b"])]),
        ("A=$(cyborg arq-list -f value 2> /dev/null)", [("cyborg", ["arq-list", "-f", "value"])]),
        ("/opt/bin/cyborg-status pending > f", [("cyborg-status", ["pending"])]),
        (
            "while ! cyborg top; do ssh host cyborg audit; done",
            [("cyborg", ["top"]), ("cyborg", ["audit"])],
        ),
        ("rabbitmqctl -p cyborg list_queues", []),
    ],
)
def test_find_calls(line: str, calls: list[tuple[str, list[str]]]) -> None:
    assert list(find_calls(line)) == calls


@pytest.mark.parametrize(
    "call",
    [
        "cyborg device-lst",
        "cyborg device-list --colour",
        "cyborg device-show",
        "cyborg-dbsync purge --older-then 3",
        "cyborg-status pending -f yaml",
        "cyborg-status convert-config",
        "openstack accelerator devices",
        "openstack accelerator hardware adopt",
    ],
)
def test_wrong_call_is_found(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    ((program, arguments),) = find_calls(call)
    with pytest.raises((SystemExit, ValueError)):
        parse_call(program, arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "cyborg device list --host compute-1",
        "cyborg --timeout 3 arq-show $ARQ",
        "cyborg-dbsync --config-file /etc/cyborg/cyborg.conf purge --older-than 30 --dry-run",
        "cyborg-status upgrade check",
        "cyborg-status convert-config /no/such.conf --output new.conf",
        "openstack accelerator device disable DEVICE",
        "openstack accelerator hardware list --host compute-1",
    ],
)
def test_right_call_is_accepted(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    ((program, arguments),) = find_calls(call)
    parse_call(program, arguments)
