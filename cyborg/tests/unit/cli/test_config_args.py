# SPDX-License-Identifier: Apache-2.0
import argparse
from typing import Any

import pytest

from cyborg.cli import drivers


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("a=b", ("a", "b")),
        ("a=", ("a", "")),
        (" a =b ", ("a", "b ")),
        ("rule=vendor=10de type=GPU", ("rule", "vendor=10de type=GPU")),
    ],
)
def test_parse_option_returns_name_and_value(text: str, pair: tuple[str, str]) -> None:
    assert drivers.parse_option(text) == pair


@pytest.mark.parametrize("text", ["", "a", "=b", " =b"])
def test_parse_option_invalid_text_raises(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not of the form NAME=VALUE"):
        drivers.parse_option(text)


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        (["a=1", "b=2"], {"a": "1", "b": "2"}),
        (["a=1", "b=2", "a=3", "a=1"], {"a": ["1", "3", "1"], "b": "2"}),
        ([], {}),
    ],
)
def test_collect_options_repeated_option_becomes_list(
    arguments: list[str], config: dict[str, Any]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(*drivers.CONFIG.names, **drivers.CONFIG.options)
    args = parser.parse_args([item for argument in arguments for item in ("--config", argument)])
    assert drivers.collect_options(args.config) == config
