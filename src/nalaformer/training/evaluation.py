"""Metrics of a model on data."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import islice

import torch
from torch import nn

from ..data import Batch, Samples, batches_in_order, map_tensors
from ..tasks.base import Metrics
from .ranks import Ranks

ALONE = Ranks(rank=0, count=1, device=torch.device("cpu"))


def evaluate(
    model: nn.Module,
    data: Samples,
    metrics: Metrics,
    *,
    batch_size: int,
    ranks: Ranks = ALONE,
    precision: torch.dtype = torch.float32,
    workers: int = 0,
    rejected: Callable[[str], None] = lambda line: None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Every sample once, over all ranks; `advance` is told each batch.

    rejected: told each file that cannot be read, at the end, those of all ranks in every one.

    A model with `is_collective` has weights spread over the ranks, and a forward pass takes all of them: ranks with fewer
    batches pass one more, which is not counted.
    """
    left_out: list[str] = []
    was_training = model.training
    model.eval()
    on_gpu = ranks.device.type == "cuda"
    batches_for = partial(batches_in_order, data, batch_size=batch_size, ranks=ranks.count, workers=workers, pin_memory=on_gpu)
    mine = batches_for(rank=ranks.rank)

    def update(metrics: Metrics, batch: Batch) -> None:
        content = map_tensors(batch.content, lambda t: t.to(ranks.device, non_blocking=True))
        with torch.autocast(ranks.device.type, precision, enabled=precision != torch.float32):
            metrics.update(model, content)

    try:
        with torch.no_grad():
            for batch in mine:
                left_out += batch.rejected
                if batch.content is not None:
                    update(metrics, batch)
                advance()
            if getattr(model, "is_collective", False):
                # the first rank has the most batches
                first = batches_for(rank=0)
                for batch in islice(first, len(first) - len(mine)):
                    update(deepcopy(metrics), batch)
    finally:
        model.train(was_training)
    for lines in ranks.gather(left_out):
        for line in lines:
            rejected(line)
    metrics.join(ranks.gather)
    return metrics.result()
