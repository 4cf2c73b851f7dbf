# SPDX-License-Identifier: Apache-2.0
"""Errors of the message broker and of its client libraries."""

import amqp
import oslo_messaging
from kombu.exceptions import KombuError

FAULTS = (oslo_messaging.MessagingException, KombuError, amqp.AMQPError, OSError)
"""Errors of calls and servers while the broker is unavailable.

The driver translates the errors of open connections; when its pool opens another connection, it
passes on the errors of the libraries.
"""
