# SPDX-License-Identifier: Apache-2.0
"""The parser of /proc/crypto, and the capability tree of algorithms."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.inventory import capability
from cyborg.drivers.crypto import algorithms
from cyborg.drivers.crypto.algorithms import Algorithm, build_tree, parse, parse_name
from cyborg.drivers.kernel.crypto import CCP, QAT, VIRTIO
from cyborg.tests.unit.drivers.crypto.simulated_qat import make_record

CBC = ("cbc(aes)", "virtio_crypto_aes_cbc", "virtio_crypto", "skcipher")


def test_parse_reads_all_fields() -> None:
    assert parse(make_record(*CBC, refcnt=3)) == (Algorithm(*CBC, users=2),)


def test_parse_ignores_algorithm_in_its_test() -> None:
    assert parse(make_record(*CBC, refcnt=3, selftest="unknown")) == ()
    placeholder = make_record("cbc(aes)", CBC[1], "kernel", "larval", 2, "unknown")
    assert parse(placeholder + make_record(*CBC, refcnt=2)) == ()


@pytest.mark.parametrize(
    "broken",
    [
        make_record(*CBC, refcnt="-1"),
        make_record(*CBC, refcnt="many"),
        make_record(*CBC, refcnt="9" * 11),
        make_record(*CBC, refcnt="²"),
        make_record("", *CBC[1:]),
        make_record("a" * 129, *CBC[1:]),
        make_record(*CBC).replace("module ", "modul "),
        make_record(*CBC).replace("type ", "name "),
        make_record(*CBC).replace(":", "="),
        make_record(*CBC[:3], "quantum"),
    ],
)
def test_parse_ignores_malformed_record_alone(broken: str) -> None:
    other = make_record("rsa", "qat-rsa", "intel_qat", "akcipher")
    assert [a.name for a in parse(broken + other)] == ["rsa"]
    assert [a.name for a in parse(other + broken)] == ["rsa"]


def test_parse_ignores_record_that_is_cut_off() -> None:
    text = make_record(*CBC) + make_record("rsa", "qat-rsa", "intel_qat", "akcipher")
    assert [a.name for a in parse(text[:-1])] == ["cbc(aes)"]
    assert parse("") == ()


@given(st.text(max_size=300))
def test_parse_accepts_any_text(text: str) -> None:
    assert all(found.users >= 0 for found in parse(f"{text}\n\n"))


def test_read_algorithms_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert algorithms.read_algorithms(tmp_path) == ()
    record = make_record(*CBC)
    (tmp_path / "crypto").write_text(record * 3)
    monkeypatch.setattr(algorithms, "MAX_BYTES", 2 * len(record) + 10)
    assert len(algorithms.read_algorithms(tmp_path)) == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sha256", ("sha256", "")),
        ("cbc(aes)", ("aes", "cbc")),
        ("hmac(sha256)", ("sha256", "hmac")),
        ("rfc3686(ctr(aes))", ("aes", "rfc3686_ctr")),
        ("authenc(hmac(sha1),cbc(aes))", ("aes", "cbc_hmac_sha1")),
        ("cbc(des3_ede)", ("des3_ede", "cbc")),
        ("ecdh-nist-p256", ("ecdh-nist-p256", "")),
    ],
)
def test_parse_name_of_cipher_or_hash(name: str, expected: tuple[str, str]) -> None:
    assert parse_name(name) == expected


def test_parse_name_of_signature_begins_with_primitive() -> None:
    assert parse_name("pkcs1pad(rsa,sha512)", first_is_primitive=True) == ("rsa", "pkcs1pad_sha512")


@pytest.mark.parametrize(
    "name",
    ["", "cbc(", "cbc(aes", "cbc(aes))", "(aes)", "a,b", "cbc()", "c b", "x(" * 20 + "aes"],
)
def test_parse_name_malformed_is_none(name: str) -> None:
    assert parse_name(name) is None


@given(st.text(st.sampled_from("ab(),"), max_size=40))
def test_parse_name_accepts_any_text(name: str) -> None:
    found = parse_name(name)
    assert found is None or found[0]


def test_build_tree_merges_modes_of_primitive() -> None:
    found = [
        Algorithm("sha256", "sha256-ccp", "ccp_crypto", "ahash", 0),
        Algorithm("hmac(sha256)", "hmac-sha256-ccp", "ccp_crypto", "ahash", 0),
        Algorithm("sha256", "other", "ccp_crypto", "ahash", 0),
        Algorithm("cbc(aes)", "cbc-aes-ccp", "ccp_crypto", "skcipher", 0),
        Algorithm("xts(aes)", "xts-aes-ccp", "ccp_crypto", "skcipher", 0),
        Algorithm("rsa", "rsa-ccp", "ccp_crypto", "akcipher", 0),
        Algorithm("deflate", "qat_deflate", "intel_qat", "acomp", 0),
        Algorithm("cbc(", "broken", "ccp_crypto", "skcipher", 0),
    ]
    tree = build_tree(found)
    assert tree == {
        "sym": {"sha256": {"hmac": 1}, "aes": {"cbc": 1, "xts": 1}},
        "asym": {"rsa": 1},
        "dc": {"deflate": 1},
    }
    traits = capability.build_traits("crypto", capability.validate(tree))
    assert {"CUSTOM_CRYPTO_SYM_AES_CBC", "CUSTOM_CRYPTO_ASYM_RSA", "CUSTOM_CRYPTO_DC"} <= traits


@pytest.mark.parametrize(
    ("driver", "module", "families"),
    [
        ("virtio_crypto_aes_cbc", "virtio_crypto", {"virtio"}),
        ("virtio_crypto_aes_cbc", "kernel", {"virtio"}),
        ("virtio-pkcs1-rsa", "kernel", {"virtio"}),
        ("qat_aes_cbc", "intel_qat", {"qat"}),
        ("qat-rsa", "kernel", {"qat"}),
        ("cbc-aes-ccp", "kernel", {"ccp"}),
        ("aes-generic", "kernel", set()),
        ("essiv(qat_aes_cbc,sha256-ccp)", "kernel", set()),
        ("cryptd(cbc-aes-ccp)", "cryptd", set()),
    ],
)
def test_algorithm_belongs_to_family_of_its_module(
    driver: str, module: str, families: set[str]
) -> None:
    algorithm = Algorithm("cbc(aes)", driver, module, "skcipher", 0)
    named = {"qat": QAT, "virtio": VIRTIO, "ccp": CCP}
    assert {name for name, family in named.items() if algorithm.belongs_to(family)} == families
