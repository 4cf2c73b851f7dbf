# SPDX-License-Identifier: Apache-2.0
"""Check of a device after a reboot of its host: does it still have its layout and its images?

A device has desired values if an operator has applied a layout or programmed an image. When the
agent sends its first heartbeat after a reboot, such a device waits for the next report. If that
report has other values, the desired values are lost: they are applied again as soon as nothing uses
the device. Other reports are not compared with the desired values, because an administrator of the
host may change a device on purpose.
"""

from enum import StrEnum


class BootCheck(StrEnum):
    """State of the check; None in the database if there is nothing to do."""

    AWAITING_REPORT = "awaiting_report"
    LOST = "lost"
