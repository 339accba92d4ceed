"""Wrong implementations of exercise 3.12."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="hook-reduces-a-copy",
        exercise="3.12",
        mistake="a copy is reduced, the buffer is left as it was",
        text="        reduce(bucket.buffer)\n",
        becomes="        reduce(bucket.buffer.clone())\n",
        caught_by="test_blocking_reductions_are_hooks",
        told_as="copies",
    ),
    Mutant(
        id="hook-binds-a-new-buffer",
        exercise="3.12",
        mistake="the bucket gets a new buffer; p.grad looks into the old one",
        text="        reduce(bucket.buffer)\n",
        becomes="""        bucket.buffer = bucket.buffer.clone()
        reduce(bucket.buffer)
""",
        caught_by="test_blocking_reductions_are_hooks",
        told_as="unchanged",
    ),
    Mutant(
        id="hook-uses-all-reduce",
        exercise="3.12",
        mistake="the function that was given is not used",
        text="        reduce(bucket.buffer)\n",
        becomes="        dist.all_reduce(bucket.buffer)\n",
        caught_by="test_blocking_reductions_are_hooks",
        told_as="copies",
    ),
    Mutant(
        id="hook-divides-again",
        exercise="3.12",
        mistake="the hook divides by W what DDP has divided already",
        text="        reduce(bucket.buffer)\n",
        becomes="""        reduce(bucket.buffer)
        bucket.buffer.div_(dist.get_world_size())
""",
        caught_by="test_blocking_reductions_are_hooks",
        told_as="divided-twice",
    ),
    Mutant(
        id="bf16-not-written-back",
        exercise="3.12",
        mistake="the sum stays in the copy",
        text="    return Then(work, lambda: bucket.buffer.copy_(half))\n",
        becomes="    return work\n",
        caught_by="test_bf16_sends_half_and_keeps_the_range",
        told_as="unchanged",
    ),
    Mutant(
        id="bf16-written-too-soon",
        exercise="3.12",
        mistake="the copy is written back before it has arrived",
        text="    return Then(work, lambda: bucket.buffer.copy_(half))\n",
        becomes="""    bucket.buffer.copy_(half)
    return work
""",
        caught_by="test_hooks_begin_and_dont_wait",
        told_as="wrong",
    ),
    Mutant(
        id="bf16-never-waited",
        exercise="3.12",
        mistake="the handle of another operation is waited for",
        text="    return Then(work, lambda: bucket.buffer.copy_(half))\n",
        becomes="""    work = dist.barrier(group, async_op=True)
    return Then(work, lambda: bucket.buffer.copy_(half))
""",
        caught_by="test_bf16_sends_half_and_keeps_the_range",
        told_as="never-waited",
    ),
    Mutant(
        id="bf16-is-fp16",
        exercise="3.12",
        mistake="float16 instead of bfloat16: small gradients vanish, large ones are infinite",
        text="    half = bucket.buffer.to(dtype)\n",
        becomes="    half = bucket.buffer.to(torch.float16)\n",
        caught_by="test_bf16_sends_half_and_keeps_the_range",
        told_as="nan",
    ),
    Mutant(
        id="bf16-sends-float32",
        exercise="3.12",
        mistake="rounded to bfloat16 and sent in float32: the loss without the gain",
        text="    half = bucket.buffer.to(dtype)\n",
        becomes="    half = bucket.buffer.to(torch.bfloat16).float()\n",
        caught_by="test_bf16_sends_half_and_keeps_the_range",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="bf16-does-nothing",
        exercise="3.12",
        mistake="nothing is compressed",
        text="    half = bucket.buffer.to(dtype)\n",
        becomes="    half = bucket.buffer\n",
        caught_by="test_bf16_loses_precision_and_not_more",
        told_as="not-compressed",
    ),
    Mutant(
        id="fp16-is-bf16",
        exercise="3.12",
        mistake="bfloat16, whatever was asked for",
        text="    half = bucket.buffer.to(dtype)\n",
        becomes="    half = bucket.buffer.to(torch.bfloat16)\n",
        caught_by="test_fp16_has_more_digits_and_less_range",
        told_as="too-lossy",
    ),
    Mutant(
        id="bf16-own-part-exact",
        exercise="3.12",
        mistake="each rank replaces its own rounded part by the exact one: replicas drift",
        text="    half = bucket.buffer.to(dtype)\n",
        becomes="""    half = bucket.buffer.to(dtype)
    rest = bucket.buffer - half
""",
        more=(
            (
                "    return Then(work, lambda: bucket.buffer.copy_(half))\n",
                "    return Then(work, lambda: bucket.buffer.copy_(half).add_(rest))\n",
            ),
        ),
        caught_by="test_bf16_sends_half_and_keeps_the_range",
        told_as="ranks-differ",
    ),
    Mutant(
        id="bf16-complex",
        exercise="3.12",
        mistake="complex gradients lose their imaginary part without a word",
        text="    if bucket.buffer.is_complex():\n",
        becomes="    if not bucket.buffer.numel():\n",
        caught_by="test_bf16_loses_precision_and_not_more",
        told_as="accepted",
    ),
    Mutant(
        id="bf16-waits-in-hook",
        exercise="3.12",
        mistake="the hook waits: backward stands still meanwhile",
        text="    return Then(work, lambda: bucket.buffer.copy_(half))\n",
        becomes="""    work.wait()
    return Then(work, lambda: bucket.buffer.copy_(half))
