"""Wrong implementations of phase 3 whose host waits for its GPU more often than it need."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="overlap-asks-each-gradient",
        exercise="3.10",
        mistake="each gradient is asked whether it is finite, which holds up backward",
        text="        self.arrived[index] = None\n",
        becomes="        self.arrived[index] = None\n"
        "        gradient = self.trainable[index].grad\n"
        "        if gradient is not None and gradient.isnan().all():\n"
        "            gradient.zero_()\n",
        caught_by="test_backward_does_not_wait_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="ddp-tells-nobody",
        exercise="3.11",
        mistake="who has a gradient is copied to the GPU where nobody asks for it",
        text="        self._flush()\n"
        "        if self.agree:\n"
        "            facts = torch.tensor([quitter, *has_gradient], dtype=torch.int32, device=device)\n"
        "            dist",
        becomes="        facts = torch.tensor([quitter, *has_gradient], dtype=torch.int32, device=device)\n"
        "        self._flush()\n"
        "        if self.agree:\n"
        "            dist",
        caught_by="test_only_agreeing_waits_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="zero-asks-each-piece",
        exercise="3.13",
        mistake="pieces whose gradient is zero are left out, for which each is looked at",
        text="            piece.part.grad = None if whole is None else whole.flatten()[piece.start : piece.stop]\n",
        becomes="            piece.part.grad = None if whole is None else whole.flatten()[piece.start : piece.stop]\n"
        "            if whole is not None and not whole.isfinite().any():\n"
        "                piece.part.grad = None\n",
        caught_by="test_a_step_does_not_wait_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="zero2-tells-each-parameter",
        exercise="3.14",
        mistake="the flag of each parameter is a tensor of its own",
        text="        used = torch.tensor(flags, dtype=torch.uint8, device=parameters[0].device)\n",
        becomes="        used = torch.stack(\n"
        "            [torch.tensor(flag, dtype=torch.uint8, device=p.device) for flag, p in zip(flags, parameters)]\n"
        "        )\n",
        caught_by="test_backward_waits_twice_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="zero2-norm-read-by-parts",
        exercise="3.14",
        mistake="the norm of each piece is read",
        text="            squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()\n",
        becomes="            squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2\n",
        caught_by="test_backward_waits_twice_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="fsdp-looks-at-what-it-gathers",
        exercise="3.15",
        mistake="the gathered vector is asked whether it is finite",
        text="            self.gathering = None\n            self.put(self.leaves)\n",
        becomes="            self.gathering = None\n"
        "            if not self.full.isfinite().all():\n"
        '                raise ValueError("a parameter is not finite")\n'
        "            self.put(self.leaves)\n",
        caught_by="test_sharding_does_not_wait_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="fsdp-norm-read-by-parts",
        exercise="3.15",
        mistake="the norm of each shard is read",
        text="        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2\n",
        becomes="        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2\n",
        caught_by="test_sharding_does_not_wait_for_the_gpu",
        told_as="host",
    ),
]
