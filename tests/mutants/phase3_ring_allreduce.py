"""Wrong implementations of exercises 3.1 to 3.4."""

from distlab.grading.wrong import Mutant

OWN, RS_BYTES = (
    "test_reduce_scatter_completes_the_own_chunk",
    "test_reduce_scatter_sends_every_chunk_but_its_own",
)
RS_TIME, RS_VIEWS = (
    "test_reduce_scatter_takes_w_minus_1_steps",
    "test_reduce_scatter_on_views_and_in_groups",
)
RS_MEMORY = "test_reduce_scatter_needs_one_chunk_of_memory"
EVERYWHERE, AG_BYTES = (
    "test_all_gather_brings_every_chunk_everywhere",
    "test_all_gather_sends_every_chunk_but_one",
)
AG_COSTS = "test_all_gather_takes_w_minus_1_steps_and_no_memory"
ALL, LEAST = "test_all_reduce_on_every_rank", "test_all_reduce_sends_the_least_possible"
TELLS, TINY = "test_check_tells_every_rank", "test_check_costs_a_few_tiny_messages"
AR_VIEWS = "test_all_reduce_on_views_and_in_groups"
SAME, SMALL = (
    "test_segments_give_the_same_result",
    "test_segments_are_small_and_nothing_is_sent_twice",
)
ONCE, HIDDEN, BUFFERS = (
    "test_latency_is_paid_once",
    "test_additions_are_hidden",
    "test_a_few_segments_of_memory",
)
SEGMENT_VIEWS = "test_segments_of_views_and_in_groups"

RS_STEPS = """        ((rank - step - 1) % world_size, (rank - step - 2) % world_size)
"""
AG_STEPS = """        ((rank - step) % world_size, (rank - step - 1) % world_size)
"""
BOTH = """    handles = [dist.irecv(incoming, group=group, group_src=source)] if incoming.numel() else []
    if outgoing.numel():
        handles.append(dist.isend(outgoing, group=group, group_dst=to))
    return handles
"""
COMBINED = """            handles = exchange(chunks[send], right, incoming, left, group)
            wait(handles[:1])
            COMBINE[op](chunks[receive], incoming)
            wait(handles[1:])
"""
DIVIDED = """        if op == "mean":
            chunks[rank].div_(world_size)
"""
GATHERED = """            wait(exchange(chunks[send], right, chunks[receive], left, group))
"""
HALVES = """        ring_reduce_scatter(flat, op, group)
        ring_all_gather(flat, group)
"""
BACK = """    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))
"""
DISTANCES = """    distance = 1
    while distance < world_size:
"""
MAXIMUM = "        known = torch.maximum(known, incoming)\n"
DIFFER = "    if most != least:\n"
FIRST = "            if len(started) == window:\n                finish(*started.popleft())\n"
WINDOWS = "        window = min(WINDOW, count)\n"
BUFFER = "            buffer = buffers[number % window][: hop.target.numel()]\n"
START = "            started.append((hop, incoming, exchange(hop.outgoing, right, incoming, left, group)))\n"

