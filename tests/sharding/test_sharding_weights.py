"""Weights of sharded bags travel with the ids, by an exchange that has no backward."""

import pytest
import torch
import workers
from sharded_cases import Case, Table, usual_plan
from sharded_training import batches, collection_of, shard


def weights_that_ask(kind: str) -> None:
    case = Case([Table("t", ["a"], usual_plan(kind, 8, 2, 2))], weighted=True)
    model = shard(case, collection_of(case, fused_params=case.fused_params))
    mine = batches(case, 0)[0][torch.distributed.get_rank()]
    mine._weights = mine.weights().clone().requires_grad_()
    with pytest.raises(
        ValueError, match="expected weights that ask for no gradient, got requires_grad"
    ):
        model(mine)
    with torch.no_grad():
        model(mine)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_weights_that_ask_for_a_gradient_are_refused(kind):
    workers.run(weights_that_ask, kind, world_size=2)
