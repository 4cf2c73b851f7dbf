#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Create the users of the services, their endpoints, and the resource provider of the compute node.
# It can be run again.
set -eu

export OS_AUTH_URL=http://keystone:5000/v3 OS_USERNAME=admin OS_PASSWORD=secret
export OS_PROJECT_NAME=admin OS_USER_DOMAIN_NAME=Default OS_PROJECT_DOMAIN_NAME=Default
export OS_REGION_NAME=RegionOne OS_PLACEMENT_API_VERSION=1.39

openstack project create --or-show service
openstack role create --or-show service
openstack role create --or-show accelerator_admin
for user in cyborg placement; do
    openstack user create --or-show --password secret "$user"
    openstack role add --project service --user "$user" service
    openstack role add --project service --user "$user" admin
done

create_service() {
    openstack service show "$1" || openstack service create --name "$1" "$2"
    [ -n "$(openstack endpoint list --service "$2" --format value -c ID)" ] ||
        openstack endpoint create "$2" public "$3" --region RegionOne
}

create_service placement placement http://placement:8778
create_service cyborg accelerator http://api:6666/v2
[ -n "$(openstack resource provider list --name compute-1 --format value -c uuid)" ] ||
    openstack resource provider create compute-1
