# SPDX-License-Identifier: Apache-2.0
"""Code that all drivers of PCI functions share."""
