"""Wrong implementations of exercise 4.11."""

from distlab.grading.wrong import mutants_of

REPORT, EMPTY = "test_report_is_of_all_ranks", "test_ranks_without_samples"
MESSAGE, GROUP = "test_one_small_message_per_report", "test_reports_of_a_group"
WHICH, QUIET = "test_which_rank_by_how_much_and_since_when", "test_no_false_alarm"
STEP, PHASE = "test_one_slow_step_is_no_slow_rank", "test_where_a_straggler_loses_its_time"

LOSS = "        losses = sum(r.loss * r.samples for r in self.ranks if r.samples)\n"
RATE = "        return sum(map(amounts, self.ranks)) / max(r.seconds for r in self.ranks)\n"
GATHER = "    dist.all_gather_into_tensor(rows, row, group=group)\n"
OWN = "        own=statistics.median(m.own_seconds for m in window),\n"
FORGET = "                self.slow_since.pop(rank, None)\n"
STANDS = "        return own > self.tolerance * usual and own - usual > self.noise * deviation\n"
SINCE = "(report.step - report.steps + 1, 0)"
OTHERS = "            others = report.ranks[:rank] + report.ranks[rank + 1 :]\n"

mutant = mutants_of("4.11", "straggler")

MUTANTS = [
    mutant(
        "first-ranks-loss",
        "BUGS 96: rank 0's own loss is reported as everybody's",
        LOSS,
        "        return self.ranks[0].loss\n" + LOSS,
        REPORT,
        "first-ranks-loss",
    ),
    mutant(
        "local-loss",
        "BUGS 96: every rank reports its own loss",
        LOSS,
        "        return self.ranks[dist.get_rank()].loss\n" + LOSS,
        REPORT,
        "local-loss",
    ),
    mutant(
        "mean-of-means",
        "the ranks' losses count equally, whatever samples they had",
        LOSS,
        "        return statistics.fmean(r.loss for r in self.ranks)\n" + LOSS,
        REPORT,
        "mean-of-means",
    ),
    mutant(
        "per-rank-throughput",
        "BUGS 98: one rank's throughput is taken for the total",
        RATE,
        "        mine = self.ranks[dist.get_rank()]\n        return amounts(mine) / mine.seconds\n",
        REPORT,
        "per-rank",
    ),
    mutant(
        "throughput-times-w",
        "BUGS 98: the total is multiplied by the number of ranks once more",
        RATE,
        "        total = len(self.ranks) * sum(map(amounts, self.ranks))\n"
        "        return total / max(r.seconds for r in self.ranks)\n",
        REPORT,
        "w-times",
    ),
    mutant(
        "added-rates",
        "the rates of ranks are added, as if nobody waited for the slowest",
        RATE,
        "        return sum(amounts(r) / r.seconds for r in self.ranks)\n",
        REPORT,
        "added-rates",
    ),
    mutant(
        "nan-spreads",
        "the loss of a rank without samples makes everybody's NaN",
        LOSS,
        "        losses = sum(r.loss * r.samples for r in self.ranks)\n",
        EMPTY,
        "loss",
    ),
    mutant(
        "nan-in-window",
        "a step without samples makes the window's loss NaN",
        "    losses = sum(m.loss * m.samples for m in window if m.samples)\n",
        "    losses = sum(m.loss * m.samples for m in window)\n",
        EMPTY,
        "loss",
    ),
    mutant(
        "message-per-number",
        "a collective for every number",
        GATHER,
        "    every = [row.new_empty(len(rows) // len(row)) for _ in row]\n"
        "    for column, number in zip(every, row, strict=True):\n"
        "        dist.all_gather_into_tensor(column, number.view(1), group=group)\n"
        "    rows = torch.stack(every, 1).flatten()\n",
        MESSAGE,
        "too-many-messages",
    ),
    mutant(
        "every-step",
        "the ranks talk after every step",
        "        if len(self.window) < self.every:\n            return None\n"
        "        report = aggregate(self.window, self.group, self.device)\n",
        "        report = aggregate(self.window, self.group, self.device)\n"
        "        if len(self.window) < self.every:\n            return None\n",
        MESSAGE,
        "too-many-messages",
    ),
    mutant(
        "group-ignored",
        "the default group is asked, whatever group was given",
        GATHER,
        "    dist.all_gather_into_tensor(rows, row)\n",
        GROUP,
        "hang",
    ),
    mutant(
        "step-times",
        "steps are compared, which take equally long on all ranks, because they wait",
        OWN,
        "        own=statistics.median(m.seconds for m in window),\n",
        WHICH,
        "missed",
    ),
    mutant(
        "mean-and-sigma",
        "three standard deviations above the mean: the slow rank itself moves both, and with four "
        "ranks nobody is ever further than 1.5",
        STANDS,
        "        every = [own, *others]\n"
        "        mean, sigma = statistics.fmean(every), statistics.pstdev(every)\n"
        "        return own > mean + 3 * sigma\n",
        WHICH,
        "missed",
    ),
    mutant(
        "median-of-all",
        "the rank is part of the median that it is compared with: two ranks are equally far off",
        OTHERS,
        "            others = report.ranks\n",
        WHICH,
        "missed",
        (
            "        usual = statistics.median_low(others)\n",
            "        usual = statistics.median(others)\n",
        ),
        ("1.4826 * statistics.median_low(abs", "1.4826 * statistics.median(abs"),
    ),
    mutant(
        "fastest-is-usual",
        "by how much: against the fastest rank",
        "            usual = statistics.median_low(r.own for r in others)\n",
        "            usual = min(r.own for r in others)\n",
        WHICH,
        "how-much",
    ),
    mutant(
        "since-it-was-found",
        "since when: the report that found it, not the first slow step",
        SINCE,
        "(report.step, 0)",
        WHICH,
        "since",
    ),
    mutant(
        "never-forgiven",
        "a rank that was slow once stays under suspicion",
        FORGET,
        "                pass\n",
        WHICH,
        "false-alarm",
    ),
    mutant(
        "no-patience",
        "one slow report is enough",
        "            if reports + 1 < self.patience:\n",
        "            if reports + 1 < 1:\n",
        QUIET,
        "false-alarm",
    ),
    mutant(
        "patience-is-two",
        "two slow reports in a row are enough, whatever patience was asked for",
        "            if reports + 1 < self.patience:\n",
        "            if reports + 1 < min(2, self.patience):\n",
        WHICH,
        "false-alarm",
    ),
    mutant(
        "memory-at-the-end",
        "the memory of the window's last step, not the most",
        "        memory_share=max(m.memory / m.memory_capacity for m in window),\n",
        "        memory_share=window[-1].memory / window[-1].memory_capacity,\n",
        REPORT,
        "memory",
    ),
    mutant(
        "any-difference",
        "whoever is above the median is slow",
        STANDS,
        "        return own > usual\n",
        QUIET,
        "false-alarm",
    ),
    mutant(
        "ratio-only",
        "ranks that differ by nature: what is usual among them is not looked at",
        STANDS,
        "        return own > self.tolerance * usual and deviation >= 0\n",
        QUIET,
        "false-alarm",
    ),
    mutant(
        "against-the-first-report",
        "a rank is compared with its own past: when everything slows down, all are stragglers",
        STANDS,
        "        first = self.__dict__.setdefault('first', own)\n"
        "        return own > self.tolerance * first and deviation >= 0\n",
        QUIET,
        "false-alarm",
    ),
    mutant(
        "mean-over-steps",
        "one long step makes the window's mean long",
        OWN,
        "        own=statistics.fmean(m.own_seconds for m in window),\n",
        STEP,
        "false-alarm",
    ),
    mutant(
        "longest-phase",
        "the phase that takes longest is blamed, not the one that takes longer than elsewhere",
        "key=lambda phase: parts(mine)[phase] - usual[phase])",
        "key=lambda phase: parts(mine)[phase] + 0 * usual[phase])",
        PHASE,
        "phase",
    ),
]
