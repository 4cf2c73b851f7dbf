# SPDX-License-Identifier: Apache-2.0
"""Programs that the lab tests run in the guest, each with one line of results."""
