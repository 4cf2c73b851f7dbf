# SPDX-License-Identifier: Apache-2.0
"""Bases of the commands: a command declares its collection and its arguments.

They share the options ``--dry-run`` and ``--service-token``.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TextIO

from cliff import app, command

from cyborg.cli.common.pci_ids import add_names
from cyborg.cli.common.progress import Progress, parse_seconds, wait_until_done
from cyborg.cli.common.rest import Collection, CommandError, RestClient, Row
from cyborg.cli.common.usage import shorten_errors
from cyborg.cli.terminal import tables
from cyborg.core.text import sanitize

Arguments = argparse.Namespace

# What people know an object by, the most telling first.
_NAMES = ("name", "binary", "kind", "subject", "type", "model")
_PLACES = ("hostname", "host", "address", "instance_uuid")


@dataclass(frozen=True, slots=True)
class Change:
    """What a command would do with an object; ``details`` tell people which object it is."""

    action: str
    kind: str
    uuid: str | None
    details: str

    def __str__(self) -> str:
        return " ".join(filter(None, ("would", self.action, self.kind, self.uuid, self.details)))


def plan(action: str, kind: str, row: Row) -> Change:
    """Return the change of an object of the service.

    >>> print(plan("delete", "device profile", {"uuid": "3f", "name": "gzip"}))
    would delete device profile 3f (gzip)
    """
    named = add_names(row) if row.get("model") else row
    texts = [str(named[key]) for key in (*_NAMES, *_PLACES) if named.get(key)]
    state = row.get("state") or row.get("status")
    shown = ", ".join([*texts, *([str(state)] if state else [])])
    return Change(action, kind, row.get("uuid"), sanitize(f"({shown})") if shown else "")


def write_changes(stdout: TextIO, args: Arguments, changes: Iterable[Change]) -> None:
    """Write changes to a stream: a line each, or one JSON document with ``-f json``."""
    found = list(changes)
    # Commands that print nothing have no formatter.
    if getattr(args, "formatter", "") == "json":
        stdout.write(json.dumps([asdict(change) for change in found], indent=2) + "\n")
        return
    stdout.writelines(f"{change}\n" for change in found)
    if not found:
        stdout.write("nothing would be changed\n")


POLL_INTERVAL = 0.5  # seconds
MAX_PARTS = 100  # of work whose parts are read at each poll


@dataclass(frozen=True)
class Argument:
    """An argument of a command, with the options of ``argparse``.

    ``field`` is the query parameter or the body field that gets its value, if any; ``lookup``
    returns the uuid for an abbreviated uuid.
    """

    names: Sequence[str]
    options: Mapping[str, Any]
    field: str | None = None
    lookup: Callable[[RestClient, str], str] | None = None

    @property
    def dest(self) -> str:
        """Return the name of the value in the parsed arguments."""
        return str(self.options.get("dest", self.names[-1].lstrip("-").replace("-", "_")))


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument that is not a field of the request."""
    return Argument(names, options)


def flag(name: str, help_text: str) -> Argument:
    """Return an option without a value, which is not a field of the request."""
    return argument(name, action="store_true", help=help_text)


def field_argument(
    *names: str,
    to: str | None = None,
    lookup: Callable[[RestClient, str], str] | None = None,
    **options: Any,
) -> Argument:
    """Return an argument whose value, if given, becomes the field ``to`` of the request.

    By default the field has the name of the argument.
    """
    return Argument(names, options, to or Argument(names, options).dest, lookup)


def pair_parser(
    separator: str, form: str, *, needs_value: bool = False
) -> Callable[[str], tuple[str, str]]:
    """Return a parser of a key and a value with a separator between them.

    ``form`` describes them in the ArgumentTypeError, which argparse shows with the argument's name.
    With ``needs_value`` an empty value is an error, and blanks around a value are removed.

    >>> pair_parser("=", "NAME=VALUE")("rule=vendor=10de")
    ('rule', 'vendor=10de')
    """

    def parse(text: str) -> tuple[str, str]:
        key, found, value = text.partition(separator)
        if not found or not key.strip() or (needs_value and not value.strip()):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form {form}")
        # Blanks can be a part of a value that may also be empty.
        return key.strip(), value.strip() if needs_value else value

    return parse