""",
        caught_by="test_hooks_begin_and_dont_wait",
        told_as="hook-waits",
    ),
    Mutant(
        id="bf16-group-ignored",
        exercise="3.12",
        mistake="the sum is taken in the default group",
        text="    work = dist.all_reduce(half, group=group, async_op=True)\n",
        becomes="    work = dist.all_reduce(half, async_op=True)\n",
        caught_by="test_hooks_work_in_a_group",
        told_as="group",
    ),
    Mutant(
        id="levels-everybody-leads",
        exercise="3.12",
        mistake="ranks that are no leaders join the leaders' all-reduce",
        text="""            if dist.get_rank(leaders) >= 0:
                dist.all_reduce(bucket.buffer, group=leaders)
""",
        becomes="            dist.all_reduce(bucket.buffer)\n",
        caught_by="test_two_levels_send_little_between_nodes",
        told_as="doubled-rank",
    ),
    Mutant(
        id="levels-not-handed-out",
        exercise="3.12",
        mistake="only the first rank of each node has the sum",
        text="            dist.broadcast(bucket.buffer, group=node, group_src=0)\n",
        becomes="",
        caught_by="test_two_levels_send_little_between_nodes",
        told_as="ranks-differ",
    ),
    Mutant(
        id="levels-nodes-only",
        exercise="3.12",
        mistake="the sum is never taken between the nodes",
        text="""            if dist.get_rank(leaders) >= 0:
                dist.all_reduce(bucket.buffer, group=leaders)
""",
        becomes="",
        caught_by="test_two_levels_send_little_between_nodes",
        told_as="missing-rank",
    ),
    Mutant(
        id="levels-source-is-global-rank-0",
        exercise="3.12",
        mistake="the root is global rank 0, which is in one node only",
        text="            dist.broadcast(bucket.buffer, group=node, group_src=0)\n",
        becomes="            dist.broadcast(bucket.buffer, 0, group=node)\n",
        caught_by="test_two_levels_send_little_between_nodes",
        told_as="exception",
    ),
    Mutant(
        id="levels-all-to-all-nodes",
        exercise="3.12",
        mistake="one all-reduce over everybody: every rank sends between the nodes",
        text="""            if dist.get_rank(leaders) >= 0:
                dist.all_reduce(bucket.buffer, group=leaders)
            dist.broadcast(bucket.buffer, group=node, group_src=0)
""",
        becomes="            pass\n",
        more=(
            (
                (
                    "        return Then(dist.reduce(bucket.buffer, group=node, group_dst=0, "
                    "async_op=True), rest)\n"
                ),
                "        return Then(dist.all_reduce(bucket.buffer, async_op=True), rest)\n",
            ),
        ),
        caught_by="test_two_levels_send_little_between_nodes",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="levels-wait-in-hook",
        exercise="3.12",
        mistake="all three steps happen in the hook",
        text=(
            "        return Then(dist.reduce(bucket.buffer, group=node, group_dst=0, "
            "async_op=True), rest)\n"
        ),
        becomes="""        dist.reduce(bucket.buffer, group=node, group_dst=0)
        rest()
        return Then(dist.barrier(node, async_op=True), lambda: None)
""",
        caught_by="test_hooks_begin_and_dont_wait",
        told_as="hook-waits",
    ),
    Mutant(
        id="bf16-of-a-stranger",
        exercise="3.12",
        mistake="on a rank outside the group there is no handle to wait for",
        text="""    rank_in(group)
    half""",
        becomes="    half",
        caught_by="test_who_is_no_member_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="hooks-returns-what-reduce-gives",
        exercise="3.12",
        mistake="what the given function returns is taken for a handle",
        text="        reduce(bucket.buffer)\n",
        becomes="        return reduce(bucket.buffer)\n",
        caught_by="test_blocking_reductions_are_hooks",
        told_as="exception",
    ),
    Mutant(
        id="hooks-one-copy-for-all",
        exercise="3.12",
        mistake="one copy for all buckets: the second one overwrites the first on its way",
        text="    half = bucket.buffer.to(dtype)\n",
        becomes="""    global HALF
    n = bucket.buffer.numel()
    if HALF is None or HALF.dtype != dtype or len(HALF) < n:
        HALF = torch.empty(n, dtype=dtype)
    half = HALF[:n].copy_(bucket.buffer)
""",
        more=(("def all_reduce(bucket", "HALF = None\n\n\ndef all_reduce(bucket"),),
        caught_by="test_hooks_begin_and_dont_wait",
        told_as=("wrong", "copies"),
    ),
    Mutant(
        id="comm-hooks-two-level-late",
        exercise="3.12",
        mistake="the first of the two levels begins in wait(): nothing travels beside backward",
        text=(
            "        return Then(dist.reduce(bucket.buffer, group=node, group_dst=0, "
            "async_op=True), rest)\n"
        ),
        becomes="""        class Later:
            def wait(self) -> None:
                dist.reduce(bucket.buffer, group=node, group_dst=0)
                rest()

        return Later()
""",
        caught_by="test_hooks_begin_and_dont_wait",
        told_as="late",
    ),
    Mutant(
        id="hooks-waits-for-the-result",
        exercise="3.12",
        mistake="what reduce returns is handed on as a handle if it can be waited for",
        text="    def hook(bucket: Bucket) -> None:\n        reduce(bucket.buffer)",
        becomes='    def hook(bucket: Bucket) -> None:\n        out = reduce(bucket.buffer)\n        return out if hasattr(out, "wait") else None',
        caught_by="test_blocking_reductions_are_hooks",
        told_as="exception",
    ),
]
