"""Bad input to the ops on one device: a clear error that says what must hold and what came."""

import numpy as np
import pytest

import jax_ep

ROWS, K, E, H = 8, 2, 4, 3
X = np.ones((ROWS, H), np.float32)
IDS = np.zeros((ROWS, K), np.int32)
W = np.ones((ROWS, K), np.float32)

PERMUTE = {
    "rows": ({"x": X[1:]}, ValueError, r"every array of x must be \[C, \.\.\.\] with C = 8"),
    "ids": ({"topk_idx": IDS[:, 0]}, ValueError, "topk_idx must be int32 or int64"),
    "experts": ({"num_local_experts": 0}, ValueError, "num_local_experts must be an int between 1"),
    "a factor as capacity": ({"capacity": 1.25}, ValueError, "capacity counts rows, so it must be an int"),
    "a capacity below a block": (
        {"capacity": 100, "expert_alignment": 128},
        ValueError,
        "100 rows cannot hold even one expert's block, which is a multiple of expert_alignment = 128",
    ),
    "alignment": ({"expert_alignment": 0}, ValueError, "expert_alignment must be"),
    "capacity": ({"capacity": -1}, ValueError, "capacity must be an int between 1"),
    "weights": ({"topk_weights": W[:, :1]}, ValueError, r"topk_weights must be floating \[C, K\]"),
}


@pytest.mark.parametrize("name", PERMUTE)
def test_permute(name):
    changed, error, text = PERMUTE[name]
    with pytest.raises(error, match="permute: .*" + text):
        jax_ep.permute(**{"x": X, "topk_idx": IDS, "num_local_experts": E, **changed})


BIAS = np.ones((E, H), np.float32)
UNPERMUTE = {
    "integers": ({"y": IDS}, TypeError, "y is summed"),
    "a number": ({"y": np.float32(1)}, ValueError, r"y must be \[P, \.\.\.\]"),
    "row_map": ({"row_map": IDS[:, 0]}, ValueError, r"row_map must be int32 \[C, K\]"),
    "weights": ({"topk_weights": W[1:]}, ValueError, "topk_weights must be floating"),
    "bias alone": ({"bias": BIAS}, ValueError, "bias needs topk_idx"),
    "bias' shape": ({"bias": BIAS[:, 1:], "topk_idx": IDS}, ValueError, "bias must be .L, ...."),
    "integer bias": ({"bias": BIAS.astype(int), "topk_idx": IDS}, TypeError, "bias is summed"),
    "ids' shape": ({"topk_idx": IDS[1:]}, ValueError, "topk_idx must have the shape of row_map"),
    "several arrays": ({"y": (X, X)}, TypeError, "y must be one array, got tuple; call it for each"),
    "out_dtype": ({"out_dtype": np.int32}, TypeError, "out_dtype must be floating, got int32"),
}


@pytest.mark.parametrize("name", UNPERMUTE)
def test_unpermute(name):
    changed, error, text = UNPERMUTE[name]
    with pytest.raises(error, match="unpermute: .*" + text):
        jax_ep.unpermute(**{"y": X, "row_map": IDS, **changed})


LAYOUT = {
    "ids": ({"topk_idx": X}, "topk_idx must be int32 or int64"),
    "wide ids": ({"topk_idx": np.full((2, 1), 2**32)}, "JAX converts int64 to int32 unless"),
    "a wide int": ({"topk_idx": [[0], [2**32]]}, "topk_idx must hold integers that JAX can hold"),
    "ranks": ({"num_ranks": 0}, "num_ranks must be an int between 1"),
    "experts": ({"num_experts": 7}, "positive multiple of the 2 ranks, got 7"),
    "domains": ({"ranks_per_domain": 3}, "ranks_per_domain must divide num_ranks = 2, got 3"),
    "no domain": ({"ranks_per_domain": 0}, "ranks_per_domain must be an int between 1"),
}


@pytest.mark.parametrize("name", LAYOUT)
def test_layout(name):
    changed, text = LAYOUT[name]
    arguments = {"topk_idx": IDS, "num_experts": E, "num_ranks": 2, **changed}
    with pytest.raises(ValueError, match=text):
        jax_ep.get_dispatch_layout(**arguments)
