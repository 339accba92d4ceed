"""Wrong implementations of phase 3 that gloo forgives: they fail by NCCL's rules."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="ring-no-batch-on-gpus",
        exercise="3.1",
        mistake="receive and send are two operations of one queue: on each rank the send waits for "
        "a receive that can't be complete",
        text="    if outgoing.is_cuda:\n",
        becomes="    if False:\n",
        caught_by="test_reduce_scatter_completes_the_own_chunk",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="ring-batch-of-two-batches",
        exercise="3.1",
        mistake="receive and send are a batch each, one after the other",
        text="        return dist.batch_isend_irecv(ops) if ops else []\n",
        becomes="        return [work for op in ops for work in dist.batch_isend_irecv([op])]\n",
        caught_by="test_reduce_scatter_completes_the_own_chunk",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="ring-tags",
        exercise="3.1",
        mistake="messages have a tag, which NCCL ignores",
        text="        ops = [dist.P2POp(dist.irecv, incoming, group=group, group_peer=source)]\n"
        "        ops += [dist.P2POp(dist.isend, outgoing, group=group, group_peer=to)]\n",
        becomes="        ops = [dist.P2POp(dist.irecv, incoming, None, group, 7, group_peer=source)]\n"
        "        ops += [dist.P2POp(dist.isend, outgoing, None, group, 7, group_peer=to)]\n",
        caught_by="test_reduce_scatter_completes_the_own_chunk",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="ddp-facts-on-the-host",
        exercise="3.11",
        mistake="who has a gradient is told by a tensor of the CPU: NCCL moves GPU memory only",
        text="        facts = torch.tensor([quitter, *has_gradient], dtype=torch.int32, device=device)\n",
        becomes="        facts = torch.tensor([quitter, *has_gradient], dtype=torch.int32)\n",
        caught_by="test_a_failed_step_is_left_out_on_all_ranks",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="zero2-flags-on-the-host",
        exercise="3.14",
        mistake="which parameters were used is told by a tensor of the CPU",
        text="        used = torch.tensor(flags, dtype=torch.uint8, device=parameters[0].device)\n",
        becomes="        used = torch.tensor(flags, dtype=torch.uint8)\n",
        caught_by="test_training_equals_one_process",
        told_as="exception",
        tier="nccl",
    ),
]
