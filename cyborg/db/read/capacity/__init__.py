# SPDX-License-Identifier: Apache-2.0
"""Read how the attach handles of classes, devices and hosts are used."""
