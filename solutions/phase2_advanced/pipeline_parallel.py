"""Pipeline parallelism: GPipe, 1F1B and interleaved 1F1B, run by one interpreter.

The layers are divided into stages, the batch into m micro-batches. While a stage works on one
micro-batch, its neighbours work on others. With p ranks and v stages per rank (``chunks``):

===========  ===========================  ====================================  ===============
schedule     bubble: share of the ranks'  activations kept by rank r, of one    messages per
             time that is idle            stage and micro-batch                 micro-batch
===========  ===========================  ====================================  ===============
GPipe        (p-1) / (m + p-1)            m                                     2(p-1)
1F1B         (p-1) / (m + p-1)            min(m, p-r)                           2(p-1)
interleaved  (p-1) / (v·m + p-1)          min(v·m, 2(p-r-1) + (v-1)p + 1),      2(v·p-1)
                                          each 1/v as large
===========  ===========================  ====================================  ===============

Divided by the work instead, the bubble is (p-1)/m, interleaved (p-1)/(v·m). A message holds one
micro-batch's activation at one boundary, or its gradient. One collective gives all ranks the loss.

Invariant: the gradients are those of one process on the whole batch, whatever the schedule.
Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965), section 2.3; Narayanan et al. 2019 (PipeDream,
SOSP), section 3.2, and 2021 (Megatron-LM, arXiv 2104.04473), section 2.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group

from .pipeline_schedules import Schedule, Step, rank_of_stages, validate, with_messages

Key = tuple[int, int]  # stage, micro-batch


def check_sizes(ranks: int, micro_batches: int, chunks: int = 1) -> None:
    """Raise ValueError unless all three are at least 1."""
    if min(ranks, micro_batches, chunks) < 1:
        numbers = f"{ranks} ranks, {micro_batches} micro-batches and {chunks} chunks per rank"
        raise ValueError(f"{numbers}: each must be at least 1")


def gpipe(ranks: int, micro_batches: int) -> list[list[Step]]:
    """Every rank's compute steps: all forwards, then all backwards; stage r on rank r.

    Micro-batches may be in any order with that bubble. Raises ValueError if a number is below 1.
    """
    # --- exercise 2.10: start
    # Step 1: the same order on every rank
    check_sizes(ranks, micro_batches)
    return [[Step(k, r, i) for k in "FB" for i in range(micro_batches)] for r in range(ranks)]
    # --- exercise 2.10: end


def one_f_one_b(ranks: int, micro_batches: int) -> list[list[Step]]:
    """Every rank's compute steps in 1F1B: each backward as early as possible; stage r on rank r.

    Rank r keeps min(m, p-r) micro-batches at most, and the bubble is GPipe's, whether B takes as
    long as F or twice as long. Any m, also m < p. Raises ValueError if a number is below 1.
    """
    # --- exercise 2.11: start
    # Step 1: warm-up: as many forwards as there are stages after this one, but no more than m
    # Step 2: then one forward, one backward in turn, until there are no more forwards
    # Step 3: then the backwards that are left, one for each forward of the warm-up
    check_sizes(ranks, micro_batches)
    order = []
    for rank in range(ranks):
        forwards = [Step("F", rank, i) for i in range(micro_batches)]
        backwards = [Step("B", rank, i) for i in range(micro_batches)]
        order.append(alternate(forwards, backwards, warm_up=ranks - rank - 1))
    return order
    # --- exercise 2.11: end


def alternate(forwards: list[Step], backwards: list[Step], warm_up: int) -> list[Step]:
    """``warm_up`` forwards, then one of each in turn, then the backwards that are left."""
    # --- exercise 2.11: start
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = [step for pair in pairs for step in pair]
    return [*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :]]
    # --- exercise 2.11: end


def interleaved(ranks: int, micro_batches: int, chunks: int) -> list[list[Step]]:
    """Every rank's compute steps in interleaved 1F1B: rank r has the stages r, r+p, … of v·p.

    Micro-batches go through in groups of p: each rank does a group's forwards with its first stage,
    then the same group's with its second …; in backward the last stage comes first. Rank r does
    2(p-r-1) + (v-1)p forwards, or all, before it takes turns; fewer if the bubble stays
    (p-1) / (v·m + p-1). It keeps at most one more activation of a stage than that. Raises
    ValueError if a number is below 1 or p does not divide m.
    """
    # --- exercise 2.12: start
    # Step 1: for a rank's k-th forward: its group of p micro-batches, its number among the rank's
    #         own stages, and its position in the group
    # Step 2: the same for backward, with the rank's own stages in reverse
    # Step 3: alternate as in 1F1B. The warm-up lasts until the first backward reaches rank r: the
    #         group passes v-1 stages here, then a micro-batch goes to the last rank and back
    check_sizes(ranks, micro_batches, chunks)
    if micro_batches % ranks:
        raise ValueError(f"{micro_batches} micro-batches are no multiple of {ranks} ranks")
    order = []
    for rank in range(ranks):
        forwards, backwards = [], []
        for k in range(micro_batches * chunks):
            group, position = divmod(k, ranks * chunks)
            own, micro_batch = position // ranks, group * ranks + position % ranks
            forwards.append(Step("F", own * ranks + rank, micro_batch))
            backwards.append(Step("B", (chunks - 1 - own) * ranks + rank, micro_batch))
        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        order.append(alternate(forwards, backwards, warm_up))
    return order
    # --- exercise 2.12: end


def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Step]]:
    """The schedule called ``"gpipe"``, ``"1f1b"`` or ``"interleaved"``, with messages.

    Raises ValueError for another name, a number below 1, or several chunks per rank in a schedule
    that is not interleaved.
    """
    # --- exercise 2.10: start
    # Step 2: the order by its name, completed with messages (exercise 2.9)
    if name == "interleaved":
        return with_messages(interleaved(ranks, micro_batches, chunks))
    if name not in ("gpipe", "1f1b"):
        raise ValueError(f"the schedule must be gpipe, 1f1b or interleaved, not {name!r}")
    if chunks != 1:
        raise ValueError(f"{chunks} chunks per rank need the interleaved schedule, not {name!r}")
    order = gpipe if name == "gpipe" else one_f_one_b
    return with_messages(order(ranks, micro_batches))
    # --- exercise 2.10: end


class Pipeline:
    """One rank's share of a pipelined model: runs any valid schedule.

    ``chunks``: this rank's stages in rising order. Each is a module with one tensor in and one out,
    and changes neither; it may communicate in other groups. ``schedule``: with messages, the same
    on all ranks. ``loss_fn(output, target)``: mean over a micro-batch, used on the last stage.
    ``boundaries[s]``: a tensor (on the meta device) with the shape and the floating dtype that
    stage s gives stage s+1 for one micro-batch. So receivers know both without a message.
    ``group``: the ranks of this pipeline; rank r of the group takes the steps ``schedule[r]``.

    Raises ValueError if the schedule is not valid, has steps of other ``kinds``, or does not fit
    the group or the chunks. After an exception in ``step`` the pipeline can't be used again.
    """

    kinds = "FB"

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        schedule: Schedule,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        boundaries: Sequence[Tensor],
        *,
        group: Group = None,
    ) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if len(schedule) != ranks:
            raise ValueError(f"the schedule is for {len(schedule)} ranks, the group has {ranks}")
        steps = [step for steps in schedule for step in steps]
        for kind in sorted({step.kind[-1] for step in steps} - {*self.kinds}):
            raise ValueError(f"{type(self).__name__} takes steps {self.kinds}, not {kind}")
        self.micro_batches = 1 + max((step.micro_batch for step in steps), default=-1)
        self.last = len(boundaries)
        validate(schedule, self.last + 1, self.micro_batches)
        self.rank_of = rank_of_stages(schedule)
        mine = [stage for stage, owner in sorted(self.rank_of.items()) if owner == rank]
        if len(chunks) != len(mine):
            raise ValueError(f"{len(chunks)} chunks for the {len(mine)} stages of this rank")
        self.chunks = dict(zip(mine, chunks, strict=True))  # by stage
        self.steps = list(schedule[rank])
        self.loss_fn, self.boundaries, self.group = loss_fn, boundaries, group
        self.kept: dict[Key, tuple[Tensor, Tensor]] = {}  # input and output of a forward
        self.gradients: dict[Key, Tensor] = {}  # of a stage's input, until a step takes it
        self.arriving: dict[Step, tuple[Tensor, dist.Work]] = {}
        self.sending: deque[tuple[Tensor, dist.Work]] = deque()

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Add the gradient of the batch's mean loss to every ``p.grad``; returns that loss.

        ``inputs`` and ``targets``: the whole batch, on every rank, so that all can check it. Only
        the first stage reads inputs, only the last one targets. The loss is a float, the same on
        all ranks. A stage is called once per micro-batch; an input that it does not use has a zero
        gradient. Sends the schedule's messages, and at most two collectives of 8 bytes for the
        loss. A send is not waited for at once, a receive not before its data is needed. When a send
        starts, at most two per stage of this rank and direction (F, B) are not waited for. A
        micro-batch's activations are freed when its backward is done, unless a send holds them. The
        host waits for a GPU once.

        Raises ValueError, before anything is sent, if inputs or targets are empty or do not divide
        into the schedule's micro-batches; also where an output differs from its boundary.
        """
        # --- exercise 2.10: start
        # Step 3: divide the batch into equal micro-batches; the loss starts at zero
        # Step 4: take this rank's steps one by one; leave no send unfinished
        # Step 5: the last stage has the loss: send it to all ranks
        m = self.micro_batches
        sizes = len(inputs), len(targets)
        if not all(sizes) or any(size % m for size in sizes):
            raise ValueError(f"{sizes} inputs and targets don't divide into {m} micro-batches")
        self.inputs, self.targets = inputs.chunk(m), targets.chunk(m)
        self.loss = torch.zeros((), dtype=torch.float64, device=inputs.device)
        for step in self.steps:
            self.take(step)
        while self.sending:
            self.sending.popleft()[1].wait()
        dist.broadcast(self.loss, group=self.group, group_src=self.rank_of[self.last])
        return self.loss.item()
        # --- exercise 2.10: end

    def take(self, step: Step) -> None:
        """Do one step of the schedule."""
        # --- exercise 2.10: start
        # Step 6: compute, or send to or receive from the rank of the other stage. Only post a
        #         receive here; the compute step that needs its data waits for it
        kind, stage, i = step
        if kind == "F":
            self.forward(stage, i)
        elif kind == "B":
            self.backward(stage, i)
        elif kind == "send F":
            self.send(self.kept[stage, i][1], stage + 1)
        elif kind == "send B":
            self.send(self.gradients.pop((stage, i)), stage - 1)
        else:
            like, source = (stage - 1, stage - 1) if kind == "recv F" else (stage, stage + 1)
            shape, dtype = self.boundaries[like].shape, self.boundaries[like].dtype
            buffer = torch.empty(shape, dtype=dtype, device=self.loss.device)
            handle = dist.irecv(buffer, group=self.group, group_src=self.rank_of[source])
            self.arriving[step] = buffer, handle
        # --- exercise 2.10: end

    def forward(self, stage: int, i: int) -> None:
        """Run a stage on micro-batch ``i``; keep its input and output for backward."""
        # --- exercise 2.10: start
        # Step 7: the input is the data, or a new leaf that requires a gradient
        # Step 8: on the last stage the loss follows, divided once by the number of micro-batches
        if stage == 0:
            x = self.inputs[i]
        elif stage - 1 in self.chunks:
            x = self.kept[stage - 1, i][1].detach().requires_grad_()
        else:
            x = self.arrived(Step("recv F", stage, i)).requires_grad_()
        output = self.call(stage, i, x)
        if stage == self.last:
            output = self.loss_fn(output, self.targets[i]) / self.micro_batches
            self.loss += output.detach()
        else:
            want = self.boundaries[stage]
            if (output.shape, output.dtype) != (want.shape, want.dtype):
                raise ValueError(f"stage {stage} gives {output.shape} {output.dtype}, not {want}")
        self.kept[stage, i] = x, output
        # --- exercise 2.10: end

    def call(self, stage: int, i: int, x: Tensor) -> Tensor:
        """The module of a stage, called."""
        return self.chunks[stage](x)

    def backward(self, stage: int, i: int) -> None:
        """Run a stage's backward for micro-batch ``i``: this frees its activations."""
        # --- exercise 2.10: start
        # Step 9: start from the gradient of the output; on the last stage start from the loss
        # Step 10: keep the gradient of the input for the stage before
        x, output = self.kept.pop((stage, i))
        if stage == self.last:
            gradient = None
        elif stage + 1 in self.chunks:
            gradient = self.gradients.pop((stage + 1, i))
        else:
            gradient = self.arrived(Step("recv B", stage, i))
        if output.requires_grad:  # not if everything up to here is frozen
            torch.autograd.backward(output, gradient)
        if stage:
            self.gradients[stage, i] = torch.zeros_like(x) if x.grad is None else x.grad
        # --- exercise 2.10: end

    def send(self, tensor: Tensor, stage: int) -> None:
        """Send to the rank of ``stage``, without waiting for it to be received."""
        # --- exercise 2.10: start
        # Step 11: keep tensor and handle until the send is done; limit how many are under way
        while len(self.sending) >= 2 * len(self.chunks):
            self.sending.popleft()[1].wait()
        tensor = tensor.detach().contiguous()
        handle = dist.isend(tensor, group=self.group, group_dst=self.rank_of[stage])
        self.sending.append((tensor, handle))
        # --- exercise 2.10: end

    def arrived(self, receive: Step) -> Tensor:
        """The tensor that ``receive`` was posted for, once it is there."""
        buffer, handle = self.arriving.pop(receive)
        handle.wait()
        return buffer
