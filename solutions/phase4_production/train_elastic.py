"""A small elastic training run, to be killed: digits, with all of recovery (4.1 to 4.14) under it.

    torchrun --nproc-per-node 4 --max-restarts 3 \\
        -m solutions.phase4_production.train_elastic --folder runs/digits

Kill a worker (``kill -9``), stop one (``kill -STOP``) or tell one to leave (``kill -TERM``): the
agent starts all again, and training goes on from the newest checkpoint. Kill the agent: its workers
are killed, too. Start it again with another ``--nproc-per-node``: ``log.jsonl`` has the same curve,
up to rounding. Or start it on two nodes with
``--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT``, and kill one of the agents. (There,
set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, so that nodes agree on an address each time they meet.)
Tell the agent to leave: the workers save, and torchrun ends with a traceback and status 1.
``python -m solutions.phase4_production.agent`` takes the same options. It ends with one line and a
status that says so (``exit_codes``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

from distlab.reference.workloads import WORKLOADS, build_model, build_optimizer, digits
from given.launched import launched
from given.parent import end_with_parent
from solutions.phase1_data_parallel.evaluation import global_metrics
from solutions.phase1_data_parallel.trainer import average_gradients, weight_hash

from .elastic_sampler import ElasticSampler
from .exit_codes import DONE, PREEMPTED, REFUSED
from .fault_tolerance import CheckpointStore
from .folder_lock import locked
from .joining import meet
from .recovery import PreemptionGuard, train
from .resume import Position, TrainingState
from .watchdog import Heartbeat, Watchdog


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints, beats, log")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=48)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until a rank hangs")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in every step")
    return parser.parse_args()


def run(options: argparse.Namespace, attempt: str) -> bool:
    """Train to the end, or until a rank is told to leave: False."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chosen = WORKLOADS["digits_mlp"]
    model = build_model(chosen.model, chosen.seed)
    optimizer = build_optimizer(chosen, model)
    data = digits()
    size, ranks = options.global_batch, {"rank": rank, "world_size": world_size}
    sampler = ElasticSampler(len(data), global_batch_size=size, seed=chosen.seed, **ranks)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=list)
    beats = Heartbeat(options.folder / "beats", rank, world_size, attempt)

    def step(batch: list[Any], position: Position) -> None:
        time.sleep(options.pause)
        optimizer.zero_grad(set_to_none=True)
        loss_sum, correct = 0.0, 0
        if batch:
            inputs, targets = map(torch.stack, zip(*batch, strict=True))
            logits = model(inputs)
            loss = F.cross_entropy(logits, targets)
            loss.backward()
            loss_sum = loss.item() * len(batch)
            correct = int((logits.argmax(1) == targets).sum())
        beats.beat(position.step, "average")
        average_gradients(model.parameters(), len(batch))
        optimizer.step()
        mean, _ = global_metrics(loss_sum, correct, len(batch))
        if rank == 0:
            line = {"step": position.step, "loss": mean, "world_size": world_size}
            with open(options.folder / "log.jsonl", "a", encoding="utf-8") as log:
                log.write(json.dumps(line | {"attempt": attempt}) + "\n")

    with Watchdog(beats, options.timeout), PreemptionGuard() as guard:
        done = train(
            step,
            loader,
            epochs=options.epochs,
            save_every=options.save_every,
            store=CheckpointStore(options.folder / "checkpoints"),
            state=TrainingState(sampler=sampler, model=model, optimizer=optimizer),
            guard=guard,
            heartbeat=beats,
            seed=chosen.seed,
        )
    if done and rank == 0:
        print(f"done with {world_size} ranks, weights {weight_hash(model)[:16]}", flush=True)
    return done


def main() -> None:
    """Entry point under torchrun."""
    end_with_parent()
    options = parse()
    joining = launched("train_elastic", "cpu", meet=meet, statuses={ValueError: REFUSED})
    with joining as at, locked(options.folder / "checkpoints", "train_elastic"):
        done = run(options, at.attempt)
    if at.rank == 0 and not done:
        note = "told to leave: saved, start it again to go on"
        print(f"train_elastic: {note}", file=sys.stderr, flush=True)
    sys.exit(DONE if done else PREEMPTED)


if __name__ == "__main__":
    main()
