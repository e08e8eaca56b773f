"""Fuse a function that was written for NumPy, unchanged.

python examples/plain_numpy.py
"""

from __future__ import annotations

import numpy as np
from common import array_module, check_accuracy, compare_times

import cupyfuse as cf


def classify(x, gain, weight, bias):
    """Return class probabilities of each row and their entropy, after RMS normalisation."""
    x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-6) * gain
    logits = x @ weight.T + bias
    logits -= logits.max(axis=1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(axis=1, keepdims=True)
    entropy = -(p * np.log(p)).sum(axis=1)
    return p, entropy


fused_classify = cf.fuse(classify)


def main() -> None:
    generator = np.random.default_rng(0)
    arguments = [
        generator.standard_normal((512, 768)),
        generator.uniform(0.5, 1.5, 768),
        generator.standard_normal((1000, 768)) / np.sqrt(768),
        generator.standard_normal(1000) / 10,
    ]
    xp = array_module()
    given = [xp.asarray(a, dtype="float32") for a in arguments]
    print(fused_classify.plan(*given))
    print()

    exact = classify(*(a.astype("float64") for a in given))
    # NumPy's functions take CuPy arrays too, so the plain function runs on either.
    for name, fused, unfused, right in zip(
        ("probabilities", "entropy"), fused_classify(*given), classify(*given), exact, strict=True
    ):
        print(f"{name}: ", end="")
        check_accuracy(fused, unfused, right)
    compare_times(lambda: fused_classify(*given), lambda: classify(*given), xp)


if __name__ == "__main__":
    main()
