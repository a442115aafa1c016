# %% [markdown]
# # Skew and balance
#
# If a router prefers some experts, the devices that hold them get more rows than the others. All devices wait
# for the fullest one, and every buffer must hold its rows. This notebook measures the skew of one layer on
# eight virtual devices, and removes it with redundant experts: `moe(num_redundant_experts=S)` lets other
# devices compute some rows of the hot experts. It needs `jax_ep` and `matplotlib`. [Skew](../balance.md)
# explains how this works and what it costs.

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

os.environ.setdefault("NPROC", "16")  # XLA:CPU needs two threads for each virtual device
jax.config.update("jax_num_cpu_devices", 8)
RANKS, EXPERTS, TOP_K, WIDTH, HIDDEN, TOKENS = 8, 64, 4, 32, 64, 512  # tokens of each rank
mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
group = jax_ep.Group(mesh, "ep")
MEAN = TOKENS * TOP_K  # rows of each rank if all ranks get the same number

# %% [markdown]
# ## A layer with popular experts
#
# The router adds a bias to its scores. It is normally distributed, so the popularity of the experts is
# lognormal. Its standard deviation `sigma` sets the skew.


# %%
def normal(seed, shape, spec, scale):
    array = scale * jax.random.normal(jax.random.key(seed), shape)
    return jax.device_put(array, NamedSharding(mesh, spec))


parameters = {
    "router": normal(1, (WIDTH, EXPERTS), P(), WIDTH**-0.5),
    "up": normal(2, (EXPERTS, WIDTH, HIDDEN), P("ep"), WIDTH**-0.5),
    "down": normal(3, (EXPERTS, HIDDEN, WIDTH), P("ep"), HIDDEN**-0.5),
}
x = normal(4, (RANKS * TOKENS, WIDTH), P("ep"), 1.0)


def popularity(sigma):
    return sigma * jax.random.normal(jax.random.key(16), (EXPERTS,))


def route(router, bias, x):
    return jax.lax.top_k(jax.nn.softmax(x @ router + bias), TOP_K)


def layer(num_redundant_experts, capacity=None):
    def experts(sent, w):  # w holds this rank's experts, and copies of hot ones in its places
        hidden = jax.nn.gelu(jax_ep.grouped_dot(sent.x, w["up"], sent.group_sizes))
        return jax_ep.grouped_dot(hidden, w["down"], sent.group_sizes)

    def on_each_device(parameters, bias, x):
        weights, topk_idx = route(parameters["router"], bias, x)
        return jax_ep.moe(
            x,
            topk_idx,
            weights,
            experts,
            group=group,
            num_experts=EXPERTS,
            capacity=capacity,
            num_redundant_experts=num_redundant_experts,
            expert_params={"up": parameters["up"], "down": parameters["down"]},
            return_stats=True,
        )

    specs = ({"router": P(), "up": P("ep"), "down": P("ep")}, P(), P("ep"))
    return jax.jit(jax.shard_map(on_each_device, mesh=mesh, in_specs=specs, out_specs=P("ep")))


# %% [markdown]
# ## The rows of each rank
#
# With two places a rank, the layer returns the same result, and its buffers are much smaller than those of
# the worst case. The plan is made anew in every step, from the counts of this step.

# %%
bias = popularity(1.5)
y, stats = layer(2)(parameters, bias, x)
everything, _ = layer(0)(parameters, bias, x)  # without places, and with room for the worst case
before, after = np.asarray(stats.loads_before[:RANKS]), np.asarray(stats.loads_after[:RANKS])
assert jnp.allclose(y, everything, atol=1e-4)
assert stats.num_dropped.sum() == 0
print(f"fullest rank: {before.max() / MEAN:.2f} x the mean, with two places {after.max() / MEAN:.2f} x")
print(f"{stats.num_replicas[0]} experts were copied, and {stats.num_moved[0]} of {RANKS * MEAN} rows moved")

# %%
# %config InlineBackend.figure_formats = ["svg"]
plt.rcParams.update(
    {"svg.fonttype": "none", "font.size": 12, "figure.figsize": (4.6, 3.4), "axes.grid": True}
)
plt.rcParams.update({"grid.alpha": 0.3, "figure.constrained_layout.use": True})
figure, axes = plt.subplots()
axes.bar(np.arange(RANKS) - 0.2, before, 0.4, label="all rows at home")
axes.bar(np.arange(RANKS) + 0.2, after, 0.4, label="two redundant experts a rank")
axes.axhline(MEAN, linestyle=":", color="black")
axes.set(xlabel="rank", ylabel="rows per step", ylim=(0, 1.35 * before.max()))
axes.legend(loc="upper right")
plt.show()

# %% [markdown]
# ## More skew, more places
#
# A plan depends only on the counts, so it can be computed without a layer: `plan_redundant_experts` takes the
# rows of each rank for each expert. Here it shows how many places a layer would need in a hard case. The
# experts are sorted by popularity, so the hottest ones share a home.

# %%
plan = jax.jit(jax_ep.plan_redundant_experts, static_argnames="num_redundant_experts")


@jax.jit
def count(sigma):
    """Returns int32 [R, E]: rows of each rank for each expert."""
    _, topk_idx = route(parameters["router"], jnp.sort(popularity(sigma), descending=True), x)
    chosen = jax.nn.one_hot(topk_idx, EXPERTS, dtype=jnp.int32)
    return jnp.sum(chosen.reshape(RANKS, -1, EXPERTS), axis=1)


sigmas = np.linspace(0, 3, 13)
figure, axes = plt.subplots()
for places in (0, 1, 2, 4):
    fullest = []
    for sigma in sigmas:
        redundant = plan(count(sigma), num_redundant_experts=max(places, 1))
        loads = redundant.loads_after if places else redundant.loads_before
        fullest.append(jnp.max(loads) / MEAN)
    axes.plot(sigmas, fullest, "o-", markersize=3, label=f"S = {places}")
axes.set(xlabel="skew, sigma of the lognormal popularity", ylabel="fullest rank, rows / mean rows")
axes.set_ylim(0, None)
axes.legend()
plt.show()

# %% [markdown]
# ## What a small buffer drops
#
# A buffer of a fixed capacity drops the rows that do not fit. The layer runs with buffers for 1.05 to 2 times
# the mean, and counts the rows that it dropped. [Full buffers](../capacity.md) explains which rows these are.

# %%
factors = (1.05, 1.25, 1.5, 2.0)
figure, axes = plt.subplots()
for places in (0, 2):
    dropped = []
    for factor in factors:
        _, stats = layer(places, capacity=int(factor * MEAN))(parameters, bias, x)
        dropped.append(100 * float(stats.num_dropped.sum()) / (RANKS * MEAN))
    axes.plot(factors, dropped, "o-", label=f"S = {places}")
    print(f"S = {places}:", ", ".join(f"{percent:.1f} %" for percent in dropped), "dropped")
axes.set(xlabel="capacity, rows / mean rows", ylabel="dropped rows, %")
axes.legend()
plt.show()

# %% [markdown]
# - These are rows, not times. A copy of an expert takes time too, and virtual devices do not show its cost.
#   [Cost](../balance.md#cost) has the arithmetic for GPUs, and `python -m jax_ep bench --parts skew` measures
#   it.
# - [A layer in flax nnx](nnx_layer.py) reduces the skew itself with an auxiliary loss. Both can be combined.
