"""Wrong implementations of exercise 4.13."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="joining-old-call",
        exercise="4.13",
        mistake="what rank 0 wrote in an earlier attempt is taken for its call",
        text="            if len(hellos) == world_size and hellos[rank] == me:\n",
        becomes="            if len(hellos) == world_size and all(hellos):\n",
        caught_by="test_a_store_full_of_old_keys",
        told_as=("old-keys", "next-call", "no-timeout"),
    ),
    Mutant(
        id="joining-no-prefix",
        exercise="4.13",
        mistake="the store is used as it is, with the addresses of dead processes in it",
        text="""                store.set(f"complete/{me}", "")
                return dist.PrefixStore(me, store), me
""",
        becomes="""                store.set(f"complete/{me}", "")
                return store, me
""",
        more=(
            (
                "return dist.PrefixStore(answered, store), answered\n",
                "return store, answered\n",
            ),
        ),
        caught_by="test_a_store_full_of_old_keys",
        told_as="old-keys",
    ),
    Mutant(
        id="joining-old-answers",
        exercise="4.13",
        mistake="rank 0 goes on when each rank has answered something, also in an earlier attempt",
        text="""            if _written(store, "answer", world_size)[1:] == [me] * (world_size - 1):
""",
        becomes="""            if all(_written(store, "answer", world_size)[1:]):
""",
        caught_by="test_a_store_full_of_old_keys",
        told_as=("old-keys", "no-timeout"),
    ),
    Mutant(
        id="joining-shorter-call",
        exercise="4.13",
        mistake="a call of fewer ranks, from an earlier attempt, is looked into without a check",
        text="            if len(hellos) == world_size and hellos[rank] == me:\n",
        becomes="            if hellos[rank] == me:\n",
        caught_by="test_a_store_full_of_old_keys",
        told_as="exception",
    ),
    Mutant(
        id="joining-answers-too-much",
        exercise="4.13",
        mistake="a rank answers the next call before it looks whether its own is complete",
        text="""            if answered and store.check([f"complete/{answered}"]):
                return dist.PrefixStore(answered, store), answered
            if len(hellos) == world_size and hellos[rank] == me:
                answered = hellos[0]
                store.set(f"answer/{rank}", answered)
""",
        becomes="""            if len(hellos) == world_size and hellos[rank] == me:
                answered = hellos[0]
                store.set(f"answer/{rank}", answered)
                if store.check([f"complete/{answered}"]):
                    return dist.PrefixStore(answered, store), answered
""",
        caught_by="test_a_store_full_of_old_keys",
        told_as="next-call",
    ),
    Mutant(
        id="joining-drawn-name",
        exercise="4.13",
        mistake="the name comes from random, which programs seed: each restart has the same one",
        text='    me, answered = uuid.uuid4().hex, ""\n',
        becomes="""    draw = __import__("random").getrandbits
    me, answered = f"{draw(128) + rank:x}", ""
""",
        caught_by="test_a_store_full_of_old_keys",
        told_as=("old-keys", "no-timeout", "streams"),
    ),
]
