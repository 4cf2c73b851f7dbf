# SPDX-License-Identifier: Apache-2.0
"""What the drivers of functions of the PCI bus have in common."""
