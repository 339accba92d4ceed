"""Wrong implementations of exercise 3.9."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="buckets-first-like-all",
        exercise="3.9",
        mistake="no small first bucket: nothing leaves early",
        text="filling.get(kind, ([], 0, first_limit))",
        becomes="filling.get(kind, ([], 0, limit))",
        caught_by="test_partition_cuts_by_bytes_and_kind",
        told_as="wrong-buckets",
    ),
    Mutant(
        id="buckets-count-elements",
        exercise="3.9",
        mistake="the limit is compared with elements, not bytes",
        text="        if current and size + tensor.nbytes > most:\n",
        becomes="        if current and size / tensor.itemsize + tensor.numel() > most:\n",
        caught_by="test_partition_cuts_by_bytes_and_kind",
        told_as="wrong-buckets",
    ),
    Mutant(
        id="buckets-mix-dtypes",
        exercise="3.9",
        mistake="float32 and float64 share a bucket",
        text="        kind = tensor.dtype, tensor.device\n",
        becomes="        kind = tensor.device\n",
        caught_by="test_partition_cuts_by_bytes_and_kind",
        told_as="wrong-buckets",
    ),
    Mutant(
        id="buckets-mix-devices",
        exercise="3.9",
        mistake="tensors of two devices share a bucket",
        text="        kind = tensor.dtype, tensor.device\n",
        becomes="        kind = tensor.dtype\n",
        caught_by="test_partition_cuts_by_bytes_and_kind",
        told_as="wrong-buckets",
    ),
    Mutant(
        id="buckets-as-opened",
        exercise="3.9",
        mistake="buckets in the order of their first tensor: one that fills late blocks the rest",
        text="    return sorted(lists, key=lambda indices: indices[-1])\n",
        becomes="    return lists\n",
        caught_by="test_partition_cuts_by_bytes_and_kind",
        told_as="wrong-buckets",
    ),
    Mutant(
        id="buckets-last-lost",
        exercise="3.9",
        mistake="the last bucket, which is not full, is never made",
        text="""            lists.append(current)
        current.append(index)
        filling[kind] = current, size + tensor.nbytes, most
""",
        becomes="""            current = []
        current.append(index)
        size += tensor.nbytes
        filling[kind] = current, size, most
        if size + tensor.nbytes > most:
            lists.append(current)
""",
        caught_by="test_partition_cuts_by_bytes_and_kind",
        told_as="tensor-lost",
    ),
    Mutant(
        id="buckets-overflow-by-one",
        exercise="3.9",
        mistake="a bucket is closed after the tensor that takes it beyond the limit",
        text="        if current and size + tensor.nbytes > most:\n",
        becomes="        if current and size >= most:\n",
        caught_by="test_partition_cuts_by_bytes_and_kind",
        told_as="wrong-buckets",
    ),
    Mutant(
        id="buckets-any-limit",
        exercise="3.9",
        mistake="limits of zero and below are accepted",
        text="    if limit <= 0 or first_limit <= 0:\n",
        becomes="    if limit < 0 or first_limit < 0:\n",
        caught_by="test_partition_cuts_by_bytes_and_kind",
        told_as="accepted",
    ),
    Mutant(
        id="bucket-plain-views",
        exercise="3.9",
        mistake="views ignore the parameters' strides: the optimizer reads two layouts",
        text="        self.views = [laid_out_like(p, part) for part, p in parts]\n",
        becomes="        self.views = [part.view(p.shape) for part, p in parts]\n",
        caught_by="test_views_cover_the_buffer_once",
        told_as="wrong-layout",
    ),
    Mutant(
        id="bucket-views-are-copies",
        exercise="3.9",
        mistake="the parts are copies: what is sent is not what the optimizer reads",
        text="        self.views = [laid_out_like(p, part) for part, p in parts]\n",
        becomes="        self.views = [laid_out_like(p, part.clone()) for part, p in parts]\n",
        caught_by="test_views_cover_the_buffer_once",
        told_as="copies",
    ),
    Mutant(
        id="take-none-keeps-rubbish",
        exercise="3.9",
        mistake="a missing gradient leaves in the bucket what was there before",
        text="""        if p.grad is None:
            view.zero_()
