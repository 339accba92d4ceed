"""Wrong implementations of exercises 3.1 to 3.4."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="ring-exchange-waits",
        exercise="3.1",
        mistake="exchange returns when both messages have arrived: nothing can happen beside them",
        text="        handles.append(dist.isend(outgoing, group=group, group_dst=to))\n    return handles\n",
        becomes="""        handles.append(dist.isend(outgoing, group=group, group_dst=to))
    wait(handles)
    return []
""",
        caught_by="test_exchange_starts_and_does_not_wait",
        told_as="hang",
    ),
    Mutant(
        id="ring-flat-by-reshape",
        exercise="3.1",
        mistake="reshape gives every other element of a row as a view, which can't be sent",
        text="    flat = tensor.detach().contiguous().view(-1)\n    yield flat\n",
        becomes="    flat = tensor.detach().reshape(-1)\n    yield flat\n",
        caught_by="test_reduce_scatter_on_views",
        told_as="exception",
    ),
    Mutant(
        id="ring-leaf-changed",
        exercise="3.1",
        mistake="a tensor that requires gradients does not when it comes back",
        text="    flat = tensor.detach().contiguous().view(-1)\n    yield flat\n",
        becomes="    flat = tensor.requires_grad_(False).contiguous().view(-1)\n    yield flat\n",
        caught_by="test_reduce_scatter_on_views",
        told_as="leaf",
    ),
    Mutant(
        id="ring-whole-tensor",
        exercise="3.1",
        mistake="the whole tensor travels at each hop",
        text="""            handles = exchange(chunks[send], right, incoming, left, group)
            wait(handles[:1])
            COMBINE[op](chunks[receive], incoming)
            wait(handles[1:])
""",
        becomes="""            whole = torch.empty_like(flat)
            wait(exchange(flat, right, whole, left, group))
            COMBINE[op](chunks[receive], whole.tensor_split(world_size)[receive])
""",
        caught_by="test_reduce_scatter_sends_every_chunk_but_its_own",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="ring-send-first",
        exercise="3.1",
        mistake="every rank sends, blocking, before it receives",
        text=(
            "    handles = [dist.irecv(incoming, group=group, group_src=source)] if "
            "incoming.numel() else []\n"
            "    if outgoing.numel():\n"
            "        handles.append(dist.isend(outgoing, group=group, group_dst=to))\n"
            "    return handles\n"
        ),
        becomes="""    if outgoing.numel():
        dist.send(outgoing, group=group, group_dst=to)
    if incoming.numel():
        dist.recv(incoming, group=group, group_src=source)
    return []
""",
        caught_by="test_reduce_scatter_completes_the_own_chunk",
        told_as="hang",
    ),
    Mutant(
        id="ring-even-odd",
        exercise="3.1",
        mistake="even ranks send first and odd ones receive first: no deadlock, but half the speed",
        text=(
            "    handles = [dist.irecv(incoming, group=group, group_src=source)] if "
            "incoming.numel() else []\n"
            "    if outgoing.numel():\n"
            "        handles.append(dist.isend(outgoing, group=group, group_dst=to))\n"
            "    return handles\n"
        ),
        becomes="""    for first in (dist.get_rank(group) % 2 == 0, dist.get_rank(group) % 2 == 1):
        if first and outgoing.numel():
            dist.send(outgoing, group=group, group_dst=to)
        elif not first and incoming.numel():
            dist.recv(incoming, group=group, group_src=source)
    return []
""",
        caught_by="test_reduce_scatter_takes_w_minus_1_steps",
        told_as="too-slow",
    ),
    Mutant(
        id="ring-own-chunk-shifted",
        exercise="3.1",
        mistake="rank r completes chunk r+1",
        text="        ((rank - step - 1) % world_size, (rank - step - 2) % world_size)\n",
        becomes="        ((rank - step) % world_size, (rank - step - 1) % world_size)\n",
        caught_by="test_reduce_scatter_completes_the_own_chunk",
        told_as="other-chunk",
    ),
    Mutant(
        id="ring-one-step-short",
        exercise="3.1",
        mistake="W-2 steps: the last rank's part is missing",
        text="""        ((rank - step - 1) % world_size, (rank - step - 2) % world_size)
        for step in range(world_size - 1)
""",
        becomes="""        ((rank - step - 1) % world_size, (rank - step - 2) % world_size)
        for step in range(1, world_size - 1)
