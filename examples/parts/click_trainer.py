"""A small click model with dynamic tables: predicts a batch of views, then learns from it."""

from __future__ import annotations

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from parts.drifting_stream import FEATURES, Views
from parts.fixed_rows import Modulo
from torch import nn
from torchrec import EmbeddingBagConfig

import torchrec_dyn as dyn

LEARNING = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.2}
UNSEEN = "initial"  # prediction and training read the same for an id without a row
GENEROUS = 100_000_000  # a limit that no run reaches; it reserves no memory


class ClickTrainer:
    """The model, its optimizers, and the number of steps.

    Attributes:
        tables: configs of the tables, for copies that serve.
        rows: the collection of the tables.
        dense: the dense part: pooled rows [B, 2 * dim] to logits [B, 1].

    Args:
        dim: columns of a row.
        seed: seed of the initial rows and of the dense weights.
        limit: on the rows of a table.
        life: policies of the tables.
        modulo: turns ids into row numbers first; None: ids are the raw ids.
    """

    def __init__(
        self,
        dim: int,
        seed: int,
        limit: int = GENEROUS,
        life: dict[str, object] | None = None,
        modulo: Modulo | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.tables = [
            EmbeddingBagConfig(
                name=name, embedding_dim=dim, num_embeddings=limit, feature_names=[name]
            )
            for name in FEATURES
        ]
        config = dyn.DynamicTableConfig(
            initializer=dyn.Uniform(-0.01, 0.01), seed=seed, unseen=UNSEEN, **(life or {})
        )
        self.rows = dyn.DynamicEmbeddingBagCollection(
            self.tables, dynamic=config, fused_params=LEARNING
        )
        self.dense = nn.Sequential(nn.Linear(len(FEATURES) * dim, 16), nn.ReLU(), nn.Linear(16, 1))
        self._modulo = modulo
        self._optimizer = torch.optim.Adam(self.dense.parameters(), lr=0.01)

    def _logits(self, views: Views) -> torch.Tensor:
        features = views.features()
        if self._modulo is not None:
            features = self._modulo(features)
        return self.dense(self.rows(features).values()).squeeze(1)

    @torch.no_grad()
    def predict(self, views: Views) -> np.ndarray:
        """Returns the logits, [B], and changes nothing."""
        self.rows.eval()
        logits = self._logits(views).numpy()
        self.rows.train()
        return logits

    def learn(self, views: Views) -> np.ndarray:
        """Takes one step of training. Returns the logits before the step, [B]."""
        logits = self._logits(views)
        labels = torch.from_numpy(views.labels)
        self._optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()  # updates rows
        self._optimizer.step()
        return logits.detach().numpy()
