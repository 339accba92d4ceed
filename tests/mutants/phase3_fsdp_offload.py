"""Wrong implementations of exercise 3.18."""

from distlab.grading.wrong import mutants_of

WHERE, BUS = "test_everything_is_where_it_should_be", "test_only_shards_cross_the_bus"
TRAIN, NOTHING = "test_training_equals_one_process", "test_device_keeps_nothing"

OWN = "        own = self.shard.detach().cpu()\n"
KEPT = "        own = self.shard.detach()\n"
GATHER = "        return super().gather_input().to(self.full.device, non_blocking=True)\n"
MEAN = "        return super().mean(chunk).to(self.shard.device)\n"

mutant = mutants_of("3.18", "offload")

MUTANTS = [
    mutant("nothing", "the shards stay on the device", OWN, KEPT, WHERE, "device"),
    mutant(
        "gathered-on-the-cpu",
        "the CPU gathers, and the full vector crosses the bus: W times the bytes",
        MEAN,
        MEAN + "\n    def start_gather(self) -> None:\n"
        "        import torch.distributed as dist\n\n"
        "        if self.full.untyped_storage().nbytes():\n            return\n"
        "        self.full.untyped_storage().resize_(self.full.nbytes)\n"
        "        own = FlatParameter.gather_input(self)\n"
        "        whole = own.new_empty(self.full.numel())\n"
        "        dist.all_gather_into_tensor(whole, own, group=self.group)\n"
        "        self.full.data.copy_(whole)\n"
        "        self.put(self.leaves)\n",
        BUS,
        "bus",
    ),
    mutant(
        "reduced-on-the-cpu",
        "the full gradient crosses the bus, and the CPU reduces it",
        MEAN,
        MEAN + "\n    def reduce_input(self) -> Tensor:\n"
        "        return super().reduce_input().to(self.shard.device)\n",
        BUS,
        "bus",
    ),
    mutant(
        "frozen-trained",
        "the new shard of a frozen parameter asks for a gradient",
        "nn.Parameter(own, requires_grad=self.shard.requires_grad)",
        "nn.Parameter(own)",
        "test_accumulation_stays_on_the_cpu",
        "frozen",
    ),
    mutant(
        "full-on-the-cpu",
        "the full vector is on the CPU as well: the device never gets it",
        "        super().__init__(parameters, group, device)\n",
        '        super().__init__(parameters, group, torch.device("cpu"))\n',
        WHERE,
        "exception",
    ),
    mutant(
        "gradient-on-the-device",
        "the gradient stays on the device, where no optimizer looks",
        MEAN,
        "        return super().mean(chunk)\n",
        WHERE,
        "exception",
    ),
    mutant(
        "trains-a-copy",
        "BUGS 73: what is gathered is a copy from before, not the shard that is stepped",
        GATHER,
        '        if not hasattr(self, "first"):\n'
        "            self.first = super().gather_input().clone()\n"
        "        return self.first.to(self.full.device, non_blocking=True)\n",
        TRAIN,
        "norm",
    ),
]
