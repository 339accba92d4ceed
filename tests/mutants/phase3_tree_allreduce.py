"""Wrong implementations of exercises 3.5, 3.6 and 3.29."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="tree-starts-from-zeros",
        exercise="3.5",
        mistake="what comes is collected in a tensor of zeros: a maximum of negative numbers is 0",
        text="""    for child in children:
        dist.recv(incoming, group=group, group_src=child)
        COMBINE[op](total, incoming)
""",
        becomes="""    collected = torch.zeros_like(total)
    for child in children:
        dist.recv(incoming, group=group, group_src=child)
        COMBINE[op](collected, incoming)
    COMBINE[op](total, collected)
""",
        caught_by="test_tree_reduces_to_any_root",
        told_as="zeros",
    ),
    Mutant(
        id="tree-power-of-two",
        exercise="3.5",
        mistake="children beyond the last rank are expected",
        text=(
            "    children = [(number + b + root) % world_size for b in bits if number + b < "
            "world_size]\n"
        ),
        becomes="    children = [(number + b + root) % world_size for b in bits]\n",
        caught_by="test_tree_reduces_to_any_root",
        told_as="hang",
    ),
    Mutant(
        id="tree-children-lost",
        exercise="3.5",
        mistake="the tree has log₂ W whole rounds: ranks beyond a power of two are left out",
        text=(
            "    bits = [1 << k for k in range(world_size.bit_length()) if not lowest or 1 << "
            "k < lowest]\n"
        ),
        becomes="""    rounds = world_size.bit_length() - 1
    bits = [1 << k for k in range(rounds) if not lowest or 1 << k < lowest]
""",
        caught_by="test_tree_reduces_to_any_root",
        told_as="hang",
    ),
    Mutant(
        id="tree-is-a-star",
        exercise="3.5",
        mistake="everybody sends to the root itself",
        text=(
            "    bits = [1 << k for k in range(world_size.bit_length()) if not lowest or 1 << "
            "k < lowest]\n"
        ),
        becomes="""    lowest = number
    bits = [] if number else range(1, world_size)
""",
        caught_by="test_tree_sends_w_minus_1_messages_each_way",
        told_as="not-a-tree",
    ),
    Mutant(
        id="tree-is-a-chain",
        exercise="3.5",
        mistake="each rank has one child: W-1 rounds instead of log₂ W",
        text=(
            "    bits = [1 << k for k in range(world_size.bit_length()) if not lowest or 1 << "
            "k < lowest]\n"
        ),
        becomes="""    lowest = min(number, 1)
    bits = [1]
""",
        caught_by="test_tree_takes_log_w_rounds",
        told_as="too-slow",
    ),
    Mutant(
        id="tree-root-ignored",
        exercise="3.5",
        mistake="the tree always grows from rank 0",
        text="    number = (rank - root) % world_size\n",
        becomes="""    root = 0
    number = (rank - root) % world_size
""",
        caught_by="test_tree_reduces_to_any_root",
        told_as="unchanged",
    ),
    Mutant(
        id="tree-near-child-first",
        exercise="3.5",
        mistake=(
            "the broadcast serves the near children first: the deepest part of the tree starts last"
        ),
        text="        for child in reversed(children):\n",
        becomes="        for child in children:\n",
        caught_by="test_tree_takes_log_w_rounds",
        told_as="too-slow",
    ),
    Mutant(
        id="tree-others-changed",
        exercise="3.5",
        mistake="ranks that pass sums on add up in the caller's tensor",
        text=(
            "        climb(flat.clone() if children and rank != root else flat, root, op, group)\n"
        ),
        becomes="        climb(flat, root, op, group)\n",
        caught_by="test_tree_reduces_to_any_root",
        told_as="others-changed",
    ),
    Mutant(
        id="tree-sends-before-children",
        exercise="3.5",
        mistake="each rank sends its own tensor to the parent before it hears from its children",
        text="""    for child in children:
        dist.recv(incoming, group=group, group_src=child)
        COMBINE[op](total, incoming)
""",
        becomes="""    early = total.clone()
    for child in children:
        dist.recv(incoming, group=group, group_src=child)
        COMBINE[op](total, incoming)
""",
        more=(
            (
                "        dist.send(total, group=group, group_dst=parent)\n",
                "        dist.send(early, group=group, group_dst=parent)\n",
            ),
        ),
        caught_by="test_tree_all_reduce_on_every_rank",
        told_as="missing-rank",
    ),
    Mutant(
        id="tree-mean-everywhere",
        exercise="3.5",
        mistake="every rank with children divides",
        text="""    if parent is not None:
        dist.send(total, group=group, group_dst=parent)
    elif op == "mean":
        total.div_(world_size)
