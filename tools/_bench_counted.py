#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a daemon and count, from outside its code, what it sends: SQL statements and RPC calls.

usage: _bench_counted.py FOLDER GROUP SCRIPT ARGUMENT...

Statements are counted where they leave for the server: every command that PyMySQL writes to the
socket, COMMIT, ROLLBACK, SET and pings included, and every statement that SQLite is given, BEGIN
and COMMIT included. Calls are counted where oslo.messaging is asked for them. Each process, also
one that was forked, answers on a unix socket ``FOLDER/GROUP.PID`` with what it has counted.
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

# The threads of pools, in which calls of others are answered; all other threads have names.
_POOL = re.compile(r"(ThreadPoolExecutor|Thread-|MainThread|Dummy|waitress)")
_SHAPE = re.compile(
    r"\s*(SELECT)\b.*?\sFROM\s+[`\"]?(\w+)|\s*(INSERT) INTO [`\"]?(\w+)|\s*(UPDATE) [`\"]?(\w+)"
    r"|\s*(DELETE) FROM [`\"]?(\w+)|\s*(SAVEPOINT|RELEASE|SET \w+|\w+)",
    re.DOTALL | re.IGNORECASE,
)
_REMEMBERED = 400
_PING = 14
_QUERY = 3


class Counter:
    """What this process has counted; begins anew in a process that was forked."""

    def __init__(self, folder: Path, group: str) -> None:
        self._folder = folder
        self._group = group
        self._pid = 0
        self._lock = threading.Lock()
        self._statements: collections.Counter[tuple[str, str, str]]
        self._calls: collections.Counter[tuple[str, str]]
        self._last: collections.deque[tuple[float, str, str, str]]
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._lock = threading.Lock()

    def statement(self, database: str, text: str) -> None:
        """Count one statement."""
        found = _SHAPE.match(text)
        shape = " ".join(part for part in found.groups() if part) if found else text[:20]
        thread = _thread()
        with self._lock:
            self._ensure()
            self._statements[database, thread, shape] += 1
            self._last.append((time.time(), database, thread, text[:1500]))

    def call(self, method: str) -> None:
        """Count one call of the bus."""
        thread = _thread()
        with self._lock:
            self._ensure()
            self._calls[thread, method] += 1
            self._last.append((time.time(), "", thread, f"RPC {method}"))

    def _ensure(self) -> None:
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._statements = collections.Counter()
        self._calls = collections.Counter()
        self._last = collections.deque(maxlen=_REMEMBERED)
        door = socket.socket(socket.AF_UNIX)
        door.bind(str(self._folder / f"{self._group}.{self._pid}"))
        door.listen(8)
        threading.Thread(target=self._answer, args=(door,), name="counted", daemon=True).start()

    def _answer(self, door: socket.socket) -> None:
        while True:
            asker, _ = door.accept()
            with asker, self._lock:
                told = {
                    "statements": [[*key, count] for key, count in self._statements.items()],
                    "calls": [[*key, count] for key, count in self._calls.items()],
                    "last": list(self._last),
                }
                asker.sendall(json.dumps(told).encode())


def _thread() -> str:
    name = threading.current_thread().name
    return "calls" if _POOL.match(name) else name


class Hooks(importlib.abc.MetaPathFinder):
    """Runs a hook when a module has been imported: the daemon decides what it loads, and when."""

    def __init__(self, hooks: dict[str, Callable[[Any], None]]) -> None:
        self._hooks = hooks

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Find a module that is waited for as it would be found without us."""
        if (hook := self._hooks.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: Any) -> None:
                execute(module)
                hook(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
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
            if self.in_transaction:  # or there is nothing to send
                counter.statement(self.name, "COMMIT")
            super().commit()

        def rollback(self) -> None:
            if self.in_transaction:
                counter.statement(self.name, "ROLLBACK")
            super().rollback()

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
    bound = {name: functools.partial(hook, counter) for name, hook in hooks.items()}
    sys.meta_path.insert(0, Hooks(bound))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
