"""Wrong implementations of exercise 3.17."""

from distlab.grading.wrong import mutants_of

DTYPES, ROUNDED = (
    "test_every_tensor_has_its_dtype",
    "test_full_parameters_are_rounded_master_weights",
)
SUMMED, SMALL = "test_gradients_are_summed_in_float32", "test_small_updates_are_not_lost"
BYTES, HALF = "test_bytes_of_a_step", "test_full_parameters_take_half"

FULL = (
    "        super().make_full(self.compute_dtype if dtype.is_floating_point else dtype, device)\n"
)
GATHER = "        return super().gather_input().to(self.full.dtype)\n"
REDUCE = "        return super().reduce_input().to(self.reduce_dtype)\n"
MEAN = "        return super().mean(chunk.to(self.shard.dtype))\n"
INIT = "        super().__init__(parameters, group, device)\n"

mutant = mutants_of("3.17", "precision")

MUTANTS = [
    mutant(
        "computes-in-float32",
        "the full vector keeps the shard's dtype: nothing is gained",
        FULL,
        "        super().make_full(dtype, device)\n",
        DTYPES,
        "exception",
    ),
    mutant(
        "cast-after-gather",
        "the shards travel in float32 and are cast on arrival",
        GATHER,
        GATHER + "\n    def start_gather(self) -> None:\n"
        "        import torch.distributed as dist\n\n"
        "        if self.full.untyped_storage().nbytes():\n            return\n"
        "        self.full.untyped_storage().resize_(self.full.nbytes)\n"
        "        own = super().gather_input()\n"
        "        wide = own.new_empty(self.full.numel())\n"
        "        dist.all_gather_into_tensor(wide, own, group=self.group)\n"
        "        self.full.data.copy_(wide)\n"
        "        self.put(self.leaves)\n",
        BYTES,
        "message-dtype",
    ),
    mutant(
        "half-master-weights",
        "BUGS 76: the master weights are bfloat16 as well",
        INIT,
        INIT + "        self.shard = torch.nn.Parameter(\n"
        "            self.shard.detach().to(compute_dtype), requires_grad=self.shard.requires_grad\n"
        "        )\n",
        DTYPES,
        "dtype",
    ),
    mutant(
        "master-weights-rounded",
        "BUGS 76: the float32 shards are overwritten by their rounded copy at every gather",
        GATHER,
        "        self.shard.data.copy_(self.shard.data.to(self.full.dtype))\n" + GATHER,
        SMALL,
        "updates-lost",
    ),
    mutant(
        "reduced-in-bfloat16",
        "the gradients are added in bfloat16, whatever was asked for",
        REDUCE,
        "        return super().reduce_input()\n",
        BYTES,
        "message-dtype",
    ),
    mutant(
        "sum-rounded",
        "the reduced gradient is rounded to bfloat16 again",
        MEAN,
        "        return super().mean(chunk.to(self.compute_dtype)).to(self.shard.dtype)\n",
        SUMMED,
        "rounding",
    ),
    mutant(
        "summed",
        "BUGS 20: widened, and the division forgotten",
        MEAN,
        "        return chunk.to(self.shard.dtype)\n",
        SUMMED,
        "summed",
    ),
    mutant(
        "integers-rounded",
        "parameters of integers are gathered in bfloat16 as well",
        "self.compute_dtype if dtype.is_floating_point else dtype",
        "self.compute_dtype",
        "test_integers_stay",
        "dtype",
    ),
    mutant(
        "both-vectors",
        "a float32 copy of the full vector stays beside the bfloat16 one",
        FULL,
        FULL + "        self.wide = torch.zeros(self.full.numel(), dtype=dtype, device=device)\n",
        HALF,
        "too-much-memory",
    ),
]