""",
        becomes="""        if p.grad is None:
            pass
""",
        caught_by="test_take_moves_and_scales_the_gradient",
        told_as="nan",
    ),
    Mutant(
        id="take-grad-stays-outside",
        exercise="3.9",
        mistake="p.grad is copied, but goes on to live outside the bucket",
        text="""            view.mul_(share)
        p.grad = view
""",
        becomes="""            view.mul_(share)
        if p.grad is None:
            p.grad = view
""",
        caught_by="test_take_moves_and_scales_the_gradient",
        told_as="unchanged",
    ),
    Mutant(
        id="take-in-place-unscaled",
        exercise="3.9",
        mistake="a gradient that is its view already is not divided",
        text="""        elif share != 1.0:
            view.mul_(share)
""",
        becomes="",
        caught_by="test_take_moves_and_scales_the_gradient",
        told_as="scaled",
    ),
    Mutant(
        id="take-scaled-twice",
        exercise="3.9",
        mistake="divided while copying and once more afterwards",
        text="""        elif share != 1.0:
            view.mul_(share)
""",
        becomes="        view.mul_(share)\n",
        caught_by="test_take_moves_and_scales_the_gradient",
        told_as="scaled",
    ),
    Mutant(
        id="take-always-scales",
        exercise="3.9",
        mistake="a gradient that is its view is multiplied by 1: a pass over all for nothing",
        text="""        elif share != 1.0:
            view.mul_(share)
""",
        becomes="""        else:
            view.mul_(share)
""",
        caught_by="test_take_moves_and_scales_the_gradient",
        told_as="extra-pass",
    ),
    Mutant(
        id="take-copies-then-scales",
        exercise="3.9",
        mistake="copied, then scaled: two passes over each new gradient",
        text="            torch.mul(p.grad, share, out=view)\n",
        becomes="            view.copy_(p.grad).mul_(share)\n",
        caught_by="test_take_moves_and_scales_the_gradient",
        told_as="extra-pass",
    ),
    Mutant(
        id="take-sparse",
        exercise="3.9",
        mistake="a sparse gradient is made dense without a word",
        text="""        elif p.grad.layout != torch.strided:
            raise ValueError(f"a sparse gradient (shape {tuple(p.shape)}) can't go into a bucket")
""",
        becomes="""        elif p.grad.layout != torch.strided:
            torch.mul(p.grad.to_dense(), share, out=view)
""",
        caught_by="test_take_moves_and_scales_the_gradient",
        told_as="accepted",
    ),
    Mutant(
        id="buckets-forget-gradients",
        exercise="3.9",
        mistake="the gradients are lost when the buckets are made anew",
        text="""            if p.grad is not None:
                bucket.take(k)
""",
        becomes="            p.grad = None\n",
        caught_by="test_buckets_keep_gradients_and_hold_no_second_copy",
        told_as="gradient-lost",
    ),
    Mutant(
        id="buckets-beside-gradients",
        exercise="3.9",
        mistake="gradients stay where they are beside the new buckets: 2N bytes",
        text="""            if p.grad is not None:
                bucket.take(k)
""",
        becomes="""            if p.grad is not None:
                bucket.views[k].copy_(p.grad)
