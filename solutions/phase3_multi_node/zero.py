"""ZeRO-1: every rank keeps and steps one W-th of the optimizer's state.

Data parallelism keeps the same Adam moments W times. Here the parameters of a bucket are joined in
one flat vector, and rank r owns shard r of it. Only rank r has state for these elements and updates
them. Then an all-gather gives all ranks the result.

    all-reduce of the gradients (by anybody) | step own shard | all-gather parameters

Memory per rank in fp32 with Adam, for Ψ parameters on W ranks: data parallelism takes 16Ψ bytes,
ZeRO-1 8Ψ + 8Ψ/W bytes. For P bytes of parameters ``step`` sends (W-1)/W·P bytes per rank. With
DDP's all-reduce that is 3(W-1)/W·P in all. Messages: one per bucket.
Invariants: each element has its state on exactly one rank, and after ``step`` all ranks have equal
parameters. ZeRO-2 is in ``zero_gradients``.

Shards of elements differ by padding only. But they need an optimizer that updates each element on
its own: SGD, Adam, AdamW or RMSprop, but not Adafactor, LBFGS or Muon.

Source: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), sections 3 and 5.1.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group, rank_in

from .buckets import partition


@dataclass(eq=False)
class Piece:
    """Elements ``start`` to ``stop`` of the flattened ``whole``, which this rank owns.

    ``part`` (stop - start,) shares their memory. The inner optimizer gets ``part``.
    """

    whole: nn.Parameter
    start: int
    stop: int
    part: nn.Parameter


class FlatVector:
    """Parameters of one dtype and device, side by side, cut into W equal shards.

    ``flat``: (W·shard,), shard = ceil(n / W) for n elements. The parameters are contiguous views of
    it, one after the other. The last W·shard - n elements are padding, which belongs to no piece.
    ``own``: (shard,) this rank's shard, a view. ``pieces``: the parameters' parts in it, in order.
    A parameter without an element in it has no piece. No autograd history.
    """

    gradient: Tensor | None = None  # (shard,) ZeRO-2's mean gradient

    def __init__(self, parameters: list[nn.Parameter], group: Group) -> None:
        """Move ``parameters`` into one vector; their values stay. No communication."""
        self.parameters = parameters
        self.pieces: list[Piece] = []
        # --- exercise 3.13: start
        # Step 1: one vector, padded to equal shards; the parameters become views of it
        # Step 2: of each parameter, the range that lies in the own shard, as a leaf of its own
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        numel = sum(p.numel() for p in parameters)
        shard = -(-numel // world_size)
        self.flat = parameters[0].new_zeros(world_size * shard)
        first, last = rank * shard, (rank + 1) * shard
        self.own = self.flat[first:last]
        offset = 0
        for p in parameters:
            view = self.flat[offset : offset + p.numel()]
            view.copy_(p.detach().flatten())
            p.data = view.view(p.shape)
            start, stop = max(first - offset, 0), min(last - offset, p.numel())
            if start < stop:
                self.pieces.append(Piece(p, start, stop, nn.Parameter(view[start:stop])))
            offset += p.numel()
        # --- exercise 3.13: end


class ZeroOptimizer(torch.optim.Optimizer):
    """ZeRO-1: ``optimizer_class`` on this rank's shards, like the whole on every rank.

    ``param_groups`` are the user's, with the whole parameters: schedulers write there. If the inner
    optimizer changes its own groups' options, they appear there after ``step`` and in
    ``state_dict``. Gradients must be the same on all ranks when ``step`` is called, as after data
    parallelism's backward. ``state`` holds this rank's part: one W-th of every element's state.
    Parameters without gradient (None) are not stepped. Parameters that are frozen when they are
    given stay as they are, also with an earlier gradient, and are not sent. Those without elements
    are not sent either. Dtypes may differ: pieces, gradients and state have that of their
    parameter. Parameters keep their identity and values, and become contiguous.

    Raises ValueError before any communication if this rank is no member of ``group``, if
    ``bucket_bytes`` is not positive, or if a parameter is given twice. All ranks pass equal ones.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        group: Group = None,
        bucket_bytes: int = 25 * 2**20,
        **defaults: Any,
    ) -> None:
        """``params`` and ``defaults`` as for ``optimizer_class``; moves the parameters' memory.

        ``bucket_bytes``: the most that one message carries (a larger parameter goes alone).
        """
        rank_in(group)
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        self.group, self.bucket_bytes = group, bucket_bytes
        self.vectors: list[FlatVector] = []
        self.inner = optimizer_class([{"params": []}], **defaults)
        self.inner.param_groups.clear()
        super().__init__(params, self.inner.defaults)
        self.state = self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard one more group, with buckets of its own, also if it comes after some steps.

        ``vectors`` gets one for each bucket, from the last parameter to the first: the order in
        which gradients come.
        """
        super().add_param_group(param_group)
        # --- exercise 3.13: start
        # Step 3: refuse a parameter given twice; make vectors of the trainable ones, last first
        # Step 4: the inner optimizer gets the own pieces only, with the group's options
        options = self.param_groups[-1]
        if len({*options["params"]}) < len(options["params"]):  # torch only warns
            self.param_groups.pop()
            raise ValueError("a group has a parameter twice")
        trainable = [p for p in reversed(options["params"]) if p.requires_grad and p.numel()]
        vectors = [
            FlatVector([trainable[i] for i in indices], self.group)
            for indices in partition(trainable, self.bucket_bytes, self.bucket_bytes)
        ]
        parts = [piece.part for vector in vectors for piece in vector.pieces]
        self.vectors += vectors
        self.inner.add_param_group({"params": parts} | options_of(options))
        options.update(options_of(self.inner.param_groups[-1]))
        # --- exercise 3.13: end

    @property
    def pieces(self) -> list[Piece]:
        """All pieces that this rank owns."""
        return [piece for vector in self.vectors for piece in vector.pieces]

    def give_gradients(self) -> None:
        """Let each piece's ``part.grad`` be its range of the whole gradient, or None."""
        # --- exercise 3.13: start
        # Step 5: views: the gradients are there in full, nothing is copied
        for piece in self.pieces:
            whole = piece.whole.grad
            piece.part.grad = None if whole is None else whole.flatten()[piece.start : piece.stop]
        # --- exercise 3.13: end

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **more: Any) -> Any:
        """Step the own pieces, then gather all ranks': (W-1)/W·P bytes sent; a collective call.

        It calls ``closure`` first and once, with autograd, and returns its result. ``more`` goes to
        the inner optimizer's ``step``. Each bucket, or each parameter, is one message of at most
        ``bucket_bytes``. All are on their way before it waits for the first, and all have arrived
        at the end. The host does not wait for a GPU, unless the inner optimizer lets it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # --- exercise 3.13: start
        # Step 6: learning rates may have changed in the user's groups
        # Step 7: step the own pieces; start all all-gathers, in place; wait for every handle
        self.give_gradients()
        for mine, users in zip(self.inner.param_groups, self.param_groups, strict=True):
            mine.update(options_of(users))
        self.inner.step(**more)
        for mine, users in zip(self.inner.param_groups, self.param_groups, strict=True):
            users.update(options_of(mine))
        handles = [
            dist.all_gather_into_tensor(v.flat, v.own, group=self.group, async_op=True)
            for v in self.vectors
        ]
        for handle in handles:
            handle.wait()
        # --- exercise 3.13: end
        return loss

    def state_dict(self, to: int | None = None) -> dict[str, Any]:
        """The whole state, as one process's ``optimizer_class`` would save it; a collective call.

        State and groups are those of one process, for every parameter that has elements. Every rank
        gets them, or only the group's rank ``to``, and the others ``{}``. State is on the CPU.
        Later steps change nothing of it, also no option that is a tensor. Raises ValueError before
        any communication if there is no rank ``to`` in the group.
        """
        world_size = dist.get_world_size(self.group)
        if to is not None and not 0 <= to < world_size:
            raise ValueError(f"no rank {to} in a group of {world_size}")
        # --- exercise 3.13: start
        # Step 8: every rank sends its pieces' state: which parameter, which range, which values
        # Step 9: a value in the shape of its piece is cut like the parameter; others are common
        whole = [p for users in self.param_groups for p in users["params"]]
        index = {p: k for k, p in enumerate(whole)}
        mine = [
            (index[piece.whole], piece.start, piece.stop, self.state[piece.part])
            for piece in self.pieces
            if piece.part in self.state
        ]
        told = gather_values(mine, whole[0].device, self.group, to)
        if not told:
            return {}
        state: dict[int, dict[str, Any]] = {}
        for k, start, stop, values in (piece for pieces in told for piece in pieces):
            entry = state.setdefault(k, {})
            for name, value in values.items():
                if is_cut(name, value, whole[k].view(-1)[start:stop]):
                    joined = entry.setdefault(name, value.new_zeros(whole[k].shape))
                    joined.view(-1)[start:stop] = value
                else:
                    entry[name] = value
        groups = [
            users | {"params": [index[p] for p in users["params"]]} for users in self.param_groups
        ]
        return {"state": state, "param_groups": copy.deepcopy(groups)}
        # --- exercise 3.13: end

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state, saved at any world size. No communication.

        The earlier state is forgotten. ``state_dict`` does not change, now or by later steps, and
        nothing of it is kept: this rank's part is a copy. A plain optimizer's state fits, too.
        Raises ValueError, before anything changes, if the groups do not have the same lengths.
        """
        saved = [len(each["params"]) for each in state_dict["param_groups"]]
        sizes = [len(users["params"]) for users in self.param_groups]
        if saved != sizes:
            raise ValueError(f"the state's groups have {saved} parameters, the optimizer's {sizes}")
        # --- exercise 3.13: start
        # Step 10: parameters are identified by their order
        # Step 11: a copy of the own range: a view would keep the whole state alive
        ids = [k for each in state_dict["param_groups"] for k in each["params"]]
        whole = [p for users in self.param_groups for p in users["params"]]
        key = dict(zip(whole, ids, strict=True))
        self.state.clear()
        for piece in self.pieces:
            if key[piece.whole] in state_dict["state"]:
                entry = dict(state_dict["state"][key[piece.whole]])
                for name, value in entry.items():
                    if is_cut(name, value, piece.whole):
                        part = value.flatten()[piece.start : piece.stop]
                        entry[name] = part.to(piece.part, copy=True)
                    else:
                        entry[name] = copy.deepcopy(value)
                self.state[piece.part] = entry
        for users, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            users.update(copy.deepcopy(options_of(loaded)))
        # --- exercise 3.13: end


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group, without its parameters and their names."""
    return {name: v for name, v in group.items() if name not in ("params", "param_names")}


def is_cut(name: str, value: Any, part: Tensor) -> bool:
    """Whether ``value`` has an element for each of ``part``'s; ``step`` is a plain count."""
    return isinstance(value, Tensor) and name != "step" and value.shape == part.shape


def gather_values(value: Any, device: torch.device, group: Group, to: int | None) -> list[Any]:
    """``value`` (tensors and plain data) of every rank, on rank ``to`` or on all; else [].

    An all-gather of 8 bytes, and a gather (all-gather) of the longest value's bytes.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    sent = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(device)
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = sent.new_empty(world_size, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(sent)], device=device), group=group)
    padded = sent.new_zeros(int(sizes.max()))
    padded[: len(sent)] = sent
    rows = [torch.empty_like(padded) for _ in range(world_size)] if to in (None, rank) else None
    if to is None:
        dist.all_gather(rows, padded, group=group)
    else:
        dist.gather(padded, rows, group=group, group_dst=to)
    told = [
        io.BytesIO(row[:size].cpu().numpy().tobytes())
        for row, size in zip(rows or (), sizes.tolist(), strict=rows is not None)
    ]
    return [torch.load(each, map_location="cpu", weights_only=True) for each in told]
