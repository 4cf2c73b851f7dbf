# SPDX-License-Identifier: Apache-2.0
"""The names of libraries that ``cyborg/compat`` uses and that are not public still exist."""

import pkgutil
import re
import struct
import weakref
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import jsonschema
import kombu
import oslo_messaging
import pytest
import sqlalchemy as sa
import webob
from oslo_db.sqlalchemy import engines
from oslo_policy import policy
from pymysql import connections

import cyborg
from cyborg.api.operation import operation
from cyborg.compat import CHECKED, memory_broker, rabbit
from cyborg.compat import api as audit_middleware
from cyborg.compat import api as pecan_signatures
from cyborg.compat import database as mysql_columns
from cyborg.compat import database as sqlite_pool
from cyborg.compat import oslo as policy_signatures
from cyborg.compat import placement as placement_caches
from cyborg.compat import placement as placement_sync
from cyborg.tests.fixtures.machine.options import make_conf

CONSTRAINTS = Path(cyborg.__file__).parents[1] / "constraints.txt"

NAMES = [
    ("amqp", "amqp.channel:Channel._basic_publish"),
    ("kombu", "kombu.transport:_transport_cache"),
    ("kombu", "kombu.transport.memory:Channel._new_queue"),
    ("kombu", "kombu.transport.memory:Channel._queue_for"),
    ("kombu", "kombu.transport.memory:Channel._put"),
    ("kombu", "kombu.transport.memory:Channel._put_fanout"),
    ("kombu", "kombu.transport.memory:Channel.queues"),
    ("kombu", "kombu.transport.memory:Transport.global_state"),
    ("kombu", "kombu.transport.virtual:BrokerState"),
    ("kombu", "kombu.transport.virtual:Transport._deliver"),
    ("openstack-placement", "placement.util:jsonschema.validate"),
    ("openstack-placement", "placement.objects.trait:_TRAITS_SYNCED"),
    ("openstack-placement", "placement.objects.resource_provider:sa"),
    ("openstack-placement", "placement.objects.resource_class:_RESOURCE_CLASSES_SYNCED"),
    ("oslo.limit", "oslo_limit.limit:CONF"),
    ("oslo.limit", "oslo_limit.limit:_SDK_CONNECTION"),
    ("oslo.log", "oslo_log.handlers:_get_binary_name"),
    ("oslo.messaging", "oslo_messaging._drivers.amqpdriver:ACK_REQUEUE_EVERY_SECONDS_MAX"),
    ("oslo.messaging", "oslo_messaging._drivers.common:PURPOSE_SEND"),
    ("oslo.messaging", "oslo_messaging._drivers.impl_rabbit:rabbit_opts"),
    ("oslo.messaging", "oslo_messaging._drivers.impl_rabbit:Consumer._callback"),
    ("oslo.messaging", "oslo_messaging._drivers.impl_rabbit:Connection._set_current_channel"),
    ("oslo.messaging", "oslo_messaging._drivers.impl_rabbit:Connection.declare_consumer"),
    ("oslo.messaging", "oslo_messaging._drivers.impl_rabbit:Connection.on_return"),
    ("oslo.messaging", "oslo_messaging._drivers.impl_rabbit:RabbitDriver._get_connection"),
    ("oslo.messaging", "oslo_messaging._drivers.impl_rabbit:RabbitDriver._get_reply_q"),
    ("oslo.messaging", "oslo_messaging._metrics.client:oslo_messaging_metrics"),
    ("oslo.messaging", "oslo_messaging._tracing.client:oslo_messaging_tracing"),
    ("oslo.messaging", "oslo_messaging.notify.notifier:_notifier_opts"),
    ("oslo.messaging", "oslo_messaging.transport:Transport._send_notification"),
    ("oslo.policy", "oslo_policy._checks:inspect.getfullargspec"),
    ("pecan", "pecan.core:getargspec"),
    ("pecan", "pecan.routing:getargspec"),
    ("PyMySQL", "pymysql.connections:FieldDescriptorPacket"),
]


