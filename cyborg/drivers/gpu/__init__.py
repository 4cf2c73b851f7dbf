# SPDX-License-Identifier: Apache-2.0
"""The gpu driver: whole GPUs, virtual functions and mediated devices."""