def within_argument(seconds: float, help_text: str) -> Argument:
    """Return the argument for the maximum time to wait for the end of some work."""
    # --timeout is a global option, for one call.
    return argument(
        "--within", type=parse_seconds, default=seconds, metavar="SECONDS", help=help_text
    )


def wait_arguments(until: str, seconds: float, note: str = "") -> tuple[Argument, Argument]:
    """Return the arguments to wait for the end of some work, for a maximum time."""
    within = f"with --wait, the maximum time to wait ({seconds:g}){note}"
    return (
        flag("--wait", f"wait until {until}"),
        within_argument(seconds, within),
    )


DRY_RUN = flag("--dry-run", "only show which objects would be changed")


class RestApp(app.App):
    """An application with a REST client: ``cyborg``, or ``openstack`` with our plug-in."""

    rest: RestClient


class Command(command.Command):
    """Base of all commands; a command declares its collection as the class argument ``of``.

    ``ARGUMENTS`` follow the ``OPTIONS``, which several commands share. Of the arguments in a tuple
    at most one may be given.
    """

    app: RestApp
    COLLECTION: Collection
    ACTION: ClassVar[str] = ""  # for people, such as delete
    OPTIONS: Sequence[Argument] = ()
    ARGUMENTS: Sequence[Argument | tuple[Argument, ...]] = ()

    def __init_subclass__(cls, of: Collection | None = None) -> None:
        """Set the collection of a command."""
        super().__init_subclass__()
        if of is not None:
            cls.COLLECTION = of

    def run(self, parsed_args: Arguments) -> int:
        """Run the command, or with --dry-run only show what it would change."""
        if not getattr(parsed_args, "dry_run", False):
            return int(super().run(parsed_args))
        write_changes(self.app.stdout, parsed_args, self.preview(parsed_args))
        return 0

    def preview(self, args: Arguments) -> Iterable[Change]:
        """Return what the command would change, for the option DRY_RUN. Raise CommandError.

        By default these are the objects that the first argument names.
        """
        rows = self.COLLECTION.read_each(self.app.rest, self.find_uuids(args))
        return [plan(self.ACTION, self.COLLECTION.noun, row) for row in rows]

    def get_epilog(self) -> str:
        """Return the text below the options."""
        # The method of cliff also names the distribution of a plug-in. For that it reads the files
        # of all installed packages at each command, which takes 0.07 s of CPU.
        hooks = [hook.obj.get_epilog() for hook in self._hooks if hook.obj is not None]
        return "\n\n".join(text for text in (self._epilog, *hooks) if text)

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the arguments."""
        parser = super().get_parser(prog_name)
        shorten_errors(parser)
        for item in (*self.OPTIONS, *self.ARGUMENTS):
            group = parser.add_mutually_exclusive_group() if isinstance(item, tuple) else parser
            for each in _flatten([item]):
                group.add_argument(*each.names, **each.options)
        return parser

    def read_fields(self, args: Arguments) -> dict[str, Any]:
        """Return the fields of the request that are given."""
        fields = {}
        for item in _flatten(self.ARGUMENTS):
            if item.field is not None and (value := getattr(args, item.dest)) is not None:
                fields[item.field] = item.lookup(self.app.rest, value) if item.lookup else value
        return fields

    def find_uuids(self, args: Arguments) -> list[str]:
        """Return the uuids of the objects that the first argument names."""
        first = self.ARGUMENTS[0]
        given = getattr(args, first.dest) if isinstance(first, Argument) else ()
        names = [given] if isinstance(given, str) else given
        return self.COLLECTION.find_uuids(self.app.rest, names)

    def find_path(self, args: Arguments) -> str:
        """Return the path of the object that the first argument names."""
        return self.COLLECTION.object_path(self.find_uuids(args)[0])


def _flatten(items: Iterable[Argument | tuple[Argument, ...]]) -> Iterator[Argument]:
    """Yield arguments, those of a tuple one after another."""
    for item in items:
        yield from item if isinstance(item, tuple) else (item,)


class Show(Command, tables.ShowOne):
    """Base of the commands that show the object that the first argument names."""

    def take_action(self, args: Arguments) -> Any:
        """Return the object."""
        (uuid,) = self.find_uuids(args)
        return self.COLLECTION.build_object(self.COLLECTION.read_one(self.app.rest, uuid))


class Create(Command, tables.ShowOne):
    """Base of the commands that create an object and show it."""

    def take_action(self, args: Arguments) -> Any:
        """Create and return the object."""
        collection, body = self.COLLECTION, self.build_body(self.read_fields(args))
        return collection.build_object(self.app.rest.call("POST", collection.path, body))

    def build_body(self, fields: dict[str, Any]) -> Any:
        """Return the body of the request."""
        return fields


class CallEach(Command):
    """Base of the commands that call the service for each object that the first argument names."""

    OPTIONS = (DRY_RUN,)
    METHOD = "DELETE"
    SUFFIX = ""  # of the path of an object
    ACTION = "delete"

    def take_action(self, args: Arguments) -> None:
        """Call the service for each object. Raise CommandError at the end if a call failed."""
        errors = []
        for uuid in self.find_uuids(args):
            try:
                self.app.rest.call(self.METHOD, self.COLLECTION.object_path(uuid) + self.SUFFIX)
            except CommandError as exc:
                # The other objects go on: each call is a change of its own.
                errors.append(f"{uuid}: {exc}")
        if errors:
            raise CommandError("; ".join(errors))


class WaitCommand(Command):
    """Base of the commands that can wait for the end of work; they set the exit status."""

    def run(self, parsed_args: Arguments) -> int:
        """Run the command and return the exit status."""
        self._status = 0
        return super().run(parsed_args) or self._status

    def wait(
        self,
        work: str | Callable[[], dict[str, Any]],
        measure: Callable[[dict[str, Any]], Progress],
        title: str,
        timeout: float,
        *,
        interval: float = POLL_INTERVAL,
        show_counts: bool = True,
    ) -> dict[str, Any]:
        """Wait for the end of some work and return its last state. Raise CommandError.

        ``work`` is the path of the work, or a function that returns its state. The other arguments
        are those of ``wait_until_done``.
        """
        return wait_until_done(
            work if callable(work) else lambda: self.app.rest.call("GET", work),
            measure,
            title,
            timeout=timeout,
            interval=interval,
            show_counts=show_counts,
        )

    def make_poll(
        self, collection: Collection, uuid: str, parts: str
    ) -> Callable[[], dict[str, Any]]:
        """Return a function for ``wait`` that reads work of many parts, whose number is constant.

        Work of at most MAX_PARTS parts is read with them, under the key ``parts``; of other work
        only the row in the list, which has the number of parts by state.
        """
        with_parts = False

        def read() -> dict[str, Any]:
            nonlocal with_parts
            if not with_parts:
                page = self.app.rest.call("GET", collection.path, params={"uuid": uuid})
                # One row; without it, the call below raises the error of the service.
                for row in page[collection.rows_key]:
                    # Not changed back: the number of parts is constant.
                    with_parts = sum(row["progress"].values()) <= MAX_PARTS
                    if not with_parts:
                        return dict(row)
            return self.app.rest.read_whole(collection.object_path(uuid), parts)

        return read


def _token(text: str) -> str:
    # A token may come with the end of a line, as from a file.
    token = text.strip()
    # The error does not contain the token, because terminal output can be logged.
    if not token.isascii() or any(letter <= " " or letter == "\x7f" for letter in token):
        raise argparse.ArgumentTypeError("a token must be one word of printable ASCII characters")
    return token


# Changes of bound requests require a service token, such as that of Nova.
SERVICE_TOKEN = argument(
    "--service-token",
    type=_token,
    metavar="TOKEN",
    help="token of a service user, such as nova; with keystone it is required to bind requests "
    "and to change bound ones (Env: OS_CYBORG_SERVICE_TOKEN)",
)


class ServiceTokenCommand(Command):
    """Base of the commands that send a service token."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the option for the service token, with its default from the environment."""
        parser = super().get_parser(prog_name)
        # Read for each command: as default of the argument it would be read at the import.
        parser.set_defaults(service_token=os.environ.get("OS_CYBORG_SERVICE_TOKEN"))
        return parser

    def call(self, args: Arguments, method: str, path: str, body: Any, **options: Any) -> Any:
        """Call the service with the token, and return its answer."""
        return self.app.rest.call(method, path, body, service_token=args.service_token, **options)
