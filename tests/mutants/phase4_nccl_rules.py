"""Wrong implementations of phase 4 that gloo forgives: they fail by NCCL's rules."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="shared-values-on-the-host",
        exercise="4.7",
        mistake="what is sent is made on the CPU, and NCCL moves GPU memory only",
        text="        values = v[positions]\n",
        becomes="        values = v[positions].cpu()\n",
        caught_by="test_sums_at_shared_positions_and_owes_the_rest",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="metrics-on-the-host",
        exercise="4.11",
        mistake="the row of metrics is made on the CPU, and NCCL moves GPU memory only",
        text="    row = torch.tensor(mine.numbers(), dtype=torch.float64, device=device)\n",
        becomes="    row = torch.tensor(mine.numbers(), dtype=torch.float64)\n",
        caught_by="test_report_is_of_all_ranks",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="flag-on-the-host",
        exercise="4.14",
        mistake="the flag is made on the CPU, and NCCL moves GPU memory only",
        text="        flag = torch.tensor(self.requested, dtype=torch.int32, device=self.device)\n",
        becomes="        flag = torch.tensor(self.requested, dtype=torch.int32)\n",
        caught_by="test_leaving_is_agreed_on",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="flag-by-or",
        exercise="4.14",
        mistake="the flag is combined by BOR, an operator that NCCL has not",
        text="            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)\n",
        becomes="            dist.all_reduce(flag, op=dist.ReduceOp.BOR, group=self.group)\n",
        caught_by="test_leaving_is_agreed_on",
        told_as="exception",
        tier="nccl",
    ),
]
