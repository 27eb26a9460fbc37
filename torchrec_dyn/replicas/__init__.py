"""Replicas of a model, each sharded over its own ranks, are merged by id (docs/guide/shard/replicas.md).

Imports `whole_model`, `state_dict`, `ranks`, `checkpoint_format`, `table`, `life`, `storage` and the ground.
Start with `sync`: Replicas has the call and its checks, and finds the ranks that hold the same ids. `merging`
is one sync over the replicas, `side` reads and writes one table, and `merge` has the rules, as functions
without ranks.
"""

from torchrec_dyn.replicas.sync import Replicas, Synced

__all__ = ["Replicas", "Synced"]
