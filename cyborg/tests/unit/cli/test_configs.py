# SPDX-License-Identifier: Apache-2.0
import argparse
from typing import Any

import pytest

from cyborg.cli import configs


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("a=b", ("a", "b")),
        ("a=", ("a", "")),
        (" a =b ", ("a", "b ")),
        ("rule=vendor=10de type=GPU", ("rule", "vendor=10de type=GPU")),
    ],
)
def test_an_option(text: str, pair: tuple[str, str]) -> None:
    assert configs.parse(text) == pair


@pytest.mark.parametrize("text", ["", "a", "=b", " =b"])
def test_what_is_no_option(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=VALUE"):
        configs.parse(text)


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (["a=1", "b=2"], {"a": "1", "b": "2"}),
        (["a=1", "b=2", "a=3", "a=1"], {"a": ["1", "3", "1"], "b": "2"}),
        ([], {}),
    ],
)
def test_one_that_is_repeated_is_a_list(words: list[str], config: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    configs.add(parser)
    args = parser.parse_args([part for word in words for part in ("--config", word)])
    assert configs.gather(args.config) == config
