"""Asks the user's own policies, and checks what they return.

They are asked before a step writes anything, about copies: whatever they do or raise, no table has changed.

Legend: M ids or rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn.own_policies import OwnAdmission, OwnEviction


def admitted_by(policy: OwnAdmission, where: str, ids: Tensor, counts: Tensor, step: int) -> Tensor:
    """Returns which waiting ids a policy admits, [M] bool. As `OwnAdmission.admit`."""
    with torch.no_grad():
        answer = policy.admit(ids, counts, step)
    return _checked(answer, f"{where}: expected a mask of {policy!r}.admit", ids, torch.bool)


def scored_by(
    policy: OwnEviction,
    where: str,
    scores: tuple[Tensor, Tensor, Tensor],
    step: int,
    rows: Tensor | None,
) -> Tensor:
    """Returns the scores of rows by a policy, [M] int64; scores: last_seen, counts and times, [M] int64.

    As `OwnEviction.score`; rows [M, columns] float32 are None unless the policy reads them.
    """
    like = scores[0]
    with torch.no_grad():
        answer = policy.score(*scores, step, *(() if rows is None else (rows,)))
    return _checked(answer, f"{where}: expected scores of {policy!r}.score", like, torch.int64)


def _checked(answer: object, where: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an answer of shape [M], as `like` has; raises ValueError if it is none."""
    if not isinstance(answer, Tensor):
        got = repr(answer)
    elif (answer.dtype, answer.shape, answer.device) != (dtype, like.shape, like.device):
        got = f"{list(answer.shape)} of {answer.dtype} on {answer.device}"
    else:
        return answer
    raise ValueError(
        f"{where} as {list(like.shape)} of {dtype} on {like.device}, got {got}. Return one number for "
        "each, computed from the arguments. No table has changed."
    )