def describe(library: str, name: str) -> str:
    """Return the message for a name that is gone."""
    return (
        f"{library} {metadata.version(library)} has no {name}, unlike {CHECKED[library]}, with "
        f"which cyborg/compat was checked"
    )


@pytest.mark.parametrize(("library", "name"), NAMES)
def test_private_name_exists(library: str, name: str) -> None:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        pytest.fail(describe(library, name))


@pytest.mark.static
@pytest.mark.parametrize("library", CHECKED)
def test_checked_version_is_that_of_constraints(library: str) -> None:
    pins = dict(re.findall(r"^([\w.-]+)===?(\S+)", CONSTRAINTS.read_text(), re.MULTILINE))
    assert pins[library] == CHECKED[library], (
        f"constraints.txt has another {library}: run the tests of cyborg/compat and cyborg/rpc "
        "with it, then set cyborg.compat.CHECKED"
    )


def test_pecan_inspects_a_signature_once() -> None:
    import pecan.core

    pecan_signatures.cache_pecan_signatures()
    cache = pecan.core.getargspec
    pecan_signatures.cache_pecan_signatures()
    assert pecan.core.getargspec is cache

    class Controller:
        def index(self) -> None: ...

    controller = Controller()
    assert cache(controller.index) is cache(Controller.index)
    assert cache(controller.index).args == ["self"]
    reference = weakref.ref(controller)
    del controller
    assert reference() is None, "the cache keeps no controller"


def test_pecan_sees_the_outer_signature_of_an_operation() -> None:
    @operation("GET devices/{uuid}", "accelerator:device:get")
    def show(self: Any, context: Any, uuid: str) -> None:
        """Return nothing."""

    assert show._pecan["argspec"].args == ["self", "req", "resp"]
    assert show._pecan["argspec"].varargs == "segments"


def test_oslo_policy_inspects_a_class_of_checks_once() -> None:
    policy_signatures.cache_policy_signatures()
    cache = policy_signatures._inspect
    enforcer = policy.Enforcer(make_conf(), rules={}, use_conf=False)
    enforcer.set_rules(policy.Rules.from_dict({"a": "role:x or role:y", "b": "not role:z"}))
    before = cache.cache_info()
    assert enforcer.enforce("a", {}, {"roles": ["y"]})
    assert not enforcer.enforce("a", {}, {"roles": ["z"]})
    assert not enforcer.enforce("b", {}, {"roles": ["z"]})
    after = cache.cache_info()
    assert after.misses - before.misses <= 3  # the classes of "or", "not" and "role"
    assert after.hits > before.hits


def test_pymysql_parses_a_description_once() -> None:
    module: Any = connections
    mysql_columns.cache_column_descriptions()
    cached = module.FieldDescriptorPacket
    mysql_columns.cache_column_descriptions()
    assert module.FieldDescriptorPacket is cached
    names = (b"def", b"cyborg", b"a", b"arqs", b"state", b"state")
    data = b"".join(bytes([len(name)]) + name for name in names)
    data += struct.pack("<xHIBHBxx", 33, 96, 253, 1, 0)
    first = cached(data, "utf8")
    assert cached(bytes(bytearray(data)), "utf8") is first
    # An alias changes the description.
    assert cached(data.replace(b"\x05state", b"\x04name", 1), "utf8") is not first
    plain = cached.__wrapped__(data, "utf8")
    assert first.description() == plain.description()
    assert first.name == "state"


def test_placement_forgets_its_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    trait = pytest.importorskip("placement.objects.trait")
    resource_class = pytest.importorskip("placement.objects.resource_class")
    monkeypatch.setattr(trait, "_TRAITS_SYNCED", True)
    monkeypatch.setattr(resource_class, "_RESOURCE_CLASSES_SYNCED", True)
    placement_sync.reset_sync_flags()
    assert not trait._TRAITS_SYNCED
    assert not resource_class._RESOURCE_CLASSES_SYNCED


