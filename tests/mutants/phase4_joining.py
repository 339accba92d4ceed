"""Wrong implementations of exercise 4.13."""

from distlab.grading.wrong import mutants_of

STORE = "test_a_store_full_of_old_keys"

MINE = "            if len(hellos) == world_size and hellos[rank] == me:\n"

mutant = mutants_of("4.13", "joining")

MUTANTS = [
    mutant(
        "old-call",
        "what rank 0 wrote in an earlier attempt is taken for its call",
        MINE,
        "            if len(hellos) == world_size and all(hellos):\n",
        STORE,
        "old-keys",
    ),
    mutant(
        "no-prefix",
        "the store is used as it is, with the addresses of dead processes in it",
        '                store.set(f"complete/{me}", "")\n                return dist.PrefixStore(me, store), me\n',
        '                store.set(f"complete/{me}", "")\n                return store, me\n',
        STORE,
        "old-keys",
        ("return dist.PrefixStore(hellos[0], store), hellos[0]\n", "return store, hellos[0]\n"),
    ),
]
