"""Sampling as an argmax: the Gumbel-max trick, so that no normalisation and no host round trip is needed.

``argmax_v(logit_v / temperature + g_v)`` with independent Gumbel g is a draw from the softmax (Gumbel 1954; used for
decoding by FlashInfer and others). g is taken as -log(E), E exponential from a Philox uniform; near zero, where the
winners are, E keeps its relative precision.

``rng`` int64[2] on the device is (seed, step); the last program of a launch advances the step, so a replayed graph
draws fresh numbers.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def uniform(rng_ptr, stream, index):
    """Return uniforms in [0, 1) for ``index`` (int32 tensor) of draw ``stream`` at the current step."""
    seed = tl.load(rng_ptr)
    step = tl.load(rng_ptr + 1)
    key = seed * 0x9E3779B97F4A7C1 + step * 0x5851F42D4C957F2D + stream
    return tl.rand(key, index)


@triton.jit
def gumbel(u):
    """Turn uniforms in [0, 1) into standard Gumbel numbers."""
    small = u * (1.0 + u * (0.5 + u * 0.3333333))  # -log(1 - u) for small u
    e = tl.where(u < 0.001, small, -tl.log(1.0 - u))
    return -tl.log(tl.maximum(e, 1e-30))
