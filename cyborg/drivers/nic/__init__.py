# SPDX-License-Identifier: Apache-2.0
"""Driver of network cards and their virtual functions."""
