# SPDX-License-Identifier: Apache-2.0
"""Options of the server of keystone, which reads the command line of its server as its own."""

wsgi_app = "keystone.wsgi.api:application"
bind = "0.0.0.0:5000"
workers = 2