""",
        caught_by="test_buckets_keep_gradients_and_hold_no_second_copy",
        told_as="copies",
    ),
    Mutant(
        id="take-scales-the-source",
        exercise="3.9",
        mistake="the gradient is scaled where it was, then copied: two passes",
        text="            torch.mul(p.grad, share, out=view)\n",
        becomes="            view.copy_(p.grad.mul_(share))\n",
        caught_by="test_take_moves_and_scales_the_gradient",
        told_as="extra-pass",
    ),
    Mutant(
        id="buckets-none-becomes-zeros",
        exercise="3.9",
        mistake="a parameter without a gradient has one of zeros as soon as there are buckets",
        text="            if p.grad is not None:\n                bucket.take(k)\n",
        becomes="            bucket.take(k)\n",
        caught_by="test_buckets_keep_gradients_and_hold_no_second_copy",
        told_as="zeros-for-none",
    ),
    Mutant(
        id="order-own",
        exercise="3.9",
        mistake="every rank keeps the order that it has seen itself",
        text="    dist.broadcast(order, group=group, group_src=0)\n",
        becomes="    dist.broadcast(order.clone(), group=group, group_src=0)\n",
        caught_by="test_first_ranks_order_is_everybodys",
        told_as="own-order",
    ),
    Mutant(
        id="order-of-global-rank-0",
        exercise="3.9",
        mistake="the source is global rank 0, which may not be in the group",
        text="    dist.broadcast(order, group=group, group_src=0)\n",
        becomes="    dist.broadcast(order, 0, group=group)\n",
        caught_by="test_first_ranks_order_is_everybodys",
        told_as="exception",
    ),
    Mutant(
        id="state-not-written",
        exercise="3.9",
        mistake="what was received is not written back",
        text="                    tensor.copy_(part.view(tensor.shape))\n",
        becomes="                    tensor = part.view(tensor.shape)\n",
        caught_by="test_broadcast_gives_the_first_ranks_state",
        told_as="not-broadcast",
    ),
    Mutant(
        id="state-floats-only",
        exercise="3.9",
        mistake="integers and booleans are left out",
        text="            chosen = [tensors[i] for i in indices]\n",
        becomes="""            chosen = [tensors[i] for i in indices]
            if not chosen[0].is_floating_point():
                continue
""",
        caught_by="test_broadcast_gives_the_first_ranks_state",
        told_as="not-broadcast",
    ),
    Mutant(
        id="state-averaged",
        exercise="3.9",
        mistake="the mean of all ranks instead of one rank's state",
        text="            dist.broadcast(flat, group=group, group_src=0)\n",
        becomes="""            kind = flat.dtype
            flat = flat.double()
            dist.all_reduce(flat, group=group)
            flat = (flat / dist.get_world_size(group)).to(kind)
""",
        caught_by="test_broadcast_gives_the_first_ranks_state",
        told_as="not-broadcast",
    ),
    Mutant(
        id="state-rebound",
        exercise="3.9",
        mistake="the tensors get new memory: what the optimizer or a view holds is the old one",
        text="                    tensor.copy_(part.view(tensor.shape))\n",
        becomes="                    tensor.data = part.view(tensor.shape)\n",
        caught_by="test_broadcast_gives_the_first_ranks_state",
        told_as="new-tensors",
    ),
    Mutant(
        id="state-one-by-one",
        exercise="3.9",
        mistake="a message per tensor",
        text="        for indices in partition(tensors, limit, limit):\n",
        becomes="        for indices in [[i] for i in range(len(tensors))]:\n",
        caught_by="test_broadcast_needs_few_messages",
        told_as="too-many-messages",
    ),
    Mutant(
        id="state-at-once",
        exercise="3.9",
        mistake="the limit is ignored: a copy of the whole model",
        text="        for indices in partition(tensors, limit, limit):\n",
        becomes="        for indices in partition(tensors, 1 << 60, 1 << 60):\n",
        caught_by="test_broadcast_needs_few_messages",
        told_as="beyond-limit",
    ),
    Mutant(
        id="order-of-a-stranger",
        exercise="3.9",
        mistake=(
            "on a rank outside the group the broadcast does nothing, and its own order is taken"
        ),
        text="""    rank_in(group)
    order""",
        becomes="    order",
        caught_by="test_who_is_no_member_is_refused",
        told_as="accepted",
    ),
]
