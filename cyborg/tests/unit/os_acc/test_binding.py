# SPDX-License-Identifier: Apache-2.0
"""The parameters of a bind."""

from typing import Any

import pytest

from cyborg import os_acc
from cyborg.core.binding.arqs import MAX_ARQS, BindRequest, parse_patch
from cyborg.core.errors import Invalid
from cyborg.tests.unit.os_acc.samples import (
    ARQ,
    INSTANCE,
    MORE_ARQS,
    OTHER_ARQ,
    OTHER_PROVIDER,
    PROVIDER,
    make_context,
    make_mappings,
)

HOST = "compute-1"
OTHERS = (OTHER_ARQ, *MORE_ARQS)
PORT = "1c2b3a49-5867-4a5b-8c9d-0e1f2a3b4c88"


def test_parse_gives_each_arq_the_provider_of_its_group() -> None:
    assert os_acc.parse(make_context(), HOST, INSTANCE, make_mappings()) == (
        os_acc.BindParameters(ARQ, HOST, PROVIDER, INSTANCE),
        *(os_acc.BindParameters(uuid, HOST, OTHER_PROVIDER, INSTANCE) for uuid in OTHERS),
    )


def test_parse_takes_arqs_that_the_context_does_not_show() -> None:
    context = make_context()
    given = context.pop("arqs")
    parameters = os_acc.parse(context, HOST, INSTANCE, make_mappings(), arqs=given)
    assert [item.arq_uuid for item in parameters] == [ARQ, *OTHERS]
    check_refused("arqs", make_context(), HOST, INSTANCE, make_mappings(), arqs=[])


def test_parse_takes_numbers_of_groups_in_any_order() -> None:
    expected = os_acc.parse(make_context(), HOST, INSTANCE, make_mappings())
    mappings = {"1": [OTHER_PROVIDER], "device_profile_0": [PROVIDER]}
    assert os_acc.parse(make_context(), HOST, INSTANCE, mappings) == expected


def test_parse_takes_the_groups_of_a_port() -> None:
    expected = os_acc.parse(make_context(), HOST, INSTANCE, make_mappings())
    groups = os_acc.to_request_groups(make_context(), PORT.upper())
    mappings = dict(zip([g.name for g in groups], make_mappings().values(), strict=True))
    arguments = (make_context(), HOST, INSTANCE, mappings)
    assert os_acc.parse(*arguments, port_uuid=PORT.upper()) == expected
    check_refused("mappings", *arguments)
    check_refused("port_uuid", *arguments, port_uuid="port-1")


def test_parse_returns_canonical_uuids() -> None:
    mappings = make_mappings(device_profile_0=[PROVIDER.upper()])
    first, *_ = os_acc.parse(make_context(), HOST, INSTANCE.replace("-", ""), mappings)
    assert (first.device_rp_uuid, first.instance_uuid) == (PROVIDER, INSTANCE)


def test_patch_is_what_the_api_parses() -> None:
    parameters = os_acc.parse(make_context(), HOST, INSTANCE, make_mappings())
    assert parse_patch(os_acc.build_patch(parameters)) == (
        BindRequest(ARQ, HOST, PROVIDER, INSTANCE),
        *(BindRequest(uuid, HOST, OTHER_PROVIDER, INSTANCE) for uuid in OTHERS),
    )


def arqs(*changes: Any) -> dict[str, Any]:
    """Return a context with other ARQs."""
    return make_context(arqs=list(changes))


def check_refused(field: str, *arguments: Any, **options: Any) -> str:
    """Check that ``parse`` raises Invalid with the field; return the message."""
    with pytest.raises(Invalid) as error:
        os_acc.parse(*arguments, **options)
    assert error.value.details["field"] == field
    return error.value.message


@pytest.mark.parametrize(
    ("context", "field"),
    [
        (None, "context"),
        (make_context(groups=None), "groups"),
        (make_context(arqs=None), "arqs"),
        (make_context(arqs={}), "arqs"),
        (arqs(), "arqs"),
        (arqs(ARQ), "arqs[0]"),
        (arqs({"device_profile_group_id": 0}), "arqs[0]['uuid']"),
        (arqs({"uuid": ARQ}), "arqs[0]['device_profile_group_id']"),
        (
            arqs({"uuid": ARQ, "device_profile_group_id": 2}),
            "arqs[0]['device_profile_group_id']",
        ),
        (
            arqs({"uuid": ARQ, "device_profile_group_id": True}),
            "arqs[0]['device_profile_group_id']",
        ),
        (arqs(*[{"uuid": ARQ, "device_profile_group_id": 0}] * 2), "arqs[1]['uuid']"),
        (arqs(*[{}] * (MAX_ARQS + 1)), "arqs"),
    ],
)
def test_parse_of_malformed_context_names_the_field(context: Any, field: str) -> None:
    check_refused(field, context, HOST, INSTANCE, make_mappings())