""",
        becomes="""    if op == "mean" and children:
        total.div_(world_size)
    if parent is not None:
        dist.send(total, group=group, group_dst=parent)
""",
        caught_by="test_tree_all_reduce_on_every_rank",
        told_as="wrong",
    ),
    Mutant(
        id="tree-never-down",
        exercise="3.5",
        mistake="the result stays with rank 0",
        text="""        climb(flat, 0, op, group)
        tree_broadcast(flat, 0, group)
""",
        becomes="        climb(flat, 0, op, group)\n",
        caught_by="test_tree_all_reduce_on_every_rank",
        told_as="unchanged",
    ),
    Mutant(
        id="tree-broadcast-by-all-reduce",
        exercise="3.5",
        mistake="torch's broadcast does the second half",
        text="""        climb(flat, 0, op, group)
        tree_broadcast(flat, 0, group)
""",
        becomes="""        climb(flat, 0, op, group)
        if flat.numel():
            dist.broadcast(flat, group=group, group_src=0)
""",
        caught_by="test_tree_sends_w_minus_1_messages_each_way",
        told_as="forbidden-operator",
    ),
    Mutant(
        id="tree-twice-up",
        exercise="3.5",
        mistake="an all-reduce as a reduction to every rank in turn",
        text="""        climb(flat, 0, op, group)
        tree_broadcast(flat, 0, group)
""",
        becomes="""        own = flat.clone()
        for root in range(dist.get_world_size(group)):
            part = own.clone()
            climb(part, root, op, group)
            if root == dist.get_rank(group):
                flat.copy_(part)
""",
        caught_by="test_tree_sends_w_minus_1_messages_each_way",
        told_as="too-many-messages",
    ),
    Mutant(
        id="tree-root-late-check",
        exercise="3.5",
        mistake="a root outside the group is noticed by nobody",
        text="    if not 0 <= root < world_size:\n",
        becomes="    if root < 0:\n",
        caught_by="test_trees_in_groups",
        told_as="accepted",
    ),
    Mutant(
        id="tree-view-lost",
        exercise="3.5",
        mistake="a strided tensor is reduced in a copy",
        text="""    check_arguments(tensor, op, group)
    with flattened(tensor) as flat:
        climb""",
        becomes="""    check_arguments(tensor, op, group)
    with flattened(tensor.contiguous()) as flat:
        climb""",
        caught_by="test_trees_on_views",
        told_as="unchanged",
    ),
    Mutant(
        id="tree-global-ranks",
        exercise="3.5",
        mistake="the group's ranks are taken for global ones",
        text="            dist.recv(flat, group=group, group_src=parent)\n",
        becomes="            dist.recv(flat, parent, group)\n",
        caught_by="test_trees_in_groups",
        told_as=("hang", "exception"),
    ),
    Mutant(
        id="halving-power-of-two",
        exercise="3.6",
        mistake="partners by XOR for any W",
        text="        core = 1 << (world_size.bit_length() - 1)\n",
        becomes="        core = 1 << (world_size - 1).bit_length()\n",
        caught_by="test_halving_doubling_on_every_rank",
        told_as="exception",
    ),
    Mutant(
        id="halving-guests-forgotten",
        exercise="3.6",
        mistake="the ranks beyond the power of two get the result, but their part is not in it",
        text="""            COMBINE[op](flat, buffer)
        piece""",
        becomes="""            pass
        piece""",
        caught_by="test_halving_doubling_on_every_rank",
        told_as="missing-rank",
    ),
    Mutant(
        id="halving-mean-by-core",
        exercise="3.6",
        mistake="the mean is divided by the power of two",
        text="""        if op == "mean":
            piece.div_(world_size)
        for partner""",
        becomes="""        if op == "mean":
            piece.div_(core)
        for partner""",
        caught_by="test_halving_doubling_on_every_rank",
        told_as="scaled",
    ),
    Mutant(
        id="halving-whole-tensor",
        exercise="3.6",
        mistake="partners exchange everything each time (recursive doubling)",
        text="        piece, path = flat, []\n",
        becomes="""        piece, path = flat, []
        distance, incoming = core // 2, flat.new_empty(flat.shape)
        while distance:
            wait(exchange(flat, rank ^ distance, incoming, rank ^ distance, group))
            COMBINE[op](flat, incoming)
            distance //= 2
""",
        more=(
            (
                (
                    "        for distance in [1 << k for k in reversed(range(core.bit_length() "
                    "- 1))]:\n"
                ),
                "        for distance in ():\n",
            ),
        ),
        caught_by="test_halving_doubling_costs_what_the_formula_says",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="halving-both-keep-first",
        exercise="3.6",
        mistake="both partners keep the first half",
        text=(
            "            keep, give = (first, second) if not rank & distance else (second, first)\n"
        ),
        becomes="            keep, give = first, second\n",
        caught_by="test_halving_doubling_on_every_rank",
        told_as="mismatch",
    ),
    Mutant(
        id="halving-not-doubled",
        exercise="3.6",
        mistake="the way back is forgotten",
        text="""        for partner, keep, give in reversed(path):
            wait(exchange(keep, partner, give, partner, group))
