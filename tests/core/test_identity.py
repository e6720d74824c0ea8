"""Identities: every field counts, on the right chain, in any process."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.identities import ARITHMETIC, MODEL, NAMESPACE

from keepwarm.core.identity import (
    ArithmeticIdentity,
    ModelIdentity,
    Namespace,
    as_json,
    canonical_json,
    differences,
    digest,
    json_digest,
    salt_key,
)

PARTS = st.lists(st.binary(max_size=12), max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def changed(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else f"{value} changed"


@pytest.mark.parametrize("name", [f.name for f in fields(ModelIdentity)])
def test_every_field_of_the_model_changes_both_roots(name: str) -> None:
    other = Namespace(replace(MODEL, **{name: changed(getattr(MODEL, name))}), ARITHMETIC)
    assert other.prefix_root != NAMESPACE.prefix_root
    assert other.exact_root != NAMESPACE.exact_root


@pytest.mark.parametrize("name", [f.name for f in fields(ArithmeticIdentity)])
def test_every_field_of_the_arithmetic_changes_the_exact_root_alone(name: str) -> None:
    other = Namespace(MODEL, replace(ARITHMETIC, **{name: changed(getattr(ARITHMETIC, name))}))
    assert other.prefix_root == NAMESPACE.prefix_root
    assert other.exact_root != NAMESPACE.exact_root


def test_the_two_roots_never_meet() -> None:
    assert NAMESPACE.prefix_root != NAMESPACE.exact_root
    assert len(NAMESPACE.prefix_root) == len(NAMESPACE.exact_root) == 32


def test_values_do_not_slip_between_fields() -> None:
    one = replace(MODEL, quantization="a", rope="b")
    two = replace(MODEL, quantization="b", rope="a")
    assert one.digest != two.digest


def test_golden_roots() -> None:
    """Stored KV is found by these: a change of either makes every existing store a miss."""
    assert NAMESPACE.prefix_root.hex() == "fdbc1f10bbf01603dd165d96b3e6b671693c99a07fa4bb6c0d2b2dd3906be7ce"
    assert NAMESPACE.exact_root.hex() == "a77a222486d0d6699a0901cde11b29178c21acce82af0c405aeff01ac99aa5bb"
    assert salt_key("tenant").hex() == "741b04df2af07ae533353e0b27a8cae959020fa16e5d461d9017490d2252c739"


def test_namespaces_describe_themselves() -> None:
    assert NAMESPACE.describe() == {"model": asdict(MODEL), "arithmetic": asdict(ARITHMETIC)}


def test_differences_are_named_whichever_side_has_the_field() -> None:
    seen = asdict(MODEL)
    assert differences(seen, asdict(MODEL)) == []
    assert differences(seen, asdict(replace(MODEL, weights="x", lora="y"))) == ["weights", "lora"]
    assert differences(seen | {"later": 1}, asdict(MODEL)) == ["later"]
    assert differences({}, {"dtype": "float32"}) == ["dtype"]


@given(PARTS, PARTS)
def test_part_lists_encode_apart(one: list[bytes], two: list[bytes]) -> None:
    assert (digest("t", *one) == digest("t", *two)) == (one == two)


def test_texts_and_tags_are_parts_too() -> None:
    assert digest("t", "é") == digest("t", "é".encode())
    assert digest("t", "a") != digest("u", "a")
    assert digest("t", "ab", "c") != digest("t", "a", "bc")


@given(JSON)
def test_canonical_json_ignores_key_order(value: Any) -> None:
    def turned(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: turned(item[key]) for key in reversed(item)}
        return [turned(part) for part in item] if isinstance(item, list) else item

    assert canonical_json(turned(value)) == canonical_json(value)
    assert json_digest("t", turned(value)) == json_digest("t", value)


def test_canonical_json_form_and_refusals() -> None:
    assert canonical_json({"b": [1, None], "a": "ä"}) == '{"a":"ä","b":[1,null]}'
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))
    with pytest.raises(TypeError):
        canonical_json({"a": object()})


@given(st.text(), st.text())
def test_salts_have_keys_of_their_own(one: str, two: str) -> None:
    assert (salt_key(one) == salt_key(two)) == (one == two)
    assert len(salt_key(one)) == 32


def test_what_json_cannot_hold_becomes_its_text() -> None:
    assert as_json({"limit": (0.0, float("inf")), "nan": float("nan")}) == {"limit": [0.0, "Infinity"], "nan": "NaN"}
