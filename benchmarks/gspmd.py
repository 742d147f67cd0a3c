"""The JAX peer: the same model with sharded parameters on virtual CPU devices, compiled by XLA.

It is FSDP as JAX users write it. Parameters, optimizer state and batches are sharded over the
devices. Constraints say that parameters are used whole and that activations stay split by samples;
without them XLA sends activations between devices. The step is compiled once, before it is timed.

The script runs under an interpreter that has JAX and need not have torch. It reads a file of
parameters and batches, and then lines with a number of steps, each of which it answers with seconds
and losses.
"""

import json
import os
import sys
import time
from typing import Any

RATE, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2  # torch's defaults for AdamW


def main(path: str, ranks: int, heads: int) -> None:
    """Take steps as the lines of the standard input ask for, until the input ends."""
    # One device is one rank. XLA chooses its number of threads, which is its default.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ranks}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    data = np.load(path)
    host = {name[6:]: data[name] for name in data.files if name.startswith("param:")}
    number = sum(name.startswith("inputs:") for name in data.files)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    shardings = {k: by_rows if v.ndim and v.shape[0] % ranks == 0 else whole for k, v in host.items()}
    place = lambda tree: {k: jax.device_put(v, shardings[k]) for k, v in tree.items()}  # noqa: E731
    params = place(host)
    zeros = {k: np.zeros_like(v) for k, v in host.items()}
    state = (place(zeros), place(zeros), jax.device_put(np.zeros((), np.float32), whole))
    batches = [tuple(jax.device_put(data[f"{kind}:{i}"], by_rows) for kind in ("inputs", "targets")) for i in range(number)]
    del host, zeros  # the other peers need the memory
    split = lambda x: jax.lax.with_sharding_constraint(x, by_rows)  # noqa: E731
    model_loss = _gpt(jax, jnp, heads, split) if heads else _deep(jnp, split)

    def loss_fn(params: Any, inputs: Any, targets: Any) -> Any:
        gathered = {k: jax.lax.with_sharding_constraint(p, whole) for k, p in params.items()}
        return model_loss(gathered, inputs, targets)

    def step(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, inputs, targets)
        grads = {k: jax.lax.with_sharding_constraint(g, shardings[k]) for k, g in grads.items()}
        first, second, count = state
        count = count + 1
        first = {k: BETAS[0] * first[k] + (1 - BETAS[0]) * g for k, g in grads.items()}
        second = {k: BETAS[1] * second[k] + (1 - BETAS[1]) * g * g for k, g in grads.items()}
        one, two = 1 - BETAS[0] ** count, 1 - BETAS[1] ** count
        params = {
            k: p * (1 - RATE * DECAY) - RATE * (first[k] / one) / (jnp.sqrt(second[k] / two) + EPS)
            for k, p in params.items()
        }
        return params, (first, second, count), loss

    out = (shardings, (shardings, shardings, whole), whole)
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=out).lower(params, state, *batches[0]).compile()
    taken = 0
    print(json.dumps({"jax": jax.__version__, "devices": len(jax.devices())}), flush=True)
    for line in sys.stdin:
        losses = []
        start = time.perf_counter()
        for _ in range(int(line)):
            params, state, loss = step(params, state, *batches[taken % number])
            losses.append(loss)
            taken += 1
        jax.block_until_ready((params, state, losses))
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "losses": [float(loss) for loss in losses]}), flush=True)


def _gpt(jax: Any, jnp: Any, heads: int, split: Any) -> Any:
    """Return the loss function of the demo's GPT; ``split`` keeps activations split by samples."""

    def linear(params: Any, name: str, x: Any) -> Any:
        return split(x @ params[f"{name}.weight"].T + params[f"{name}.bias"])

    def norm(params: Any, name: str, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
        return scaled * params[f"{name}.weight"] + params[f"{name}.bias"]

    def attention(params: Any, name: str, x: Any) -> Any:
        batch, length, width = x.shape
        qkv = linear(params, f"{name}.qkv", x).reshape(batch, length, 3, heads, width // heads)
        q, k, v = (qkv[:, :, i] for i in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return linear(params, f"{name}.out", mixed.reshape(batch, length, width))

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        x = split(params["token.weight"][inputs] + params["position.weight"][: inputs.shape[1]])
        layers = 1 + max(int(name.split(".")[1]) for name in params if name.startswith("blocks."))
        for i in range(layers):
            block = f"blocks.{i}"
            x = x + attention(params, f"{block}.attention", norm(params, f"{block}.norm1", x))
            inside = linear(params, f"{block}.mlp.up", norm(params, f"{block}.norm2", x))
            x = x + linear(params, f"{block}.mlp.out", jax.nn.gelu(inside, approximate=False))
        logits = split(norm(params, "norm", x) @ params["token.weight"].T)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()

    return loss


def _deep(jnp: Any, split: Any) -> Any:
    """Return the loss function of the deep shape in JAX."""

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        x = inputs
        for i in range(len(params) // 2):
            x = x + jnp.tanh(split(x @ params[f"{i}.linear.weight"].T + params[f"{i}.linear.bias"]))
        return ((x - targets) ** 2).mean()

    return loss


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
