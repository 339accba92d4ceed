"""Wrong implementations of exercises 3.5, 3.6 and 3.29."""

from distlab.grading.wrong import Mutant

REDUCES, BROADCASTS = "test_tree_reduces_to_any_root", "test_tree_broadcasts_from_any_root"
TREE, EACH_WAY = "test_tree_all_reduce_on_every_rank", "test_tree_sends_w_minus_1_messages_each_way"
ROUNDS, TREE_VIEWS = "test_tree_takes_log_w_rounds", "test_trees_on_views_and_in_groups"
HALVES, COSTS = (
    "test_halving_doubling_on_every_rank",
    ("test_halving_doubling_costs_what_the_formula_says"),
)
TWO_LOG, HD_VIEWS = (
    "test_halving_doubling_takes_two_log_w_rounds",
    "test_halving_doubling_on_views_and_in_groups",
)
MODEL, FIT, CHOICE = (
    "test_critical_path_and_prediction",
    "test_fit_finds_alpha_and_beta",
    "test_choice_is_the_smallest_prediction",
)
AUTO, ANY, FIRST = (
    "test_auto_sends_what_the_best_pattern_sends",
    "test_all_reduce_with_any_pattern",
    "test_all_reduce_checks_first",
)

BITS = (
    "    bits = [1 << k for k in range(world_size.bit_length()) if not lowest or 1 << k < lowest]\n"
)
CHILDREN = (
    "    children = [(number + b + root) % world_size for b in bits if number + b < world_size]\n"
)
HEAR = """    for child in children:
        dist.recv(incoming, group=group, group_src=child)
        COMBINE[op](total, incoming)
"""
COPY = "        climb(flat.clone() if children and rank != root else flat, root, op, group)\n"
DOWN = "        for child in reversed(children):\n"
BOTH = """        climb(flat, 0, op, group)
        tree_broadcast(flat, 0, group)
"""
GUEST = "        guest = rank + core if rank + core < world_size else None\n"
DISTANCES = "        for distance in [1 << k for k in reversed(range(core.bit_length() - 1))]:\n"
KEEP = "            keep, give = (first, second) if not rank & distance else (second, first)\n"
SWAPPED = """            handles = exchange(give, rank ^ distance, incoming, rank ^ distance, group)
            wait(handles[:1])
            COMBINE[op](keep, incoming)
            wait(handles[1:])
"""
DIVIDED = """        if op == "mean":
            piece.div_(world_size)
        for partner"""
RETURN = """        for partner, keep, give in reversed(path):
            wait(exchange(keep, partner, give, partner, group))
"""
EXTRA = "    extra = 0 if w == core else 2\n"
ROWS = """            rows = [(m / s, b / s, t / s) for (m, b, t), s in zip(paths, scales, strict=True)]
"""
SIGN = "    return Link(alpha, beta) if beta >= 0 else Link(mt / mm, 0.0)\n"