""",
        caught_by="test_reduce_scatter_completes_the_own_chunk",
        told_as="missing-rank",
    ),
    Mutant(
        id="ring-equal-chunks",
        exercise="3.1",
        mistake="chunks of N // W elements: the rest is never reduced",
        text="        buffer = torch.empty_like(chunks[0])\n",
        becomes="""        even = flat.numel() // world_size
        chunks = [chunk[:even] for chunk in chunks]
        buffer = torch.empty_like(chunks[0])
""",
        caught_by="test_reduce_scatter_completes_the_own_chunk",
        told_as="rest-kept",
    ),
    Mutant(
        id="ring-chunk-not-split",
        exercise="3.1",
        mistake="torch.chunk gives fewer chunks than ranks if the tensor is short",
        text="""        chunks = flat.tensor_split(world_size)
        buffer""",
        becomes="""        chunks = flat.chunk(world_size)
        buffer""",
        caught_by="test_reduce_scatter_completes_the_own_chunk",
        told_as="exception",
    ),
    Mutant(
        id="ring-send-buffer-reused",
        exercise="3.1",
        mistake="the sum is written into the buffer that is still being sent",
        text="""            handles = exchange(chunks[send], right, incoming, left, group)
            wait(handles[:1])
            COMBINE[op](chunks[receive], incoming)
            wait(handles[1:])
""",
        becomes="""            travelling = chunks[send].clone()
            handles = exchange(travelling, right, incoming, left, group)
            wait(handles[:1])
            if travelling.numel() == incoming.numel():
                travelling.copy_(incoming)
            wait(handles[1:])
            COMBINE[op](chunks[receive], incoming)
""",
        caught_by="test_reduce_scatter_sends_every_chunk_but_its_own",
        told_as="overwritten-in-flight",
    ),
    Mutant(
        id="ring-send-not-awaited",
        exercise="3.1",
        mistake="only the receive is waited for",
        text="""            handles = exchange(chunks[send], right, incoming, left, group)
            wait(handles[:1])
            COMBINE[op](chunks[receive], incoming)
            wait(handles[1:])
""",
        becomes="""            wait(exchange(chunks[send], right, incoming, left, group)[:1])
            COMBINE[op](chunks[receive], incoming)
""",
        caught_by="test_reduce_scatter_sends_every_chunk_but_its_own",
        told_as="never-waited",
    ),
    Mutant(
        id="ring-max-new-tensor",
        exercise="3.1",
        mistake="the maximum is a new tensor, the chunk stays as it was",
        text="torch.maximum(ours, theirs, out=ours)",
        becomes="torch.maximum(ours, theirs)",
        caught_by="test_reduce_scatter_completes_the_own_chunk",
        told_as="unchanged",
    ),
    Mutant(
        id="ring-view-not-written",
        exercise="3.1",
        mistake="a strided tensor is reduced in a copy that nobody sees",
        text="""    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))
""",
        becomes="",
        caught_by="test_reduce_scatter_on_views",
        told_as="unchanged",
    ),
    Mutant(
        id="ring-global-ranks",
        exercise="3.1",
        mistake="the group's ranks are taken for global ones",
        text="dist.isend(outgoing, group=group, group_dst=to)",
        becomes="dist.isend(outgoing, to, group)",
        caught_by="test_reduce_scatter_in_groups",
        told_as="exception",
    ),
    Mutant(
        id="ring-mean-each-step",
        exercise="3.1",
        mistake="the mean is divided at each step",
        text="""            handles = exchange(chunks[send], right, incoming, left, group)
            wait(handles[:1])
            COMBINE[op](chunks[receive], incoming)
            wait(handles[1:])
""",
        becomes="""            handles = exchange(chunks[send], right, incoming, left, group)
            wait(handles[:1])
            COMBINE[op](chunks[receive], incoming)
            wait(handles[1:])
            if op == "mean":
                chunks[receive].div_(world_size)
""",
        caught_by="test_reduce_scatter_completes_the_own_chunk",
        told_as="wrong",
    ),
    Mutant(
        id="ring-not-divided",
        exercise="3.1",
        mistake="the mean is the sum",
        text="""        if op == "mean":
            chunks[rank].div_(world_size)
""",
        becomes="",
        caught_by="test_reduce_scatter_completes_the_own_chunk",
        told_as="summed",
    ),
    Mutant(
        id="ring-library",
        exercise="3.1",
        mistake="torch's own all-reduce does the work",
        text="""            handles = exchange(chunks[send], right, incoming, left, group)
            wait(handles[:1])
            COMBINE[op](chunks[receive], incoming)
            wait(handles[1:])
