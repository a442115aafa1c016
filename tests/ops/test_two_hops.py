"""Groups whose ranks span domains, with domains made up on one: as one hop would do it, bit for bit."""

import dataclasses
import functools
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import (
    BF16,
    few_tokens_as_many,
    floats,
    ranks,
    routing,
    same_bits,
    tagged_rows,
    weights_of,
)
from devices import flags_of_processes, make_mesh, most_ranks, need_devices
from processes import num_processes

import jax_ep
from jax_ep import _extension
from jax_ep._group.group import ranks_of
from jax_ep._ops.layout import get_dispatch_layout
from jax_ep._transport import ffi, hop_1
from jax_ep._transport.routing import Routing

R = most_ranks()
PER_DOMAIN = [n for n in (1, 2, 4) if n < R]
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("two_devices")]
ALONE = pytest.mark.skipif(num_processes() > 1, reason="tells nothing more in several processes")


def domains_of(per_domain, size=R):
    return ranks(size, per_domain)


def flat_in_slots(sent):
    """Padded experts' rows [R, L, slots, ...] as the oracle has them."""
    flatten = lambda array: array.reshape(array.shape[0], -1, *array.shape[3:])
    return dataclasses.replace(sent, x=flatten(sent.x), row_weights=flatten(sent.row_weights))


def dispatch(on, x, ids, weights, experts, **options):
    return on.apply(compiled(on, experts, **options), x, ids, weights)


@functools.cache
def compiled(on, experts, by_counts=False, **options):
    """Returns a dispatch that tests of other routings share. `by_counts`: as if there were many tokens."""

    def shard(x, ids, weights):
        with few_tokens_as_many(by_counts):
            return jax_ep.dispatch(x, ids, weights, group=on.group, num_experts=experts, **options)

    return jax.jit(on.map(shard))


def filled(sent):
    """Of padded experts' rows [R, L * slots, 1] those that hold a token."""
    slots = sent.x.shape[1] // sent.group_sizes.shape[1]
    mask = np.arange(slots) < sent.group_sizes[..., None]
    return mask.reshape(len(mask), -1, 1)


def assert_same(got, want):
    """Two dispatches, with whatever they bring but the handle of hop 2."""
    without = lambda sent: dataclasses.replace(
        sent, handle=dataclasses.replace(sent.handle, within=None, routing=None)
    )
    if got.handle.routing.order == "expert_padded":  # on GPUs empty slots may hold anything
        got, want = (flat_in_slots(sent) for sent in (got, want))
        got, want = (dataclasses.replace(sent, x=np.where(filled(sent), sent.x, 0)) for sent in (got, want))
    for path, leaf in jax.tree.leaves_with_path(without(got)):
        other = dict(jax.tree.leaves_with_path(without(want)))[path]
        assert same_bits(leaf, other), jax.tree_util.keystr(path)


