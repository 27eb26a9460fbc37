"""Predicts the next item of each user, while items come and go, with one bounded table for all items.

    python examples/generative.py                                   # a generated stream, one process
    torchrun --nproc-per-node 2 examples/generative.py --plot generative.png
    python examples/generative.py --parquet ratings.parquet         # yours, with the columns of MovieLens
    python examples/generative.py --folder FOLDER                   # kill it, and start it again

A causal transformer reads a user's history and predicts each next item. Three features read the table `item`:
`history`, `next`, and `candidate`, with which the next item competes: drawn negatives in training, all items
with a row in the evaluation. Only next items get rows and are counted. The counts decide which negatives are
drawn, and correct the loss for it. A full table evicts the items that were next items longest ago.

The stream is cut into windows of events. In each window the last event of each user is left out, and asked
for at the end of the window (parts/histories.py). The printed figures are those of all such events of the
second half of the windows:

- HR@10: share of events whose item is among the ten best of all items with a row.
- NDCG@10: the mean of 1 / log2(1 + rank), 0 for a rank beyond ten.
- popular in the window: ranked by the number of events in the window that are not left out.
- random: the expectation of a random order.
- one who knows the stream: the step of each user, and the popularity of the items.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from parts.generative_report import as_text, draw, means
from parts.histories import FEATURES, Histories, Sample, features_of, in_batches
from parts.item_stream import ItemStream
from parts.options import (
    add_sizes,
    agreed_world_size,
    file,
    hide_notes_to_developers,
    new_file,
    positive,
    seed,
    set_sizes,
    start_processes,
)
from parts.parquet_events import WHAT_IT_HAS, read_events
from parts.ranking import ranks_by_popularity, ranks_by_score, sums_of, sums_of_random
from torch import Tensor, nn
from torchrec import EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import Checkpoints, Positions

TABLE = "item"
HEADS, LAYERS = 2, 2  # of the transformer
DENSE_RATE, ROW_RATE = 0.003, 0.05  # learning rates: Adam; row-wise Adagrad
DRAWN_TOGETHER = (
    16  # batches whose negatives are drawn at once, since a draw lists all ids of the table
)
SIZES = {  # option: default, default with --quick, meaning
    "windows": (40, 16, "windows; of a Parquet file: all"),
    "window": (4000, 1000, "events of a window"),
    "users": (1000, 100, "generated stream: users"),
    "groups": (12, 8, "generated stream: groups of items, which users go around"),
    "places": (20, 12, "generated stream: items of a group that live at a time"),
    "lifetime": (12, 8, "generated stream: windows that an item lives"),
    "rows": (400, 150, "limit of the table"),
    "dim": (32, 16, "columns of a row; even"),
    "length": (16, 8, "most items of a history"),
    "batch_size": (128, 32, "samples of a batch, of all ranks together"),
    "negatives": (256, 64, "drawn negatives of a batch; even"),
}


class NextItem(nn.Module):
    """A causal transformer over the rows of a history. Legend: D columns, T next items, n candidates."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        item = EmbeddingConfig(
            name=TABLE,
            embedding_dim=options.dim,
            num_embeddings=options.rows,
            feature_names=FEATURES,
        )
        only_read = {"inserts": False, "counts": False}
        life = dyn.DynamicTableConfig(
            initializer=dyn.Uniform(-0.05, 0.05),
            seed=options.seed,
            eviction=dyn.LeastRecentlyUsed(),
            features=(
                dyn.FeatureUse("history", **only_read),
                dyn.FeatureUse("candidate", **only_read),
            ),
        )
        self.items = dyn.DynamicEmbeddingCollection([item], dynamic=life, fused_params=learning())
        torch.manual_seed(options.seed)  # the same dense part on all ranks
        self._length = options.length
        self.start = nn.Parameter(torch.randn(options.dim) * 0.1)  # stands before each history
        self.positions = nn.Parameter(torch.randn(options.length + 1, options.dim) * 0.1)
        block = nn.TransformerEncoderLayer(
            options.dim, HEADS, 4 * options.dim, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, LAYERS, norm=nn.LayerNorm(options.dim), enable_nested_tensor=False
        )
        mask = nn.Transformer.generate_square_subsequent_mask(options.length + 1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the states that predict the next items [T, D], their rows [T, D], and candidates [n, D]."""
        rows = self.items(batch)
        history, following = rows["history"], rows["next"]
        padded = history.to_padded_dense(
            self._length
        )  # zeros behind the history: no token sees them
        start = self.start.expand(len(padded), 1, -1)
        scale = self.start.numel() ** 0.5  # rows are short vectors, as the scores need them
        tokens = torch.cat([start, padded * scale], 1) + self.positions
        states = self.blocks(tokens, mask=self.mask, is_causal=True)
        states = states[last_tokens(history.lengths(), following.lengths())]
        return states, following.values(), rows["candidate"].values()


def last_tokens(histories: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sample and token of each next item, [T] each: the last tokens of each sample predict them."""
    samples = torch.arange(len(following)).repeat_interleave(following)
    first = following.cumsum(0) - following
    offsets = torch.arange(len(samples)) - first[samples]
    return samples, (histories - following + 1)[samples] + offsets


def learning() -> dict[str, Any]:
    """Returns the optimizer of the rows, as `fused_params`."""
    return {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": ROW_RATE,
        "eps": 1e-8,
    }


def number_of_draw(seed: int, window: int, batch: int) -> int:
    """Returns the seed of a draw, a different one for each."""
    state = np.random.SeedSequence([seed, window, batch]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def draw_negatives(items: nn.Module, count: int, draw: int) -> tuple[Tensor, Tensor]:
    """Draws ids with a row: half of them uniformly, half by their counts. Collective.

    Returns:
        ids: [count] int64, the two halves alternate.
        probabilities: [count] float64, of this id in a draw of one half or the other.

    Source of the two halves: Yang et al., "Mixed Negative Sampling for Learning Two-tower Neural Networks in
    Recommendations", 2020.
    """
    half = count // 2
    live = dyn.read_ids(items, TABLE)
    shares = dyn.read_counts(items, TABLE, live).double()
    shares /= shares.sum()
    generator = torch.Generator().manual_seed(draw)
    points = torch.rand(half, generator=generator, dtype=torch.float64)
    by_count = torch.searchsorted(shares.cumsum(0), points).clamp(max=len(live) - 1)
    by_id = live.argsort()
    ids = dyn.sample_ids(items, TABLE, half, seed=draw)
    uniform = by_id[torch.searchsorted(live[by_id], ids)]
    places = torch.stack([uniform, by_count], 1).reshape(-1)
    return live[places], 0.5 / len(live) + 0.5 * shares[places]


def sampled_softmax(
    states: Tensor,
    rows: Tensor,
    ids: Tensor,
    negatives: Tensor,
    drawn: Tensor,
    probabilities: Tensor,
) -> Tensor:
    """Returns the sum over next items of the cross-entropy, with negatives in place of all other items.

    The sum over all items of e^score is that of the next item and an estimate for the others: the mean over
    n draws of e^score / q, where q is the probability of the draw. So log(n q) is subtracted from the score
    of a negative: the logQ correction. Draws of the next item itself, and negatives that lost their row since
    the draw, are left out.

    Sources: Bengio and Senecal, "Adaptive Importance Sampling to Accelerate Training of a Neural
    Probabilistic Language Model", 2008; Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus
    Item Recommendations", 2019, which estimates q from how often an item occurs in the stream.

    Args:
        states: [T, D].
        rows: [T, D], of the next items.
        ids: [T] int64.
        negatives: [n, D], rows; zeros for an id without a row.
        drawn: [n] int64, their ids.
        probabilities: [n], of their draws.
    """
    own = (states * rows).sum(1, keepdim=True)
    expected = torch.log(len(drawn) * probabilities).to(states.dtype)
    others = states @ negatives.T - expected
    left_out = (ids[:, None] == drawn) | ~negatives.any(1)
    others = others.masked_fill(left_out, float("-inf"))
    return (torch.cat([own, others], 1).logsumexp(1) - own.squeeze(1)).sum()


class Trainer:
    """Model, optimizer and histories of this rank."""

    def __init__(self, options: argparse.Namespace, histories: Histories, best: Any) -> None:
        self._options, self._histories, self._best = options, histories, best
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        model = NextItem(options)
        sharder = dyn.DynamicEmbeddingCollectionSharder(
            fused_params=learning(), use_index_dedup=True
        )
        plan = construct_module_sharding_plan(
            model.items,
            {TABLE: row_wise(compute_kernel="fused")},
            sharder=sharder,
            local_size=self._ranks,
            world_size=self._ranks,
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            model,
            plan=ShardingPlan({"items": plan}),
            sharders=[sharder],
            device=torch.device("cpu"),
        )
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.Adam(parameters, lr=DENSE_RATE),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        self._items = self.model.module.items

    def _mine(self, batch: list[Sample]) -> list[Sample]:
        return batch[self._rank :: self._ranks]

    def window(self, number: int, bar: Any) -> dict[str, Any]:
        """Trains a window, then asks for the events left out. Returns the figures, equal on all ranks."""
        before = dyn.read_stats(self._items, TABLE)["evicted_full"]
        trained, left_out = self._histories.samples(number)
        loss = self._train(number, trained)
        asked = self._evaluate(trained, left_out)
        stats = dyn.read_stats(self._items, TABLE)
        result = {
            "window": number,
            "loss": loss,
            "evicted": stats["evicted_full"]
            - before,  # counts of stats() start at 0 in each process
            "items": self._histories.items_until(number),
            "rows": stats["rows"],
            "limit": stats["limit"],
            **asked,
        }
        bar.update()
        if asked["asked"]:
            hits, gains = means([result], "model")
            bar.set_postfix_str(
                f"loss {loss:.3f}, HR@10 {hits:.3f}, NDCG@10 {gains:.3f}, rows {result['rows']:,}"
            )
        return result

    def _train(self, window: int, samples: list[Sample]) -> float:
        """Trains each next item once. Returns the mean loss of a next item, over all ranks."""
        self.model.train()
        size = self._options.negatives
        drawn, probabilities = torch.empty(0, dtype=torch.int64), torch.empty(0)
        losses, targets = torch.zeros(()), sum(len(sample.following) for sample in samples)
        batches = in_batches(samples, self._options.batch_size, [self._options.seed, window])
        for number, batch in enumerate(batches if samples else []):
            place = number % DRAWN_TOGETHER
            if place == 0 and dyn.read_num_rows(self._items, TABLE):  # else: the very first batches
                draw = number_of_draw(self._options.seed, window, number)
                drawn, probabilities = draw_negatives(self._items, size * DRAWN_TOGETHER, draw)
            chosen = slice(place * size, (place + 1) * size)
            mine = features_of(self._mine(batch), drawn[chosen])
            states, rows, negatives = self.model(mine)
            loss = sampled_softmax(
                states, rows, mine["next"].values(), negatives, drawn[chosen], probabilities[chosen]
            )
            self.optimizer.zero_grad()
            # Gradients are averaged over ranks: that is the mean over the next items of all ranks.
            of_all = sum(len(sample.following) for sample in batch)
            (loss * self._ranks / of_all).backward()  # updates the rows
            self.optimizer.step()  # updates the dense part
            losses += loss.detach()
        dist.all_reduce(losses)
        return float(losses) / max(targets, 1)

    @torch.no_grad()
    def _evaluate(self, trained: list[Sample], left_out: list[Sample]) -> dict[str, Any]:
        """Ranks the events left out among all items with a row. Inserts and counts nothing."""
        self.model.eval()
        live = dyn.read_ids(self._items, TABLE)
        if not len(live):
            left_out = []
        by_id = live.argsort()
        of_item = Counter(id for sample in trained for id in sample.following.tolist())
        counts = np.array([of_item[id] for id in live.tolist()])
        sums = {who: torch.zeros(2, dtype=torch.float64) for who in ("model", "popular", "random")}
        if self._best is not None:
            sums["best"] = torch.zeros(2, dtype=torch.float64)
        missed = torch.tensor(0)
        for batch in in_batches(left_out, self._options.batch_size, None) if left_out else []:
            mine = self._mine(batch)
            features = features_of(mine, live)
            states, _, candidates = self.model(features)
            ids = features["next"].values()
            places = by_id[torch.searchsorted(live[by_id], ids).clamp(max=len(live) - 1)]
            places = places.where(live[places] == ids, -1)
            missed += (places < 0).sum()
            sums["model"] += sums_of(ranks_by_score(states @ candidates.T, places))
            sums["popular"] += sums_of(ranks_by_popularity(counts, places))
            sums["random"] += sums_of_random(places, len(live))
            if self._best is not None:
                best = self._best[[sample.event for sample in mine]]
                sums["best"] += sums_of(torch.from_numpy(best))
        for value in (*sums.values(), missed):
            dist.all_reduce(value)
        return {
            "asked": len(left_out),
            "missed": int(missed),
            "candidates": len(live),
            **{who: value.tolist() for who, value in sums.items()},
        }


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of the command line. Wrong options end the program with a usage message."""
    parser = argparse.ArgumentParser(
        prog="generative.py", description="Predicts next items, with one table for all items."
    )
    parser.add_argument("--parquet", type=file, metavar="FILE", help=f"events: {WHAT_IT_HAS}")
    add_sizes(parser, SIZES)
    parser.add_argument("--seed", type=seed, default=0, help="of stream and model (default: 0)")
    parser.add_argument("--folder", type=Path, help="for checkpoints, to go on after a crash")
    parser.add_argument("--save-every", type=positive, default=5, help="windows (default: 5)")
    parser.add_argument("--plot", type=new_file, metavar="OUT", help="draw figures over windows")
    parser.add_argument(
        "--world-size", type=positive, help="processes (default: torchrun's number, else 1)"
    )
    options = parser.parse_args(arguments)
    asked_windows = options.windows
    set_sizes(options, SIZES)
    if options.parquet:
        options.windows = asked_windows
    options.world_size = agreed_world_size(parser, options.world_size, 1)
    for name in ("negatives", "dim"):
        if getattr(options, name) % 2:
            parser.error(f"--{name}: expected an even number, got {getattr(options, name)}.")
    for option, package in (("plot", "matplotlib"), ("parquet", "pyarrow")):
        if getattr(options, option) and importlib.util.find_spec(package) is None:
            parser.error(f"--{option}: expected {package}, got none. Run pip install {package}.")
    return options


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains from the newest checkpoint to the end. Returns the results of all windows."""
    if options.parquet:
        events = read_events(options.parquet)
    else:
        sizes = (options.groups, options.places, options.lifetime)
        stream = ItemStream(options.seed, options.users, options.window, *sizes)
        events = stream.events(options.windows)
    histories = Histories(events, options.window, options.length)
    windows = min(histories.windows, options.windows or histories.windows)
    if windows < 2:
        raise ValueError(
            f"expected at least two windows of {options.window:,} events, got {windows}. Use a smaller "
            "--window, or more events."
        )
    trainer = Trainer(options, histories, events.best)
    positions = Positions(
        range(windows), is_global=True
    )  # a window is the same on any number of ranks
    results: list[dict[str, Any]] = []
    checkpoints = Checkpoints(options.folder, full_every=4) if options.folder else None
    sizes = {name: getattr(options, name) for name in (*SIZES, "seed") if name != "windows"}
    if checkpoints:
        restored = checkpoints.restore(
            trainer.model, trainer.optimizer, extra={"position": positions}
        )
        if restored:
            results = restored.extra["results"]
            if restored.extra["sizes"] != sizes:
                raise ValueError(
                    f"--folder {options.folder}: expected the options of its run, "
                    f"{restored.extra['sizes']}, got {sizes}. Use these, or another folder."
                )
    is_first = dist.get_rank() == 0
    bar = tqdm(
        total=windows, initial=len(results), unit="window", disable=not is_first, mininterval=0.5
    )
    for window in positions:
        results.append(trainer.window(window, bar))
        positions.step()
        if checkpoints and ((window + 1) % options.save_every == 0 or window + 1 == windows):
            extra = {"position": positions, "results": results, "sizes": sizes}
            checkpoints.save(trainer.model, trainer.optimizer, step=window + 1, extra=extra)
    bar.close()
    if checkpoints:
        checkpoints.close()
    return results


def main() -> int:
    """Starts the processes, or does the work of one. Returns the exit status."""
    options = parse_options(sys.argv[1:])
    if "RANK" not in os.environ:
        # Tensors are small: a second thread would cost more than it does.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        return start_processes(__file__, sys.argv[1:], options.world_size)
    hide_notes_to_developers()
    dist.init_process_group("gloo")
    is_first, error = dist.get_rank() == 0, None
    try:
        results = run(options)
        if is_first:
            print(as_text(results))
            if options.plot:
                where = options.parquet.name if options.parquet else "generated stream"
                draw(results, f"{where}: windows of {options.window:,} events", options.plot)
    except ValueError as wrong:
        error = f"generative.py: {wrong}" if is_first else ""
    gc.collect()  # the model holds the process groups; gloo joins its threads only after it is freed
    dist.destroy_process_group()
    if error is not None:
        print(error, end="\n" if error else "", file=sys.stderr)
    return 0 if error is None else 1


if __name__ == "__main__":
    sys.exit(main())