""",
        becomes="""            pass
        dist.all_reduce(flat, dist.ReduceOp.MAX if op == 'max' else dist.ReduceOp.SUM, group=group)
""",
        caught_by="test_reduce_scatter_sends_every_chunk_but_its_own",
        told_as="forbidden-operator",
    ),
    Mutant(
        id="ring-buffer-per-step",
        exercise="3.1",
        mistake="all receive buffers are allocated at once: a whole tensor of memory",
        text="        buffer = torch.empty_like(chunks[0])\n",
        becomes="""        kept = [torch.empty_like(chunk) for chunk in chunks]
        buffer = kept[0]
""",
        caught_by="test_reduce_scatter_needs_one_chunk_of_memory",
        told_as="too-much-memory",
    ),
    Mutant(
        id="ring-integer-mean",
        exercise="3.1",
        mistake="the mean of integers is accepted",
        text='    if op == "mean" and not tensor.is_floating_point():\n',
        becomes='    if op == "average":\n',
        caught_by="test_reduce_scatter_in_groups",
        told_as="accepted",
    ),
    Mutant(
        id="gather-off-by-one",
        exercise="3.2",
        mistake="the all-gather begins with the chunk after the own one",
        text="        ((rank - step) % world_size, (rank - step - 1) % world_size)\n",
        becomes="        ((rank - step + 1) % world_size, (rank - step) % world_size)\n",
        caught_by="test_all_gather_brings_every_chunk_everywhere",
        told_as="wrong",
    ),
    Mutant(
        id="gather-adds",
        exercise="3.2",
        mistake="what arrives is still added up",
        text="            wait(exchange(chunks[send], right, chunks[receive], left, group))\n",
        becomes="""            incoming = torch.empty_like(chunks[receive])
            wait(exchange(chunks[send], right, incoming, left, group))
            chunks[receive].add_(incoming)
""",
        caught_by="test_all_gather_brings_every_chunk_everywhere",
        told_as="wrong",
    ),
    Mutant(
        id="gather-from-the-start",
        exercise="3.2",
        mistake="the own chunk goes to everybody at once instead of around the ring",
        text="            wait(exchange(chunks[send], right, chunks[receive], left, group))\n",
        becomes="""            step = (rank - send) % world_size + 1
            to, source = (rank + step) % world_size, (rank - step) % world_size
            wait(exchange(chunks[rank], to, chunks[source], source, group))
""",
        caught_by="test_all_gather_sends_every_chunk_but_one",
        told_as="not-a-ring",
    ),
    Mutant(
        id="gather-whole",
        exercise="3.2",
        mistake="everything that is known is sent at each hop",
        text="            wait(exchange(chunks[send], right, chunks[receive], left, group))\n",
        becomes="""            whole = torch.empty_like(flat)
            wait(exchange(flat, right, whole, left, group))
            chunks[receive].copy_(whole.tensor_split(world_size)[receive])
""",
        caught_by="test_all_gather_sends_every_chunk_but_one",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="gather-one-after-another",
        exercise="3.2",
        mistake="rank 0 sends, then rank 1 …: one link is busy at a time",
        text="            wait(exchange(chunks[send], right, chunks[receive], left, group))\n",
        becomes=(
            "            first = dist.P2POp(dist.irecv, chunks[receive], group=group, "
            "group_peer=left)\n"
            "            handles = dist.batch_isend_irecv([first]) if chunks[receive].numel() "
            "else []\n"
            "            for handle in handles if rank else []:\n"
            "                handle.wait()\n"
            "            if chunks[send].numel():\n"
            "                dist.send(chunks[send], group=group, group_dst=right)\n"
            "            for handle in handles if not rank else []:\n"
            "                handle.wait()\n"
        ),
        caught_by="test_all_gather_takes_w_minus_1_steps_and_no_memory",
        told_as="too-slow",
    ),
    Mutant(
        id="gather-library",
        exercise="3.2",
        mistake="torch's own broadcast does the work, chunk after chunk",
        text="            wait(exchange(chunks[send], right, chunks[receive], left, group))\n",
        becomes="""            pass
        for root, chunk in enumerate(chunks):
            dist.broadcast(chunk, group=group, group_src=root)
