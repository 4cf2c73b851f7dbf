# SPDX-License-Identifier: Apache-2.0
"""Detection of PCI functions that the host uses, which are never offered."""