MUTANTS = [
    Mutant(
        id="tree-starts-from-zeros",
        exercise="3.5",
        bug="what comes is collected in a tensor of zeros: a maximum of negative numbers is 0",
        find=HEAR,
        replace="    collected = torch.zeros_like(total)\n"
        + HEAR.replace("total", "collected")
        + "    COMBINE[op](total, collected)\n",
        killed_by=REDUCES,
        cause="zeros",
    ),
    Mutant(
        id="tree-power-of-two",
        exercise="3.5",
        bug="BUGS 49: children beyond the last rank are expected",
        find=CHILDREN,
        replace="    children = [(number + b + root) % world_size for b in bits]\n",
        killed_by=REDUCES,
        cause="hang",
    ),
    Mutant(
        id="tree-children-lost",
        exercise="3.5",
        bug="BUGS 49: the tree has log₂ W whole rounds: ranks beyond a power of two are left out",
        find=BITS,
        replace="    rounds = world_size.bit_length() - 1\n"
        "    bits = [1 << k for k in range(rounds) if not lowest or 1 << k < lowest]\n",
        killed_by=REDUCES,
        cause="hang",
    ),
    Mutant(
        id="tree-is-a-star",
        exercise="3.5",
        bug="everybody sends to the root itself",
        find=BITS,
        replace="    lowest = number\n    bits = [] if number else range(1, world_size)\n",
        killed_by=EACH_WAY,
        cause="not-a-tree",
    ),
    Mutant(
        id="tree-is-a-chain",
        exercise="3.5",
        bug="each rank has one child: W-1 rounds instead of log₂ W",
        find=BITS,
        replace="    lowest = min(number, 1)\n    bits = [1]\n",
        killed_by=ROUNDS,
        cause="too-slow",
    ),
    Mutant(
        id="tree-root-ignored",
        exercise="3.5",
        bug="the tree always grows from rank 0",
        find="    number = (rank - root) % world_size\n",
        replace="    root = 0\n    number = (rank - root) % world_size\n",
        killed_by=REDUCES,
        cause="unchanged",
    ),
    Mutant(
        id="tree-near-child-first",
        exercise="3.5",
        bug="the broadcast serves the near children first: the deepest part of the tree starts last",
        find=DOWN,
        replace="        for child in children:\n",
        killed_by=ROUNDS,
        cause="too-slow",
    ),
    Mutant(
        id="tree-others-changed",
        exercise="3.5",
        bug="ranks that pass sums on add up in the caller's tensor",
        find=COPY,
        replace="        climb(flat, root, op, group)\n",
        killed_by=REDUCES,
        cause="others-changed",
    ),
    Mutant(
        id="tree-sends-before-children",
        exercise="3.5",
        bug="each rank sends its own tensor to the parent before it hears from its children",
        find=HEAR,
        replace="    early = total.clone()\n" + HEAR,
        patches=[
            (
                "        dist.send(total, group=group, group_dst=parent)\n",
                "        dist.send(early, group=group, group_dst=parent)\n",
            )
        ],
        killed_by=TREE,
        cause="missing-rank",
    ),
    Mutant(
        id="tree-mean-everywhere",
        exercise="3.5",
        bug="BUGS 21: every rank with children divides",
        find="    if parent is not None:\n        dist.send(total, group=group, group_dst=parent)\n"
        '    elif op == "mean":\n        total.div_(world_size)\n',
        replace='    if op == "mean" and children:\n        total.div_(world_size)\n'
        "    if parent is not None:\n        dist.send(total, group=group, group_dst=parent)\n",
        killed_by=TREE,
        cause="wrong",
    ),
    Mutant(
        id="tree-never-down",
        exercise="3.5",
        bug="the result stays with rank 0",
        find=BOTH,
        replace="        climb(flat, 0, op, group)\n",
        killed_by=TREE,
        cause="unchanged",
    ),
    Mutant(
        id="tree-broadcast-by-all-reduce",
        exercise="3.5",
        bug="BUGS 50: torch's broadcast does the second half",
        find=BOTH,
        replace="        climb(flat, 0, op, group)\n"
        "        if flat.numel():\n"
        "            dist.broadcast(flat, group=group, group_src=0)\n",
        killed_by=EACH_WAY,
        cause="forbidden-operator",
    ),
    Mutant(
        id="tree-twice-up",
        exercise="3.5",
        bug="an all-reduce as a reduction to every rank in turn",
        find=BOTH,
        replace="        own = flat.clone()\n"
        "        for root in range(dist.get_world_size(group)):\n"
        "            part = own.clone()\n"
        "            climb(part, root, op, group)\n"
        "            if root == dist.get_rank(group):\n"
        "                flat.copy_(part)\n",
        killed_by=EACH_WAY,
        cause="too-many-messages",
    ),
    Mutant(
        id="tree-root-late-check",
        exercise="3.5",
        bug="a root outside the group is noticed by nobody",
        find="    if not 0 <= root < world_size:\n",
        replace="    if root < 0:\n",
        killed_by=TREE_VIEWS,
        cause="accepted",
    ),
    Mutant(
        id="tree-view-lost",
        exercise="3.5",
        bug="BUGS 48: a strided tensor is reduced in a copy",
        find="    check_arguments(tensor, op, group)\n    with flattened(tensor) as flat:\n        climb",
        replace="    check_arguments(tensor, op, group)\n"
        "    with flattened(tensor.contiguous()) as flat:\n        climb",
        killed_by=TREE_VIEWS,
        cause="unchanged",
    ),
    Mutant(
        id="tree-global-ranks",
        exercise="3.5",
        bug="the group's ranks are taken for global ones",
        find="            dist.recv(flat, group=group, group_src=parent)\n",
        replace="            dist.recv(flat, parent, group)\n",
        killed_by=TREE_VIEWS,
        cause="hang",
    ),
    Mutant(
        id="halving-power-of-two",
        exercise="3.6",
        bug="BUGS 49: partners by XOR for any W",
        find="        core = 1 << (world_size.bit_length() - 1)\n",
        replace="        core = 1 << (world_size - 1).bit_length()\n",
        killed_by=HALVES,
        cause="exception",
    ),
    Mutant(
        id="halving-guests-forgotten",
        exercise="3.6",
        bug="the ranks beyond the power of two get the result, but their part is not in it",
        find="            COMBINE[op](flat, buffer)\n        piece",
        replace="            pass\n        piece",
        killed_by=HALVES,
        cause="missing-rank",
    ),
    Mutant(
        id="halving-mean-by-core",
        exercise="3.6",
        bug="the mean is divided by the power of two",
        find=DIVIDED,
        replace=DIVIDED.replace("world_size", "core"),
        killed_by=HALVES,
        cause="scaled",
    ),
    Mutant(
        id="halving-whole-tensor",
        exercise="3.6",
        bug="BUGS 42: partners exchange everything each time (recursive doubling)",
        find="        piece, path = flat, []\n",
        replace="        piece, path = flat, []\n"
        "        distance, incoming = core // 2, flat.new_empty(flat.shape)\n"
        "        while distance:\n"
        "            wait(exchange(flat, rank ^ distance, incoming, rank ^ distance, group))\n"
        "            COMBINE[op](flat, incoming)\n"
        "            distance //= 2\n",
        patches=[
            (DISTANCES, "        for distance in ():\n"),
        ],
        killed_by=COSTS,
        cause="too-many-bytes",
    ),
    Mutant(
        id="halving-both-keep-first",
        exercise="3.6",
        bug="both partners keep the first half",
        find=KEEP,
        replace="            keep, give = first, second\n",
        killed_by=HALVES,
        cause="mismatch",
    ),
    Mutant(
        id="halving-not-doubled",
        exercise="3.6",
        bug="the way back is forgotten",
        find=RETURN,
        replace="",
        killed_by=HALVES,
        cause="wrong",
    ),
    Mutant(
        id="halving-back-in-order",
        exercise="3.6",
        bug="the way back begins with the first partner: what is sent is not complete yet",
        find="        for partner, keep, give in reversed(path):\n",
        replace="        for partner, keep, give in path:\n",
        killed_by=HALVES,
        cause="chunk-partial",
    ),
    Mutant(
        id="halving-send-first",
        exercise="3.6",
        bug="BUGS 43: partners send to each other, blocking, before they receive",
        find=SWAPPED,
        replace="            if give.numel():\n"
        "                dist.send(give, group=group, group_dst=rank ^ distance)\n"
        "            if keep.numel():\n"
        "                dist.recv(incoming, group=group, group_src=rank ^ distance)\n"
        "            COMBINE[op](keep, incoming)\n",
        killed_by=HALVES,
        cause="hang",
    ),
    Mutant(
        id="halving-lower-first",
        exercise="3.6",
        bug="the lower partner sends first, the other receives first: twice the time",
        find=SWAPPED,
        replace="            for sends in (not rank & distance, bool(rank & distance)):\n"
        "                if sends and give.numel():\n"
        "                    dist.send(give, group=group, group_dst=rank ^ distance)\n"
        "                elif not sends and keep.numel():\n"
        "                    dist.recv(incoming, group=group, group_src=rank ^ distance)\n"
        "            COMBINE[op](keep, incoming)\n",
        killed_by=TWO_LOG,
        cause="too-slow",
    ),
    Mutant(
        id="halving-library",
        exercise="3.6",
        bug="BUGS 50: torch's own all-reduce does the work",
        find="        core = 1 << (world_size.bit_length() - 1)\n        if not flat.numel():\n            return\n",
        replace="        kind = dist.ReduceOp.MAX if op == 'max' else dist.ReduceOp.SUM\n"
        "        dist.all_reduce(flat, kind, group=group)\n        return\n",
        killed_by=COSTS,
        cause="forbidden-operator",
    ),
    Mutant(
        id="halving-odd-element-lost",
        exercise="3.6",
        bug="BUGS 45: halves of n // 2 elements: the last one of an odd piece is never reduced",
        find="            first, second = piece.tensor_split(2)\n",
        replace="            half = piece.numel() // 2\n"
        "            first, second = piece[:half], piece[half : 2 * half]\n",
        killed_by=HALVES,
        cause="wrong",
    ),
    Mutant(
        id="halving-view-lost",
        exercise="3.6",
        bug="BUGS 48: a strided tensor is reduced in a copy",
        find="    rank, world_size = check_arguments(tensor, op, group)\n"
        "    with flattened(tensor) as flat:\n        core",
        replace="    rank, world_size = check_arguments(tensor, op, group)\n"
        "    with flattened(tensor.contiguous()) as flat:\n        core",
        killed_by=HD_VIEWS,
        cause="unchanged",
    ),
    Mutant(
        id="model-guests-free",
        exercise="3.29",
        bug="the model forgets what ranks beyond a power of two cost",
        find=EXTRA,
        replace="    extra = 0\n",
        killed_by=MODEL,
        cause="formula",
    ),
    Mutant(
        id="model-ring-whole",
        exercise="3.29",
        bug="BUGS 42: the ring is charged with whole tensors",
        find='"ring": (2 * (w - 1), 2 * (w - 1) / w * nbytes),',
        replace='"ring": (2 * (w - 1), 2 * (w - 1) * nbytes),',
        killed_by=MODEL,
        cause="formula",
    ),
    Mutant(
        id="model-no-latency",
        exercise="3.29",
        bug="the prediction knows bytes only",
        find="    return messages * links[pattern].alpha + volume * links[pattern].beta\n",
        replace="    return volume * links[pattern].beta\n",
        killed_by=MODEL,
        cause="prediction",
    ),
    Mutant(
        id="fit-absolute",
        exercise="3.29",
        bug="absolute errors: the largest tensor decides what the smallest costs",
        find=ROWS,
        replace="            rows = paths\n",
        killed_by=FIT,
        cause="absolute-errors",
    ),
    Mutant(
        id="fit-one-line-for-all",
        exercise="3.29",
        bug="one α and β for all patterns",
        find="        mine = [t for t in timings if t.pattern == pattern and t.world_size > 1]\n",
        replace="        mine = [t for t in timings if t.world_size > 1]\n",
        killed_by=FIT,
        cause="fit",
    ),
    Mutant(
        id="fit-negative",
        exercise="3.29",
        bug="a negative α or β is kept",
        find=SIGN,
        replace="    return Link(alpha, beta)\n",
        killed_by=FIT,
        cause="negative",
    ),
    Mutant(
        id="fit-cut-off",
        exercise="3.29",
        bug="a negative β is cut off, and α stays what it was beside the negative one",
        find=SIGN,
        replace="    return Link(alpha, max(beta, 0.0))\n",
        killed_by=FIT,
        cause="negative",
    ),
    Mutant(
        id="fit-one-size",
        exercise="3.29",
        bug="a line through timings of one size",
        find="        if len({t.nbytes for t in mine}) < 2:\n",
        replace="        if not mine:\n",
        killed_by=FIT,
        cause="accepted",
    ),
    Mutant(
        id="choice-by-latency",
        exercise="3.29",
        bug="the pattern with the fewest messages is chosen at any size",
        find="predict(pattern, world_size, nbytes, links))",
        replace="predict(pattern, world_size, 0, links))",
        killed_by=CHOICE,
        cause="choice",
    ),
    Mutant(
        id="choice-not-in-links",
        exercise="3.29",
        bug="patterns without measurements are asked for",
        find="    candidates = [pattern for pattern in PATTERNS if pattern in links]\n",
        replace="    candidates = [*PATTERNS]\n",
        killed_by=CHOICE,
        cause="exception",
    ),
    Mutant(
        id="auto-is-the-ring",
        exercise="3.29",
        bug="auto always takes the ring",
        find="        pattern = choose(world_size, tensor.nbytes, links)\n",
        replace='        pattern = "ring"\n',
        killed_by=AUTO,
        cause="not-chosen",
    ),
    Mutant(
        id="auto-default-links",
        exercise="3.29",
        bug="the links that the caller gives are not used",
        find="choose(world_size, tensor.nbytes, links)",
        replace="choose(world_size, tensor.nbytes, LINKS)",
        killed_by=AUTO,
        cause="not-chosen",
    ),
    Mutant(
        id="auto-checks-late",
        exercise="3.29",
        bug="the ranks choose before they agree, and each does something else",
        find="    if check:\n        agree(tensor, op, group)\n",
        replace="",
        patches=[
            (
                "    PATTERNS[pattern](tensor, op, group)\n",
                "    PATTERNS[pattern](tensor, op, group)\n"
                "    if check:\n        agree(tensor, op, group)\n",
            )
        ],
        killed_by=FIRST,
        cause="mismatch",
    ),
    Mutant(
        id="auto-unknown-pattern",
        exercise="3.29",
        bug="an unknown pattern falls back to the tree without a word",
        find="    if pattern not in PATTERNS:\n",
        replace="    if pattern not in PATTERNS and (pattern := 'tree') is None:\n",
        killed_by=ANY,
        cause="accepted",
    ),
]
