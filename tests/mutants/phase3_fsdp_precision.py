"""Wrong implementations of exercise 3.17."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="precision-computes-in-float32",
        exercise="3.17",
        mistake="the full vector keeps the shard's dtype: nothing is gained",
        text=(
            "        super().make_full(self.compute_dtype if dtype.is_floating_point else "
            "dtype, device)\n"
        ),
        becomes="        super().make_full(dtype, device)\n",
        caught_by="test_every_tensor_has_its_dtype",
        told_as="dtype",
    ),
    Mutant(
        id="precision-cast-after-gather",
        exercise="3.17",
        mistake="the shards travel in float32 and are cast on arrival",
        text="        return super().gather_input().to(self.full.dtype)\n",
        becomes="""        return super().gather_input().to(self.full.dtype)

    def start_gather(self) -> None:
        import torch.distributed as dist

        if self.full.untyped_storage().nbytes():
            return
        self.full.untyped_storage().resize_(self.full.nbytes)
        own = super().gather_input()
        wide = own.new_empty(self.full.numel())
        dist.all_gather_into_tensor(wide, own, group=self.group)
        self.full.data.copy_(wide)
        self.put(self.leaves)
""",
        caught_by="test_bytes_of_a_step",
        told_as="message-dtype",
    ),
    Mutant(
        id="precision-half-master-weights",
        exercise="3.17",
        mistake="the master weights are bfloat16 as well",
        text="        super().__init__(parameters, group, device)\n",
        becomes="""        super().__init__(parameters, group, device)
        self.shard = torch.nn.Parameter(
            self.shard.detach().to(compute_dtype), requires_grad=self.shard.requires_grad
        )
""",
        caught_by="test_every_tensor_has_its_dtype",
        told_as="dtype",
    ),
    Mutant(
        id="precision-master-weights-rounded",
        exercise="3.17",
        mistake="the float32 shards are overwritten by their rounded copy at every gather",
        text="        return super().gather_input().to(self.full.dtype)\n",
        becomes="""        self.shard.data.copy_(self.shard.data.to(self.full.dtype))
        return super().gather_input().to(self.full.dtype)
""",
        caught_by="test_small_updates_are_not_lost",
        told_as="updates-lost",
    ),
    Mutant(
        id="precision-reduced-in-bfloat16",
        exercise="3.17",
        mistake="the gradients are added in bfloat16, whatever was asked for",
        text="joined.to(self.reduce_dtype) if joined.is_floating_point() else joined",
        becomes="joined",
        caught_by="test_bytes_of_a_step",
        told_as="message-dtype",
    ),
    Mutant(
        id="precision-sum-rounded",
        exercise="3.17",
        mistake="the reduced gradient is rounded to bfloat16 again",
        text="        return super().mean(chunk.to(self.shard.dtype))\n",
        becomes="        return super().mean(chunk.to(self.compute_dtype)).to(self.shard.dtype)\n",
        caught_by="test_gradients_are_summed_in_float32",
        told_as="rounding",
    ),
    Mutant(
        id="precision-summed",
        exercise="3.17",
        mistake="widened, and the division forgotten",
        text="        return super().mean(chunk.to(self.shard.dtype))\n",
        becomes="        return chunk.to(self.shard.dtype)\n",
        caught_by="test_gradients_are_summed_in_float32",
        told_as="summed",
    ),
    Mutant(
        id="precision-integers-rounded",
        exercise="3.17",
        mistake="parameters of integers are gathered in bfloat16 as well",
        text="self.compute_dtype if dtype.is_floating_point else dtype",
        becomes="self.compute_dtype",
        caught_by="test_integers_stay",
        told_as="dtype",
    ),
    Mutant(
        id="precision-both-vectors",
        exercise="3.17",
        mistake="a float32 copy of the full vector stays beside the bfloat16 one",
        text=(
            "        super().make_full(self.compute_dtype if dtype.is_floating_point else "
            "dtype, device)\n"
        ),
        becomes=(
            "        super().make_full(self.compute_dtype if dtype.is_floating_point else "
            "dtype, device)\n"
            "        self.wide = torch.zeros(self.full.numel(), dtype=dtype, device=device)\n"
        ),
        caught_by="test_full_parameters_take_half",
        told_as="too-much-memory",
    ),
    Mutant(
        id="precision-divided-in-reduce-dtype",
        exercise="3.17",
        mistake="the sum is divided in bfloat16 and widened afterwards",
        text="        return super().mean(chunk.to(self.shard.dtype))\n",
        becomes="        return super().mean(chunk).to(self.shard.dtype)\n",
        caught_by="test_vectors_of_every_dtype",
        told_as=("divided-too-early", "rounding", "wrong"),
    ),
    Mutant(
        id="precision-always-float32",
        exercise="3.17",
        mistake="gradients become float32, whatever the parameters are",
        text="        return super().mean(chunk.to(self.shard.dtype))\n",
        becomes="        return super().mean(chunk.float())\n",
        caught_by="test_vectors_of_every_dtype",
        told_as=("dtype", "exception"),
    ),
    Mutant(
        id="precision-gathered-through-reduce-dtype",
        exercise="3.17",
        mistake="the shard goes through the dtype of the reduction before it is gathered",
        text="        return super().gather_input().to(self.full.dtype)\n",
        becomes="        return super().gather_input().to(self.reduce_dtype).to(self.full.dtype)\n",
        caught_by="test_vectors_of_every_dtype",
        told_as=("wrong", "rounding"),
    ),
    Mutant(
        id="precision-imaginary-part-lost",
        exercise="3.17",
        mistake="complex gradients are reduced as real numbers: the imaginary part is lost",
        text="joined.to(self.reduce_dtype) if joined.is_floating_point() else joined",
        becomes="joined.to(self.reduce_dtype)",
        caught_by="test_integers_stay",
        told_as="complex-gradient",
    ),
    Mutant(
        id="precision-rounded-twice",
        exercise="3.17",
        mistake="float32 goes to bfloat16 by way of float16, and is rounded twice",
        text="        return super().gather_input().to(self.full.dtype)\n",
        becomes="""        own = super().gather_input()
        own = own.half() if self.full.dtype == torch.bfloat16 else own
        return own.to(self.full.dtype)
""",
        caught_by="test_vectors_of_every_dtype",
        told_as=("wrong", "rounding"),
    ),
]
