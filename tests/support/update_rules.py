"""The update rules: what a call of `ops.update_rows_` needs for a rule, and the plain formulas.

Legend: D columns, K rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from torchrec_dyn.optimizers import RULES, STATE_NAMES, OptimizerKind, RowOptimizer

KINDS = {rule.number: kind for kind, rule in reversed(RULES.items())}  # by number
NUMBERS = sorted(KINDS)


def hyper_of(number: int, learning_rate: float = 0.1, **options: float) -> list[float]:
    """Returns the hyper-parameters of a rule; options that the rule lacks are dropped."""
    options = {name: value for name, value in options.items() if name in RULES[KINDS[number]].hyper}
    return RowOptimizer(KINDS[number], **options).hyper(learning_rate)


def state_widths(number: int, columns: int) -> tuple[int, ...]:
    """Returns the width of each of `STATE_NAMES` for rows of `columns` columns, 0 for no such state."""
    rule = RULES[KINDS[number]]
    width = dict(zip(rule.states, RowOptimizer(KINDS[number]).state_columns(columns), strict=True))
    return tuple(width.get(name, 0) for name in STATE_NAMES)


def update(
    kind: OptimizerKind,
    hyper: dict[str, Any],
    step: int,
    mean_square: Callable[[np.ndarray], Any],
    rows: tuple[np.ndarray, ...],
) -> tuple[np.ndarray, ...]:
    """Returns the weights and both states after an update, computed in their dtype.

    Source: FBGEMM fbgemm_gpu/codegen/genscript/optimizers.py, the CUDA side.

    Args:
        hyper: numbers of the dtype of the rows, "learning_rate" among them.
        mean_square: the mean square of gradients [..., D], [..., 1] or a number.
        rows: gradients, weights and both states, [K, D] or [D]; a state of a number a row has 1 for D.
    """
    g, w, m1, m2 = rows
    lr, one = hyper["learning_rate"], type(hyper["learning_rate"])(1)
    if kind == OptimizerKind.EXACT_SGD:
        return w - lr * g, m1, m2
    eps = hyper["eps"]
    if kind == OptimizerKind.EXACT_ADAGRAD:
        m1 = m1 + g * g
        return w - lr * g / (np.sqrt(m1) + eps), m1, m2
    decay = hyper["weight_decay"]
    if kind == OptimizerKind.EXACT_ROWWISE_ADAGRAD:
        mode = hyper["weight_decay_mode"]
        m1 = m1 + mean_square(g + decay * w if mode == 1 else g)
        k = lr / (np.sqrt(m1) + eps)
        keep = {0: one, 1: one - k * decay, 2: one - lr * decay}[int(mode)]
        return keep * w - k * g, m1, m2
    b1, b2 = hyper["beta1"], hyper["beta2"]
    square = mean_square(g) if kind == OptimizerKind.PARTIAL_ROWWISE_ADAM else g * g
    first, second = (type(one)(1.0 - np.float64(b) ** step) for b in (b1, b2))
    m1 = b1 * m1 + (one - b1) * g
    m2 = b2 * m2 + (one - b2) * square
    return w - lr * (m1 / first / (np.sqrt(m2 / second) + eps) + decay * w), m1, m2