MUTANTS = [
    Mutant(
        id="ring-whole-tensor",
        exercise="3.1",
        bug="BUGS 42: the whole tensor travels at each hop",
        find=COMBINED,
        replace="            whole = torch.empty_like(flat)\n"
        "            wait(exchange(flat, right, whole, left, group))\n"
        "            COMBINE[op](chunks[receive], whole.tensor_split(world_size)[receive])\n",
        killed_by=RS_BYTES,
        cause="too-many-bytes",
    ),
    Mutant(
        id="ring-send-first",
        exercise="3.1",
        bug="BUGS 43: every rank sends, blocking, before it receives",
        find=BOTH,
        replace="    if outgoing.numel():\n        dist.send(outgoing, group=group, group_dst=to)\n"
        "    if incoming.numel():\n        dist.recv(incoming, group=group, group_src=source)\n"
        "    return []\n",
        killed_by=OWN,
        cause="hang",
    ),
    Mutant(
        id="ring-even-odd",
        exercise="3.1",
        bug="even ranks send first and odd ones receive first: no deadlock, but half the speed",
        find=BOTH,
        replace="    for first in (dist.get_rank(group) % 2 == 0, dist.get_rank(group) % 2 == 1):\n"
        "        if first and outgoing.numel():\n"
        "            dist.send(outgoing, group=group, group_dst=to)\n"
        "        elif not first and incoming.numel():\n"
        "            dist.recv(incoming, group=group, group_src=source)\n"
        "    return []\n",
        killed_by=RS_TIME,
        cause="too-slow",
    ),
    Mutant(
        id="ring-own-chunk-shifted",
        exercise="3.1",
        bug="BUGS 44: rank r completes chunk r+1",
        find=RS_STEPS,
        replace=AG_STEPS,
        killed_by=OWN,
        cause="other-chunk",
    ),
    Mutant(
        id="ring-one-step-short",
        exercise="3.1",
        bug="BUGS 44: W-2 steps: the last rank's part is missing",
        find=RS_STEPS + "        for step in range(world_size - 1)\n",
        replace=RS_STEPS + "        for step in range(1, world_size - 1)\n",
        killed_by=OWN,
        cause="missing-rank",
    ),
    Mutant(
        id="ring-equal-chunks",
        exercise="3.1",
        bug="BUGS 45: chunks of N // W elements: the rest is never reduced",
        find="        buffer = torch.empty_like(chunks[0])\n",
        replace="        even = flat.numel() // world_size\n"
        "        chunks = [chunk[:even] for chunk in chunks]\n"
        "        buffer = torch.empty_like(chunks[0])\n",
        killed_by=OWN,
        cause="rest-kept",
    ),
    Mutant(
        id="ring-chunk-not-split",
        exercise="3.1",
        bug="BUGS 45: torch.chunk gives fewer chunks than ranks if the tensor is short",
        find="        chunks = flat.tensor_split(world_size)\n        buffer",
        replace="        chunks = flat.chunk(world_size)\n        buffer",
        killed_by=OWN,
        cause="exception",
    ),
    Mutant(
        id="ring-send-buffer-reused",
        exercise="3.1",
        bug="BUGS 46: the sum is written into the buffer that is still being sent",
        find=COMBINED,
        replace="            travelling = chunks[send].clone()\n"
        "            handles = exchange(travelling, right, incoming, left, group)\n"
        "            wait(handles[:1])\n"
        "            if travelling.numel() == incoming.numel():\n"
        "                travelling.copy_(incoming)\n"
        "            wait(handles[1:])\n"
        "            COMBINE[op](chunks[receive], incoming)\n",
        killed_by=RS_BYTES,
        cause="overwritten-in-flight",
    ),
    Mutant(
        id="ring-send-not-awaited",
        exercise="3.1",
        bug="BUGS 22: only the receive is waited for",
        find=COMBINED,
        replace="            wait(exchange(chunks[send], right, incoming, left, group)[:1])\n"
        "            COMBINE[op](chunks[receive], incoming)\n",
        killed_by=RS_BYTES,
        cause="never-waited",
    ),
    Mutant(
        id="ring-max-new-tensor",
        exercise="3.1",
        bug="BUGS 47: the maximum is a new tensor, the chunk stays as it was",
        find="torch.maximum(ours, theirs, out=ours)",
        replace="torch.maximum(ours, theirs)",
        killed_by=OWN,
        cause="unchanged",
    ),
    Mutant(
        id="ring-view-not-written",
        exercise="3.1",
        bug="BUGS 48: a strided tensor is reduced in a copy that nobody sees",
        find=BACK,
        replace="",
        killed_by=RS_VIEWS,
        cause="unchanged",
    ),
    Mutant(
        id="ring-global-ranks",
        exercise="3.1",
        bug="the group's ranks are taken for global ones",
        find="dist.isend(outgoing, group=group, group_dst=to)",
        replace="dist.isend(outgoing, to, group)",
        killed_by=RS_VIEWS,
        cause="exception",
    ),
    Mutant(
        id="ring-mean-each-step",
        exercise="3.1",
        bug="BUGS 21: the mean is divided at each step",
        find=COMBINED,
        replace=COMBINED
        + '            if op == "mean":\n                chunks[receive].div_(world_size)\n',
        killed_by=OWN,
        cause="wrong",
    ),
    Mutant(
        id="ring-not-divided",
        exercise="3.1",
        bug="BUGS 20: the mean is the sum",
        find=DIVIDED,
        replace="",
        killed_by=OWN,
        cause="summed",
    ),
    Mutant(
        id="ring-library",
        exercise="3.1",
        bug="BUGS 50: torch's own all-reduce does the work",
        find=COMBINED,
        replace="            pass\n        dist.all_reduce(flat, dist.ReduceOp.MAX if op == 'max' else "
        "dist.ReduceOp.SUM, group=group)\n",
        killed_by=RS_BYTES,
        cause="forbidden-operator",
    ),
    Mutant(
        id="ring-buffer-per-step",
        exercise="3.1",
        bug="all receive buffers are allocated at once: a whole tensor of memory",
        find="        buffer = torch.empty_like(chunks[0])\n",
        replace="        kept = [torch.empty_like(chunk) for chunk in chunks]\n        buffer = kept[0]\n",
        killed_by=RS_MEMORY,
        cause="too-much-memory",
    ),
    Mutant(
        id="ring-integer-mean",
        exercise="3.1",
        bug="the mean of integers is accepted",
        find='    if op == "mean" and not tensor.is_floating_point():\n',
        replace='    if op == "average":\n',
        killed_by=RS_VIEWS,
        cause="accepted",
    ),
    Mutant(
        id="gather-off-by-one",
        exercise="3.2",
        bug="BUGS 44: the all-gather begins with the chunk after the own one",
        find=AG_STEPS,
        replace="        ((rank - step + 1) % world_size, (rank - step) % world_size)\n",
        killed_by=EVERYWHERE,
        cause="wrong",
    ),
    Mutant(
        id="gather-adds",
        exercise="3.2",
        bug="BUGS 44: what arrives is still added up",
        find=GATHERED,
        replace="            incoming = torch.empty_like(chunks[receive])\n"
        "            wait(exchange(chunks[send], right, incoming, left, group))\n"
        "            chunks[receive].add_(incoming)\n",
        killed_by=EVERYWHERE,
        cause="wrong",
    ),
    Mutant(
        id="gather-from-the-start",
        exercise="3.2",
        bug="the own chunk goes to everybody at once instead of around the ring",
        find=GATHERED,
        replace="            step = (rank - send) % world_size + 1\n"
        "            to, source = (rank + step) % world_size, (rank - step) % world_size\n"
        "            wait(exchange(chunks[rank], to, chunks[source], source, group))\n",
        killed_by=AG_BYTES,
        cause="not-a-ring",
    ),
    Mutant(
        id="gather-whole",
        exercise="3.2",
        bug="BUGS 42: everything that is known is sent at each hop",
        find=GATHERED,
        replace="            whole = torch.empty_like(flat)\n"
        "            wait(exchange(flat, right, whole, left, group))\n"
        "            chunks[receive].copy_(whole.tensor_split(world_size)[receive])\n",
        killed_by=AG_BYTES,
        cause="too-many-bytes",
    ),
    Mutant(
        id="gather-one-after-another",
        exercise="3.2",
        bug="rank 0 sends, then rank 1 …: one link is busy at a time",
        find=GATHERED,
        replace="            first = dist.P2POp(dist.irecv, chunks[receive], group=group, group_peer=left)\n"
        "            handles = dist.batch_isend_irecv([first]) if chunks[receive].numel() else []\n"
        "            for handle in handles if rank else []:\n                handle.wait()\n"
        "            if chunks[send].numel():\n"
        "                dist.send(chunks[send], group=group, group_dst=right)\n"
        "            for handle in handles if not rank else []:\n                handle.wait()\n",
        killed_by=AG_COSTS,
        cause="too-slow",
    ),
    Mutant(
        id="gather-library",
        exercise="3.2",
        bug="BUGS 50: torch's own broadcast does the work, chunk after chunk",
        find=GATHERED,
        replace="            pass\n"
        "        for root, chunk in enumerate(chunks):\n"
        "            dist.broadcast(chunk, group=group, group_src=root)\n",
        killed_by=AG_BYTES,
        cause="forbidden-operator",
    ),
    Mutant(
        id="gather-buffers",
        exercise="3.2",
        bug="chunks are received into a buffer and copied",
        find=GATHERED,
        replace="            incoming = torch.empty_like(chunks[receive])\n"
        "            wait(exchange(chunks[send], right, incoming, left, group))\n"
        "            chunks[receive].copy_(incoming)\n",
        killed_by=AG_COSTS,
        cause="too-much-memory",
    ),
    Mutant(
        id="all-reduce-half",
        exercise="3.3",
        bug="the second half is forgotten: every rank has one chunk of the result",
        find=HALVES,
        replace="        ring_reduce_scatter(flat, op, group)\n",
        killed_by=ALL,
        cause="chunk-partial",
    ),
    Mutant(
        id="all-reduce-mean-twice",
        exercise="3.3",
        bug="BUGS 21: divided by the world size after the reduce-scatter has done it",
        find=HALVES,
        replace=HALVES
        + '        if op == "mean":\n            flat.div_(dist.get_world_size(group))\n',
        killed_by=ALL,
        cause="divided-twice",
    ),
    Mutant(
        id="all-reduce-everyone-adds",
        exercise="3.3",
        bug="whole tensors go round and every rank adds in its own order: replicas drift apart",
        find=HALVES,
        replace="        rank, world_size = dist.get_rank(group), dist.get_world_size(group)\n"
        "        moving, total = flat.clone(), flat\n"
        "        for _ in range(world_size - 1):\n"
        "            incoming = torch.empty_like(moving)\n"
        "            to, source = (rank + 1) % world_size, (rank - 1) % world_size\n"
        "            wait(exchange(moving, to, incoming, source, group))\n"
        "            COMBINE[op](total, incoming)\n"
        "            moving = incoming\n"
        '        if op == "mean":\n            total.div_(world_size)\n',
        killed_by=LEAST,
        cause="too-many-bytes",
    ),
    Mutant(
        id="all-reduce-clones",
        exercise="3.3",
        bug="BUGS 47: the result is in a new tensor",
        find="    check_arguments(tensor, op, group)\n    with flattened(tensor) as flat:\n",
        replace="    check_arguments(tensor, op, group)\n    tensor = tensor.clone()\n"
        "    with flattened(tensor) as flat:\n",
        killed_by=ALL,
        cause="unchanged",
    ),
    Mutant(
        id="all-reduce-library",
        exercise="3.3",
        bug="BUGS 50: torch's own all-reduce does the work",
        find=HALVES,
        replace="        operator = dist.ReduceOp.MAX if op == 'max' else dist.ReduceOp.SUM\n"
        "        dist.all_reduce(flat, operator, group=group)\n"
        "        if op == 'mean':\n"
        "            flat.div_(dist.get_world_size(group))\n",
        killed_by=LEAST,
        cause="forbidden-operator",
    ),
    Mutant(
        id="all-reduce-view-lost",
        exercise="3.3",
        bug="BUGS 48: reshape copies a strided tensor, and the copy is reduced",
        find="    with flattened(tensor) as flat:\n" + HALVES,
        replace="    flat = tensor.detach().reshape(-1)\n    if flat.numel():\n" + HALVES,
        killed_by=AR_VIEWS,
        cause="unchanged",
    ),
    Mutant(
        id="agree-neighbours-only",
        exercise="3.3",
        bug="each rank compares with its left neighbour only: the others don't learn of it",
        find=DISTANCES,
        replace="    distance = 1\n    while distance < min(world_size, 2):\n",
        killed_by=TELLS,
        cause="mismatch",
    ),
    Mutant(
        id="agree-power-of-two",
        exercise="3.3",
        bug="BUGS 49: partners by XOR exist for powers of two only",
        find="        to, source = (rank + distance) % world_size, (rank - distance) % world_size\n",
        replace="        to = source = rank ^ distance\n",
        killed_by=TELLS,
        cause="exception",
    ),
    Mutant(
        id="agree-unknown-alone",
        exercise="3.3",
        bug="BUGS 7: a rank with an unknown operator raises alone, and the others wait for it",
        find="ops.index(op) if op in ops else -1]\n",
        replace="ops.index(op)]\n",
        killed_by=TELLS,
        cause="messages",
    ),
    Mutant(
        id="agree-sums",
        exercise="3.3",
        bug="sums count some ranks twice if W is no power of two",
        find=MAXIMUM,
        replace="        known = known + incoming\n",
        patches=[
            (
                DIFFER,
                "    if [world_size * fact for fact in facts] != most:\n",
            )
        ],
        killed_by=TELLS,
        cause="exception",
    ),
    Mutant(
        id="agree-lengths-only",
        exercise="3.3",
        bug="dtypes and operators are not compared",
        find=DIFFER,
        replace="    if most[0] != least[0]:\n",
        killed_by=TELLS,
        cause="mismatch",
    ),
    Mutant(
        id="agree-after-arguments",
        exercise="3.3",
        bug="the rank with the integers leaves before the agreement, and the others wait for it",
        find="    if check:\n        agree(tensor, op, group)\n    check_arguments(tensor, op, group)\n",
        replace="    check_arguments(tensor, op, group)\n    if check:\n        agree(tensor, op, group)\n",
        killed_by=TELLS,
        cause="messages",
    ),
    Mutant(
        id="agree-own-words",
        exercise="3.3",
        bug="every rank's message is about itself",
        find='            f"the ranks pass different tensors: {least[0]}',
        replace='            f"rank {rank} differs from others: {least[0]}',
        killed_by=TELLS,
        cause="messages",
    ),
    Mutant(
        id="agree-around-the-ring",
        exercise="3.3",
        bug="W-1 messages one after another to agree, where ⌈log₂ W⌉ are enough",
        find="        distance *= 2\n",
        replace="        distance += 1\n",
        patches=[
            (
                "        to, source = (rank + distance) % world_size, (rank - distance) % world_size\n",
                "        to, source = (rank + 1) % world_size, (rank - 1) % world_size\n",
            )
        ],
        killed_by=TINY,
        cause="too-many-bytes",
    ),
    Mutant(
        id="agree-always",
        exercise="3.3",
        bug="the agreement costs its messages also when nobody asked for it",
        find="    if check:\n        agree(tensor, op, group)\n    check_arguments",
        replace="    agree(tensor, op, group)\n    check_arguments",
        killed_by=LEAST,
        cause="not-a-ring",
    ),
    Mutant(
        id="segments-one-at-a-time",
        exercise="3.4",
        bug="each segment is finished before the next is started: nothing overlaps",
        find=WINDOWS,
        replace="        window = 1\n",
        killed_by=ONCE,
        cause="too-slow",
    ),
    Mutant(
        id="segments-start-late",
        exercise="3.4",
        bug="a pair of segments is waited for, then both are combined while the links are idle",
        find=FIRST,
        replace="            if len(started) == window:\n"
        "                for _, _, handles in started:\n"
        "                    for handle in handles:\n"
        "                        handle.wait()\n"
        "                    handles.clear()\n"
        "                while started:\n"
        "                    finish(*started.popleft())\n",
        killed_by=HIDDEN,
        cause="additions-exposed",
    ),
    Mutant(
        id="segments-sends-not-awaited",
        exercise="3.4",
        bug="BUGS 22: only the receives are waited for",
        find="            hop.target.div_(world_size)\n        wait(handles[1:])\n",
        replace="            hop.target.div_(world_size)\n",
        killed_by=SAME,
        cause="never-waited",
    ),
    Mutant(
        id="segments-short-last-one-lost",
        exercise="3.4",
        bug="BUGS 45: whole segments only: what is left of a chunk is never reduced",
        find="math.ceil(chunks[0].numel() / longest))\n"
        "        segments = [chunk.tensor_split(count) for chunk in chunks]\n",
        replace="chunks[0].numel() // longest)\n"
        "        size = min(longest, chunks[0].numel())\n"
        "        segments = [(chunk.split(size) * count)[:count] for chunk in chunks]\n",
        killed_by=SAME,
        cause="wrong",
    ),
    Mutant(
        id="segments-below-an-element",
        exercise="3.4",
        bug="a segment_bytes smaller than an element gives segments of no element",
        find="        longest = max(1, segment_bytes // flat.element_size())\n",
        replace="        longest = segment_bytes // flat.element_size()\n",
        killed_by=SEGMENT_VIEWS,
        cause="exception",
    ),
    Mutant(
        id="segments-share-a-buffer",
        exercise="3.4",
        bug="BUGS 46: two segments arrive in one buffer",
        find=BUFFER,
        replace="            buffer = buffers[0][: hop.target.numel()]\n",
        killed_by=SAME,
        cause="wrong",
    ),
    Mutant(
        id="segments-too-many-at-once",
        exercise="3.4",
        bug="a segment is sent on before it has come: more hops on their way than segments per chunk",
        find=WINDOWS,
        replace="        window = WINDOW\n",
        killed_by=SMALL,
        cause="overwritten-in-flight",
    ),
    Mutant(
        id="segments-all-at-once",
        exercise="3.4",
        bug="a buffer for every segment of a chunk",
        find=WINDOWS,
        replace="        window = count\n",
        killed_by=BUFFERS,
        cause="too-much-memory",
    ),
    Mutant(
        id="segments-by-own-chunk",
        exercise="3.4",
        bug="the number of segments follows from the own chunk, whose length differs by rank",
        find="        count = max(1, math.ceil(chunks[0].numel() / longest))\n",
        replace="        count = max(1, math.ceil(chunks[rank].numel() / longest))\n",
        killed_by=SAME,
        cause="mismatch",
    ),
    Mutant(
        id="segments-too-long",
        exercise="3.4",
        bug="segment_bytes counts elements",
        find="        longest = max(1, segment_bytes // flat.element_size())\n",
        replace="        longest = segment_bytes\n",
        killed_by=SMALL,
        cause="long-segment",
    ),
    Mutant(
        id="segments-mean-at-the-end",
        exercise="3.4",
        bug="BUGS 21: the mean is divided where a segment completes, and again at the end",
        find="        for each in started:\n            finish(*each)\n",
        replace="        for each in started:\n            finish(*each)\n"
        '        if op == "mean":\n            flat.div_(world_size)\n',
        killed_by=SAME,
        cause="divided-twice",
    ),
    Mutant(
        id="segments-last-not-finished",
        exercise="3.4",
        bug="what is on its way at the end is not waited for",
        find="        for each in started:\n            finish(*each)\n",
        replace="",
        killed_by=SAME,
        cause="never-waited",
    ),
    Mutant(
        id="segments-completes-always",
        exercise="3.4",
        bug="BUGS 21: every hop of the reduce-scatter divides",
        find="combines and receive == rank)",
        replace="combines)",
        killed_by=SAME,
        cause="wrong",
    ),
]