ALL_ARQS = make_context()["arqs"]
EXTRA_ARQ = {"uuid": INSTANCE, "device_profile_group_id": 0}


@pytest.mark.parametrize(
    ("given", "number", "found"),
    [(ALL_ARQS[1:], 0, 0), (ALL_ARQS[:3], 1, 2), ([EXTRA_ARQ, *ALL_ARQS], 0, 2)],
)
def test_parse_of_other_arqs_than_the_groups_ask_for_names_the_group(
    given: Any, number: int, found: int
) -> None:
    message = check_refused("arqs", arqs(*given), HOST, INSTANCE, make_mappings())
    assert f"found {found} ARQs of group {number}" in message


def test_parse_expects_two_arqs_of_an_fpga_with_two_functions() -> None:
    group = {"resources:FPGA": "1", "trait:CUSTOM_FPGA_XILINX": "required"}
    functions = [{**arq, "device_profile_group_id": 0} for arq in ALL_ARQS[:2]]
    arguments = (make_context(groups=[group]), HOST, INSTANCE, {"0": [PROVIDER]})
    parameters = os_acc.parse(*arguments, arqs=functions)
    assert [item.device_rp_uuid for item in parameters] == [PROVIDER, PROVIDER]
    check_refused("arqs", *arguments, arqs=functions[:1])


@pytest.mark.parametrize("host", [None, "", "a\nb", "x" * 256])
def test_parse_of_malformed_host_names_the_field(host: Any) -> None:
    check_refused("hostname", make_context(), host, INSTANCE, make_mappings())


@pytest.mark.parametrize("instance", [None, "", "vm-1", f"{INSTANCE}'"])
def test_parse_of_malformed_instance_names_the_field(instance: Any) -> None:
    check_refused("instance_uuid", make_context(), HOST, instance, make_mappings())


@pytest.mark.parametrize(
    ("mappings", "field"),
    [
        (None, "mappings"),
        ([PROVIDER, OTHER_PROVIDER], "mappings"),
        (make_mappings(device_profile_2=[PROVIDER]), "mappings"),
        (make_mappings(**{"": [PROVIDER]}), "mappings"),
        ({"device_profile_0": [PROVIDER]}, "mappings['device_profile_1']"),
        (make_mappings(**{"00": [PROVIDER]}), "mappings"),
        (make_mappings(**{"1": [OTHER_PROVIDER]}), "mappings['1']"),
        (make_mappings(device_profile_0=[]), "mappings['device_profile_0']"),
        (make_mappings(device_profile_0=PROVIDER), "mappings['device_profile_0']"),
        (make_mappings(device_profile_0=[PROVIDER] * 2), "mappings['device_profile_0']"),
        (make_mappings(device_profile_0=["card-1"]), "mappings['device_profile_0']"),
        (make_mappings(device_profile_0=[None]), "mappings['device_profile_0']"),
    ],
)
def test_parse_of_malformed_mappings_names_the_field(mappings: Any, field: str) -> None:
    message = check_refused(field, make_context(), HOST, INSTANCE, mappings)
    assert field in message


def test_parse_of_foreign_group_names_it_and_those_of_the_context() -> None:
    mappings = make_mappings(device_profile_2=[PROVIDER])
    message = check_refused("mappings", make_context(), HOST, INSTANCE, mappings)
    assert "'device_profile_2'" in message
    assert "device_profile_0 to device_profile_1" in message


def test_parse_of_foreign_provider_names_the_group() -> None:
    field = "mappings['device_profile_1']"
    message = check_refused(
        field, make_context(), HOST, INSTANCE, make_mappings(), providers={PROVIDER.upper()}
    )
    assert OTHER_PROVIDER in message


@pytest.mark.parametrize("providers", [PROVIDER, 7, ["card-1"]])
def test_parse_of_malformed_providers_names_the_field(providers: Any) -> None:
    arguments = (make_context(), HOST, INSTANCE, make_mappings())
    check_refused("providers", *arguments, providers=providers)