""",
        caught_by="test_all_gather_sends_every_chunk_but_one",
        told_as="forbidden-operator",
    ),
    Mutant(
        id="gather-buffers",
        exercise="3.2",
        mistake="chunks are received into a buffer and copied",
        text="            wait(exchange(chunks[send], right, chunks[receive], left, group))\n",
        becomes="""            incoming = torch.empty_like(chunks[receive])
            wait(exchange(chunks[send], right, incoming, left, group))
            chunks[receive].copy_(incoming)
""",
        caught_by="test_all_gather_takes_w_minus_1_steps_and_no_memory",
        told_as="too-much-memory",
    ),
    Mutant(
        id="all-reduce-half",
        exercise="3.3",
        mistake="the second half is forgotten: every rank has one chunk of the result",
        text="""        ring_reduce_scatter(flat, op, group)
        ring_all_gather(flat, group)
""",
        becomes="        ring_reduce_scatter(flat, op, group)\n",
        caught_by="test_all_reduce_on_every_rank",
        told_as="chunk-partial",
    ),
    Mutant(
        id="all-reduce-mean-twice",
        exercise="3.3",
        mistake="divided by the world size after the reduce-scatter has done it",
        text="""        ring_reduce_scatter(flat, op, group)
        ring_all_gather(flat, group)
""",
        becomes="""        ring_reduce_scatter(flat, op, group)
        ring_all_gather(flat, group)
        if op == "mean":
            flat.div_(dist.get_world_size(group))
""",
        caught_by="test_all_reduce_on_every_rank",
        told_as="divided-twice",
    ),
    Mutant(
        id="all-reduce-everyone-adds",
        exercise="3.3",
        mistake="whole tensors go round and every rank adds in its own order: replicas drift apart",
        text="""        ring_reduce_scatter(flat, op, group)
        ring_all_gather(flat, group)
""",
        becomes="""        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        moving, total = flat.clone(), flat
        for _ in range(world_size - 1):
            incoming = torch.empty_like(moving)
            to, source = (rank + 1) % world_size, (rank - 1) % world_size
            wait(exchange(moving, to, incoming, source, group))
            COMBINE[op](total, incoming)
            moving = incoming
        if op == "mean":
            total.div_(world_size)
""",
        caught_by="test_all_reduce_sends_the_least_possible",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="all-reduce-clones",
        exercise="3.3",
        mistake="the result is in a new tensor",
        text="""        agree(tensor, op, group)
    with flattened(tensor) as flat:
""",
        becomes="""        agree(tensor, op, group)
    tensor = tensor.clone()
    with flattened(tensor) as flat:
""",
        caught_by="test_all_reduce_on_every_rank",
        told_as="unchanged",
    ),
    Mutant(
        id="all-reduce-library",
        exercise="3.3",
        mistake="torch's own all-reduce does the work",
        text="""        ring_reduce_scatter(flat, op, group)
        ring_all_gather(flat, group)
""",
        becomes="""        operator = dist.ReduceOp.MAX if op == 'max' else dist.ReduceOp.SUM
        dist.all_reduce(flat, operator, group=group)
        if op == 'mean':
            flat.div_(dist.get_world_size(group))
""",
        caught_by="test_all_reduce_sends_the_least_possible",
        told_as="forbidden-operator",
    ),
    Mutant(
        id="all-reduce-view-lost",
        exercise="3.3",
        mistake="reshape copies a strided tensor, and the copy is reduced",
        text="""    with flattened(tensor) as flat:
        ring_reduce_scatter(flat, op, group)
        ring_all_gather(flat, group)
""",
        becomes="""    flat = tensor.detach().reshape(-1)
    if flat.numel():
        ring_reduce_scatter(flat, op, group)
        ring_all_gather(flat, group)
""",
        caught_by="test_all_reduce_on_views",
        told_as="unchanged",
    ),
    Mutant(
        id="agree-neighbours-only",
        exercise="3.3",
        mistake="each rank compares with its left neighbour only: the others don't learn of it",
        text="""    distance = 1
    while distance < world_size:
""",
        becomes="""    distance = 1
    while distance < min(world_size, 2):
