# SPDX-License-Identifier: Apache-2.0
"""Corrective actions that conductors take without an operator, and that they count."""

from cyborg.core.text import DescribedEnum


class CorrectiveAction(DescribedEnum):
    """Kinds of corrective actions: values of the self-heal counters."""

    ORPHAN_SCANS = "orphan_scans", "All bound ARQs were compared with Placement's allocations."
    DELETION_SCANS = "deletion_scans", "Nova was asked for the servers that were deleted lately."
    ORPHANS_SUSPECTED = (
        "orphans_suspected",
        "A bound ARQ whose instance has no allocation was found.",
    )
    ORPHANS_RELEASED = "orphans_released", "An ARQ without an allocation was unbound or deleted."
    OWNERS_VERIFIED = "owners_verified", "An ARQ bound by an administrator got its project."
    UNBOUND_EXPIRED = "unbound_expired", "An ARQ that stayed unbound for too long was deleted."
    JOBS_TAKEN_OVER = "jobs_taken_over", "A job was taken over from a conductor that had stopped."
    JOBS_UNDONE = "jobs_undone", "A job that failed or timed out was undone."
    HANDLES_CLEANED = "handles_cleaned", "A handle was cleaned after a failed attempt."
    HANDLES_RESTORED = (
        "handles_restored",
        "A bound handle was prepared again after its host had rebooted.",
    )
    STUCK_BINDS_FAILED = (
        "stuck_binds_failed",
        "An ARQ in BindStarted without a job became BindFailed.",
    )
    DRIFT_REPAIRED = "drift_repaired", "A provider that another client had changed was repaired."
