# SPDX-License-Identifier: Apache-2.0
"""Placements of GPU instances: which memory slices of a GPU in MIG mode each instance occupies.

``nvmlDeviceGetGpuInstancePossiblePlacements`` of the NVML API Reference Guide returns those of a
profile, in each mode of the GPU, to a privileged caller; ``nvidia-smi mig -lgipp`` of the MIG User
Guide lists them. The kernel driver chooses one if the caller does not, and then instances that have
room may not fit: of eight slices with seven places for 1g instances, a 3g instance in the first
four leaves three of them, and one in the last four leaves four.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple


class Placement(NamedTuple):
    """The first memory slice of an instance, and the number of its slices."""

    start: int
    size: int


def place(
    instances: Mapping[str, int], possible: Mapping[str, Sequence[Placement]]
) -> list[tuple[str, Placement]] | None:
    """Return the profile and the placement of each instance, so that none overlap.

    ``instances`` are numbers by profile, ``possible`` the placements of each profile. Return None
    if the instances do not fit.
    """
    # A profile with few placements first: most searches end without a second try.
    return _place(sorted(instances, key=lambda name: len(possible[name])), instances, possible, ())


def _place(
    names: Sequence[str],
    instances: Mapping[str, int],
    possible: Mapping[str, Sequence[Placement]],
    used: Sequence[int],
) -> list[tuple[str, Placement]] | None:
    if not names:
        return []
    name, *others = names
    for chosen in combinations(possible[name], instances[name]):
        slices = [*used, *(n for start, size in chosen for n in range(start, start + size))]
        if len(set(slices)) < len(slices):
            continue
        rest = _place(others, instances, possible, slices)
        if rest is not None:
            return [*((name, placement) for placement in chosen), *rest]
    return None
