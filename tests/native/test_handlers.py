"""What only a handler can see, by calling the targets as no op would; and the tests' own guards."""

import devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import _extension

IDS = jnp.zeros((4, 2), jnp.int32)


def call(target, results, *operands, **attributes):
    assert _extension.extension() is not None  # and with it the targets are registered
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    function = jax.ffi.ffi_call(f"jax_ep_{target}", types)
    return jax.block_until_ready(jax.jit(lambda *a: function(*a, **attributes))(*operands))


def layout(ids=IDS, ranks=2, experts=4, nodes=2, in_rank=(4, 2), ranks_per_domain=1):
    results = [((ranks,), jnp.int32), ((nodes,), jnp.int32), ((experts,), jnp.int32), (in_rank, jnp.bool_)]
    return call("layout", results, ids, ranks_per_domain=np.int64(ranks_per_domain))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"ids": jnp.zeros((4, 2), jnp.float32)}, "layout: ids must be int32 or int64"),
        ({"ids": jnp.zeros((4,), jnp.int32)}, "layout: ids must have two dimensions"),
        ({"experts": 5}, "the 2 ranks must divide the 5 experts"),
        ({"ranks_per_domain": 3}, "ranks_per_domain must divide the 2 ranks, got 3"),
        ({"nodes": 1}, r"num_tokens_per_domain: expected shape \[2\], got \[1\]"),
        (
            {"ids": jnp.zeros((0, 2**31), jnp.int32), "in_rank": (0, 2)},
            r"tokens \* choices a token must be less than 2\*\*31, got 0 \* 2147483648",
        ),
        ({"in_rank": (4, 3)}, r"is_token_in_rank: expected shape \[4, 2\], got \[4, 3\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_layout(changed, text):
    layout()
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        layout(**changed)


def balance(counts=None, places=1, tolerance=20, min_rows=1, source=None, **shapes):
    counts = jnp.ones((2, 4), jnp.int32) if counts is None else counts
    source = jnp.zeros((1,), jnp.int32) if source is None else source
    names = ("physical_to_logical", "quotas", "order", "ends")
    expected = dict.fromkeys(names, (6,)) | shapes
    attributes = {"num_redundant_experts": places, "tolerance": tolerance, "min_rows": min_rows}
    attributes = {name: np.int64(value) for name, value in attributes.items()}
    return call("balance", [(expected[name], jnp.int32) for name in names], counts, source, **attributes)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"counts": jnp.ones((8,), jnp.int32)}, "balance: counts must have two dimensions"),
        ({"counts": jnp.ones((2, 5), jnp.int32)}, "balance: the 2 ranks must divide the 5 experts"),
        ({"counts": jnp.ones((0, 4), jnp.int32)}, "balance: the 0 ranks must divide the 4 experts"),
        ({"places": 0}, "num_redundant_experts must be between 1 and the 2 home experts of a rank, got 0"),
        ({"places": 3}, "num_redundant_experts must be between 1 and the 2 home experts of a rank, got 3"),
        ({"tolerance": 1001}, "tolerance must be between 0 and 1000, got 1001"),
        ({"min_rows": -1}, "min_rows out of range: -1"),
        ({"physical_to_logical": (4,)}, r"physical_to_logical: expected shape \[6\], got \[4\]"),
        ({"quotas": (2, 3)}, r"quotas: expected shape \[6\], got \[2, 3\]"),
        ({"order": (5,)}, r"order: expected shape \[6\], got \[5\]"),
        ({"source": jnp.zeros((), jnp.int32)}, r"source: expected shape \[1\], got \[\]"),
        ({"ends": (2, 6)}, r"ends: expected shape \[6\], got \[2, 6\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_balance(changed, text):
    physical_to_logical, *_ = balance()
    assert physical_to_logical.tolist() == [0, 1, -1, 2, 3, -1]
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        balance(**changed)


@pytest.mark.one_jax
def test_rows_that_do_not_fit():
    x, row_map, absent = jnp.zeros((4, 3)), jnp.zeros((4, 2), jnp.int32), jnp.zeros(())
    with pytest.raises(jax.errors.JaxRuntimeError, match="the result must have 4 rows of y's shape"):
        call("unpermute", [((5, 3), jnp.float32)], jnp.zeros((8, 3)), row_map, absent, absent, row_map)

    def again(rows, dots, weights=absent, factors=absent, leaf=x):
        results = [(rows, leaf.dtype), (dots, jnp.float32), ((8,), jnp.uint8)]
        call("repermute", results, row_map, leaf, weights, factors)

    weights, factors = jnp.zeros((4, 2)), jnp.zeros((8, 3))
    again((8, 3), (0,))
    again((8, 3), (4, 2), weights, factors)
    for text, arguments in {
        "payload 0 must have 4 rows and its result 8 rows": ((8, 2), (0,)),
        r"topk_weights: expected shape \[4, 2\], got \[2, 4\]": ((8, 3), (4, 2), weights.T, factors),
        r"dots: expected shape \[4, 2\], got \[4, 3\]": ((8, 3), (4, 3), weights, factors),
        "the factors must have 8 rows of the payload's shape": ((8, 3), (4, 2), weights, factors[:, :2]),
        "must be of one dtype": ((8, 3), (4, 2), weights, factors.astype(jnp.float16)),
        "float16, bfloat16, float32 or float64": (
            (8, 3),
            (4, 2),
            weights,
            factors.astype(int),
            x.astype(int),
        ),
    }.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            again(*arguments)

    def routed(target, *operands, experts, **routing):
        sizes = {"num_experts": experts, "capacity": 1, "alignment": 1}
        if routing:
            sizes |= {"order": 1, "masks": 0, "quantize": 0, "num_ranks": routing.pop("ranks"), **routing}
            operands = (jnp.zeros((2,), jnp.int32), *operands)
        attributes = {name: np.int64(size) for name, size in sizes.items()}
        names = {"group": "none", "program": "test"} if "order" in sizes else {}
        call(target, [((1,), jnp.float32)], *operands, **attributes, **names)

    counts, one = jnp.zeros((1,), jnp.int32), jnp.ones((1,))
    handle = [IDS, IDS, counts[None], counts, IDS]
    many = 2**20
    for text, refused in {
        rf"less than 2\*\*31, got {many} \* 4 \* 512": lambda: routed(
            "route", jnp.zeros((4, 512), jnp.int32), ranks=many, experts=many
        ),
        r"less than 2\*\*31, got 65536 \* 65536": lambda: routed("route", IDS, ranks=2**16, experts=2**16),
        r"less than 2\*\*31, got 1 \* 2147483648": lambda: routed("permute", IDS, experts=2**31 - 1),
        "combine: row_weights and weights to return": lambda: routed(
            "pull", *handle, one, one, ranks=1, experts=1
        ),
        "combine: attribute quantize out of range: 3": lambda: routed(
            "pull", *handle, absent, absent, ranks=1, experts=1, quantize=3
        ),
        "combine: sums are not quantized together with weights to return": lambda: routed(
            "pull", *handle, absent, one, ranks=1, experts=1, quantize=1
        ),
    }.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            refused()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"ids": jnp.zeros((4, 33), jnp.int32)}, "at most 32 choices a token, got 33"),
        ({"experts": 8192}, "at most 4096 experts, got 8192"),
        (
            {"ranks": 1025, "experts": 1025, "nodes": 1025, "in_rank": (4, 1025)},
            "at most 1024 ranks, got 1025",
        ),
    ],
)
def test_what_only_gpus_refuse(changed, text):
    if jax.default_backend() != "gpu":
        per_rank, _, per_expert, in_rank = map(np.asarray, layout(**changed))
        choices = changed.get("ids", IDS).size  # all of them of expert 0
        assert (per_rank[0], per_expert[0]) == (4, choices)
        assert (per_rank.sum(), per_expert.sum(), in_rank.sum()) == (4, choices, 4)
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"layout: on GPUs {text}; use implementation='xla'"):
        layout(**changed)


def test_a_skip_for_want_of_devices_can_be_an_error(monkeypatch):
    monkeypatch.delenv("JAX_EP_REQUIRE_DEVICES", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs 1000 devices"):
        devices.need_devices(1000)
    monkeypatch.setenv("JAX_EP_REQUIRE_DEVICES", "1000")
    with pytest.raises(pytest.fail.Exception, match="needs 1000 devices"):
        devices.need_devices(1000)
