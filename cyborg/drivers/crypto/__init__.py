# SPDX-License-Identifier: Apache-2.0
"""Driver for crypto accelerators: Intel QAT, virtio-crypto and AMD CCP."""
