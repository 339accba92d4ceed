"""Wrong implementations of exercise 3.9."""

from distlab.grading.wrong import Mutant

CUT, VIEWS = "test_partition_cuts_by_bytes_and_kind", "test_views_cover_the_buffer_once"
TAKE, KEEP = (
    "test_take_moves_and_scales_the_gradient",
    "test_buckets_keep_gradients_and_hold_no_second_copy",
)
ORDER = "test_first_ranks_order_is_everybodys"
STATE, FEW = "test_broadcast_gives_the_first_ranks_state", "test_broadcast_needs_few_messages"

SORTED = "    return sorted(lists, key=lambda places: places[-1])\n"
SCALE = "        elif share != 1.0:\n            view.mul_(share)\n"
ZERO = "        if p.grad is None:\n            view.zero_()\n"
SPARSE = (
    "        elif p.grad.layout != torch.strided:\n"
    '            raise ValueError(f"a sparse gradient (shape {tuple(p.shape)}) '
    "can't go into a bucket\")\n"
)
BROADCAST = "            dist.broadcast(flat, group=group, group_src=0)\n"

MUTANTS = [
    Mutant(
        id="buckets-first-like-all",
        exercise="3.9",
        bug="no small first bucket: nothing leaves early",
        find="filling.get(kind, ([], 0, first_limit))",
        replace="filling.get(kind, ([], 0, limit))",
        killed_by=CUT,
        cause="wrong-buckets",
    ),
    Mutant(
        id="buckets-count-elements",
        exercise="3.9",
        bug="the limit is compared with elements, not bytes",
        find="        if current and size + tensor.nbytes > most:\n",
        replace="        if current and size / tensor.itemsize + tensor.numel() > most:\n",
        killed_by=CUT,
        cause="wrong-buckets",
    ),
    Mutant(
        id="buckets-mix-dtypes",
        exercise="3.9",
        bug="float32 and float64 share a bucket",
        find="        kind = tensor.dtype, tensor.device\n",
        replace="        kind = tensor.device\n",
        killed_by=CUT,
        cause="wrong-buckets",
    ),
    Mutant(
        id="buckets-mix-devices",
        exercise="3.9",
        bug="tensors of two devices share a bucket",
        find="        kind = tensor.dtype, tensor.device\n",
        replace="        kind = tensor.dtype\n",
        killed_by=CUT,
        cause="wrong-buckets",
    ),
    Mutant(
        id="buckets-as-opened",
        exercise="3.9",
        bug="BUGS 28: buckets in the order of their first tensor: one that fills late blocks the rest",
        find=SORTED,
        replace="    return lists\n",
        killed_by=CUT,
        cause="wrong-buckets",
    ),
    Mutant(
        id="buckets-last-lost",
        exercise="3.9",
        bug="BUGS 28: the last bucket, which is not full, is never made",
        find="            lists.append(current)\n        current.append(place)\n"
        "        filling[kind] = current, size + tensor.nbytes, most\n",
        replace="            current = []\n        current.append(place)\n"
        "        size += tensor.nbytes\n"
        "        filling[kind] = current, size, most\n"
        "        if size + tensor.nbytes > most:\n"
        "            lists.append(current)\n",
        killed_by=CUT,
        cause="tensor-lost",
    ),
    Mutant(
        id="buckets-overflow-by-one",
        exercise="3.9",
        bug="a bucket is closed after the tensor that takes it beyond the limit",
        find="        if current and size + tensor.nbytes > most:\n",
        replace="        if current and size >= most:\n",
        killed_by=CUT,
        cause="wrong-buckets",
    ),
    Mutant(
        id="buckets-any-limit",
        exercise="3.9",
        bug="limits of zero and below are accepted",
        find="    if limit <= 0 or first_limit <= 0:\n",
        replace="    if limit < 0 or first_limit < 0:\n",
        killed_by=CUT,
        cause="accepted",
    ),
    Mutant(
        id="bucket-plain-views",
        exercise="3.9",
        bug="views ignore the parameters' strides: the optimizer reads two layouts",
        find="        self.views = [laid_out_like(p, part) for part, p in parts]\n",
        replace="        self.views = [part.view(p.shape) for part, p in parts]\n",
        killed_by=VIEWS,
        cause="wrong-layout",
    ),
    Mutant(
        id="bucket-views-are-copies",
        exercise="3.9",
        bug="the parts are copies: what is sent is not what the optimizer reads",
        find="        self.views = [laid_out_like(p, part) for part, p in parts]\n",
        replace="        self.views = [laid_out_like(p, part.clone()) for part, p in parts]\n",
        killed_by=VIEWS,
        cause="copies",
    ),
    Mutant(
        id="take-none-keeps-rubbish",
        exercise="3.9",
        bug="BUGS 24: a missing gradient leaves in the bucket what was there before",
        find=ZERO,
        replace="        if p.grad is None:\n            pass\n",
        killed_by=TAKE,
        cause="nan",
    ),
    Mutant(
        id="take-grad-stays-outside",
        exercise="3.9",
        bug="p.grad is copied, but goes on to live outside the bucket",
        find="            view.mul_(share)\n        p.grad = view\n",
        replace="            view.mul_(share)\n        if p.grad is None:\n            p.grad = view\n",
        killed_by=TAKE,
        cause="unchanged",
    ),
    Mutant(
        id="take-in-place-unscaled",
        exercise="3.9",
        bug="BUGS 20: a gradient that is in its place already is not divided",
        find=SCALE,
        replace="",
        killed_by=TAKE,
        cause="scaled",
    ),
    Mutant(
        id="take-scaled-twice",
        exercise="3.9",
        bug="BUGS 21: divided while copying and once more afterwards",
        find=SCALE,
        replace="        view.mul_(share)\n",
        killed_by=TAKE,
        cause="scaled",
    ),
    Mutant(
        id="take-always-scales",
        exercise="3.9",
        bug="a gradient in its place is multiplied by 1: a pass over all gradients for nothing",
        find=SCALE,
        replace="        else:\n            view.mul_(share)\n",
        killed_by=TAKE,
        cause="extra-pass",
    ),
    Mutant(
        id="take-copies-then-scales",
        exercise="3.9",
        bug="copied, then scaled: two passes over each new gradient",
        find="            torch.mul(p.grad, share, out=view)\n",
        replace="            view.copy_(p.grad).mul_(share)\n",
        killed_by=TAKE,
        cause="extra-pass",
    ),
    Mutant(
        id="take-sparse",
        exercise="3.9",
        bug="a sparse gradient is made dense without a word",
        find=SPARSE,
        replace="        elif p.grad.layout != torch.strided:\n"
        "            torch.mul(p.grad.to_dense(), share, out=view)\n",
        killed_by=TAKE,
        cause="accepted",
    ),
    Mutant(
        id="buckets-forget-gradients",
        exercise="3.9",
        bug="the gradients are lost when the buckets are made anew",
        find="            if p.grad is not None:\n                bucket.take(place)\n",
        replace="            p.grad = None\n",
        killed_by=KEEP,
        cause="gradient-lost",
    ),
    Mutant(
        id="buckets-beside-gradients",
        exercise="3.9",
        bug="gradients stay where they are beside the new buckets: 2N bytes",
        find="            if p.grad is not None:\n                bucket.take(place)\n",
        replace="            if p.grad is not None:\n                bucket.views[place].copy_(p.grad)\n",
        killed_by=KEEP,
        cause="copies",
    ),
    Mutant(
        id="order-own",
        exercise="3.9",
        bug="every rank keeps the order that it has seen itself",
        find="    dist.broadcast(order, group=group, group_src=0)\n",
        replace="    dist.broadcast(order.clone(), group=group, group_src=0)\n",
        killed_by=ORDER,
        cause="own-order",
    ),
    Mutant(
        id="order-of-global-rank-0",
        exercise="3.9",
        bug="the source is global rank 0, which may not be in the group",
        find="    dist.broadcast(order, group=group, group_src=0)\n",
        replace="    dist.broadcast(order, 0, group=group)\n",
        killed_by=ORDER,
        cause="exception",
    ),
    Mutant(
        id="state-not-written",
        exercise="3.9",
        bug="BUGS 18: what was received is not written back",
        find="                    tensor.copy_(part.view(tensor.shape))\n",
        replace="                    tensor = part.view(tensor.shape)\n",
        killed_by=STATE,
        cause="not-broadcast",
    ),
    Mutant(
        id="state-floats-only",
        exercise="3.9",
        bug="BUGS 19: integers and booleans are left out",
        find="            chosen = [tensors[i] for i in places]\n",
        replace="            chosen = [tensors[i] for i in places]\n"
        "            if not chosen[0].is_floating_point():\n"
        "                continue\n",
        killed_by=STATE,
        cause="not-broadcast",
    ),
    Mutant(
        id="state-averaged",
        exercise="3.9",
        bug="BUGS 18: the mean of all ranks instead of one rank's state",
        find=BROADCAST,
        replace="            kind = flat.dtype\n"
        "            flat = flat.double()\n"
        "            dist.all_reduce(flat, group=group)\n"
        "            flat = (flat / dist.get_world_size(group)).to(kind)\n",
        killed_by=STATE,
        cause="not-broadcast",
    ),
    Mutant(
        id="state-rebound",
        exercise="3.9",
        bug="the tensors get new memory: what the optimizer or a view holds is the old one",
        find="                    tensor.copy_(part.view(tensor.shape))\n",
        replace="                    tensor.data = part.view(tensor.shape)\n",
        killed_by=STATE,
        cause="new-tensors",
    ),
    Mutant(
        id="state-one-by-one",
        exercise="3.9",
        bug="a message per tensor",
        find="        for places in partition(tensors, limit, limit):\n",
        replace="        for places in [[i] for i in range(len(tensors))]:\n",
        killed_by=FEW,
        cause="too-many-messages",
    ),
    Mutant(
        id="state-at-once",
        exercise="3.9",
        bug="the limit is ignored: a copy of the whole model",
        find="        for places in partition(tensors, limit, limit):\n",
        replace="        for places in partition(tensors, 1 << 60, 1 << 60):\n",
        killed_by=FEW,
        cause="beyond-limit",
    ),
    Mutant(
        id="order-of-a-stranger",
        exercise="3.9",
        bug="on a rank outside the group the broadcast does nothing, and its own order is taken",
        find="    rank_in(group)\n    order",
        replace="    order",
        killed_by="test_who_is_no_member_is_refused",
        cause="accepted",
    ),
]