CASES = [
    ("rank", None, 1),
    ("rank", 20, 1),
    ("expert", None, 1),
    ("expert", 40, 4),
    ("expert_padded", None, 1),
]


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("order", "capacity", "alignment", "per_domain", "implementation", "by_counts"),
    # "ffi" with all numbers of ranks on a domain, in one order with each of them; "xla" once in each order.
    [
        *((*CASES[2], number, "ffi", False) for number in PER_DOMAIN),
        *(
            (*case, PER_DOMAIN[i % len(PER_DOMAIN)], "ffi", by_counts)
            for i, case in enumerate(CASES)
            for by_counts in (False, True)
            if PER_DOMAIN and (i != 2 or by_counts)
        ),
        *((*CASES[i], PER_DOMAIN[i % len(PER_DOMAIN)], "xla", i == 4) for i in (1, 2, 4) if PER_DOMAIN),
    ],
)
def test_dispatch_is_that_of_one_hop(order, capacity, alignment, per_domain, implementation, by_counts):
    """Rows, weights, counts, drops and the handle's arrays but those of hop 2, by the oracle too."""
    tokens, k, experts = 13, 3, 4 * R
    weights = floats((R, tokens, k))
    x = tagged_rows(R, tokens, 6, BF16)  # any bits: NaN too
    options = {"order": order, "capacity": capacity, "expert_alignment": alignment}
    kinds = [routing(kind, R, tokens, k, experts) for kind in ("sprinkled", "one_rank", "unused")]
    fills_blocks = np.tile(np.arange(k, dtype=np.int32), (R, tokens, 1))  # padded experts' blocks
    for ids in (*kinds, fills_blocks):
        by = {"implementation": implementation, "by_counts": by_counts}
        got = dispatch(domains_of(per_domain), x, ids, weights, experts, **by, **options)
        assert_same(got, dispatch(ranks(R), x, ids, weights, experts, **options))
        expected = oracle.dispatch(x, ids, weights, experts, order, capacity, alignment)
        if order == "expert_padded":
            got = flat_in_slots(got)
        for rank, want in enumerate(expected):
            assert same_bits(got.x[rank], want.x)
            np.testing.assert_array_equal(weights_of(got)[rank], want.weights)


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ["rank", "expert"])
def test_wide_types(order):
    with jax.enable_x64(True):
        ids = routing("sprinkled", R, 9, 2, 2 * R).astype(np.int64)
        x, w = floats((R, 9, 5), np.float64), floats((R, 9, 2), np.float64)
        got, want = (dispatch(on, x, ids, w, 2 * R, order=order) for on in (domains_of(R // 2), ranks(R)))
        assert_same(got, want)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("domain_rows", "order", "capacity", "implementation", "by_counts"),
    [
        (1, "rank", None, "ffi", False),
        (6, "rank", 16, "ffi", True),
        (1, "expert", 24, "ffi", True),
        (3, "expert", 24, "ffi", False),
        (6, "rank", 16, "xla", False),
        (1, "expert", 24, "xla", True),
    ],
)
def test_domain_capacity(domain_rows, order, capacity, implementation, by_counts):
    """What hop 1 drops is as if it had not been chosen, but counted at its receiver."""
    tokens, k, experts, per_domain = 12, 3, 4 * R, R // 2
    ids, weights = routing("sprinkled", R, tokens, k, experts), floats((R, tokens, k))
    x = tagged_rows(R, tokens, 3, np.int32)
    left = oracle.dropped_by_hop_1(ids, experts, per_domain, domain_rows)
    assert (left < 0).sum() > (np.stack([oracle.routed(one, experts) for one in ids]) < 0).sum()
    options = {"order": order, "capacity": capacity}
    rows = 2 * domain_rows + 1  # of both domains, and one that cannot be shared
    by = {"domain_capacity": rows, "implementation": implementation, "by_counts": by_counts}
    got = dispatch(domains_of(per_domain), x, ids, weights, experts, **by, **options)
    want = dispatch(ranks(R), x, left, weights, experts, **options)
    wanted = oracle.rank_prefix_matrix(ids, experts, order)[-1]
    arrive = wanted[:, None] - want.num_tokens
    np.testing.assert_array_equal(got.num_dropped, arrive)
    assert_same(
        dataclasses.replace(got, num_dropped=want.num_dropped, num_invalid=want.num_invalid), want
    )  # the ids that `want` got have no invalid ones


@pytest.mark.one_jax
@pytest.mark.parametrize("quantize", ["fp8", "fp8_dequantize"])
def test_rows_are_quantised_before_they_travel(quantize, implementation):
    """What crosses the network is a byte for each element, and the scales."""
    ids = routing("sprinkled", R, 5, 2, 2 * R)
    x = floats((R, 5, 256), BF16)
    on, by = domains_of(R // 2), {"quantize": quantize, "implementation": implementation}
    got = dispatch(on, x, ids, None, 2 * R, **by)
    assert_same(got, dispatch(ranks(R), x, ids, None, 2 * R, quantize=quantize))
    arguments = x.reshape(-1, 256), ids.reshape(-1, 2), None
    text = compiled(on, 2 * R, by_counts=True, **by).lower(*arguments).as_text()
    between = [line for line in text.splitlines() if "all_to_all" in line and "x256x" in line]
    assert between
    assert all("x256xui8" in line for line in between)
    assert not [line for line in text.splitlines() if "all_to_all" in line and "bf16" in line]


@ALONE
@pytest.mark.parametrize(
    ("order", "tokens", "top_k", "width", "at_once"),
    [
        ("expert", 4096, 4, 1, True),  # 65536 choices of all ranks
        ("expert", 4097, 4, 1, False),
        ("rank", 4096, 1, 1, True),  # and as many destinations
        ("rank", 4097, 1, 1, False),
        ("expert", 512, 8, 8176, True),  # 32 MiB with the choices and weights
        ("expert", 512, 8, 8177, False),
    ],
)
def test_what_few_tokens_are(order, tokens, top_k, width, at_once):
    need_devices(4)
    of_routing = Routing(
        ranks=ranks_of(domains_of(2, 4).group),
        order=order,
        num_tokens=tokens,
        top_k=top_k,
        num_experts=8,
        capacity=1,
        expert_alignment=1,
        domain_rows=tokens,
    )
    x, weights = (jax.ShapeDtypeStruct((tokens, n), np.float32) for n in (width, top_k))
    assert hop_1.makes_one_exchange(of_routing, (x, weights)) == at_once


@pytest.mark.one_jax
@ALONE
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_few_tokens_cross_the_network_once(quantize):
    """One exchange for a dispatch, one for a combine, and one for the gradient of each."""
    tokens, k, width = 5, 2, 256
    ids, w = routing("sprinkled", R, tokens, k, 2 * R), floats((R, tokens, k))
    x, on = floats((R, tokens, width), BF16), domains_of(R // 2)

    def shard(x, ids, w):
        def layer(x, w):
            sent = jax_ep.dispatch(
                x, ids, w, group=on.group, num_experts=2 * R, quantize=quantize and "fp8_dequantize"
            )
            return jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights, quantize=quantize)

        y, transposed = jax.vjp(layer, x, w)
        return y, transposed(y)

    flat = (array.reshape(-1, array.shape[-1]) for array in (x, ids, w))
    text = jax.jit(on.map(shard)).lower(*flat).as_text()
    exchanged = re.findall(r"all_to_all.*-> tensor<2x(\S+)>", text)
    words, rows = lambda size: f"{tokens * size // 4}xi32", f"{tokens}x{width}xbf16"
    packed, of_choices = width + 4 * width // 128, 4 * k  # bytes of a row in FP8; of the ids or weights
    assert exchanged == [
        words(2 * of_choices + (packed if quantize else 2 * width)),
        words(packed) if quantize else rows,
        rows,
        words(2 * width + of_choices),
    ]


def test_num_valid_tokens_statistics_and_start_done():
    ids = routing("sprinkled", R, 8, 2, 2 * R)
    x, w = floats((R, 8, 4)), floats((R, 8, 2))
    valid = np.arange(R, dtype=np.int32)[:, None] % 9

    def run(on):
        def shard(x, ids, w, valid):
            statistics = jax_ep.DispatchStatistics.zeros(on.group, 2 * R)
            options = {"group": on.group, "num_experts": 2 * R, "num_valid_tokens": valid}
            pending = jax_ep.dispatch_start(x, ids, w, **options, statistics=statistics)
            sent = pending.done()
            out = jax_ep.combine_start(sent.x, sent.handle, row_weights=None).done()
            return sent, out

        return on.run(shard, x, ids, w, valid)

    (got, out), (want, other) = run(domains_of(R // 2)), run(ranks(R))
    assert not got.statistics.wait_us.any()  # nobody measures it
    np.testing.assert_array_equal(got.statistics.tokens_per_expert, got.tokens_per_expert)
    assert_same(dataclasses.replace(got, statistics=None), dataclasses.replace(want, statistics=None))
    np.testing.assert_allclose(out, other, rtol=1e-6, atol=1e-6)


def test_no_tokens():
    got = dispatch(
        domains_of(R // 2), np.zeros((R, 0, 3)), np.zeros((R, 0, 2), np.int32), None, R, capacity=4
    )
    assert not got.x.any()
    assert not got.num_tokens.any()


def test_a_group_is_that_of_its_hosts(open_group):
    mesh = make_mesh((R,), ("ep",))
    one, two, same = (open_group(mesh, "ep", ranks_per_domain=n) for n in (R, R // 2, R // 2))
    assert one == open_group(mesh, "ep") != two == same
    assert one.ranks_per_domain == R
    assert two.info().ranks_per_domain == R // 2
    assert f"ranks_per_domain={R // 2}" in repr(two)


def test_combines_by_rank_of_rows_that_are_relayed_avoid_the_arena(open_group):
    """What comes from a rank there lies among rows of others, which slots by number cannot tell.

    A rank that is alone on its domain relays nothing to others.
    """
    module = _extension.extension()
    if not hasattr(module, "fits_arena"):
        pytest.skip("the extension has no CUDA part, which alone has an arena")
    mesh = make_mesh((R,), ("ep",))
    for each in {R, R // 2, 1}:
        group = open_group(mesh, "ep", ranks_per_domain=each)
        opened = ranks_of(group).within or ranks_of(group)
        by_rank = each in (R, 1)
        sizes = (group.size, 128, 4, 8 * R)
        fits = functools.partial(module.fits_arena, opened.key, sizes=sizes, row_bytes=1024)
        assert fits(combines=True, by_expert=False) == by_rank
        assert fits(combines=True, by_expert=True)
        assert fits(combines=False, by_expert=False)


def test_wrong_uses(open_group):
    mesh = make_mesh((R,), ("ep",))
    with pytest.raises(
        ValueError, match=f"ranks_per_domain must divide the {R} ranks of the group, got {R + 1}"
    ):
        jax_ep.Group(mesh, "ep", ranks_per_domain=R + 1)
    with pytest.raises(TypeError, match=r"ranks_per_domain must be an int \(or None\), got '2'"):
        jax_ep.Group(mesh, "ep", ranks_per_domain="2")
    ids = routing("sprinkled", R, 8, 2, 2 * R)
    x = floats((R, 8, 4))
    on = domains_of(R // 2)
    with pytest.raises(ValueError, match="need a group whose ranks share a domain"):
        dispatch(on, x, ids, None, 2 * R, on_timeout="mask")
    with pytest.raises(ValueError, match=r"domain_capacity counts the rows .* at least 2, got 1"):
        dispatch(on, x, ids, None, 2 * R, domain_capacity=1)
    with pytest.raises(ValueError, match="domain_capacity must be an int between 1"):
        dispatch(on, x, ids, None, 2 * R, domain_capacity=2.5)


@pytest.mark.one_jax
@ALONE
@pytest.mark.parametrize(("domains", "copies"), [(2, 1.00), (4, 2.71), (8, 4.63)])
def test_a_token_crosses_the_network_once_for_each_other_domain(domains, copies):
    """Of 256 experts and eight choices, all different: the bound that nothing can be below."""
    size, tokens, experts, k = 8, 512, 256, 8
    on = domains_of(size // domains, size)
    ids = routing("uniform", size, tokens, k, experts)

    def shard(x, ids):
        handle = jax_ep.dispatch(x, ids, group=on.group, num_experts=experts).handle
        backend = ffi.Ffi(handle.routing.ranks)
        came = hop_1.send_to_domains(backend, handle.routing, handle.topk_idx, x).reshape(domains, tokens)
        layout = get_dispatch_layout(
            ids, num_experts=experts, num_ranks=size, ranks_per_domain=size // domains
        )
        mine = jax.lax.axis_index("ep") // (size // domains)
        elsewhere = jnp.arange(domains)[:, None] != mine
        return (
            jnp.sum((came > 0) & elsewhere, keepdims=True),
            jnp.sum(jnp.where(elsewhere[:, 0], layout.num_tokens_per_domain, 0), keepdims=True),
        )

    came, sent = on.run(shard, np.ones((size, tokens)), ids)
    assert came.sum() == sent.sum()
    expected = (domains - 1) * (1 - math.comb(experts - experts // domains, k) / math.comb(experts, k))
    assert round(expected, 2) == copies
    np.testing.assert_allclose(came.sum() / (size * tokens), expected, rtol=0.01)


@pytest.mark.slow
@ALONE
@pytest.mark.parametrize(("size", "per_domain", "experts"), [(64, 8, 128), (256, 16, 512)])
def test_more_ranks_than_a_domain_has(size, per_domain, experts):
    """In a process of its own, which has as many devices."""
    worker = pathlib.Path(__file__).parents[1] / "support" / "many_ranks_worker.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": flags_of_processes()}
    command = [sys.executable, str(worker), str(size), str(per_domain), str(experts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"{size} ranks ok" in done.stdout
