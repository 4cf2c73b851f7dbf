#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a daemon and count its SQL statements and RPC calls without changes of its code.

usage: counter.py FOLDER GROUP SCRIPT ARGUMENT...

Statements are counted at the driver: every command that PyMySQL writes to the socket, including
COMMIT, ROLLBACK, SET and pings, and every statement that SQLite executes, including BEGIN and
COMMIT. Calls are counted at oslo.messaging. Each process, including forked ones, serves its counts
on a unix socket ``FOLDER/GROUP.PID``.
"""

import collections
import functools
import importlib.abc
import importlib.util
import json
import os
import re
import runpy
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Threads of pools, which handle incoming calls; all other threads have their own names.
_POOL = re.compile(r"(ThreadPoolExecutor|Thread-|MainThread|Dummy|waitress)")
_SHAPE = re.compile(
    r"\s*(SELECT)\b.*?\sFROM\s+[`\"]?(\w+)|\s*(INSERT) INTO [`\"]?(\w+)|\s*(UPDATE) [`\"]?(\w+)"
    r"|\s*(DELETE) FROM [`\"]?(\w+)|\s*(SAVEPOINT|RELEASE|SET \w+|\w+)",
    re.DOTALL | re.IGNORECASE,
)
_MAX_LAST = 400
_MAX_SHAPES = 1000
_HEAD = 300  # characters that distinguish the SELECT statements of this service
_PING = 14
_QUERY = 3


class Counter:
    """Counts of this process; a forked process starts with empty counts."""

    def __init__(self, folder: Path, group: str) -> None:
        self._folder = folder
        self._group = group
        self._shapes: dict[str, str] = {}
        self._restart()
        os.register_at_fork(after_in_child=self._restart)

    def _restart(self) -> None:
        self._serving = False
        self._lock = threading.Lock()

    def statement(self, database: str, text: str) -> None:
        """Count one statement."""
        # The search for the table of a SELECT would be 3 % of the time of a conductor.
        head = text[:_HEAD]
        if (shape := self._shapes.get(head)) is None:
            match = _SHAPE.match(text)
            shape = " ".join(part for part in match.groups() if part) if match else text[:20]
            if head.startswith("SELECT") and len(self._shapes) < _MAX_SHAPES:
                self._shapes[head] = shape
        self._count("statements", (database, _thread(), shape), database, text[:1500])

    def call(self, method: str) -> None:
        """Count one RPC call."""
        self._count("calls", (_thread(), method), "", f"RPC {method}")

    def _count(self, kind: str, key: tuple[str, ...], database: str, text: str) -> None:
        with self._lock:
            if not self._serving:
                self._serve()
            self._counts[kind][key] += 1
            self._last.append((time.time(), database, _thread(), text))

    def _serve(self) -> None:
        """Begin with empty counts and serve them."""
        self._serving = True
        self._counts: dict[str, collections.Counter[tuple[str, ...]]]
        self._counts = {"statements": collections.Counter(), "calls": collections.Counter()}
        self._last: collections.deque[tuple[float, str, str, str]]
        self._last = collections.deque(maxlen=_MAX_LAST)
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(self._folder / f"{self._group}.{os.getpid()}"))
        server.listen(8)
        threading.Thread(target=self._answer, args=(server,), name="counted", daemon=True).start()

    def _answer(self, server: socket.socket) -> None:
        while True:
            client, _ = server.accept()
            with client, self._lock:
                counts: dict[str, Any] = {
                    kind: [[*key, count] for key, count in counter.items()]
                    for kind, counter in self._counts.items()
                }
                counts["last"] = list(self._last)
                client.sendall(json.dumps(counts).encode())


def _thread() -> str:
    name = threading.current_thread().name
    return "calls" if _POOL.match(name) else name


class Hooks(importlib.abc.MetaPathFinder):
    """Import hook that runs a function after the import of a module, at any time."""

    def __init__(self, hooks: dict[str, Callable[[Any], None]]) -> None:
        self._hooks = hooks

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the normal spec of a hooked module, with a loader that runs the hook."""
        if (hook := self._hooks.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_hook(module: Any) -> None:
            execute(module)
            hook(module)

        spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes | bytearray) else str(value)


def _hook_rpc(counter: Counter, client: Any) -> None:
    for name in ("call", "cast"):
        real = getattr(client._BaseCallContext, name)

        def counted(self: Any, ctxt: Any, method: str, _real: Any = real, **kwargs: Any) -> Any:
            counter.call(method)
            return _real(self, ctxt, method, **kwargs)

        setattr(client._BaseCallContext, name, counted)


def _hook_mysql(counter: Counter, connections: Any) -> None:
    real = connections.Connection._execute_command

    def sent(self: Any, command: int, sql: Any) -> Any:
        if command in (_QUERY, _PING):
            text = "PING" if command == _PING else _text(sql)
            counter.statement(_text(self.db or ""), text)
        return real(self, command, sql)

    connections.Connection._execute_command = sent


def _hook_sqlite(counter: Counter, sa: Any) -> None:
    import sqlite3

    class CountedCursor(sqlite3.Cursor):
        connection: Any  # one with a name, see below

        def execute(self, text: str, *rest: Any) -> Any:
            counter.statement(self.connection.name, text)
            return super().execute(text, *rest)

        def executemany(self, text: str, *rest: Any) -> Any:
            counter.statement(self.connection.name, text)
            return super().executemany(text, *rest)

    class CountedConnection(sqlite3.Connection):
        def __init__(self, database: Any, *rest: Any, **options: Any) -> None:
            self.name = Path(str(database).partition("?")[0]).name
            super().__init__(database, *rest, **options)

        def cursor(self, factory: Any = CountedCursor) -> Any:
            return super().cursor(factory)

        def commit(self) -> None:
            self.count("COMMIT")
            super().commit()

        def rollback(self) -> None:
            self.count("ROLLBACK")
            super().rollback()

        def count(self, statement: str) -> None:
            if self.in_transaction:  # or there is nothing to send
                counter.statement(self.name, statement)

    def connecting(dialect: Any, record: Any, args: Any, options: dict[str, Any]) -> None:
        if dialect.name == "sqlite":
            options["factory"] = CountedConnection

    sa.event.listen(sa.Engine, "do_connect", connecting)


def main() -> None:
    folder, group, script, *arguments = sys.argv[1:]
    counter = Counter(Path(folder), group)
    hooks = {
        "oslo_messaging.rpc.client": _hook_rpc,
        "pymysql.connections": _hook_mysql,
        "sqlalchemy": _hook_sqlite,
    }
    bound: dict[str, Callable[[Any], None]] = {
        name: functools.partial(hook, counter) for name, hook in hooks.items()
    }
    sys.meta_path.insert(0, Hooks(bound))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
