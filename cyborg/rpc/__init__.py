# SPDX-License-Identifier: Apache-2.0
"""The internal bus: oslo.messaging with a contract of named methods, plain values and bounds."""

from oslo_service import backend

# oslo.messaging imports oslo.service, which would take eventlet unless told otherwise by then.
backend.register_backend_default_hook(lambda: backend.BackendType.THREADING)
