"""Arguments that describe no attention call: one error that names argument, rule and what came."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.dispatch import attention
from hf_attn_backends.errors import InvalidCallError, InvalidDtypeError


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


Q, KV = zeros(2, 4, 5, 16), zeros(2, 2, 7, 16)

CASES = {
    "rank": ((zeros(4, 5, 16), KV, KV), {}, r"query must have 4 dimensions .* got shape \(4, 5"),
    "key rank": ((Q, zeros(2, 7, 16), KV), {}, "key must have 4 dimensions"),
    "head_dim": ((Q, zeros(2, 2, 7, 8), KV), {}, "key must have the query's head_dim 16, got 8"),
    "heads": ((Q, KV, zeros(2, 4, 7, 16)), {}, "value must have as many heads as key, got 4 and 2"),
    "ratio": ((Q, zeros(2, 3, 7, 16), zeros(2, 3, 7, 16)), {}, "whole multiple .* got 4 over 3"),
    "batch": ((Q, zeros(1, 2, 7, 16), zeros(1, 2, 7, 16)), {}, "query's batch 2, got 1 and 1"),
    "lengths": ((Q, KV, zeros(2, 2, 6, 16)), {}, "as long as key, got lengths 6 and 7"),
    "devices": ((Q, KV.to("meta"), KV), {}, "must be on one device, got cpu, meta and cpu"),
    "window 0": ((Q, KV, KV), {"is_causal": True, "window": 0}, "window must be .* got 0"),
    "window -3": ((Q, KV, KV), {"is_causal": True, "window": -3}, "window must be .* got -3"),
    "lone window": ((Q, KV, KV), {"window": 3}, "window must come with is_causal"),
    "softcap 0": ((Q, KV, KV), {"softcap": 0.0}, "softcap must be .* got 0.0"),
    "softcap -1": ((Q, KV, KV), {"softcap": -1.0}, "softcap must be .* got -1.0"),
    "softcap nan": ((Q, KV, KV), {"softcap": float("nan")}, "softcap must be .* got nan"),
    "dropout": ((Q, KV, KV), {"dropout_p": 1.0}, "dropout_p must be .* got 1.0"),
    "mask": ((Q, KV, KV), {"attn_mask": zeros(5, 6).bool()}, r"broadcast to \(2, 4, 5, 7\)"),
    "mask rank": ((Q, KV, KV), {"attn_mask": zeros(1, 1, 1, 5, 7).bool()}, "must broadcast to"),
    "mask twice": ((Q, KV, KV), {"attn_mask": zeros(5, 7).bool(), "is_causal": True}, "alone"),
    "intervals": ((Q, KV, KV), {"attn_mask": zeros(2, 4, 2).int()}, "intervals must have shape"),
    "no tensor": ((None, KV, KV), {}, "query must be a tensor, got None"),
    "an array": ((Q, KV.numpy(), KV), {}, "key must be a tensor, got array"),
    "mask's type": (
        (Q, KV, KV),
        {"attn_mask": "causal"},
        "attn_mask must be a tensor, got 'causal'",
    ),
    "window's type": ((Q, KV, KV), {"is_causal": True, "window": 2.5}, "whole number.* got 2.5"),
    "window's text": ((Q, KV, KV), {"is_causal": True, "window": "3"}, "whole number.* got '3'"),
    "window's list": ((Q, KV, KV), {"is_causal": True, "window": [3]}, "whole number.* got .3"),
    "softcap inf": ((Q, KV, KV), {"softcap": float("inf")}, "softcap must be .* got inf"),
    "softcap's type": ((Q, KV, KV), {"softcap": "x"}, "softcap must be .* got 'x'"),
    "dropout's type": ((Q, KV, KV), {"dropout_p": "x"}, "dropout_p must be .* got 'x'"),
    "sinks' type": ((Q, KV, KV), {"sinks": 4.0}, "sinks must be a tensor, got 4.0"),
    "sinks": ((Q, KV, KV), {"sinks": zeros(2)}, r"sinks must have shape \(4,\)"),
}


@pytest.mark.parametrize("backend", [None, "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_one_value_error_names_argument_rule_and_value(case, backend):
    tensors, options, text = CASES[case]
    for _ in range(2):  # no plan of a good call may hide it the second time either
        with pytest.raises(InvalidCallError, match=text) as caught:
            attention(*tensors, backend=backend, **options)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("tensors", "options", "text"),
    [
        ((Q, KV.half(), KV), {}, "one dtype, got float32, float16 and float32"),
        ((Q.int(), KV.int(), KV.int()), {}, "query must be one of .* got int32"),
        ((Q, KV, KV), {"attn_mask": zeros(5, 7, dtype=torch.float16)}, "bool or float32"),
        ((Q, KV, KV), {"attn_mask": zeros(5, 7).long()}, "bool or float32, got int64"),
    ],
)
def test_dtypes_are_a_type_error(tensors, options, text):
    with pytest.raises(InvalidDtypeError, match=text) as caught:
        attention(*tensors, **options)
    assert isinstance(caught.value, TypeError)


def test_a_good_call_does_not_hide_a_bad_one_of_the_same_shapes():
    good = attention(Q, KV, KV, is_causal=True)
    assert good.shape == (2, 4, 5, 16)
    with pytest.raises(InvalidDtypeError):
        attention(Q, KV, KV.double(), is_causal=True)
    with pytest.raises(InvalidCallError):
        attention(Q, KV, KV, is_causal=True, window=-1)
