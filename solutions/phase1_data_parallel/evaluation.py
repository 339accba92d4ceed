"""Exact loss and accuracy of a data set that is sharded over the ranks.

Every rank evaluates the samples of its own shard. Shards may have different sizes, and the sampler
pads short ones. So a mean of the ranks' means would be wrong twice. Sums are exact:

    mean loss = Σ_r (sum of rank r's losses) / Σ_r n_r,    n_r: rank r's samples without padding

Per evaluation and rank: one all-reduce of 24 bytes, whatever the size of the data set. Invariant:
every sample counts once, and every rank returns the same two numbers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from given.agreement import Group


def global_metrics(
    loss_sum: float,
    correct: int,
    count: int,
    group: Group = None,
    device: torch.device | str = "cpu",
) -> tuple[float, float]:
    """(mean loss, accuracy) over the samples of all ranks of ``group``, as floats.

    Every rank gets the same two numbers. The arguments are this rank's sum of losses, number of
    right answers and number of samples (possibly 0). The result is exact in float64, for billions
    of samples, too. A mean of the ranks' means would weigh small shards too much. One message per
    rank, of at most 64 bytes. Raises ValueError, on every rank, if no rank has a sample.
    """
    # --- exercise 1.6: start
    # Step 1: sum the three numbers over the ranks in float64 (exact for counts), then divide
    sums = torch.tensor([loss_sum, correct, count], dtype=torch.float64, device=device)
    dist.all_reduce(sums, group=group)
    total_loss, total_correct, total = sums.tolist()
    if not total:
        raise ValueError("no rank has a sample to evaluate")
    return total_loss / total, total_correct / total
    # --- exercise 1.6: end


def evaluate(
    model: nn.Module,
    loader: DataLoader[tuple[Tensor, Tensor]],
    group: Group = None,
    device: torch.device | str = "cpu",
) -> tuple[float, float]:
    """(mean cross-entropy, accuracy) over the samples of all ranks' shards, on every rank.

    Each sample counts once, whatever the shards' sizes. The entries that pad this rank's shard come
    last, and ``loader.batch_sampler.sampler.num_real`` is the number of entries before them. A
    sampler that drops the remainder leaves those samples out. A batch may be empty, or all batches
    of a rank. The model is called with samples only. It is evaluated in eval mode, on ``device``,
    without gradients. Each of its modules is left in the mode it was in, also after an exception.
    Afterwards gradients are recorded as before. One message per rank. The host waits for a GPU at
    most twice per batch, to copy it there, and eight times at the end.
    """
    # --- exercise 1.6: start
    # Step 2: eval mode, and back to the mode each module was in, also after an exception
    # Step 3: of each batch only the entries before the padding count; a batch may be empty
    # Step 4: add up sums, not means, on the device: a GPU has nothing to do while the host reads.
    #         One global reduction at the end
    modes = {module: module.training for module in model.modules()}
    model.eval()
    loss_sum, correct, count = 0.0, 0, 0
    left = loader.batch_sampler.sampler.num_real
    try:
        with torch.no_grad():
            for inputs, targets in loader:
                inputs, targets = inputs[:left].to(device), targets[:left].to(device)
                left -= len(targets)
                if not len(targets):
                    continue
                logits = model(inputs)
                loss_sum += F.cross_entropy(logits, targets, reduction="sum").double()
                correct += (logits.argmax(1) == targets).sum()
                count += len(targets)
    finally:
        for module, training in modes.items():
            module.training = training
    return global_metrics(float(loss_sum), int(correct), count, group, device)
    # --- exercise 1.6: end


def print_once(message: str, group: Group = None) -> None:
    """Print ``message`` on the first rank of ``group`` only, without any communication.

    A rank that is no member of ``group`` prints nothing.
    """
    # --- exercise 1.6: start
    # Step 5: the group's own rank decides, not LOCAL_RANK (every node has one that is 0)
    if dist.get_rank(group) == 0:
        print(message, flush=True)
    # --- exercise 1.6: end
