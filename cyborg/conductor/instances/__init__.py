# SPDX-License-Identifier: Apache-2.0
"""Instance watcher: check the ARQs of the instances that Nova's notifications name."""
