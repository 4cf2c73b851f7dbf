# SPDX-License-Identifier: Apache-2.0
"""The life of a device: every state with a sentence, and the one rule which of them it is in.

A device is new for no longer than the transaction that takes its first report, and gone when its
row is: neither is a state that anybody can see.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cyborg.core.device import Health


class Life(StrEnum):
    """The states of a device. Where several hold at once, the last of them here is shown."""

    READY = "ready"
    SETUP_REQUIRED = "setup_required"
    REBOOT_REQUIRED = "reboot_required"
    WITHDRAWN = "withdrawn"
    MAINTAINING = "maintaining"
    PROGRAMMING = "programming"
    UNHEALTHY = "unhealthy"
    HOST_DOWN = "host_down"
    DRAINING = "draining"


SENTENCES: Mapping[Life, str] = {
    Life.READY: "What is free of it can be given out.",
    Life.SETUP_REQUIRED: "Its driver must be set up on the host first.",
    Life.REBOOT_REQUIRED: "The host must boot again first.",
    Life.WITHDRAWN: "Its backend was disabled or is being uninstalled; what is bound stays bound.",
    Life.MAINTAINING: "An operator disabled it; what is bound stays bound.",
    Life.PROGRAMMING: "An image is being loaded into it.",
    Life.UNHEALTHY: "Its driver measured that it does not work as it should.",
    Life.HOST_DOWN: "The agent of its host has not been heard of for too long.",
    Life.DRAINING: "The host does not have it any longer; it goes when what is bound is released.",
}

if missing := set(Life) - set(SENTENCES):
    raise AssertionError(f"states without a sentence: {sorted(missing)}")

ENABLED = "enabled"
"""The operator's status of a device that may be used; the other one is ``maintaining``."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that decides the state of a device, or of one part of it.

    ``status`` is what the operator wants, ``health`` what its driver measured, ``host_down`` what
    the conductors hold of its host's agent.
    """

    status: str = ENABLED
    health: str = Health.OK
    setup_required: bool = False
    reboot_required: bool = False
    withdrawn: bool = False
    programming: bool = False
    draining: bool = False
    host_down: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """What facts come to: the reasons why nothing is given out, the strongest first."""

    reasons: tuple[Life, ...]

    @property
    def state(self) -> Life:
        """The state that is shown."""
        return self.reasons[0] if self.reasons else Life.READY

    @property
    def open(self) -> bool:
        """Whether anything of it may be given out; for the scheduler it is reserved otherwise."""
        return not self.reasons


def decide(facts: Facts) -> Standing:
    """Return the state that facts come to.

    An unknown status closes, for a newer release may have written it; a device whose health is not
    measured is taken for a healthy one.
    """
    holds = {
        Life.SETUP_REQUIRED: facts.setup_required,
        Life.REBOOT_REQUIRED: facts.reboot_required,
        Life.WITHDRAWN: facts.withdrawn,
        Life.MAINTAINING: facts.status != ENABLED,
        Life.PROGRAMMING: facts.programming,
        Life.UNHEALTHY: facts.health == Health.UNHEALTHY,
        Life.HOST_DOWN: facts.host_down,
        Life.DRAINING: facts.draining,
    }
    return Standing(tuple(state for state in reversed(Life) if holds.get(state)))
