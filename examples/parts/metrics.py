"""Two metrics of a click model on held-out clicks: AUC and normalized entropy."""

from __future__ import annotations

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns the probability that a label 1 has a higher score than a label 0; ties count half.

    Returns NaN if all labels are equal, because there is no such pair.

    Args:
        labels: [N] 0 or 1.
        scores: [N], any increasing function of the probability.

    Source: the Mann-Whitney U statistic, from the ranks of the labels 1.
    """
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    rank_of_group = np.cumsum(sizes) - (sizes - 1) / 2.0  # ranks from 1; ties share their mean rank
    clicked = labels == 1
    num_clicked = int(clicked.sum())
    pairs = num_clicked * (len(labels) - num_clicked)
    if pairs == 0:
        return float("nan")
    rank_sum = rank_of_group[group[clicked]].sum()
    return float((rank_sum - num_clicked * (num_clicked + 1) / 2.0) / pairs)


def normalized_entropy(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the log loss divided by the entropy of the click rate; below 1 is better than a constant.

    Args:
        labels: [N] 0 or 1.
        probabilities: [N] in [0, 1].

    Source: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", 2014,
    section 3.
    """
    entropy = log_loss(labels, np.full(len(labels), labels.mean()))
    return log_loss(labels, probabilities) / entropy if entropy > 0 else float("nan")


def log_loss(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the mean of -log(probability of the label), in nats."""
    of_what_happened = np.where(labels == 1, probabilities, 1.0 - probabilities)
    return float(-np.log(np.clip(of_what_happened, 1e-12, 1.0)).mean())
