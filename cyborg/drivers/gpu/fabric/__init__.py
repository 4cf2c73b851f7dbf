# SPDX-License-Identifier: Apache-2.0
"""Partitions of the NVLink fabric, which NVIDIA Fabric Manager activates and deactivates."""
