# %% [markdown]
# # A layer in flax nnx
#
# This notebook trains a Mixture-of-Experts layer as a `flax.nnx` module on eight devices, once without and
# once with an auxiliary loss that balances its experts. The devices are virtual, so it runs on a laptop. It
# needs `jax_ep`, `flax`, `optax` and `matplotlib`. [Use it in flax nnx](../howto/flax_nnx.md) explains the
# module in more detail.

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_ep

os.environ.setdefault("NPROC", "16")  # XLA:CPU needs two threads for each virtual device
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
group = jax_ep.Group(mesh, "ep")
EXPERTS, TOP_K, WIDTH, HIDDEN, TOKENS = 16, 2, 32, 64, 1024

# %% [markdown]
# ## The module
#
# The module is called outside of `shard_map`, under `jit`. Its parameters are whole arrays whose experts are
# sharded over the devices, two on each. The router runs outside of `shard_map`, where arrays are whole too.
# So its statistics are those of the whole batch, and the auxiliary loss needs no `psum`.


# %%
class MoE(nnx.Module):
    """Returns y [T, WIDTH], the probabilities [T, E], and the number of tokens that chose each expert [E]."""

    def __init__(self, rngs):
        matrix = nnx.initializers.lecun_normal()
        matrices = nnx.initializers.lecun_normal(batch_axis=0)  # one for each expert
        sharded = nnx.with_partitioning(matrices, ("ep", None, None), mesh=mesh)
        self.router = nnx.Param(matrix(rngs.params(), (WIDTH, EXPERTS)))
        self.up = nnx.Param(sharded(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.down = nnx.Param(sharded(rngs.params(), (EXPERTS, HIDDEN, WIDTH)))

    def __call__(self, x):
        probabilities = jax.nn.softmax(x @ self.router[...])
        weights, topk_idx = jax.lax.top_k(probabilities, TOP_K)
        counts = jnp.sum(jax.nn.one_hot(topk_idx, EXPERTS), axis=(0, 1))

        @jax.shard_map(mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        def on_each_device(x, topk_idx, weights, up, down):
            def experts(sent):  # the rows that arrived here, sorted by expert
                hidden = nnx.gelu(jax_ep.grouped_dot(sent.x, up, sent.group_sizes))
                return jax_ep.grouped_dot(hidden, down, sent.group_sizes)

            return jax_ep.moe(x, topk_idx, weights, experts, group=group, num_experts=EXPERTS)

        return on_each_device(x, topk_idx, weights, self.up[...], self.down[...]), probabilities, counts


# %% [markdown]
# Before you train a new layer, compare it with one that computes every expert for every token:


# %%
def dense(model, x):
    weights, topk_idx = jax.lax.top_k(jax.nn.softmax(x @ model.router[...]), TOP_K)
    chosen = jnp.sum(jax.nn.one_hot(topk_idx, EXPERTS) * weights[..., None], axis=1)
    hidden = nnx.gelu(jnp.einsum("th,ehf->tef", x, model.up[...]))
    return jnp.einsum("te,tef,efh->th", chosen, hidden, model.down[...])


@nnx.jit
def squares_and_gradients(model, x):
    of_moe = nnx.value_and_grad(lambda model: jnp.mean(model(x)[0] ** 2))
    of_dense = nnx.value_and_grad(lambda model: jnp.mean(dense(model, x) ** 2))
    return of_moe(model), of_dense(model)


model = MoE(nnx.Rngs(0))
got, want = squares_and_gradients(model, jax.random.normal(jax.random.key(0), (256, WIDTH)))
differences = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), got, want)
assert max(jax.tree.leaves(differences)) < 1e-5
print("the sharded layer and the dense one agree, in values and gradients")
print(f"experts on each device: {model.up[...].addressable_shards[0].data.shape[0]}")

# %% [markdown]
# ## A task for experts
#
# Each token belongs to one of 16 kinds, and each kind has its own map from input to target. The kinds are not
# equally frequent, and their inputs share a common direction. A fresh router therefore sends most tokens to
# the same few experts.

# %%
KINDS = 16
keys = jax.random.split(jax.random.key(1), 4)
centers = jax.random.normal(keys[0], (KINDS, WIDTH)) + 0.7 * jax.random.normal(keys[1], (WIDTH,))
maps = jax.random.normal(keys[2], (KINDS, WIDTH, WIDTH)) / WIDTH**0.5
frequency = -0.1 * jnp.arange(KINDS)


def batch(key):
    which, noise = jax.random.split(key)
    kinds = jax.random.categorical(which, frequency, shape=(TOKENS,))
    x = centers[kinds] + 0.5 * jax.random.normal(noise, (TOKENS, WIDTH))
    return x, jnp.einsum("th,thf->tf", x, maps[kinds])


# %% [markdown]
# ## Train it
#
# The auxiliary loss is that of GShard and Switch Transformer: E times the sum over the experts of their share
# of the choices times their mean probability. It is 1 if all experts are chosen equally.


# %%
@nnx.jit
def train_step(model, optimizer, key, auxiliary_weight):
    x, target = batch(key)

    def loss(model):
        y, probabilities, counts = model(x)
        error = jnp.mean((y - target) ** 2)
        auxiliary = EXPERTS * jnp.sum(counts / jnp.sum(counts) * jnp.mean(probabilities, axis=0))
        return error + auxiliary_weight * auxiliary, (error, counts)

    (_, (error, counts)), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, gradients)
    return error, counts


