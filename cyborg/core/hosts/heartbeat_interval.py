# SPDX-License-Identifier: Apache-2.0
"""Interval of the heartbeats of agents, which grows with their number."""

HEARTBEAT_COST = 0.003
"""CPU seconds that a conductor needs for a heartbeat without changes.

``tools/bench agents`` measures it. Alternative not taken: each conductor measures its own cost. A
process cannot tell the threads of the message bus that serve heartbeats from those that serve other
calls, and an interval that follows the load of the moment changes with every heartbeat."""

MAX_CORES = 0.5
"""Cores of a conductor process that heartbeats may use."""


def choose_interval(agents: int, processes: int, minimum: float, maximum: float) -> float:
    """Return the seconds between two heartbeats of an agent.

    ``agents`` is the number of agents that are up, ``processes`` that of conductor processes. The
    interval is the shortest one with which the heartbeats use MAX_CORES of each process, within
    ``minimum`` and ``maximum``. ``minimum`` takes precedence if it is the larger one.
    """
    needed = agents * HEARTBEAT_COST / (max(1, processes) * MAX_CORES)
    return max(minimum, min(needed, maximum))
