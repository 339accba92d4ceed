"""Wrong implementations of exercise 3.12."""

from distlab.grading.wrong import Mutant

BLOCKING = "test_blocking_reductions_are_hooks"
BF16, LOSES = "test_bf16_sends_half_and_keeps_the_range", "test_bf16_loses_precision_and_not_more"
LEVELS = "test_two_levels_send_little_between_nodes"
BEGIN, GROUP = "test_hooks_begin_and_dont_wait", "test_hooks_work_in_a_group"

REDUCE = "        reduce(bucket.buffer)\n"
HALF = "    half = bucket.buffer.to(dtype)\n"
WORK = "    work = dist.all_reduce(half, group=group, async_op=True)\n"
BACK = "    return Then(work, lambda: bucket.buffer.copy_(half))\n"
LEAD = """            if dist.get_rank(leaders) >= 0:
                dist.all_reduce(bucket.buffer, group=leaders)
"""
OUT = "            dist.broadcast(bucket.buffer, group=node, group_src=0)\n"
IN = "        return Then(dist.reduce(bucket.buffer, group=node, group_dst=0, async_op=True), rest)\n"

MUTANTS = [
    Mutant(
        id="hook-reduces-a-copy",
        exercise="3.12",
        bug="BUGS 47: a copy is reduced, the buffer is left as it was",
        find=REDUCE,
        replace="        reduce(bucket.buffer.clone())\n",
        killed_by=BLOCKING,
        cause="unchanged",
    ),
    Mutant(
        id="hook-binds-a-new-buffer",
        exercise="3.12",
        bug="BUGS 47: the bucket gets a new buffer; p.grad looks into the old one",
        find=REDUCE,
        replace="        bucket.buffer = bucket.buffer.clone()\n" + REDUCE,
        killed_by=BLOCKING,
        cause="unchanged",
    ),
    Mutant(
        id="hook-uses-all-reduce",
        exercise="3.12",
        bug="BUGS 50: the function that was given is not used",
        find=REDUCE,
        replace="        dist.all_reduce(bucket.buffer)\n",
        killed_by=BLOCKING,
        cause="forbidden-operator",
    ),
    Mutant(
        id="hook-divides-again",
        exercise="3.12",
        bug="BUGS 21: the hook divides by W what DDP has divided already",
        find=REDUCE,
        replace=REDUCE + "        bucket.buffer.div_(dist.get_world_size())\n",
        killed_by=BLOCKING,
        cause="divided-twice",
    ),
    Mutant(
        id="bf16-not-written-back",
        exercise="3.12",
        bug="BUGS 47: the sum stays in the copy",
        find=BACK,
        replace="    return work\n",
        killed_by=BF16,
        cause="unchanged",
    ),
    Mutant(
        id="bf16-written-too-soon",
        exercise="3.12",
        bug="BUGS 22: the copy is written back before it has arrived",
        find=BACK,
        replace="    bucket.buffer.copy_(half)\n    return work\n",
        killed_by=BEGIN,
        cause="wrong",
    ),
    Mutant(
        id="bf16-never-waited",
        exercise="3.12",
        bug="BUGS 22: the handle of another operation is waited for",
        find=BACK,
        replace="    work = dist.barrier(group, async_op=True)\n" + BACK,
        killed_by=BF16,
        cause="never-waited",
    ),
    Mutant(
        id="bf16-is-fp16",
        exercise="3.12",
        bug="float16 instead of bfloat16: small gradients vanish, large ones are infinite",
        find=HALF,
        replace="    half = bucket.buffer.to(torch.float16)\n",
        killed_by=BF16,
        cause="nan",
    ),
    Mutant(
        id="bf16-sends-float32",
        exercise="3.12",
        bug="rounded to bfloat16 and sent in float32: the loss without the gain",
        find=HALF,
        replace="    half = bucket.buffer.to(torch.bfloat16).float()\n",
        killed_by=BF16,
        cause="too-many-bytes",
    ),
    Mutant(
        id="bf16-does-nothing",
        exercise="3.12",
        bug="nothing is compressed",
        find=HALF,
        replace="    half = bucket.buffer\n",
        killed_by=LOSES,
        cause="not-compressed",
    ),
    Mutant(
        id="fp16-is-bf16",
        exercise="3.12",
        bug="bfloat16, whatever was asked for",
        find=HALF,
        replace="    half = bucket.buffer.to(torch.bfloat16)\n",
        killed_by="test_fp16_has_more_digits_and_less_range",
        cause="too-lossy",
    ),
    Mutant(
        id="bf16-own-part-exact",
        exercise="3.12",
        bug="BUGS 30: each rank replaces its own rounded part by the exact one: replicas drift",
        find=HALF,
        replace=HALF + "    rest = bucket.buffer - half\n",
        patches=[(BACK, "    return Then(work, lambda: bucket.buffer.copy_(half).add_(rest))\n")],
        killed_by=BF16,
        cause="ranks-differ",
    ),
    Mutant(
        id="bf16-complex",
        exercise="3.12",
        bug="complex gradients lose their imaginary part without a word",
        find="    if bucket.buffer.is_complex():\n",
        replace="    if not bucket.buffer.numel():\n",
        killed_by=LOSES,
        cause="accepted",
    ),
    Mutant(
        id="bf16-waits-in-hook",
        exercise="3.12",
        bug="BUGS 27: the hook waits: backward stands still meanwhile",
        find=BACK,
        replace="    work.wait()\n    return Then(work, lambda: bucket.buffer.copy_(half))\n",
        killed_by=BEGIN,
        cause="hook-waits",
    ),
    Mutant(
        id="bf16-group-ignored",
        exercise="3.12",
        bug="the sum is taken in the default group",
        find=WORK,
        replace="    work = dist.all_reduce(half, async_op=True)\n",
        killed_by=GROUP,
        cause="hang",
    ),
    Mutant(
        id="levels-everybody-leads",
        exercise="3.12",
        bug="BUGS 6: ranks that are no leaders join the leaders' all-reduce",
        find=LEAD,
        replace="            dist.all_reduce(bucket.buffer)\n",
        killed_by=LEVELS,
        cause="doubled-rank",
    ),
    Mutant(
        id="levels-not-handed-out",
        exercise="3.12",
        bug="only the first rank of each node has the sum",
        find=OUT,
        replace="",
        killed_by=LEVELS,
        cause="ranks-differ",
    ),
    Mutant(
        id="levels-nodes-only",
        exercise="3.12",
        bug="the sum is never taken between the nodes",
        find=LEAD,
        replace="",
        killed_by=LEVELS,
        cause="missing-rank",
    ),
    Mutant(
        id="levels-source-is-global-rank-0",
        exercise="3.12",
        bug="the root is global rank 0, which is in one node only",
        find=OUT,
        replace="            dist.broadcast(bucket.buffer, 0, group=node)\n",
        killed_by=LEVELS,
        cause="exception",
    ),
    Mutant(
        id="levels-all-to-all-nodes",
        exercise="3.12",
        bug="one all-reduce over everybody: every rank sends between the nodes",
        find=LEAD + OUT,
        replace="            pass\n",
        patches=[
            (IN, "        return Then(dist.all_reduce(bucket.buffer, async_op=True), rest)\n")
        ],
        killed_by=LEVELS,
        cause="too-many-bytes",
    ),
    Mutant(
        id="levels-wait-in-hook",
        exercise="3.12",
        bug="BUGS 27: all three steps happen in the hook",
        find=IN,
        replace="        dist.reduce(bucket.buffer, group=node, group_dst=0)\n"
        "        rest()\n"
        "        return Then(dist.barrier(node, async_op=True), lambda: None)\n",
        killed_by=BEGIN,
        cause="hook-waits",
    ),
    Mutant(
        id="bf16-of-a-stranger",
        exercise="3.12",
        bug="on a rank outside the group there is no handle to wait for",
        find="    rank_in(group)\n    half",
        replace="    half",
        killed_by="test_who_is_no_member_is_refused",
        cause="accepted",
    ),
]