adam = optax.adam(1e-2)  # outside of train, so that train_step is compiled once


def train(auxiliary_weight):
    model = MoE(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    keys = jax.random.split(jax.random.key(2), 100)
    history = [train_step(model, optimizer, key, auxiliary_weight) for key in keys]
    errors, counts = (jnp.stack(values) for values in zip(*history, strict=True))
    return errors, counts


results = {"without": train(0.0), "with auxiliary loss": train(0.1)}
for name, (errors, counts) in results.items():
    fullest = jnp.max(counts[-1]) / jnp.mean(counts[-1])
    print(f"{name:20} error {errors[0]:.2f} -> {errors[-1]:.3f}, fullest expert {fullest:.2f} x the mean")

# %% [markdown]
# Without the loss, the layer learns too, but a few experts do most of the work. The device that holds them is
# then slower than the others, and needs larger buffers.

# %%
# %config InlineBackend.figure_formats = ["svg"]
plt.rcParams.update(
    {"svg.fonttype": "none", "font.size": 12, "figure.figsize": (4.6, 3.4), "axes.grid": True}
)
plt.rcParams.update({"grid.alpha": 0.3, "figure.constrained_layout.use": True})
figure, axes = plt.subplots()
for name, (errors, _) in results.items():
    axes.plot(errors, label=name)
axes.set(xlabel="step", ylabel="mean squared error", yscale="log", yticks=[0.1, 0.3, 1, 3])
axes.yaxis.set_major_formatter("{x:g}")
axes.yaxis.set_minor_formatter("")
axes.legend()
plt.show()

# %%
figure, axes = plt.subplots()
for name, (_, counts) in results.items():
    axes.plot(counts.max(axis=1) / counts.mean(axis=1), label=name)
axes.axhline(1, linestyle=":", color="black")
axes.set(xlabel="step", ylabel="fullest expert, rows / mean rows", ylim=(0, None))
axes.legend()
plt.show()

# %%
figure, axes = plt.subplots()
for i, (name, (_, counts)) in enumerate(results.items()):
    axes.bar(jnp.arange(EXPERTS) + 0.4 * i - 0.2, counts[-10:].mean(axis=0), 0.4, label=name)
axes.axhline(TOKENS * TOP_K / EXPERTS, linestyle=":", color="black")
axes.set(xlabel="expert", ylabel="rows per step, last 10 steps", xticks=range(0, EXPERTS, 3))
axes.margins(y=0.35)  # for the legend
axes.legend()
plt.show()

# %% [markdown]
# - Models use a weight of 0.001 to 0.01. It is larger here so that few steps show its effect.
# - A balancing loss works over many steps. [Skew and balance](skew.py) shows what evens out the ranks within
#   each step.
# - [Recipes](../recipes.md#load-balancing-loss-and-bias-update) has the bias update of DeepSeek-V3, which
#   balances the experts without a loss.
# - [Save and restore with orbax](../howto/checkpoints.md) saves such a module.
