# SPDX-License-Identifier: Apache-2.0
"""The sweeps of a conductor, such as ``FailureDetector.sweep``, as one periodic task."""

from collections.abc import Callable, Mapping

from cyborg.core.errors import Unavailable, is_expected
from cyborg.core.log import get_logger

LOG = get_logger(__name__)


def run_all(sweeps: Mapping[str, Callable[[], object]]) -> None:
    """Run every sweep, even if others fail; raise the first failure and log the other failures.

    ``sweeps`` maps names for the log to functions. While the database is unavailable, all sweeps
    fail with the same error, which is raised once and not logged here.
    """
    failures: list[tuple[str, Exception]] = []
    for name, sweep in sweeps.items():
        try:
            sweep()
        except Exception as exc:  # noqa: BLE001  a failure must not stop the other sweeps
            failures.append((name, exc))
    if failures:
        _, first = failures[0]
        for name, other in failures[1:]:
            if not is_expected(other):
                LOG.error("Periodic sweep of %s failed", name, exc_info=other)
            elif not (isinstance(first, Unavailable) and isinstance(other, Unavailable)):
                LOG.warning("Periodic sweep of %s failed, retrying: %s", name, other)
        raise first
