"""Wrong implementations of phase 1 that gloo forgives: they fail by NCCL's rules."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="average-facts-on-the-host",
        exercise="1.4",
        mistake="what the ranks tell each other is made on the CPU, and NCCL moves GPU memory only",
        text="    facts = torch.tensor(known, dtype=torch.int64, device=trainable[0].device)\n",
        becomes="    facts = torch.tensor(known, dtype=torch.int64)\n",
        caught_by="test_mean_over_the_ranks",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="average-facts-in-16-bits",
        exercise="1.4",
        mistake="the facts are sent as int16, a dtype that NCCL has not",
        text="    facts = torch.tensor(known, dtype=torch.int64, device=trainable[0].device)\n",
        becomes="    facts = torch.tensor(known, dtype=torch.int16, device=trainable[0].device)\n",
        caught_by="test_mean_over_the_ranks",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="step-sums-on-the-host",
        exercise="1.5",
        mistake="the sum of the losses is made on the CPU, and NCCL moves GPU memory only",
        text="dtype=torch.float64, device=inputs.device)\n",
        becomes="dtype=torch.float64)\n",
        caught_by="test_training_equals_one_process",
        told_as="exception",
        tier="nccl",
    ),
]
