"""A model for the example of the documentation: mean patches among the tokens, and one softmax."""

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 32
Tree = dict[str, jax.Array]


def parameters() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    shapes = {"text": (300, WIDTH), "vision": (588, WIDTH)}
    return {name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def loss_of(params: Tree, batch: Tree) -> jax.Array:
    """Sum over the targets of a microbatch."""
    rows = params["text"][batch["token_ids"]].reshape(-1, WIDTH)
    images = (batch["patches"] / 255 @ params["vision"]).reshape(-1, 4, WIDTH).mean(1)
    rows = rows.at[batch["embedding_slots"]].set(images, mode="drop")
    labels = batch["labels"].reshape(-1, 1)
    scores = jnp.take_along_axis(jax.nn.log_softmax(rows @ params["text"].T), labels.clip(0), 1)
    return -jnp.where(labels < 0, 0, scores).sum()
