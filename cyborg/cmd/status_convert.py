# SPDX-License-Identifier: Apache-2.0
"""``cyborg-status convert-config``: convert configuration files of OpenStack Cyborg."""

import argparse
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from keystoneauth1 import loading
from oslo_config import cfg, iniparser

from cyborg import conf as own_options
from cyborg.core.migration import config_conversion, config_tables

VERB = "convert-config"
# Namespaces of the options of libraries that the services use.
LIBRARIES = (
    *("keystonemiddleware.auth_token", "oslo.log", "oslo.messaging", "oslo.policy"),
    "oslo.middleware.http_proxy_to_wsgi",
)
# Of oslo.service, whose own list imports eventlet.
SERVICE_OPTIONS = (cfg.IntOpt("graceful_shutdown_timeout", min=0), cfg.BoolOpt("log_options"))


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
    parser.add_argument(
        "files",
        metavar="OLD.conf",
        nargs="+",
        help="the files of OpenStack Cyborg, in the order in which it reads them",
    )
    parser.add_argument("--output", metavar="FILE", help="a new file; standard output by default")
    args = parser.parse_args(argv)
    source = Parser()
    try:
        for file in args.files:
            source.parse(Path(file).read_text(encoding="utf-8").splitlines(keepends=True))
        result = config_conversion.convert(source.settings, known_options())
        if args.output is None:
            sys.stdout.write(result.render())
        else:
            # The passwords of the former file are in it. An existing file is not replaced.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(args.output, flags, 0o600), "w", encoding="utf-8") as output:
                output.write(result.render())
    except (OSError, UnicodeDecodeError, iniparser.ParseError) as exc:
        sys.stderr.write(f"cyborg-status: {exc}\n")
        return 1
    for note in result.notes:
        sys.stderr.write(f"{note}\n")
    counts = ", ".join(f"{count} {kind}" for kind, count in result.counts.items())
    sys.stderr.write(f"cyborg-status: options: {counts}\n")
    return 0


def known_options() -> dict[str, dict[str, Callable[[str], object]]]:
    """Return the options of this service and of the installed libraries, by section and name.

    Each has the function that parses a value.
    """
    known: dict[str, dict[str, Callable[[str], object]]] = {}
    for section, listed in (*own_options.list_opts(), *_library_options(), *_credentials()):
        for option in listed:
            # A file may have the name of an option with dashes or with underscores.
            places = {(section, name) for name in (option.name, option.dest)}
            places |= {
                (old.group or section, old.name or option.dest) for old in option.deprecated_opts
            }
            for group, name in places:
                known.setdefault(group, {})[name] = option.type
    if find_spec("memcache") is None:  # without this library these options make each request fail
        for name in ("memcached_servers", "memcache_servers"):
            known.get("keystone_authtoken", {}).pop(name, None)
    return known


def _library_options() -> Iterator[tuple[str, Sequence[cfg.Opt]]]:
    """Yield the options of the libraries that are installed."""
    importlib.import_module("cyborg.rpc")  # so that oslo.messaging does not import eventlet
    yield "DEFAULT", SERVICE_OPTIONS
    for name in LIBRARIES:
        for point in entry_points(group="oslo.config.opts", name=name):
            for group, listed in point.load()():
                yield str(getattr(group, "name", group) or "DEFAULT"), listed


def _credentials() -> Iterator[tuple[str, Sequence[cfg.Opt]]]:
    """Yield the options of keystoneauth, with all plug-ins, for each section with credentials."""
    shared = loading.get_auth_common_conf_options()
    plugins = itertools.chain.from_iterable(
        map(loading.get_auth_plugin_conf_options, loading.get_available_plugin_names())
    )
    listed = [*shared, *plugins]
    for section in config_tables.SERVICES:
        yield section, [*listed, *loading.get_adapter_conf_options()]
    if find_spec("keystonemiddleware") is not None:  # else all options of the section are kept
        yield "keystone_authtoken", listed