def test_placement_makes_an_alias_once() -> None:
    resource_provider: Any = pytest.importorskip("placement.objects.resource_provider")
    placement_caches.cache_computed_values()
    cached = resource_provider.sa
    placement_caches.cache_computed_values()
    assert resource_provider.sa is cached
    table = resource_provider._RP_TBL
    alias = cached.alias(table, name="rp")
    assert cached.alias(table, name="rp") is alias
    assert cached.alias(table, name="parent") is not alias
    assert str(sa.select(alias.c.uuid)) == "SELECT rp.uuid \nFROM resource_providers AS rp"
    with pytest.raises(TypeError):
        cached.alias(table)


def test_placement_checks_a_schema_once(monkeypatch: pytest.MonkeyPatch) -> None:
    util: Any = pytest.importorskip("placement.util")
    placement_caches.cache_computed_values()
    cached = util.jsonschema
    placement_caches.cache_computed_values()
    assert util.jsonschema is cached
    checked: list[Any] = []
    validator = jsonschema.validators.validator_for({})
    monkeypatch.setattr(validator, "check_schema", checked.append)
    schema = {"properties": {"uuid": {"type": "string", "format": "uuid"}}}
    for _ in range(2):
        assert util.extract_json(b'{"uuid": "%s"}' % str(uuid4()).encode(), schema)
        with pytest.raises(webob.exc.HTTPBadRequest, match="JSON does not validate: 7 is not"):
            util.extract_json(b'{"uuid": 7}', schema)
    assert checked == [schema]


class Recorder(rabbit.Connection):
    """Connection that records its consumers and producers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seen: list[Any] = []
        super().__init__(*args, **options)

    def make_receiver(self, consumer: Any) -> Any:
        self.seen.append(consumer)
        return lambda raw: raw.ack()

    def make_sender(self, channel: Any, producer: Any) -> Any:
        self.seen.append(producer)
        return producer.publish


def test_engine_of_oslo_db_keeps_its_connections_and_pragmas(tmp_path: Path) -> None:
    engine = engines.create_engine(f"sqlite:///{tmp_path}/file.sqlite", sqlite_synchronous=False)
    sqlite_pool.keep_connections(engine)
    opened: list[Any] = []
    sa.event.listen(engine, "connect", lambda connection, _: opened.append(connection))
    try:
        for _ in range(3):
            with engine.begin() as connection:
                assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 0
    finally:
        engine.dispose()
    assert len(opened) == 1, describe("SQLAlchemy", "Pool._creator")


def test_rabbit_driver_uses_the_connection() -> None:
    memory_broker.install()
    conf = make_conf()
    rabbit.register_options(conf)
    transport = oslo_messaging.get_rpc_transport(conf, "kombu+memory:////")
    rabbit.use_connections(transport, Recorder)
    try:
        with rabbit.exclusive_connection(transport) as connection:
            assert isinstance(connection, Recorder), describe(
                "oslo.messaging", "Pool.connection_cls"
            )
            (producer,) = connection.seen
            assert isinstance(producer, kombu.Producer)
        connection.declare_topic_consumer("e", "t", lambda message: None, "t")
        assert connection.seen[1].queue_name == "t"
    finally:
        transport.cleanup()


def test_send_of_an_amqp_channel_is_wrapped_once() -> None:
    class Channel:
        sent = 0

        def _basic_publish(self) -> None:
            self.sent += 1

    def wrap(send: Any) -> Any:
        def publish() -> None:
            send()
            send()

        return publish

    channel = Channel()
    rabbit.wrap_send(channel, wrap)
    rabbit.wrap_send(channel, wrap)
    channel._basic_publish()
    assert channel.sent == 2
    rabbit.wrap_send(object(), wrap)  # no AMQP channel


def test_audit_middleware_uses_the_given_notifier(tmp_path: Path) -> None:
    map_file = tmp_path / "map.conf"
    map_file.write_text("[path_keywords]\n")
    events: list[str] = []

    class Notifier:
        def notify(self, context: Any, event_type: str, payload: Any) -> None:
            events.append(event_type)

    app = audit_middleware.make_audit_middleware(webob.Response(), str(map_file), Notifier())
    webob.Request.blank("/").get_response(app)
    assert events == ["audit.http.request", "audit.http.response"], describe(
        "keystonemiddleware", "AuditMiddleware._notifier"
    )