""",
        caught_by="test_check_tells_every_rank",
        told_as=("accepted", "hang"),
    ),
    Mutant(
        id="agree-power-of-two",
        exercise="3.3",
        mistake="partners by XOR exist for powers of two only",
        text=(
            "        to, source = (rank + distance) % world_size, (rank - distance) % world_size\n"
        ),
        becomes="        to = source = rank ^ distance\n",
        caught_by="test_check_tells_every_rank",
        told_as=("accepted", "hang"),
    ),
    Mutant(
        id="agree-unknown-alone",
        exercise="3.3",
        mistake="a rank with an unknown operator raises alone, and the others wait for it",
        text="ops.index(op) if op in ops else -1]\n",
        becomes="ops.index(op)]\n",
        caught_by="test_check_tells_every_rank",
        told_as=("hang", "mismatch"),
    ),
    Mutant(
        id="agree-unknown-counts-as-the-mean",
        exercise="3.3",
        mistake="an unknown operator has the number of the mean: it is refused on its own rank alone",
        text="ops.index(op) if op in ops else -1]\n",
        becomes="ops.index(op) if op in ops else 1]\n",
        caught_by="test_check_tells_every_rank",
        told_as=("hang", "mismatch"),
    ),
    Mutant(
        id="agree-sums",
        exercise="3.3",
        mistake="sums count some ranks twice if W is no power of two",
        text="        known = torch.maximum(known, incoming)\n",
        becomes="        known = known + incoming\n",
        more=(
            (
                "    if most != least:\n",
                "    if [world_size * fact for fact in facts] != most:\n",
            ),
        ),
        caught_by="test_check_tells_every_rank",
        told_as="exception",
    ),
    Mutant(
        id="agree-lengths-only",
        exercise="3.3",
        mistake="dtypes and operators are not compared",
        text="    if most != least:\n",
        becomes="    if most[0] != least[0]:\n",
        caught_by="test_check_tells_every_rank",
        told_as="mismatch",
    ),
    Mutant(
        id="agree-after-arguments",
        exercise="3.3",
        mistake=(
            "the rank with the integers leaves before the agreement, and the others wait for it"
        ),
        text="""    if check:
        agree(tensor, op, group)
""",
        becomes="""    check_arguments(tensor, op, group)
    if check:
        agree(tensor, op, group)
""",
        caught_by="test_check_tells_every_rank",
        told_as=("hang", "mismatch"),
    ),
    Mutant(
        id="agree-around-the-ring",
        exercise="3.3",
        mistake="W-1 messages one after another to agree, where ⌈log₂ W⌉ are enough",
        text="        distance *= 2\n",
        becomes="        distance += 1\n",
        more=(
            (
                (
                    "        to, source = (rank + distance) % world_size, (rank - distance) % "
                    "world_size\n"
                ),
                "        to, source = (rank + 1) % world_size, (rank - 1) % world_size\n",
            ),
        ),
        caught_by="test_check_costs_a_few_tiny_messages",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="agree-always",
        exercise="3.3",
        mistake="the agreement costs its messages also when nobody asked for it",
        text="""    if check:
        agree(tensor, op, group)
""",
        becomes="""    agree(tensor, op, group)
""",
        caught_by="test_all_reduce_sends_the_least_possible",
        told_as="not-a-ring",
    ),
    Mutant(
        id="segments-one-at-a-time",
        exercise="3.4",
        mistake="each segment is finished before the next is started: nothing overlaps",
        text="        window = min(WINDOW, count)\n",
        becomes="        window = 1\n",
        caught_by="test_latency_is_paid_once",
        told_as="too-slow",
    ),
    Mutant(
        id="segments-start-late",
        exercise="3.4",
        mistake="a pair of segments is waited for, then both are combined while the links are idle",
        text="""            if len(started) == window:
                finish(*started.popleft())
""",
        becomes="""            if len(started) == window:
                for _, _, handles in started:
                    for handle in handles:
                        handle.wait()
                    handles.clear()
                while started:
                    finish(*started.popleft())
""",
        caught_by="test_additions_are_hidden",
        told_as="additions-exposed",
    ),
    Mutant(
        id="segments-sends-not-awaited",
        exercise="3.4",
        mistake="only the receives are waited for",
        text="""            hop.target.div_(world_size)
        wait(handles[1:])
""",
        becomes="            hop.target.div_(world_size)\n",
        caught_by="test_segments_give_the_same_result",
        told_as="never-waited",
    ),
    Mutant(
        id="segments-short-last-one-lost",
        exercise="3.4",
        mistake="whole segments only: what is left of a chunk is never reduced",
        text="""math.ceil(chunks[0].numel() / longest))
        segments = [chunk.tensor_split(count) for chunk in chunks]
