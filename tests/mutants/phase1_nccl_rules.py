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
        id="step-sums-on-the-host",
        exercise="1.5",
        mistake="the sum of the losses is moved to the CPU, and NCCL moves GPU memory only",
        text="    pending = dist.all_reduce(sums",
        becomes="    sums = sums.cpu()\n    pending = dist.all_reduce(sums",
        caught_by="test_training_equals_one_process",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="direct-no-batch",
        exercise="1.8",
        mistake="all ranks queue their receives, then their sends, as calls of their own: the "
        "first receive waits for a send that is behind another receive",
        text="    batch = [dist.P2POp(dist.irecv, values[peer], group=group, group_peer=peer) for peer in others]\n"
        "    batch += [dist.P2POp(dist.isend, mine, group=group, group_peer=peer) for peer in others]\n"
        "    handles = dist.batch_isend_irecv(batch) if batch else []\n",
        becomes="    receives = [dist.irecv(values[p], group=group, group_src=p) for p in others]\n"
        "    sends = [dist.isend(mine, group=group, group_dst=p) for p in others]\n"
        "    handles = receives + sends\n",
        caught_by="test_direct_and_chain_combine",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="direct-sends-queued-first",
        exercise="1.8",
        mistake="all ranks queue their sends, then their receives, as calls of their own",
        text="    batch = [dist.P2POp(dist.irecv, values[peer], group=group, group_peer=peer) for peer in others]\n"
        "    batch += [dist.P2POp(dist.isend, mine, group=group, group_peer=peer) for peer in others]\n"
        "    handles = dist.batch_isend_irecv(batch) if batch else []\n",
        becomes="    sends = [dist.isend(mine, group=group, group_dst=p) for p in others]\n"
        "    receives = [dist.irecv(values[p], group=group, group_src=p) for p in others]\n"
        "    handles = sends + receives\n",
        caught_by="test_direct_and_chain_combine",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="direct-batch-of-receives",
        exercise="1.8",
        mistake="the receives are a batch, the sends another one behind it",
        text="    batch = [dist.P2POp(dist.irecv, values[peer], group=group, group_peer=peer) for peer in others]\n"
        "    batch += [dist.P2POp(dist.isend, mine, group=group, group_peer=peer) for peer in others]\n"
        "    handles = dist.batch_isend_irecv(batch) if batch else []\n",
        becomes="    receives = [dist.P2POp(dist.irecv, values[p], None, group, group_peer=p) for p in others]\n"
        "    sends = [dist.P2POp(dist.isend, mine, None, group, group_peer=p) for p in others]\n"
        "    handles = [w for batch in (receives, sends) if batch for w in dist.batch_isend_irecv(batch)]\n",
        caught_by="test_direct_and_chain_combine",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="direct-batch-per-partner",
        exercise="1.8",
        mistake="a batch for each partner, the right neighbour first: the ranks of a circle "
        "begin with different partners",
        text="    batch = [dist.P2POp(dist.irecv, values[peer], group=group, group_peer=peer) for peer in others]\n"
        "    batch += [dist.P2POp(dist.isend, mine, group=group, group_peer=peer) for peer in others]\n"
        "    handles = dist.batch_isend_irecv(batch) if batch else []\n",
        becomes="    handles = []\n"
        "    for peer in others[rank:] + others[:rank]:\n"
        "        pair = [dist.P2POp(dist.irecv, values[peer], group=group, group_peer=peer)]\n"
        "        pair += [dist.P2POp(dist.isend, mine, group=group, group_peer=peer)]\n"
        "        handles += dist.batch_isend_irecv(pair)\n",
        caught_by="test_direct_and_chain_combine",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="chain-result-awaited-early",
        exercise="1.8",
        mistake="the receive of the result is queued before the partial result leaves",
        text="        dist.send(result, group=group, group_dst=rank + 1)\n"
        "        dist.recv(result, group=group, group_src=rank + 1)\n",
        becomes="        total = torch.empty_like(result)\n"
        "        arriving = dist.irecv(total, group=group, group_src=rank + 1)\n"
        "        dist.send(result, group=group, group_dst=rank + 1)\n"
        "        arriving.wait()\n"
        "        result = total\n",
        caught_by="test_direct_and_chain_combine",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="chain-way-back-tagged",
        exercise="1.8",
        mistake="the results have a tag, which NCCL ignores",
        text="        dist.recv(result, group=group, group_src=rank + 1)\n",
        becomes="        dist.recv(result, group=group, tag=1, group_src=rank + 1)\n",
        caught_by="test_direct_and_chain_combine",
        told_as="exception",
        more=[
            (
                "        dist.send(result, group=group, group_dst=rank - 1)\n",
                "        dist.send(result, group=group, tag=1, group_dst=rank - 1)\n",
            )
        ],
        tier="nccl",
    ),
    Mutant(
        id="root-result-awaited-early",
        exercise="1.7",
        mistake="the receive of the result is queued before the own tensor leaves",
        text="        dist.send(result, group=group, group_dst=root)\n"
        "        dist.recv(result, group=group, group_src=root)\n",
        becomes="        total = torch.empty_like(result)\n"
        "        arriving = dist.irecv(total, group=group, group_src=root)\n"
        "        dist.send(result, group=group, group_dst=root)\n"
        "        arriving.wait()\n"
        "        result = total\n",
        caught_by="test_root_combines_all_operators",
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="step-loss-looked-at-in-flight",
        exercise="1.5",
        mistake="the sum of the losses is looked at while its all-reduce is under way",
        text="    average_gradients(model.parameters(), len(targets), group)\n"
        "    optimizer.step()\n",
        becomes="    if not sums.isfinite().all():\n"
        '        raise ValueError("the loss is not finite")\n'
        "    average_gradients(model.parameters(), len(targets), group)\n"
        "    optimizer.step()\n",
        caught_by="test_training_equals_one_process",
        told_as="read-in-flight",
        tier="nccl",
    ),
    Mutant(
        id="sums-on-the-host",
        exercise="1.6",
        mistake="the sums are made on the CPU, and NCCL moves GPU memory only",
        text="    sums = torch.tensor([loss_sum, correct, count], dtype=torch.float64, device=device)\n",
        becomes="    sums = torch.tensor([loss_sum, correct, count], dtype=torch.float64)\n",
        caught_by="test_evaluation_is_exact",
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="state-on-the-host",
        exercise="1.3",
        mistake="the state is copied to the CPU to be sent, and NCCL moves GPU memory only",
        text="            flat = tensor.clone(memory_format=torch.contiguous_format)\n"
        "            dist",
        becomes="            flat = tensor.cpu().clone(memory_format=torch.contiguous_format)\n"
        "            dist",
        caught_by="test_state_equals_the_source",
        told_as="exception",
        tier="nccl",
    ),
]
