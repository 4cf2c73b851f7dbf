#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The devstack plugin: the API under uWSGI, a conductor, and an agent on each node that enables it.
# devstack sources this file and provides the functions that are not defined here.

cyborg_enabled() {
    is_service_enabled cyborg-api || is_service_enabled cyborg-cond ||
        is_service_enabled cyborg-agent
}

cyborg_endpoint() {
    if [[ $CYBORG_USE_PORT == True ]]; then
        echo "$SERVICE_PROTOCOL://$SERVICE_HOST:$CYBORG_PORT/v2"
    else
        echo "$SERVICE_PROTOCOL://$SERVICE_HOST/accelerator/v2"
    fi
}

install_cyborg() {
    setup_develop "$CYBORG_DIR" all
    # The command "openstack accelerator".
    pip_install python-cyborgclient
}

configure_cyborg() {
    sudo install -d -o "$STACK_USER" "$CYBORG_CONF_DIR" "$CYBORG_STATE_PATH"
    rm -f "$CYBORG_CONF"
    touch "$CYBORG_CONF"

    iniset "$CYBORG_CONF" DEFAULT debug "$ENABLE_DEBUG_LOG_LEVEL"
    iniset "$CYBORG_CONF" DEFAULT state_path "$CYBORG_STATE_PATH"
    iniset "$CYBORG_CONF" DEFAULT auth_strategy keystone
    # nova-compute's name for this host; providers hang below the one of that name.
    iniset "$CYBORG_CONF" DEFAULT host "$(hostname -f)"
    iniset_rpc_backend cyborg "$CYBORG_CONF"
    setup_logging "$CYBORG_CONF"

    if is_service_enabled cyborg-agent; then
        iniset "$CYBORG_CONF" agent enabled_drivers "$CYBORG_ENABLED_DRIVERS"
        if is_service_enabled g-api; then
            configure_cyborg_auth glance
        fi
    fi
    if is_service_enabled cyborg-api || is_service_enabled cyborg-cond; then
        iniset "$CYBORG_CONF" database connection "$(database_connection_url cyborg)"
    fi
    if is_service_enabled cyborg-cond; then
        configure_cyborg_auth placement
        configure_cyborg_auth nova
    fi
    if is_service_enabled cyborg-api; then
        configure_keystone_authtoken_middleware "$CYBORG_CONF" cyborg
        iniset "$CYBORG_CONF" keystone_authtoken service_token_roles service
        iniset "$CYBORG_CONF" keystone_authtoken service_token_roles_required True
        configure_cyborg_uwsgi
    fi
    if is_service_enabled n-cpu || is_service_enabled n-api; then
        # Binding needs Nova's service token.
        configure_cyborg_nova_token
    fi
}

# configure_cyborg_auth SECTION: how a daemon authenticates with another service.
# devstack has a function configure_keystoneauth, which must not be replaced.
configure_cyborg_auth() {
    local section=$1
    iniset "$CYBORG_CONF" "$section" auth_type password
    iniset "$CYBORG_CONF" "$section" auth_url "$KEYSTONE_SERVICE_URI"
    iniset "$CYBORG_CONF" "$section" username cyborg
    iniset "$CYBORG_CONF" "$section" password "$SERVICE_PASSWORD"
    iniset "$CYBORG_CONF" "$section" user_domain_name "$SERVICE_DOMAIN_NAME"
    iniset "$CYBORG_CONF" "$section" project_name "$SERVICE_PROJECT_NAME"
    iniset "$CYBORG_CONF" "$section" project_domain_name "$SERVICE_DOMAIN_NAME"
    iniset "$CYBORG_CONF" "$section" region_name "$REGION_NAME"
}

configure_cyborg_nova_token() {
    iniset "$NOVA_CONF" service_user send_service_user_token True
    iniset "$NOVA_CONF" service_user auth_type password
    iniset "$NOVA_CONF" service_user auth_url "$KEYSTONE_SERVICE_URI"
    iniset "$NOVA_CONF" service_user username nova
    iniset "$NOVA_CONF" service_user password "$SERVICE_PASSWORD"
    iniset "$NOVA_CONF" service_user user_domain_name "$SERVICE_DOMAIN_NAME"
    iniset "$NOVA_CONF" service_user project_name "$SERVICE_PROJECT_NAME"
    iniset "$NOVA_CONF" service_user project_domain_name "$SERVICE_DOMAIN_NAME"
}

configure_cyborg_uwsgi() {
    if [[ $CYBORG_USE_PORT == True ]]; then
        write_uwsgi_config "$CYBORG_UWSGI_CONF" cyborg.wsgi.api:application "" \
            "http://0.0.0.0:$CYBORG_PORT" cyborg-api
    else
        write_uwsgi_config "$CYBORG_UWSGI_CONF" cyborg.wsgi.api:application /accelerator "" cyborg-api
    fi
    iniset "$CYBORG_UWSGI_CONF" uwsgi env "OS_CYBORG_CONFIG_FILES=$CYBORG_CONF"
    iniset "$CYBORG_UWSGI_CONF" uwsgi buffer-size 65535
}

create_cyborg_accounts() {
    create_service_user cyborg admin
    get_or_create_role accelerator_admin
    get_or_create_service cyborg accelerator "Accelerators"
    get_or_create_endpoint accelerator "$REGION_NAME" "$(cyborg_endpoint)"
}

init_cyborg() {
    if is_service_enabled cyborg-cond; then
        recreate_database cyborg
        "$CYBORG_BIN_DIR/cyborg-dbsync" --config-file "$CYBORG_CONF" upgrade
    fi
}

start_cyborg() {
    run_process cyborg-cond "$CYBORG_BIN_DIR/cyborg-conductor --config-file $CYBORG_CONF"
    run_process cyborg-agent "$CYBORG_BIN_DIR/cyborg-agent --config-file $CYBORG_CONF" "" root
    if is_service_enabled cyborg-api; then
        run_process cyborg-api "$(which uwsgi) --procname-prefix cyborg-api --ini $CYBORG_UWSGI_CONF"
        if ! wait_for_service "$SERVICE_TIMEOUT" "$(cyborg_endpoint)"; then
            die "$LINENO" "the accelerator API did not start"
        fi
    fi
}

stop_cyborg() {
    local service
    for service in cyborg-api cyborg-agent cyborg-cond; do
        stop_process "$service"
    done
}

configure_cyborg_tempest() {
    iniset "$TEMPEST_CONFIG" service_available cyborg True
}

cleanup_cyborg() {
    remove_uwsgi_config "$CYBORG_UWSGI_CONF" cyborg-api
    sudo rm -rf "$CYBORG_CONF_DIR" "$CYBORG_STATE_PATH"
}

CYBORG_BIN_DIR=$(get_python_exec_prefix)

if cyborg_enabled; then
    case "$1 ${2:-}" in
        "stack install")
            install_cyborg
            ;;
        "stack post-config")
            configure_cyborg
            if is_service_enabled key && is_service_enabled cyborg-api; then
                create_cyborg_accounts
            fi
            ;;
        "stack extra")
            # After nova-compute, which makes the provider that ours hang below.
            init_cyborg
            start_cyborg
            ;;
        "stack test-config")
            if is_service_enabled tempest; then
                configure_cyborg_tempest
            fi
            ;;
        "unstack ")
            stop_cyborg
            ;;
        "clean ")
            cleanup_cyborg
            ;;
    esac
fi
