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
        told_as="old-keys",
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
                "return dist.PrefixStore(hellos[0], store), hellos[0]\n",
                "return store, hellos[0]\n",
            ),
        ),
        caught_by="test_a_store_full_of_old_keys",
        told_as="old-keys",
    ),
]
