# SPDX-License-Identifier: Apache-2.0
"""How many statements a piece of work costs, for tests and benches."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa


@dataclass
class Count:
    """The statements that were sent, in order; an executemany is one."""

    statements: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.statements)


@contextlib.contextmanager
def counting(engine: sa.Engine) -> Iterator[Count]:
    """Count the statements of an engine in all threads until the end of the block.

    Beginnings and ends of transactions do not count: only SQLite's are statements.
    """
    count = Count()

    def seen(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if not statement.startswith("BEGIN"):
            count.statements.append(statement)

    sa.event.listen(engine, "before_cursor_execute", seen)
    try:
        yield count
    finally:
        sa.event.remove(engine, "before_cursor_execute", seen)
