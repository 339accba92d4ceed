"""Wrong implementations of phase 2 that gloo forgives: they fail by NCCL's rules."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="window-count-on-the-host",
        exercise="2.2",
        mistake="the number of targets stays on the CPU, and NCCL moves GPU memory only",
        text="    count = count.to(device)\n",
        becomes="",
        caught_by="test_window_of_all_ranks_equals_one_process",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="window-losses-on-the-host",
        exercise="2.2",
        mistake="the sum of the losses is made on the CPU, and NCCL moves GPU memory only",
        text="    losses = torch.tensor(loss_sum, dtype=torch.float64, device=device)\n",
        becomes="    losses = torch.tensor(loss_sum, dtype=torch.float64)\n",
        caught_by="test_window_of_all_ranks_equals_one_process",
        told_as="exception",
        tier="nccl",
    ),
]
