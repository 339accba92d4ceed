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
    Mutant(
        id="header-on-the-host",
        exercise="2.8",
        mistake="the header is made on the CPU, and NCCL moves GPU memory only",
        text="        message = torch.tensor(header, device=y.device)\n",
        becomes="        message = torch.tensor(header)\n",
        caught_by="test_gradients_of_every_stage",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="header-buffer-on-the-host",
        exercise="2.8",
        mistake="the buffer for the header is made on the CPU, and NCCL moves GPU memory only",
        text="        message = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=inputs.device)\n",
        becomes="        message = torch.empty(2 + MOST_DIMS, dtype=torch.int64)\n",
        caught_by="test_gradients_of_every_stage",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="activation-buffer-on-the-host",
        exercise="2.8",
        mistake="the buffer for the activation is made on the CPU, and NCCL moves GPU memory only",
        text="    x = torch.empty(shape, dtype=dtype, device=inputs.device)\n",
        becomes="    x = torch.empty(shape, dtype=dtype)\n",
        caught_by="test_gradients_of_every_stage",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="split-loss-on-the-host",
        exercise="2.8",
        mistake="the loss is made on the CPU, and NCCL moves GPU memory only",
        text="    loss = torch.zeros((), dtype=torch.float64, device=inputs.device)\n    if stage",
        becomes="    loss = torch.zeros((), dtype=torch.float64)\n    if stage",
        caught_by="test_gradients_of_every_stage",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="pipeline-buffer-on-the-host",
        exercise="2.10",
        mistake="the buffer for a message is made on the CPU, and NCCL moves GPU memory only",
        text="            buffer = torch.empty(shape, dtype=dtype, device=self.loss.device)\n",
        becomes="            buffer = torch.empty(shape, dtype=dtype)\n",
        caught_by="test_gpipe_equals_one_process",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="pipeline-loss-on-the-host",
        exercise="2.10",
        mistake="the loss is made on the CPU, and NCCL moves GPU memory only",
        text="        self.loss = torch.zeros((), dtype=torch.float64, device=inputs.device)\n",
        becomes="        self.loss = torch.zeros((), dtype=torch.float64)\n",
        caught_by="test_gpipe_equals_one_process",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="tie-groups-of-whole-pipelines-alone",
        exercise="2.8",
        mistake="a group of all stages of a pipeline is made by them alone: NCCL divides the "
        "world's communicator for it, and waits for the ranks outside of the pipeline, too",
        text="    return {ranks: dist.new_group(ranks) for ranks in dict.fromkeys(sets)}\n",
        becomes="""    whole = [tuple(sorted(ranks)) for ranks in pipelines]
    return {
        ranks: dist.new_group(ranks, use_local_synchronization=ranks in whole)
        for ranks in dict.fromkeys(sets)
    }
""",
        caught_by="test_ranks_outside_come_to_the_groups_of_a_pipeline",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="tie-groups-synchronised-locally",
        exercise="2.8",
        mistake="only members make the group of a tied parameter: NCCL divides the world's "
        "communicator for it, and waits for every rank",
        text="    return {ranks: dist.new_group(ranks) for ranks in dict.fromkeys(sets)}\n",
        becomes="    return {\n"
        "        ranks: dist.new_group(ranks, use_local_synchronization=True)\n"
        "        for ranks in dict.fromkeys(sets)\n"
        "    }\n",
        caught_by="test_gradients_of_every_stage",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="header-in-16-bits",
        exercise="2.8",
        mistake="the header is int16, a dtype that NCCL has not",
        text="        message = torch.tensor(header, device=y.device)\n",
        becomes="        message = torch.tensor(header, dtype=torch.int16, device=y.device)\n",
        caught_by="test_gradients_of_every_stage",
        told_as="exception",
        more=[
            (
                "        message = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=inputs.device)\n",
                "        message = torch.empty(2 + MOST_DIMS, dtype=torch.int16, device=inputs.device)\n",
            )
        ],
        tier="nccl",
    ),
    Mutant(
        id="split-gradient-awaited-early",
        exercise="2.8",
        mistake="the receive of the gradient is queued before the activation leaves",
        text="        send_activation(stage, y, announce)\n"
        "        gradient = torch.empty_like(y, memory_format=torch.contiguous_format)\n"
        "        dist.recv(gradient, group=stage.group, group_src=stage.rank + 1)\n",
        becomes="        gradient = torch.empty_like(y, memory_format=torch.contiguous_format)\n"
        "        arriving = dist.irecv(gradient, group=stage.group, group_src=stage.rank + 1)\n"
        "        send_activation(stage, y, announce)\n"
        "        arriving.wait()\n",
        caught_by="test_gradients_of_every_stage",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="split-loss-awaited-early",
        exercise="2.8",
        mistake="all stages but the last queue the broadcast of the loss before the receive "
        "of the gradient; the last one queues it after its send",
        text="        send_activation(stage, y, announce)\n"
        "        gradient = torch.empty_like(y, memory_format=torch.contiguous_format)\n",
        becomes="        send_activation(stage, y, announce)\n"
        "        telling = dist.broadcast(\n"
        "            loss, group_src=stage.count - 1, group=stage.group, async_op=True\n"
        "        )\n"
        "        gradient = torch.empty_like(y, memory_format=torch.contiguous_format)\n",
        caught_by="test_gradients_of_every_stage",
        told_as="hang",
        more=[
            (
                "    dist.broadcast(loss, group_src=stage.count - 1, group=stage.group)\n"
                "    return loss.item()\n",
                "    if stage.rank == stage.count - 1:\n"
                "        telling = dist.broadcast(loss, group_src=stage.rank, group=stage.group, async_op=True)\n"
                "    telling.wait()\n"
                "    return loss.item()\n",
            )
        ],
        tier="nccl",
    ),
    Mutant(
        id="activation-tagged",
        exercise="2.8",
        mistake="activations have a tag, to tell them from headers, and NCCL ignores tags",
        text="    dist.send(y.detach().contiguous(), group=stage.group, group_dst=stage.rank + 1)\n",
        becomes="    dist.send(y.detach().contiguous(), group=stage.group, tag=1, group_dst=stage.rank + 1)\n",
        caught_by="test_gradients_of_every_stage",
        told_as="exception",
        more=[
            (
                "    dist.recv(x, group=stage.group, group_src=source)\n    return",
                "    dist.recv(x, group=stage.group, tag=1, group_src=source)\n    return",
            )
        ],
        tier="nccl",
    ),
    Mutant(
        id="pipeline-receives-at-the-start",
        exercise="2.10",
        mistake="all receives of a step are queued before its first send",
        text="        for step in self.steps:\n            self.take(step)\n",
        becomes='        for step in sorted(self.steps, key=lambda step: not step.kind.startswith("recv")):\n'
        "            self.take(step)\n",
        caught_by="test_gpipe_equals_one_process",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="overflow-by-or",
        exercise="2.6",
        mistake="the flag is combined by BOR, an operator that NCCL has not",
        text="        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group)\n",
        becomes="        overflow = overflow.to(torch.uint8)\n"
        "        dist.all_reduce(overflow, op=dist.ReduceOp.BOR, group=group)\n",
        caught_by="test_overflow_on_one_rank_is_everybodys",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="overflow-on-the-host",
        exercise="2.6",
        mistake="the flag is moved to the CPU, and NCCL moves GPU memory only",
        text="        overflow = overflow.to(device_in(group))\n",
        becomes="        overflow = overflow.cpu()\n",
        caught_by="test_overflow_on_one_rank_is_everybodys",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="fits-on-the-host",
        exercise="2.4",
        mistake="the answer is made on the CPU, and NCCL moves GPU memory only",
        text="    everywhere = torch.tensor(fits, device=device)\n",
        becomes="    everywhere = torch.tensor(fits)\n",
        caught_by="test_search_finds_the_largest_on_all_ranks",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="sequence-own-block-in-flight",
        exercise="2.18",
        mistake="the own block is written into the buffer while the gather is under way",
        text="    work = dist.all_gather_into_tensor(blocks, x_BtD, group=group, async_op=True)\n",
        becomes="    work = dist.all_gather_into_tensor(blocks, x_BtD, group=group, async_op=True)\n"
        "    blocks.chunk(world_size)[dist.get_rank(group)].copy_(x_BtD)\n",
        caught_by="test_gather_and_scatter_are_conjugate",
        told_as="overwritten-in-flight",
        tier="nccl",
    ),
    Mutant(
        id="context-sends-one-by-one",
        exercise="2.22",
        mistake="every rank queues its receive, then its send: none is first by NCCL's order",
        text="""    handles = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=left),
            dist.P2POp(dist.isend, block, group=group, group_peer=right),
        ]
    )
""",
        becomes="""    handles = [
        dist.irecv(incoming, group=group, group_src=left),
        dist.isend(block, group=group, group_dst=right),
    ]
""",
        caught_by="test_ring_equals_one_process",
        told_as="hang",
        tier="nccl",
    ),
]