""",
        becomes="",
        caught_by="test_halving_doubling_on_every_rank",
        told_as="wrong",
    ),
    Mutant(
        id="halving-back-in-order",
        exercise="3.6",
        mistake="the way back begins with the first partner: what is sent is not complete yet",
        text="        for partner, keep, give in reversed(path):\n",
        becomes="        for partner, keep, give in path:\n",
        caught_by="test_halving_doubling_on_every_rank",
        told_as="chunk-partial",
    ),
    Mutant(
        id="halving-send-first",
        exercise="3.6",
        mistake="partners send to each other, blocking, before they receive",
        text=(
            "            handles = exchange(give, rank ^ distance, incoming, rank ^ distance, "
            "group)\n"
            "            wait(handles[:1])\n"
            "            COMBINE[op](keep, incoming)\n"
            "            wait(handles[1:])\n"
        ),
        becomes="""            if give.numel():
                dist.send(give, group=group, group_dst=rank ^ distance)
            if keep.numel():
                dist.recv(incoming, group=group, group_src=rank ^ distance)
            COMBINE[op](keep, incoming)
""",
        more=[
            (
                "from torch import Tensor\n",
                "import torch.distributed as dist\nfrom torch import Tensor\n",
            )
        ],
        caught_by="test_halving_doubling_on_every_rank",
        told_as="hang",
    ),
    Mutant(
        id="halving-lower-first",
        exercise="3.6",
        mistake="the lower partner sends first, the other receives first: twice the time",
        text=(
            "            handles = exchange(give, rank ^ distance, incoming, rank ^ distance, "
            "group)\n"
            "            wait(handles[:1])\n"
            "            COMBINE[op](keep, incoming)\n"
            "            wait(handles[1:])\n"
        ),
        becomes="""            for sends in (not rank & distance, bool(rank & distance)):
                if sends and give.numel():
                    dist.send(give, group=group, group_dst=rank ^ distance)
                elif not sends and keep.numel():
                    dist.recv(incoming, group=group, group_src=rank ^ distance)
            COMBINE[op](keep, incoming)
""",
        more=[
            (
                "from torch import Tensor\n",
                "import torch.distributed as dist\nfrom torch import Tensor\n",
            )
        ],
        caught_by="test_halving_doubling_takes_two_log_w_rounds",
        told_as="too-slow",
    ),
    Mutant(
        id="halving-library",
        exercise="3.6",
        mistake="torch's own all-reduce does the work",
        text="""        core = 1 << (world_size.bit_length() - 1)
        if not flat.numel():
            return
""",
        becomes="""        kind = dist.ReduceOp.MAX if op == 'max' else dist.ReduceOp.SUM
        dist.all_reduce(flat, kind, group=group)
        return
""",
        more=[
            (
                "from torch import Tensor\n",
                "import torch.distributed as dist\nfrom torch import Tensor\n",
            )
        ],
        caught_by="test_halving_doubling_costs_what_the_formula_says",
        told_as="forbidden-operator",
    ),
    Mutant(
        id="halving-odd-element-lost",
        exercise="3.6",
        mistake="halves of n // 2 elements: the last one of an odd piece is never reduced",
        text="            first, second = piece.tensor_split(2)\n",
        becomes="""            half = piece.numel() // 2
            first, second = piece[:half], piece[half : 2 * half]