""",
        becomes="""chunks[0].numel() // longest)
        size = min(longest, chunks[0].numel())
        segments = [(chunk.split(size) * count)[:count] for chunk in chunks]
""",
        caught_by="test_segments_give_the_same_result",
        told_as="two-in-one-buffer",
    ),
    Mutant(
        id="segments-below-an-element",
        exercise="3.4",
        mistake="a segment_bytes smaller than an element gives segments of no element",
        text="        longest = max(1, segment_bytes // flat.element_size())\n",
        becomes="        longest = segment_bytes // flat.element_size()\n",
        caught_by="test_segments_of_views",
        told_as="exception",
    ),
    Mutant(
        id="segments-share-a-buffer",
        exercise="3.4",
        mistake="two segments arrive in one buffer",
        text="            buffer = buffers[number % window][: hop.target.numel()]\n",
        becomes="            buffer = buffers[0][: hop.target.numel()]\n",
        caught_by="test_segments_give_the_same_result",
        told_as="two-in-one-buffer",
    ),
    Mutant(
        id="segments-too-many-at-once",
        exercise="3.4",
        mistake=(
            "a segment is sent on before it has come: more hops on their way than segments per "
            "chunk"
        ),
        text="        window = min(WINDOW, count)\n",
        becomes="        window = WINDOW\n",
        caught_by="test_segments_are_small_and_nothing_is_sent_twice",
        told_as="overwritten-in-flight",
    ),
    Mutant(
        id="segments-all-at-once",
        exercise="3.4",
        mistake="a buffer for every segment of a chunk",
        text="        window = min(WINDOW, count)\n",
        becomes="        window = count\n",
        caught_by="test_a_few_segments_of_memory",
        told_as="too-much-memory",
    ),
    Mutant(
        id="segments-by-own-chunk",
        exercise="3.4",
        mistake="the number of segments follows from the own chunk, whose length differs by rank",
        text="        count = max(1, math.ceil(chunks[0].numel() / longest))\n",
        becomes="        count = max(1, math.ceil(chunks[rank].numel() / longest))\n",
        caught_by="test_segments_give_the_same_result",
        told_as="mismatch",
    ),
    Mutant(
        id="segments-too-long",
        exercise="3.4",
        mistake="segment_bytes counts elements",
        text="        longest = max(1, segment_bytes // flat.element_size())\n",
        becomes="        longest = segment_bytes\n",
        caught_by="test_segments_are_small_and_nothing_is_sent_twice",
        told_as="long-segment",
    ),
    Mutant(
        id="segments-mean-at-the-end",
        exercise="3.4",
        mistake="the mean is divided where a segment completes, and again at the end",
        text="""        for each in started:
            finish(*each)
""",
        becomes="""        for each in started:
            finish(*each)
        if op == "mean":
            flat.div_(world_size)
""",
        caught_by="test_segments_give_the_same_result",
        told_as="divided-twice",
    ),
    Mutant(
        id="segments-last-not-finished",
        exercise="3.4",
        mistake="what is on its way at the end is not waited for",
        text="""        for each in started:
            finish(*each)
""",
        becomes="",
        caught_by="test_segments_give_the_same_result",
        told_as="never-waited",
    ),
    Mutant(
        id="segments-completes-always",
        exercise="3.4",
        mistake="every hop of the reduce-scatter divides",
        text="combines and receive == rank)",
        becomes="combines)",
        caught_by="test_segments_give_the_same_result",
        told_as="wrong",
    ),
    Mutant(
        id="ring-gathers-a-copy",
        exercise="3.2",
        mistake="what a strided tensor receives stays in the copy",
        text="""    with flattened(tensor) as flat:
        chunks = flat.tensor_split(world_size)
        for send, receive in all_gather_steps""",
        becomes="""    for flat in [tensor.detach().contiguous().view(-1)]:
        chunks = flat.tensor_split(world_size)
        for send, receive in all_gather_steps""",
        caught_by="test_all_gather_on_views_and_in_groups",
        told_as="unchanged",
    ),
    Mutant(
        id="ring-in-the-order-of-memory",
        exercise="3.3",
        mistake="elements go by their addresses: with other strides on another rank others meet",
        text="""    with flattened(tensor) as flat:
        ring_reduce_scatter(flat, op, group)
""",
        becomes="""    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    with flattened(tensor.detach().permute(order)) as flat:
        ring_reduce_scatter(flat, op, group)
""",
        caught_by="test_all_reduce_on_views",
        told_as="wrong",
    ),
]
