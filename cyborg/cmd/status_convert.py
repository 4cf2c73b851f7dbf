# SPDX-License-Identifier: Apache-2.0
"""``cyborg-status convert-config``: convert a configuration file of OpenStack Cyborg."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from oslo_config import cfg, iniparser
from oslo_log import log

from cyborg import conf as options
from cyborg.core.migration import config_conversion

VERB = "convert-config"


class Parser(iniparser.BaseParser):
    """The values of each option of a file by section and name."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, dict[str, list[str]]] = {}
        self._section = "DEFAULT"

    def new_section(self, section: str) -> None:
        """Begin a section."""
        self._section = section

    def assignment(self, key: str, value: Sequence[str]) -> None:
        """Add a value, which has one item for each line."""
        values = self.settings.setdefault(self._section, {}).setdefault(key, [])
        values.append("\n".join(value).strip())


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser("cyborg-status", description=__doc__)
    parser.add_argument("verb", choices=[VERB])
    parser.add_argument("file", metavar="OLD.conf", help="the file of OpenStack Cyborg")
    parser.add_argument("--output", metavar="FILE", help="a new file; standard output by default")
    args = parser.parse_args(argv)
    source = Parser()
    try:
        source.parse(Path(args.file).read_text(encoding="utf-8").splitlines(keepends=True))
        result = config_conversion.convert(source.settings, known_options())
        if args.output is None:
            sys.stdout.write(result.render())
        else:
            # The passwords of the former file are in it. An existing file is not replaced.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(args.output, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(result.render())
    except (OSError, UnicodeDecodeError, iniparser.ParseError) as exc:
        sys.stderr.write(f"cyborg-status: {exc}\n")
        return 1
    for note in result.notes:
        sys.stderr.write(f"{note}\n")
    return 0


def known_options() -> dict[str, set[str]]:
    """Return the names of the options of this service by section."""
    conf = cfg.ConfigOpts()
    options.register(conf)
    log.register_options(conf)
    conf([], project="cyborg", default_config_files=[], default_config_dirs=[])
    known: dict[str, set[str]] = {"DEFAULT": set(config_conversion.BUS)}
    for name, value in conf.items():
        if isinstance(value, cfg.ConfigOpts.GroupAttr):
            known[name] = set(value)
        else:
            known["DEFAULT"].add(name)
    return known