""",
        caught_by="test_halving_doubling_on_every_rank",
        told_as="wrong",
    ),
    Mutant(
        id="halving-view-lost",
        exercise="3.6",
        mistake="a strided tensor is reduced in a copy",
        text="""    rank, world_size = check_arguments(tensor, op, group)
    with flattened(tensor) as flat:
        core""",
        becomes="""    rank, world_size = check_arguments(tensor, op, group)
    with flattened(tensor.contiguous()) as flat:
        core""",
        caught_by="test_halving_doubling_on_views",
        told_as="unchanged",
    ),
    Mutant(
        id="model-guests-free",
        exercise="3.29",
        mistake="the model forgets what ranks beyond a power of two cost",
        text="    extra = 0 if w == core else 2\n",
        becomes="    extra = 0\n",
        caught_by="test_critical_path_and_prediction",
        told_as="formula",
    ),
    Mutant(
        id="model-ring-whole",
        exercise="3.29",
        mistake="the ring is charged with whole tensors",
        text='"ring": (2 * (w - 1), 2 * (w - 1) / w * nbytes),',
        becomes='"ring": (2 * (w - 1), 2 * (w - 1) * nbytes),',
        caught_by="test_critical_path_and_prediction",
        told_as="formula",
    ),
    Mutant(
        id="model-no-latency",
        exercise="3.29",
        mistake="the prediction knows bytes only",
        text="    return messages * links[pattern].alpha + volume * links[pattern].beta\n",
        becomes="    return volume * links[pattern].beta\n",
        caught_by="test_critical_path_and_prediction",
        told_as="prediction",
    ),
    Mutant(
        id="fit-absolute",
        exercise="3.29",
        mistake="absolute errors: the largest tensor decides what the smallest costs",
        text=(
            "            rows = [(m / s, b / s, t / s) for (m, b, t), s in zip(paths, scales, "
            "strict=True)]\n"
        ),
        becomes="            rows = paths\n",
        caught_by="test_fit_finds_alpha_and_beta",
        told_as="absolute-errors",
    ),
    Mutant(
        id="fit-one-line-for-all",
        exercise="3.29",
        mistake="one α and β for all patterns",
        text="        mine = [t for t in timings if t.pattern == pattern and t.world_size > 1]\n",
        becomes="        mine = [t for t in timings if t.world_size > 1]\n",
        caught_by="test_fit_finds_alpha_and_beta",
        told_as="fit",
    ),
    Mutant(
        id="fit-negative",
        exercise="3.29",
        mistake="a negative α or β is kept",
        text="    return Link(alpha, beta) if beta >= 0 else Link(mt / mm, 0.0)\n",
        becomes="    return Link(alpha, beta)\n",
        caught_by="test_fit_finds_alpha_and_beta",
        told_as="negative",
    ),
    Mutant(
        id="fit-cut-off",
        exercise="3.29",
        mistake="a negative β is set to 0, and α stays what it was beside the negative one",
        text="    return Link(alpha, beta) if beta >= 0 else Link(mt / mm, 0.0)\n",
        becomes="    return Link(alpha, max(beta, 0.0))\n",
        caught_by="test_fit_finds_alpha_and_beta",
        told_as="negative",
    ),
    Mutant(
        id="fit-one-size",
        exercise="3.29",
        mistake="a line through timings of one size",
        text="        if len({t.nbytes for t in mine}) < 2:\n",
        becomes="        if not mine:\n",
        caught_by="test_fit_finds_alpha_and_beta",
        told_as="accepted",
    ),
    Mutant(
        id="choice-by-latency",
        exercise="3.29",
        mistake="the pattern with the fewest messages is chosen at any size",
        text="predict(pattern, world_size, nbytes, links))",
        becomes="predict(pattern, world_size, 0, links))",
        caught_by="test_choice_is_the_smallest_prediction",
        told_as="choice",
    ),
    Mutant(
        id="choice-not-in-links",
        exercise="3.29",
        mistake="patterns without measurements are asked for",
        text="    candidates = [pattern for pattern in PATTERNS if pattern in links]\n",
        becomes="    candidates = [*PATTERNS]\n",
        caught_by="test_choice_is_the_smallest_prediction",
        told_as="exception",
    ),
    Mutant(
        id="auto-is-the-ring",
        exercise="3.29",
        mistake="auto always takes the ring",
        text="        pattern = choose(world_size, tensor.nbytes, links)\n",
        becomes='        pattern = "ring"\n',
        caught_by="test_auto_sends_what_the_best_pattern_sends",
        told_as="not-chosen",
    ),
    Mutant(
        id="auto-default-links",
        exercise="3.29",
        mistake="the links that the caller gives are not used",
        text="choose(world_size, tensor.nbytes, links)",
        becomes="choose(world_size, tensor.nbytes, LINKS)",
        caught_by="test_auto_sends_what_the_best_pattern_sends",
        told_as="not-chosen",
    ),
    Mutant(
        id="auto-checks-late",
        exercise="3.29",
        mistake="the ranks choose before they agree, and each does something else",
        text="""    if check:
        agree(tensor, op, group)
""",
        becomes="",
        more=(
            (
                "    PATTERNS[pattern](tensor, op, group)\n",
                """    PATTERNS[pattern](tensor, op, group)
    if check:
        agree(tensor, op, group)
""",
            ),
        ),
        caught_by="test_all_reduce_checks_first",
        told_as="mismatch",
    ),
    Mutant(
        id="auto-unknown-pattern",
        exercise="3.29",
        mistake="an unknown pattern falls back to the tree without a word",
        text="    if pattern not in PATTERNS:\n",
        becomes="    if pattern not in PATTERNS and (pattern := 'tree') is None:\n",
        caught_by="test_all_reduce_with_any_pattern",
        told_as="accepted",
    ),
]
