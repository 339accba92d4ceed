"""Wrong implementations of exercise 4.19: the bottleneck and its evidence."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="profile-mean-growth",
        exercise="4.19",
        mistake="one large step makes a growing run",
        text="steps >= 3 and min(grown) >= leak",
        becomes="steps >= 3 and sum(grown) >= leak * len(grown)",
        caught_by="test_where_the_verdict_turns",
        told_as="limits",
    ),
    Mutant(
        id="profile-two-steps-grow",
        exercise="4.19",
        mistake="the growth of a single step is enough",
        text="steps >= 3 and min(grown)",
        becomes="steps >= 2 and min(grown)",
        caught_by="test_where_the_verdict_turns",
        told_as="limits",
    ),
    Mutant(
        id="profile-always-lost",
        exercise="4.19",
        mistake="a healthy run has a bottleneck, too: whatever is largest",
        text='    part = part if lost[part] >= share * (end - begin) else "compute"\n',
        becomes="    del share\n",
        caught_by="test_the_planted_bottleneck_is_found",
        told_as="bottleneck",
    ),
    Mutant(
        id="profile-updates-by-their-begin",
        exercise="4.19",
        mistake="kernels count as the optimizer's when they run, not when it launches them",
        text="any(a <= span.launched < b for a, b in updates)",
        becomes="any(a <= span.begin < b for a, b in updates)",
        caught_by="test_the_planted_bottleneck_is_found",
        told_as="evidence",
    ),
    Mutant(
        id="profile-all-of-the-trace",
        exercise="4.19",
        mistake="work before the first step and after the last one counts",
        text="for s in trace.spans if begin <= s.launched < end)",
        becomes="for s in trace.spans)",
        caught_by="test_the_planted_bottleneck_is_found",
        told_as="evidence",
    ),
    Mutant(
        id="profile-begun-in-the-window",
        exercise="4.19",
        mistake="spans count if they begin in the window, whenever they were launched",
        text="for s in trace.spans if begin <= s.launched < end)",
        becomes="for s in trace.spans if begin <= s.begin < end)",
        caught_by="test_where_the_verdict_turns",
        told_as="limits",
    ),
    Mutant(
        id="profile-longest-operation",
        exercise="4.19",
        mistake="the longest collective is blamed, also if compute hides it",
        text="length(without(inside, busy))",
        becomes="length(inside)",
        caught_by="test_where_the_verdict_turns",
        told_as="limits",
    ),
]
