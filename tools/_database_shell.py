# SPDX-License-Identifier: Apache-2.0
"""Shell on a database by its SQLAlchemy URL: SQLite in this process, else the server's client."""

import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

PROMPT, CONTINUATION = "sqlite> ", "   ...> "


def read_statements() -> Iterator[str]:
    """Yield the statements of standard input; print a prompt on a terminal."""
    text = ""
    prompts = (PROMPT, CONTINUATION) if sys.stdin.isatty() else ("", "")
    if sys.stdin.isatty():
        import readline  # noqa: F401  line editing for input()
    while True:
        try:
            text += input(prompts[bool(text)]) + "\n"
        except EOFError:
            break
        if sqlite3.complete_statement(text):
            yield text
            text = ""
    if text.strip():
        yield text


def run_sqlite(path: Path) -> int:
    """Execute the statements; return 1 if one failed."""
    if not path.exists():
        print(f"{path} does not exist: start the service with tools/dev run", file=sys.stderr)
        return 1
    status = 0
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in read_statements():
        try:
            cursor = connection.execute(statement)
        except sqlite3.Error as exc:
            print(f"error: {exc}", file=sys.stderr)
            status = 1
            continue
        if cursor.description:
            print(*(column[0] for column in cursor.description), sep="\t")
            for row in cursor:
                print(*row, sep="\t")
    connection.close()
    return status


def client_command(url: sa.URL) -> tuple[list[str], dict[str, str]]:
    """Return the command of the server's client and its environment, which has the password."""
    options = {"--host": url.host, "--port": url.port, "--user": url.username}
    password = "MYSQL_PWD"
    names = ["mariadb", "mysql"]
    if url.get_backend_name() == "postgresql":
        options["--username"] = options.pop("--user")
        password = "PGPASSWORD"
        names = ["psql"]
    programs = [program for name in names if (program := shutil.which(name))]
    if not programs:
        raise SystemExit(f"{names[0]} is not installed: it is the client of {url.drivername}")
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    secret = {password: str(url.password)} if url.password else {}
    return [programs[0], *words, *([url.database] if url.database else [])], secret


def main() -> None:
    """Open the shell."""
    url = sa.make_url(sys.argv[1])
    if url.get_backend_name() == "sqlite":
        sys.exit(run_sqlite(Path(url.database or "")))
    command, secret = client_command(url)
    os.execve(command[0], command, {**os.environ, **secret})


if __name__ == "__main__":
    main()
