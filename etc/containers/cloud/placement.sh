#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Create the database of Placement, and serve it.
set -eu

placement-manage --config-file /etc/placement/placement.conf db sync
exec gunicorn placement.wsgi.api:application
