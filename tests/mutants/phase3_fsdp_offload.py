"""Wrong implementations of exercise 3.18."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="offload-nothing",
        exercise="3.18",
        mistake="the shards stay on the device",
        text="        own = self.shard.detach()\n",
        becomes="        own = self.shard.detach().to(device)\n",
        caught_by="test_everything_is_where_it_should_be",
        told_as="device",
    ),
    Mutant(
        id="offload-gathered-on-the-cpu",
        exercise="3.18",
        mistake="the CPU gathers, and the full vector crosses the bus: W times the bytes",
        text="        return super().mean(chunk).to(self.shard.device)\n",
        becomes="""        return super().mean(chunk).to(self.shard.device)

    def start_gather(self) -> None:
        import torch.distributed as dist

        if self.full.untyped_storage().nbytes():
            return
        self.full.untyped_storage().resize_(self.full.nbytes)
        own = FlatParameter.gather_input(self)
        whole = own.new_empty(self.full.numel())
        dist.all_gather_into_tensor(whole, own, group=self.group)
        self.full.data.copy_(whole)
        self.put(self.leaves)
""",
        caught_by="test_only_shards_cross_the_bus",
        told_as="bus",
    ),
    Mutant(
        id="offload-reduced-on-the-cpu",
        exercise="3.18",
        mistake="the full gradient crosses the bus, and the CPU reduces it",
        text="        return super().mean(chunk).to(self.shard.device)\n",
        becomes="""        return super().mean(chunk).to(self.shard.device)

    def reduce_input(self) -> Tensor:
        return super().reduce_input().to(self.shard.device)
""",
        caught_by="test_only_shards_cross_the_bus",
        told_as="bus",
    ),
    Mutant(
        id="offload-frozen-trained",
        exercise="3.18",
        mistake="the new shard of a frozen parameter asks for a gradient",
        text="nn.Parameter(own, requires_grad=self.shard.requires_grad)",
        becomes="nn.Parameter(own)",
        caught_by="test_accumulation_stays_on_the_cpu",
        told_as="frozen",
    ),
    Mutant(
        id="offload-full-on-the-cpu",
        exercise="3.18",
        mistake="the full vector is on the CPU as well: the device never gets it",
        text="        self.make_full(self.full.dtype, device)\n",
        becomes="",
        caught_by="test_everything_is_where_it_should_be",
        told_as="exception",
    ),
    Mutant(
        id="offload-gradient-on-the-device",
        exercise="3.18",
        mistake="the gradient stays on the device, where no optimizer looks",
        text="        return super().mean(chunk).to(self.shard.device)\n",
        becomes="        return super().mean(chunk)\n",
        caught_by="test_everything_is_where_it_should_be",
        told_as="exception",
    ),
    Mutant(
        id="offload-trains-a-copy",
        exercise="3.18",
        mistake="what is gathered is a copy from before, not the shard that is stepped",
        text="        return super().gather_input().to(self.full.device, non_blocking=True)\n",
        becomes="""        if not hasattr(self, "first"):
            self.first = super().gather_input().clone()
        return self.first.to(self.full.device, non_blocking=True)
""",
        caught_by="test_training_equals_one_process",
        told_as="stale",
    ),
    Mutant(
        id="offload-float32-on-the-cpu",
        exercise="3.18",
        mistake="the CPU's shards are float32, whatever the parameters are",
        text="        own = self.shard.detach()\n",
        becomes="        own = self.shard.detach().float()\n",
        caught_by="test_vectors_in_a_group",
        told_as=("dtype", "exception"),
    ),
    Mutant(
        id="offload-gradient-in-float32",
        exercise="3.18",
        mistake="the gradient is divided and kept in float32",
        text="        return super().mean(chunk).to(self.shard.device)\n",
        becomes="        return super().mean(chunk.float()).to(self.shard.device)\n",
        caught_by="test_vectors_in_a_group",
        told_as=("dtype", "exception"),
    ),
    Mutant(
        id="offload-cut-on-the-device",
        exercise="3.18",
        mistake="the shard is cut on the device, and copied from there",
        text="""        super().__init__(parameters, group, torch.device("cpu"))
""",
        becomes="        super().__init__(parameters, group, device)\n",
        more=(
            ("        own = self.shard.detach()\n", "        own = self.shard.detach().cpu()\n"),
        ),
        caught_by="test_vectors_in_a_group",
        told_as="device",
    ),
    Mutant(
        id="offload-last-copy-kept",
        exercise="3.18",
        mistake="the device keeps the last copy of every shard in an attribute",
        text="        return super().gather_input().to(self.full.device, non_blocking=True)\n",
        becomes="""        self.sent = super().gather_input().to(self.full.device, non_blocking=True)
        return self.sent
""",
        caught_by="test_device_keeps_nothing",
        told_as="too-much-memory",
    ),
    Mutant(
        id="offload-values-needed",
        exercise="3.18",
        mistake="the shard is cut from values: parameters on meta have none yet",
        text="        own = self.shard.detach()\n",
        becomes="""        vector = torch.cat([p.detach().flatten() for p in parameters]).cpu()
        own = vector[self.start : self.start + self.shard.numel()].clone()
""",
        caught_by="test_vectors_in_a_group",
        told_as="device",
    ),
]
