# SPDX-License-Identifier: Apache-2.0
"""Keys of ``vendor_board_info`` that Cyborg defines.

A separate module, because each client command for devices would otherwise import the types of a
report.
"""

NOT_OFFERED = "not_offered"
"""The reason why a device or deployable is not offered."""
