"""The mistakes of learners who are told a cause: sentences about many, for a report on a class.

``distlab.explain.mistakes`` explains one tensor to one learner. Here are the words for the same
mistake that continue "31 of 60".
"""

from __future__ import annotations

# The rules of ``mistakes`` tell these causes. The mistake is the same one in every check.
OF_RULES = {
    "nan": "get nan or infinity where the right value is finite, or lose it where it belongs",
    "unchanged": "never write the result into the caller's tensor: it still holds the input",
    "zeros": "give zeros back",
    "sign": "have the wrong sign in every element",
    "summed": "do not divide the sum over the ranks, or divide it by the wrong number",
    "divided-twice": "divide by the world size more than once",
    "scaled": "get the right values times a constant factor",
    "unweighted-mean": "take the plain mean over ranks that hold unequal numbers of samples",
    "missing-rank": "leave out what one or several ranks contribute",
    "doubled-rank": "count the contribution of a rank twice",
    "only-own": "use the rank's own part alone: nothing of the other ranks is in the result",
    "rank-0-only": "give the value of rank 0 instead of the combination of all ranks",
    "one-rank-only": "give the value of one rank instead of the combination of all ranks",
    "bias-counted": "add the bias once per rank instead of once",
    "bias-missing": "forget the bias",
    "chunk-misplaced": "put chunks at the wrong positions",
    "chunk-partial": "have chunks that lack the contribution of some rank",
    "permuted": "get the right values in the wrong order",
    "rounding": "lose precision: another dtype in between, or another order of the sum",
    "shape": "give back a tensor of another shape",
    "dtype": "give back a tensor of another dtype",
}

# These causes say what happened. The reason depends on the check.
OF_RUNS = {
    "hang": "have ranks that wait for each other for ever",
    "endless-loop": "have a loop that never ends",
    "running": "do far too much work for a small case",
    "mismatch": "let ranks call different collectives, or with different shapes or dtypes",
    "exception": "raise an exception",
    "error": "have a file that can't be imported",
    "crash": "end a rank's process",
    "absent-rank": "address a rank that takes no part",
    "invented-communication": "communicate where nothing is to be communicated",
    "never-waited": "never wait for an asynchronous call",
    "waited-twice": "wait twice for the same asynchronous call",
    "overwritten-in-flight": "write into a tensor while it is being sent or received",
    "read-in-flight": "read a tensor before it has arrived",
    "two-in-one-buffer": "receive two messages into one buffer at the same time",
    "too-many-bytes": "send more bytes than the exercise allows",
    "too-few-bytes": "send fewer bytes than the result needs",
    "too-much-memory": "hold more memory than the exercise allows",
    "forbidden-operator": "call an operator that the exercise asks to write",
    "shortcut": "take a shortcut: code of the solutions, or PyTorch's own version of the exercise",
    "graph-cut": "cut autograd's graph: no gradient flows back",
    "changed-default": "change a default of torch, and leave it changed",
    "accepted": "accept arguments that the exercise asks to refuse",
    "type": "give back another type than the docstring promises",
    "missing": "give back nothing where a tensor is expected",
    "unusable": "give back something that can't be used as the docstring promises",
}


def is_of_a_rule(cause: str) -> bool:
    """Whether the cause names the same mistake in whichever check it is told."""
    return cause in OF_RULES


def what_they_do(cause: str) -> str:
    """The rest of a sentence that begins with "31 of 60"; "" if the cause has none of its own."""
    return OF_RULES.get(cause) or OF_RUNS.get(cause, "")
