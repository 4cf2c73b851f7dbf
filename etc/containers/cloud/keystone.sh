#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Create the database, the keys and the administrator of keystone, and serve it.
set -eu

manage() {
    keystone-manage --config-file /etc/keystone/keystone.conf "$@"
}

umask 077
mkdir -p /var/lib/neighbours/fernet-keys /var/lib/neighbours/credential-keys
manage db_sync
user=$(id -u) group=$(id -g)
manage fernet_setup --keystone-user "$user" --keystone-group "$group"
manage credential_setup --keystone-user "$user" --keystone-group "$group"
manage bootstrap --bootstrap-username admin --bootstrap-password secret \
    --bootstrap-region-id RegionOne --bootstrap-public-url http://keystone:5000/v3 \
    --bootstrap-internal-url http://keystone:5000/v3
exec gunicorn
