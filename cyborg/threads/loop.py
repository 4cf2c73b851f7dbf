# SPDX-License-Identifier: Apache-2.0
"""Thread that runs work in rounds, can be woken between rounds, and ends after ``stop``."""

import threading

from cyborg.core.log import get_logger

LOG = get_logger(__name__)

ERROR_PAUSE = 10.0  # seconds until the next round after an unexpected error


class LoopThread:
    """Base class of a thread that calls ``run_once`` until it is stopped."""

    def __init__(self, name: str, *, run_at_start: bool = True) -> None:
        """If ``run_at_start`` is False, the first round begins only after a ``wake``."""
        self._run_at_start = run_at_start
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def run_once(self) -> float | None:
        """Run one round; return the seconds until the next round, None to wait for ``wake``."""
        raise NotImplementedError

    def on_end(self) -> None:
        """Clean up at the end of the thread."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Start a round now, or after the current round."""
        self._wake.set()

    def stop(self) -> None:
        """Start no more rounds."""
        self._stopped.set()
        self._wake.set()

    def join(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the current round; return whether the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if not self._run_at_start:
            self._wake.wait()
        while True:
            # Cleared before the check and the round: neither a stop nor a wake-up is lost.
            self._wake.clear()
            if self._stopped.is_set():
                break
            self._wait(self._run_safely())
        self.on_end()

    def _run_safely(self) -> float | None:
        """Run one round and log an unexpected error, which must not end the thread."""
        try:
            return self.run_once()
        except Exception:
            LOG.exception("Unexpected error in thread %s", self._thread.name)
            return ERROR_PAUSE

    def _wait(self, seconds: float | None) -> None:
        """Wait for the next round."""
        self._wake.wait(seconds)
