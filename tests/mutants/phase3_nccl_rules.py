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
    Mutant(
        id="streaming-packed-on-the-host",
        exercise="3.34",
        mistake="the differences are packed on the host: NCCL moves GPU memory only",
        text="            mine = pack_e3m0(flat)\n",
        becomes="            mine = pack_e3m0(flat.cpu())\n",
        caught_by="test_four_bits_travel",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="ring-check-on-the-host",
        exercise="3.3",
        mistake="what the ranks compare is made on the CPU, and NCCL moves GPU memory only",
        text="    known = torch.tensor([*facts, *(-fact for fact in facts)], device=tensor.device)\n",
        becomes="    known = torch.tensor([*facts, *(-fact for fact in facts)])\n",
        caught_by="test_check_tells_every_rank",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="order-on-the-host",
        exercise="3.9",
        mistake="the order is made on the CPU, and NCCL moves GPU memory only",
        text="    order = torch.tensor(arrived, dtype=torch.int64, device=device)\n",
        becomes="    order = torch.tensor(arrived, dtype=torch.int64)\n",
        caught_by="test_first_ranks_order_is_everybodys",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="states-sizes-on-the-host",
        exercise="3.13",
        mistake="the size of a state is made on the CPU, and NCCL moves GPU memory only",
        text="torch.tensor([len(sent)], device=device), group=group)\n",
        becomes="torch.tensor([len(sent)]), group=group)\n",
        caught_by="test_state_moves_to_another_world_size",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="local-sums-on-the-host",
        exercise="3.25",
        mistake="the sum of the losses is made on the CPU, and NCCL moves GPU memory only",
        text="    dist.all_reduce(sums, group=rounds.group)\n",
        becomes="    sums = sums.cpu()\n    dist.all_reduce(sums, group=rounds.group)\n",
        caught_by="test_train_counts_empty_batches",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="halves-no-batch",
        exercise="3.6",
        mistake="both partners queue a receive, then a send, as calls of their own",
        text="            handles = exchange(give, rank ^ distance, incoming, rank ^ distance, group)\n",
        becomes="            handles = [dist.irecv(incoming, group=group, group_src=rank ^ distance)]\n"
        "            handles.append(dist.isend(give, group=group, group_dst=rank ^ distance))\n",
        more=[
            (
                "from torch import Tensor\n",
                "import torch.distributed as dist\nfrom torch import Tensor\n",
            )
        ],
        caught_by="test_halving_doubling_on_every_rank",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="guest-result-awaited-early",
        exercise="3.6",
        mistake="a rank above P queues the receive of the result before its tensor leaves",
        text="            wait(exchange(flat, rank - core, flat[:0], rank - core, group))\n"
        "            wait(exchange(flat[:0], rank - core, flat, rank - core, group))\n"
        "            return\n",
        becomes="            result = flat.clone()\n"
        "            arriving = exchange(flat[:0], rank - core, result, rank - core, group)\n"
        "            wait(exchange(flat, rank - core, flat[:0], rank - core, group))\n"
        "            wait(arriving)\n"
        "            flat.copy_(result)\n"
        "            return\n",
        caught_by="test_halving_doubling_on_every_rank",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="agree-no-batch",
        exercise="3.3",
        mistake="all ranks of a circle queue a send, then a receive, as calls of their own",
        text="        wait(exchange(known, to, incoming, source, group))\n        known",
        becomes="        sending = dist.isend(known, group=group, group_dst=to)\n"
        "        dist.recv(incoming, group=group, group_src=source)\n"
        "        sending.wait()\n"
        "        known",
        caught_by="test_check_tells_every_rank",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="tree-from-any-child",
        exercise="3.5",
        mistake="a parent takes what comes first, and NCCL has no receive from any rank",
        text="        dist.recv(incoming, group=group, group_src=child)\n",
        becomes="        dist.recv(incoming, group=group)\n",
        caught_by="test_tree_all_reduce_on_every_rank",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="node-exchange-no-batch",
        exercise="3.8",
        mistake="the shards of a node go by messages: all its ranks queue their receives, "
        "then their sends",
        text="    dist.all_to_all_single(received, padded, group=groups.node)\n"
        "    versions = received.view(local_size, shard)\n",
        becomes="    versions, mine = received.view(local_size, shard), padded.view(local_size, shard)\n"
        "    me = dist.get_rank(groups.node)\n"
        "    others = [peer for peer in range(local_size) if peer != me]\n"
        "    handles = [dist.irecv(versions[p], group=groups.node, group_src=p) for p in others]\n"
        "    handles += [dist.isend(mine[p], group=groups.node, group_dst=p) for p in others]\n"
        "    versions[me] = mine[me]\n"
        "    for handle in handles:\n"
        "        handle.wait()\n",
        caught_by="test_even_nodes_combine",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="leader-sums-from-anyone",
        exercise="3.8",
        mistake="the leader takes what comes first, and NCCL has no receive from any rank",
        text="    dist.reduce(result, op=REDUCE[op], group=groups.node, group_dst=0)\n"
        "    if dist.get_rank(groups.node) == 0:\n",
        becomes="    if dist.get_rank(groups.node):\n"
        "        dist.send(result, group=groups.node, group_dst=0)\n"
        "    else:\n"
        "        value = torch.empty_like(result)\n"
        "        for _ in range(dist.get_world_size(groups.node) - 1):\n"
        "            dist.recv(value, group=groups.node)\n"
        '            result = torch.maximum(result, value) if op == "max" else result.add_(value)\n',
        caught_by="test_uneven_nodes_combine",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="bucket-looked-at-in-flight",
        exercise="3.10",
        mistake="a bucket is looked at, for numbers that are not finite, while it is under way",
        text="            self.handles.append(self.hook(self.buckets[len(self.handles)]))\n",
        becomes="            self.handles.append(self.hook(self.buckets[len(self.handles)]))\n"
        "            if not self.buckets[len(self.handles) - 1].buffer.isfinite().all():\n"
        '                raise ValueError("a gradient is not finite")\n',
        caught_by="test_gradients_are_means_over_the_ranks",
        told_as="read-in-flight",
        tier="nccl",
    ),
    Mutant(
        id="zero2-flags-by-or",
        exercise="3.14",
        mistake="flags are combined by BOR, an operator that NCCL has not",
        text="        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)\n",
        becomes="        dist.all_reduce(used, dist.ReduceOp.BOR, group=self.group)\n",
        caught_by="test_training_equals_one_process",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="own-part-written-in-flight",
        exercise="3.15",
        mistake="the own part is written into the full vector while the gather is under way",
        text="            self.full, self.gather_input(), group=self.group, async_op=True\n"
        "        )\n",
        becomes="            self.full, self.gather_input(), group=self.group, async_op=True\n"
        "        )\n"
        "        rank = dist.get_rank(self.group)\n"
        "        self.full.data.view(-1, self.chunk)[rank].copy_(self.gather_input())\n",
        caught_by="test_training_equals_one_process",
        told_as="overwritten-in-flight",
        tier="nccl",
    ),
    Mutant(
        id="budget-on-the-host",
        exercise="3.21",
        mistake="the bytes are made on the CPU, and NCCL moves GPU memory only",
        text="    least = torch.tensor(own_bytes, dtype=torch.int64, device=device)\n",
        becomes="    least = torch.tensor(own_bytes, dtype=torch.int64)\n",
        caught_by="test_ranks_agree_on_the_budget",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="local-model-strided",
        exercise="3.25",
        mistake="the model's tensors are sent as they lie, and NCCL takes contiguous tensors only",
        text="                values = tensor.contiguous()\n"
        "                dist.broadcast(values, group=self.group, group_src=0)\n"
        "                tensor.copy_(values)\n",
        becomes="                dist.broadcast(tensor, group=self.group, group_src=0)\n",
        caught_by="test_rounds_of_local_sgd",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="clip-on-the-host",
        exercise="3.15",
        mistake="the sum of squares stays on the CPU, where offloaded shards are, and NCCL "
        "moves GPU memory only",
        text="    squares = squares.to(device_in(model.group))\n",
        becomes="",
        caught_by="test_clipping_of_shards_on_the_cpu",
        told_as="exception",
        tier="nccl",
    ),
]
