"""How long an operator takes on the cluster's GPU: a roofline over counted FLOPs and bytes.

time = max(FLOPs / (FLOP/s of its dtype), bytes read and written / memory bandwidth, kernel)

FLOPs are counted for matrix products, convolutions and attention by torch's own table
(``torch.utils.flop_counter``); every other operator is bound by memory. Views cost nothing. Works
on meta tensors, which have shapes but no data: a model of any size then costs neither memory nor
arithmetic. Operators whose tensors' sizes say nothing about their work are counted as
``unmodelled``.

If the run asks for measured kernels, a GPU that has them takes their times (``kernel_time.py``).
Its kernels also wait until the host has launched them. This waiting is no compute. A CPU is its own
host: each operator, a view as well, takes the host's time and then its kernel's.

Programs still look at some values; see ``shadows.py``. Attention counts as the fused kernel that
GPUs run; this kernel never writes its matrix of scores (Dao et al. 2022, arXiv 2205.14135).

Source: Williams, Waterman & Patterson 2009 (the roofline model).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..observe.memory import PeakMemory, following
from .calls import Call, call_key
from .fusion import Fusion
from .isolation import entered
from .journal import Journal
from .kernel_time import Cost, kernel_cost, nbytes_of, update_seconds
from .meta_functions import skip_initial_values, use_fused_functions
from .shadows import READS_VALUES, read_value, shadow_of, with_shadow
from .state import RankState
from .world import World

VIEWS = {"detach", "lift_fresh", "alias", "_unsafe_view"}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# work that the sizes of inputs and outputs don't tell
UNKNOWN = {"nonzero", "unique", "_unique2", "sort", "topk", "multinomial", "linalg_svd", "bincount"}


class ComputeModel(TorchDispatchMode):
    """Moves one rank's clock by the modelled time of every operator; follows its memory.

    On meta tensors an operator's result is decided by the shapes it is given. torch takes 100 µs to
    find it out, so it is kept and shared by all ranks of the process.
    """

    calls: ClassVar[dict[Any, Call]] = {}
    kind: ClassVar[dict[Any, str]] = {}

    def __init__(self, world: World, state: RankState) -> None:
        super().__init__()
        self.world, self.state, self.gpu = world, state, world.network.cluster.gpu
        self.kernels = world.kernels
        self.slower = 1.0
        self.meet(world.size)
        self.fusion: Fusion | None = None
        self.is_host = self.kernels is not None and world.network.cluster.processors > 0
        self.operators: Counter[str] = Counter()  # that the host has run, by phase
        self.host = 0.0  # the time until which the host has launched kernels
        self.updating = 0  # an optimizer's step has a time of its own
        self.memory = PeakMemory()
        self.unmodelled: Counter[str] = Counter()
        self.spent: dict[str, float] = defaultdict(float)  # seconds of compute by kind of kernel
        self.flops = 0.0
        self.journal: Journal | None = None
        if not _prepared:
            use_fused_functions()
            skip_initial_values()
            _follow_phases()

    def meet(self, ranks: int) -> None:
        """So many neighbours wait for each other in every layer: kernels are as slow as the slowest
        rank's on their nodes."""
        if self.kernels is not None:
            nodes = math.ceil(ranks / self.world.network.cluster.gpus_per_node)
            self.slower = self.kernels.growing(nodes)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see Ledger

    def write(self, journal: Journal | None) -> None:
        """Note in ``journal`` what the rank does from now on; None: nowhere."""
        self.journal = self.memory.follower = self.state.journal = journal

    def __enter__(self) -> ComputeModel:
        following().append(self.memory)
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        following().remove(self.memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = self.kind.get(func)
        if kind is None:
            kind = self.kind[func] = _kind(func)
        if self.is_host and func.namespace == "aten":
            self.host_runs()
        if kind == "value":
            out = read_value(func, args, kwargs)
            if func is torch.ops.aten._to_copy.default and out.is_meta:
                self.memory.note(out)  # another dtype takes memory of its own
            if self.kernels and isinstance(out, Tensor) and out.is_meta and shadow_of(out) is None:
                cost = kernel_cost(self.kernels, self.gpu, func, args, kwargs, out, 0.0)
                self.account(cost, func, args, kwargs, out)
            return out
        if kind == "view":
            if args and args[0].is_meta and shadow_of(args[0]) is None:
                return func(*args, **kwargs)
            return with_shadow(func, args, kwargs, func(*args, **kwargs))
        key = call_key(func, args, kwargs)
        known = self.calls.get(key) if key is not None else None
        if known is None:
            known = self._run(func, kind, args, kwargs)
            if key is not None and known.repeatable:
                self.calls[key] = known
            out = known.out
            known.out = None
        else:
            out = known.repeat(args, kwargs)
            self.memory.note(out if known.made else ())
        self.flops += known.flops
        if self.journal is not None and known.flops:
            self.journal.counted(known.flops)
        if kind == "unknown":
            self.unmodelled[str(func)] += 1
        if known.cost.seconds:
            self.account(known.cost, func, args, kwargs, out)
        return out

    def account(self, cost: Cost, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Spend an operator's time: that of a kernel of its own, or of a part of the last one."""
        share = self.fusion.left(func, args, kwargs, out) if self.fusion is not None else None
        if share is None:
            self.spend(cost)
        else:
            self.spend(Cost(cost.part, cost.seconds * share), launched=False)

    def spend(self, cost: Cost, launched: bool = True) -> None:
        """Run a kernel: it begins when the host has launched it and the kernel before it ended."""
        seconds = cost.seconds
        if self.journal is not None:
            self.journal.spent(cost, launched)
        if self.kernels is not None and not self.is_host:
            if self.updating:
                return
            if launched:
                self.host += self.kernels.host
            self.state.rank.clock = max(self.state.rank.clock, self.host)
            seconds *= self.slower
        self.spent[cost.part] += seconds
        self.world.compute(self.state, seconds)

    def host_runs(self) -> None:
        """Spend the host's own time for an operator, on a CPU."""
        assert self.kernels is not None
        phase = self.world.phase(self.state)
        self.operators[phase] += 1
        self.spent["host"] += (seconds := self.kernels.phases.get(phase, self.kernels.host))
        self.world.compute(self.state, seconds)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Spend the time of a whole step of ``optimizer``; a CPU has spent it, tensor by tensor."""
        if self.kernels is not None and not self.is_host:
            seconds = update_seconds(self.kernels, self.gpu, optimizer)
            self.spent["optimizer"] += seconds
            self.world.compute(self.state, seconds)

    def _run(self, func: Any, kind: str, args: Any, kwargs: Any) -> Call:
        """Run an operator for the first time with these shapes; returns its cost."""
        out = with_shadow(func, args, kwargs, self.memory.watch(func, args, kwargs))
        call = Call.of(func, args, kwargs, out)
        if kind == "free":
            return call
        if kind == "flops":
            call.flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        if self.kernels is not None:
            call.cost = kernel_cost(self.kernels, self.gpu, func, args, kwargs, out, call.flops)
        else:
            call.cost = self._roofline(kind, (args, kwargs, out), call.flops)
        return call

    def _roofline(self, kind: str, given: Any, flops: float) -> Cost:
        """Bound by memory or by arithmetic; no kernel is shorter than the least one."""
        tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
        seconds = max(nbytes_of(tensors) / self.gpu.bandwidth, self.gpu.kernel)
        if kind != "flops":
            return Cost("memory", seconds)
        return Cost("product", max(seconds, flops / self._rate(tensors[0].dtype)))

    def _rate(self, dtype: torch.dtype) -> float:
        name = str(dtype).removeprefix("torch.")
        return self.gpu.flops.get(name, self.gpu.flops["float32"])


def _kind(func: Any) -> str:
    """How an operator is timed: value, view, free, flops, unknown or memory."""
    name = func._schema.name.split("::")[1]
    if func.namespace in ("c10d", "_c10d_functional", "profiler"):
        return "free"
    if name in READS_VALUES:
        return "value"
    if func.is_view or name in VIEWS:
        return "view"
    if name in FREE:
        return "free"
    if func.overloadpacket in flop_registry:
        return "flops"
    if name in UNKNOWN or not func._schema.returns:
        return "memory" if name.startswith("_foreach") else "unknown"
    return "memory"


_prepared: list[Any] = []  # hooks of this process


def _follow_phases() -> None:
    """Know forward and optimizer steps, in whichever world this process has entered."""

    def module(step: int) -> Callable[..., None]:
        def call(*_: Any) -> None:
            ledger = entered().mine.ledger
            ledger.depth += step
            ledger.phase = "forward" if ledger.depth > 0 else ""

        return call

    def optimizer(step: int) -> Callable[..., None]:
        def call(done: torch.optim.Optimizer, *_: Any) -> None:
            mine = entered().mine
            mine.ledger.phase = "optimizer" if step > 0 else ""
            if type(done).__module__.startswith("torch.optim."):
                mine.model.updating += step
                if step < 0:
                    mine.model.update(done)

        return call

    _prepared.append(register_module_forward_pre_hook(module(1)))
    _prepared.append(register_module_forward_hook(module(-1), always_call=True))
    _prepared.append(register_optimizer_step_pre_hook(optimizer(1)))
    _prepared.append(register_optimizer_step_post_hook(optimizer(-1)))
