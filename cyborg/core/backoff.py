# SPDX-License-Identifier: Apache-2.0
"""How long to wait before something that failed is tried again."""

STEEPEST = 30  # doublings; more would only be cut off again, or not be a number


def pause(failures: int, longest: float, draw: float) -> float:
    """Return the seconds until the next try: about 1, doubled with each failure.

    ``failures`` counts those before this one. The pause is at least half and at most one and a half
    times its middle, which ``longest`` bounds; ``draw``, from 0 to 1, says where between the two,
    so that those who failed together do not come back together.
    """
    middle = min(longest, 2.0 ** min(failures, STEEPEST))
    return middle * (0.5 + draw)
