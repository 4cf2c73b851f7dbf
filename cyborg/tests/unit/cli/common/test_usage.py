# SPDX-License-Identifier: Apache-2.0
"""Errors of the command line: one line, and an example that the parser accepts."""

import argparse

import pytest

from cyborg.cli.common.usage import format_example, shorten_errors


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("cyborg thing-set")
    parser.add_argument("device", nargs="+")
    parser.add_argument("layout", nargs="?")
    parser.add_argument("--host", required=True)
    parser.add_argument("--epoch", type=int)
    parser.add_argument("--mode", choices=["live", "next-boot"])
    parser.add_argument("--force", action="store_true")
    shorten_errors(parser)
    return parser


@pytest.mark.parametrize(
    ("words", "message", "example"),
    [
        ("--host h", "the following arguments are required: device", ""),
        ("d --host h --epoch x", "argument --epoch: invalid int value: 'x'", " --epoch 1"),
        (
            "d --host h --mode x",
            "argument --mode: invalid choice: 'x' (choose from 'live', 'next-boot')",
            " --mode live",
        ),
        ("d --host h --forze", "unrecognized arguments: --forze; did you mean --force?", ""),
        (
            "d --host h --zzz",
            "unrecognized arguments: --zzz; cyborg thing-set --help lists the options",
            "",
        ),
    ],
)
def test_error_is_one_line_and_a_correct_example(
    words: str, message: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        make_parser().parse_args(words.split())
    error, shown = capsys.readouterr().err.splitlines()
    assert (exit_.value.code, error.replace("live, next-boot", "'live', 'next-boot'")) == (
        2,
        f"cyborg thing-set: {message}",
    )
    expected = f"cyborg thing-set compute-1/0000:3b:00.0 --host compute-1{example}"
    assert shown == f"Example: {expected}"
    assert make_parser().parse_args(shown.split()[3:])


def test_example_of_an_option_without_a_value_has_none() -> None:
    assert format_example(make_parser(), "argument --force: x").endswith(" --force")
