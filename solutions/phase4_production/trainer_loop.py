"""The training loop of the production trainer.

A step of one rank has a message of 8 bytes (readable targets, and whether to leave) beside the
first forward, forward and backward of its micro-batches, the reduction of gradients, and the
optimizer.
``engines`` hides the strategy, ``trainer_state`` knows the contents of a checkpoint.

Invariant: the loss curve depends neither on the strategy, nor on the number of ranks, nor on
interruptions, up to rounding (batch norm, mixup and compressors: not on interruptions).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from given.step_metrics import StepMetrics
from solutions.phase1_data_parallel.data_loader import seed_everything
from solutions.phase1_data_parallel.evaluation import print_once
from solutions.phase2_advanced.gradient_accumulation import IGNORED
from solutions.phase2_advanced.loss_scaling import LossScaler

from .async_checkpoint import AsyncCheckpointer
from .batches import (
    Batch,
    DataError,
    Decoded,
    EvaluationBatches,
    RunBatches,
    Sample,
    make_loader,
    name_unreadable,
)
from .elastic_sampler import ElasticSampler
from .evaluation import evaluate
from .fault_tolerance import CheckpointError, CheckpointStore
from .folder_lock import locked
from .recipe import AverageOfWeights, learning_rate
from .recovery import PreemptionGuard
from .sinks import ProfileWindow, open_sinks
from .stragglers import StragglerDetector, aggregate
from .task import Evaluation
from .trainer_config import Config
from .trainer_setup import open_task, set_up_model
from .trainer_state import TrainerState
from .training_plan import autocast
from .training_report import write_report
from .watchdog import Heartbeat, Watchdog

Loader: TypeAlias = DataLoader[Batch]
PROFILED = 4  # steps


class Trainer:
    """One rank's part of a run; all ranks make it, and run it, together."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.task = open_task(config, self.rank)
        self.plan, self.engine, self.monitor = set_up_model(self.task, device)
        seed_everything(config.seed, self.rank)
        self.sampler = ElasticSampler(
            self.plan.samples,
            global_batch_size=config.global_batch,
            seed=config.seed,
            **self.engine.place,
        )
        decay = config.ema_decay
        self.average = AverageOfWeights(self.engine.averaged, decay) if decay else None
        self.scaler = LossScaler() if config.precision == "fp16" else None
        self.store = CheckpointStore(config.checkpoints, keep=config.keep)
        self.state = TrainerState(
            config=config,
            engine=self.engine,
            sampler=self.sampler,
            classes=self.task.classes,
            device=device,
            average=self.average,
            scaler=self.scaler,
        )
        self.checkpoints = AsyncCheckpointer(self.store) if config.async_save else self.store
        self.detector = StragglerDetector()
        self.guard = PreemptionGuard(device=device)
        self.leaving = False  # a rank has been told to end, and all know it
        self.recent: list[StepMetrics] = []  # since the last record
        self.unreadable: set[str] = set()  # paths
        self.evaluation: Evaluation | None = None  # the last one
        self.val_loader: Loader | None = None

    # -- the state ---------------------------------------------------------------------------------
    def restore(self) -> int:
        """Go on from the newest checkpoint that is intact; the number of its steps."""
        saved = self.store.load() if self.config.resume else None
        if saved is None:
            return 0
        for reason in saved.skipped:
            print_once(f"skipped a checkpoint: {reason}")
        self.state.restore(saved)
        print_once(f"resumed after step {saved.step}, saved by {saved.world_size} ranks")
        return saved.step

    # -- training ---------------------------------------------------------------------------------
    def train_step(self, step: int, window: Sequence[Batch]) -> StepMetrics:
        """One optimizer step from this rank's micro-batches, one at least.

        Sets ``leaving`` on all ranks if any of them had been told to end when the step began.
        """
        config, engine, monitor, task = self.config, self.engine, self.monitor, self.task
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate(step, config, self.plan.steps_per_epoch)
        engine.zero_grad()
        own = engine.counts * sum(int((batch.targets != IGNORED).sum()) for batch in window)
        facts = torch.tensor([float(own), self.guard.requested], device=self.device)
        told = dist.all_reduce(facts, async_op=True)  # travels beside forward
        scale = self.sampler.world_size * (self.scaler.scale if self.scaler else 1.0)

        def weight() -> Tensor:
            told.wait()
            return scale / facts[0].clamp(min=1)

        loss_sum = engine.train(
            (task.training_part(b, self.device, step, n) for n, b in enumerate(window)),
            len(window),
            weight,
            monitor=monitor,
            surroundings=autocast(config, self.device),
        )
        with monitor.phase("optimizer"):
            self.update(step)
        metrics = monitor.step(
            samples=own // task.targets_per_sample,
            loss=loss_sum / max(own, 1),
            tokens=own if task.counts_tokens else 0,
        )
        self.leaving = bool(facts[1])  # after the monitor has waited for the device
        return metrics

    def update(self, step: int) -> None:
        """Unscale, clip, step; on all ranks or, after an overflow, on none."""
        engine = self.engine
        finite = self.scaler is None or self.scaler.unscale(engine.parameters)
        if finite:
            if self.config.max_norm is not None:
                engine.clip(self.config.max_norm)
            engine.optimizer.step()
            if self.average is not None:
                self.average.update(step)
        if self.scaler is not None:
            self.scaler.update()

    def windows(self, first_step: int, steps: int) -> Iterator[tuple[int, list[Batch]]]:
        """Each step with its micro-batches; waiting for them is the phase "data"."""
        batches = RunBatches(
            self.sampler, self.plan.micro_batch, first_step=first_step, steps=steps
        )
        loader = self.loader(self.task.train_set, batches)
        stream = name_unreadable(self.task.train_set, self.monitor.batches(loader), self.unreadable)
        for step in range(first_step, steps):
            yield step, list(islice(stream, batches.count(step)))

    def loader(self, dataset: Dataset[Decoded], batches: Sampler[list[Sample]]) -> Loader:
        """A loader as the configuration wants it."""
        return make_loader(
            dataset,
            batches,
            blank=self.task.blank(),
            workers=self.config.workers,
            prefetch=self.config.prefetch,
            device=self.device,
        )

    # -- the run ----------------------------------------------------------------------------------
    def run(self, attempt: str = "") -> bool:
        """Train to the end, or until the ranks are to leave; whether the run is complete.

        Raises FolderInUseError on all ranks if another run saves into the same folder.
        """
        with locked(self.config.checkpoints, "imagenet_trainer"), self.guard:
            self.train(attempt)
            if self.rank == 0:
                write_report(Path(self.config.logs))
        return not self.leaving

    def train(self, attempt: str) -> None:
        """From the newest checkpoint on, watched and recorded."""
        config, plan = self.config, self.plan
        first_step = self.restore()
        steps = min(plan.steps, config.max_steps or plan.steps)
        logs = Path(config.logs)
        where = {"port": config.metrics_port, "host": config.metrics_host, "device": self.device}
        self.sinks = open_sinks(logs, total_steps=plan.steps, first_step=first_step, **where)
        heartbeat = Heartbeat(logs / "heartbeat", self.rank, self.world_size, attempt)
        first = -PROFILED if config.profile_at is None else config.profile_at
        last = first + PROFILED - 1
        profiler = ProfileWindow(logs / f"trace-rank{self.rank}.json", first, last)
        failure = None
        patience = config.watchdog_seconds
        watchdog = Watchdog(heartbeat, patience, interval=min(1.0, patience / 8))
        try:
            with watchdog:
                try:
                    self.loop(first_step, steps, heartbeat, profiler)
                except (CheckpointError, DataError) as error:
                    failure = error  # the same on all ranks: no rank has to be told
        finally:
            profiler.close()
            self.sinks.close()
        if failure is not None:
            raise failure

    def loop(
        self, first_step: int, steps: int, heartbeat: Heartbeat, profiler: ProfileWindow
    ) -> None:
        """All steps from ``first_step`` on, or until the ranks are ``leaving``."""
        self.begin_step(first_step)
        for step, window in self.windows(first_step, steps):
            heartbeat.beat(step, "step")
            profiler.step(step)
            self.recent.append(self.train_step(step, window))
            self.after_step(step + 1, self.leaving or step + 1 == steps, heartbeat)
            if self.leaving:
                break
        if isinstance(self.checkpoints, AsyncCheckpointer):
            self.checkpoints.wait()

    def after_step(self, done: int, last: bool, heartbeat: Heartbeat) -> None:
        """The work that is due after ``done`` steps: evaluation, records, a checkpoint."""
        config, per_epoch = self.config, self.plan.steps_per_epoch
        epoch, left = divmod(done, per_epoch)
        extra: dict[str, float] = {}
        evaluating = self.task.val_set is not None and (
            done == self.plan.steps or (not left and epoch % config.evaluate_every == 0)
        )
        if evaluating:
            heartbeat.beat(done, "evaluate")
            self.evaluation = self.evaluate()
            extra = asdict(self.evaluation)
        if evaluating or last or done % config.log_every == 0:
            self.record(extra)
        if last or (config.save_every and done % config.save_every == 0):
            heartbeat.beat(done, "save")
            self.save(done)
        if evaluating:
            self.begin_step(done)

    def begin_step(self, step: int) -> None:
        """Step ``step`` begins now: time since the last one belongs to no step."""
        self.monitor.step(samples=0, loss=0.0)
        self.monitor.steps = step

    def record(self, extra: dict[str, float]) -> None:
        """Hand the metrics of all ranks since the last record to the sinks; collective."""
        report = aggregate(self.recent, device=self.device)
        self.recent = []
        report = replace(report, stragglers=self.detector.update(report))
        self.sinks.write(report.step, {**report.as_dict(), **extra})

    def evaluate(self) -> Evaluation:
        """Evaluate on ``val``, with the average of the weights if there is one; collective."""
        val_set = self.task.val_set
        assert val_set is not None  # see after_step
        size = self.plan.evaluation_batch
        batches = EvaluationBatches(len(val_set), size, **self.engine.place)
        if self.val_loader is None:  # its workers stay
            self.val_loader = self.loader(val_set, batches)
        self.engine.share_buffers()
        with self.average.applied() if self.average else nullcontext():
            return evaluate(
                self.engine,
                name_unreadable(val_set, self.val_loader, self.unreadable),
                self.device,
                task=self.task,
                surroundings=autocast(self.config, self.device),
            )

    def summary(self) -> str:
        """The result of the run in a line, and where to read more."""
        parts = [f"{self.monitor.steps} steps on {self.world_size} ranks, {self.plan.strategy}"]
        if self.evaluation is not None:
            parts.append(str(self.evaluation))
        return f"{'; '.join(parts)}\nreport: {Path(self.config.logs) / 'report.md'}"

    def save(self, done: int) -> None:
        """A checkpoint after ``done`` steps; collective."""
        shared, own = self.state.capture(done)
        score = self.evaluation.score if self.evaluation else None
        self.checkpoints.save(done, shared, own, score=score, metadata=asdict(self.config))
