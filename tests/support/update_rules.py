"""The update rules: what a call of `ops.update_rows_` needs for a rule, and the plain formulas.

Legend: D columns, K rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from torchrec_dyn.optimizers import RULES, OptimizerKind, RowOptimizer

KINDS = {rule.number: kind for kind, rule in reversed(RULES.items())}  # by number
NUMBERS = sorted(KINDS)


def hyper_of(number: int, learning_rate: float = 0.1, **options: float) -> list[float]:
    """Returns the hyper-parameters of a rule; options that the rule lacks are dropped."""
    options = {name: value for name, value in options.items() if name in RULES[KINDS[number]].hyper}
    return RowOptimizer(KINDS[number], **options).hyper(learning_rate)


def state_widths(number: int, columns: int) -> tuple[int, ...]:
    """Returns the width of each state of a rule for rows of `columns` columns."""
    return RowOptimizer(KINDS[number]).state_columns(columns)


def state_blocks(
    number: int, weights: list[Tensor], new: Callable[[int, int], Tensor]
) -> list[Tensor]:
    """Returns `states` for blocks of weights [rows, columns]; new(rows, width) makes each block."""
    count = len(state_widths(number, 1))
    return [
        new(len(block), state_widths(number, block.shape[1])[state])
        for state in range(count)
        for block in weights
    ]


def update(
    kind: OptimizerKind,
    hyper: dict[str, Any],
    step: int,
    mean_square: Callable[[np.ndarray], Any],
    sum_square: Callable[[np.ndarray], Any],
    rows: tuple[np.ndarray, ...],
) -> tuple[np.ndarray, ...]:
    """Returns the weights and the states after an update, computed in their dtype.

    Source: FBGEMM fbgemm_gpu/codegen/genscript/optimizers.py, the CUDA side. LAMB: algorithm 2 of You et al.,
    "Large batch optimization for deep learning", ICLR 2020, whose phi is the identity; a norm of 0 takes no
    part. FTRL: ApplyFtrl of tensorflow/core/kernels/training_ops.cc with lr_power -0.5.
    """
    g, w, *states = rows
    lr, one = hyper["learning_rate"], type(hyper["learning_rate"])(1)
    if kind == OptimizerKind.EXACT_SGD:
        return (w - lr * g,)
    if kind == OptimizerKind.FTRL:
        return ftrl(hyper, rows)
    eps = hyper["eps"]
    if kind == OptimizerKind.EXACT_ADAGRAD:
        total = states[0] + g * g
        return w - lr * g / (np.sqrt(total) + eps), total
    decay = hyper["weight_decay"]
    if kind == OptimizerKind.EXACT_ROWWISE_ADAGRAD:
        mode = hyper["weight_decay_mode"]
        total = states[0] + mean_square(g + decay * w if mode == 1 else g)
        k = lr / (np.sqrt(total) + eps)
        keep = {0: one, 1: one - k * decay, 2: one - lr * decay}[int(mode)]
        w, most = keep * w - k * g, hyper["max_norm"]
        if most > 0:
            norm = np.sqrt(sum_square(w))
            w = w * np.where(norm > most, most / np.maximum(norm, most), one)
        return w, total
    m1, m2, *further = states
    b1, b2 = hyper["beta1"], hyper["beta2"]
    square = mean_square(g) if "momentum2" in RULES[kind].rowwise else g * g
    first, second = (type(one)(1.0 - np.float64(b) ** step) for b in (b1, b2))
    if kind == OptimizerKind.ADAM_BY_ROW:
        count = further[0] + one
        further = [count]
        steps = np.where(count < 2.0**24, count, one * 2**24)
        steps = np.floor(np.maximum(steps, one) + one / 2)
        first, second = (
            (1.0 - np.float64(b) ** np.float64(steps)).astype(type(one)) for b in (b1, b2)
        )
    m1 = b1 * m1 + (one - b1) * g
    m2 = b2 * m2 + (one - b2) * square
    if kind in (OptimizerKind.LAMB, OptimizerKind.PARTIAL_ROWWISE_LAMB):
        direction = m1 / first / (np.sqrt(m2 / second) + eps) + decay * w
        weight_norm, norm = np.sqrt(sum_square(w)), np.sqrt(sum_square(direction))
        has_ratio = (weight_norm > 0) & (norm > 0)
        ratio = np.where(has_ratio, weight_norm / np.where(has_ratio, norm, one), one)
        return w - lr * ratio * direction, m1, m2
    return w - lr * (m1 / first / (np.sqrt(m2 / second) + eps) + decay * w), m1, m2, *further


def ftrl(hyper: dict[str, Any], rows: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Returns `update` of FTRL; the states are TensorFlow's `accum` and `linear`."""
    g, w, accumulator, linear = rows
    lr, l1, l2 = (hyper[name] for name in ("learning_rate", "l1", "l2"))
    total = accumulator + g * g
    linear = linear + (g - (np.sqrt(total) - np.sqrt(accumulator)) / lr * w)
    quadratic = np.sqrt(total) / lr + type(lr)(2) * l2
    is_zero = (np.abs(linear) <= l1) | (quadratic == 0)
    kept = (np.sign(linear) * l1 - linear) / np.where(is_zero, type(lr)(1), quadratic)
    return np.where(is_zero, type(lr)(0), kept), total, linear
