"""Wrong implementations of exercise 4.11."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="stragglers-nan-left-out",
        exercise="4.11",
        mistake="losses of NaN are left out, not those of no samples: a diverged step is hidden",
        text="        losses = sum(r.loss * r.samples for r in self.ranks if r.samples)\n",
        becomes="        losses = sum(r.loss * r.samples for r in self.ranks if r.loss == r.loss)\n",
        caught_by="test_ranks_without_samples",
        told_as=("nan-hidden", "loss"),
    ),
    Mutant(
        id="stragglers-when-the-step-divides",
        exercise="4.11",
        mistake="reports where the step's number divides: a resumed run's first window is shorter",
        text="        if len(self.window) < self.every:\n",
        becomes="        if (metrics.step + 1) % self.every:\n",
        caught_by="test_one_small_message_per_report",
        told_as="when",
    ),
    Mutant(
        id="straggler-tolerance-in-seconds",
        exercise="4.11",
        mistake="the tolerance is compared with seconds, not with times the median",
        text="        return own > self.tolerance * usual and own",
        becomes="        return own > self.tolerance and own",
        caught_by="test_thresholds_are_as_promised",
        told_as=("missed", "false-alarm"),
    ),
    Mutant(
        id="report-missing-phase",
        exercise="4.11",
        mistake="a step that lacks a phase is left out of the phase's mean",
        text="statistics.fmean(m.phases.get(p, 0.0) for m in window) for p in PHASES",
        becomes="statistics.fmean([m.phases[p] for m in window if p in m.phases] or [0.0]) "
        "for p in PHASES",
        caught_by="test_a_rank_sums_up_its_window",
        told_as="times",
    ),
    Mutant(
        id="report-zero-times-infinity",
        exercise="4.11",
        mistake="a rank without samples is weighted with 0: infinity times 0 is NaN",
        text="        losses = sum(r.loss * r.samples for r in self.ranks if r.samples)\n",
        becomes="        losses = sum(r.loss * r.samples for r in self.ranks)\n",
        caught_by="test_ranks_without_samples",
        told_as="loss",
    ),
    Mutant(
        id="straggler-first-ranks-loss",
        exercise="4.11",
        mistake="rank 0's own loss is reported as everybody's",
        text="        losses = sum(r.loss * r.samples for r in self.ranks if r.samples)\n",
        becomes="""        return self.ranks[0].loss
        losses = sum(r.loss * r.samples for r in self.ranks if r.samples)
""",
        caught_by="test_report_is_of_all_ranks",
        told_as="first-ranks-loss",
    ),
    Mutant(
        id="straggler-local-loss",
        exercise="4.11",
        mistake="every rank reports its own loss",
        text="        losses = sum(r.loss * r.samples for r in self.ranks if r.samples)\n",
        becomes="""        return self.ranks[dist.get_rank()].loss
        losses = sum(r.loss * r.samples for r in self.ranks if r.samples)
""",
        caught_by="test_report_is_of_all_ranks",
        told_as="local-loss",
    ),
    Mutant(
        id="straggler-mean-of-means",
        exercise="4.11",
        mistake="the ranks' losses count equally, whatever samples they had",
        text="        losses = sum(r.loss * r.samples for r in self.ranks if r.samples)\n",
        becomes="""        return statistics.fmean(r.loss for r in self.ranks)
        losses = sum(r.loss * r.samples for r in self.ranks if r.samples)
""",
        caught_by="test_report_is_of_all_ranks",
        told_as="mean-of-means",
    ),
    Mutant(
        id="straggler-per-rank-throughput",
        exercise="4.11",
        mistake="one rank's throughput is taken for the total",
        text="        return sum(map(amounts, self.ranks)) / max(r.seconds for r in self.ranks)\n",
        becomes="""        mine = self.ranks[dist.get_rank()]
        return amounts(mine) / mine.seconds
""",
        caught_by="test_report_is_of_all_ranks",
        told_as="per-rank",
    ),
    Mutant(
        id="straggler-throughput-times-w",
        exercise="4.11",
        mistake="the total is multiplied by the number of ranks once more",
        text="        return sum(map(amounts, self.ranks)) / max(r.seconds for r in self.ranks)\n",
        becomes="""        total = len(self.ranks) * sum(map(amounts, self.ranks))
        return total / max(r.seconds for r in self.ranks)
""",
        caught_by="test_report_is_of_all_ranks",
        told_as="w-times",
    ),
    Mutant(
        id="straggler-added-rates",
        exercise="4.11",
        mistake="the rates of ranks are added, as if nobody waited for the slowest",
        text="        return sum(map(amounts, self.ranks)) / max(r.seconds for r in self.ranks)\n",
        becomes="        return sum(amounts(r) / r.seconds for r in self.ranks)\n",
        caught_by="test_report_is_of_all_ranks",
        told_as="added-rates",
    ),
    Mutant(
        id="straggler-nan-spreads",
        exercise="4.11",
        mistake="the loss of a rank without samples makes everybody's NaN",
        text="        losses = sum(r.loss * r.samples for r in self.ranks if r.samples)\n",
        becomes="        losses = sum(r.loss * r.samples for r in self.ranks)\n",
        caught_by="test_ranks_without_samples",
        told_as="loss",
    ),
    Mutant(
        id="straggler-nan-in-window",
        exercise="4.11",
        mistake="a step without samples makes the window's loss NaN",
        text="    losses = sum(m.loss * m.samples for m in window if m.samples)\n",
        becomes="    losses = sum(m.loss * m.samples for m in window)\n",
        caught_by="test_ranks_without_samples",
        told_as="loss",
    ),
    Mutant(
        id="straggler-message-per-number",
        exercise="4.11",
        mistake="a collective for every number",
        text="    dist.all_gather_into_tensor(rows, row, group=group)\n",
        becomes="""    every = [row.new_empty(len(rows) // len(row)) for _ in row]
    for column, number in zip(every, row, strict=True):
        dist.all_gather_into_tensor(column, number.view(1), group=group)
    rows = torch.stack(every, 1).flatten()
""",
        caught_by="test_one_small_message_per_report",
        told_as="too-many-messages",
    ),
    Mutant(
        id="straggler-every-step",
        exercise="4.11",
        mistake="the ranks talk after every step",
        text="""        if len(self.window) < self.every:
            return None
        report = aggregate(self.window, self.group, self.device)
""",
        becomes="""        report = aggregate(self.window, self.group, self.device)
        if len(self.window) < self.every:
            return None
""",
        caught_by="test_one_small_message_per_report",
        told_as="too-many-messages",
    ),
    Mutant(
        id="straggler-group-ignored",
        exercise="4.11",
        mistake="the default group is asked, whatever group was given",
        text="    dist.all_gather_into_tensor(rows, row, group=group)\n",
        becomes="    dist.all_gather_into_tensor(rows, row)\n",
        caught_by="test_reports_of_a_group",
        told_as=("hang", "exception"),
    ),
    Mutant(
        id="straggler-step-times",
        exercise="4.11",
        mistake="steps are compared, which take equally long on all ranks, because they wait",
        text="        own=statistics.median(m.own_seconds for m in window),\n",
        becomes="        own=statistics.median(m.seconds for m in window),\n",
        caught_by="test_which_rank_by_how_much_and_since_when",
        told_as="missed",
    ),
    Mutant(
        id="straggler-mean-and-sigma",
        exercise="4.11",
        mistake=(
            "three standard deviations above the mean: the slow rank itself moves both, and "
            "with four ranks nobody is ever further than 1.5"
        ),
        text=(
            "        return own > self.tolerance * usual and own - usual > self.noise * deviation\n"
        ),
        becomes="""        every = [own, *others]
        mean, sigma = statistics.fmean(every), statistics.pstdev(every)
        return own > mean + 3 * sigma
""",
        caught_by="test_which_rank_by_how_much_and_since_when",
        told_as="missed",
    ),
    Mutant(
        id="straggler-median-of-all",
        exercise="4.11",
        mistake=(
            "the rank is part of the median that it is compared with: two ranks are equally far off"
        ),
        text="            others = report.ranks[:rank] + report.ranks[rank + 1 :]\n",
        becomes="            others = report.ranks\n",
        more=(
            (
                "        usual = statistics.median_low(others)\n",
                "        usual = statistics.median(others)\n",
            ),
            (
                "1.4826 * statistics.median_low(abs",
                "1.4826 * statistics.median(abs",
            ),
        ),
        caught_by="test_which_rank_by_how_much_and_since_when",
        told_as="missed",
    ),
    Mutant(
        id="straggler-fastest-is-usual",
        exercise="4.11",
        mistake="by how much: against the fastest rank",
        text="            usual = statistics.median_low(r.own for r in others)\n",
        becomes="            usual = min(r.own for r in others)\n",
        caught_by="test_which_rank_by_how_much_and_since_when",
        told_as="how-much",
    ),
    Mutant(
        id="straggler-since-it-was-found",
        exercise="4.11",
        mistake="since when: the report that found it, not the first slow step",
        text="(report.step - report.steps + 1, 0)",
        becomes="(report.step, 0)",
        caught_by="test_which_rank_by_how_much_and_since_when",
        told_as="since",
    ),
    Mutant(
        id="straggler-never-forgiven",
        exercise="4.11",
        mistake="a rank that was slow once stays under suspicion",
        text="                self.slow_since.pop(rank, None)\n",
        becomes="                pass\n",
        caught_by="test_which_rank_by_how_much_and_since_when",
        told_as="false-alarm",
    ),
    Mutant(
        id="straggler-no-patience",
        exercise="4.11",
        mistake="one slow report is enough",
        text="            if reports + 1 < self.patience:\n",
        becomes="            if reports + 1 < 1:\n",
        caught_by="test_no_false_alarm",
        told_as="false-alarm",
    ),
    Mutant(
        id="straggler-patience-is-two",
        exercise="4.11",
        mistake="two slow reports in a row are enough, whatever patience was asked for",
        text="            if reports + 1 < self.patience:\n",
        becomes="            if reports + 1 < min(2, self.patience):\n",
        caught_by="test_which_rank_by_how_much_and_since_when",
        told_as="false-alarm",
    ),
    Mutant(
        id="straggler-memory-at-the-end",
        exercise="4.11",
        mistake="the memory of the window's last step, not the most",
        text="        memory_share=max(m.memory / m.memory_capacity for m in window),\n",
        becomes="        memory_share=window[-1].memory / window[-1].memory_capacity,\n",
        caught_by="test_report_is_of_all_ranks",
        told_as="memory",
    ),
    Mutant(
        id="straggler-any-difference",
        exercise="4.11",
        mistake="whoever is above the median is slow",
        text=(
            "        return own > self.tolerance * usual and own - usual > self.noise * deviation\n"
        ),
        becomes="        return own > usual\n",
        caught_by="test_no_false_alarm",
        told_as="false-alarm",
    ),
    Mutant(
        id="straggler-ratio-only",
        exercise="4.11",
        mistake="ranks that differ by nature: what is usual among them is not looked at",
        text=(
            "        return own > self.tolerance * usual and own - usual > self.noise * deviation\n"
        ),
        becomes="        return own > self.tolerance * usual and deviation >= 0\n",
        caught_by="test_no_false_alarm",
        told_as="false-alarm",
    ),
    Mutant(
        id="straggler-against-the-first-report",
        exercise="4.11",
        mistake=(
            "a rank is compared with its own past: when everything slows down, all are stragglers"
        ),
        text=(
            "        return own > self.tolerance * usual and own - usual > self.noise * deviation\n"
        ),
        becomes="""        first = self.__dict__.setdefault('first', own)
        return own > self.tolerance * first and deviation >= 0
""",
        caught_by="test_no_false_alarm",
        told_as="false-alarm",
    ),
    Mutant(
        id="straggler-mean-over-steps",
        exercise="4.11",
        mistake="one long step makes the window's mean long",
        text="        own=statistics.median(m.own_seconds for m in window),\n",
        becomes="        own=statistics.fmean(m.own_seconds for m in window),\n",
        caught_by="test_one_slow_step_is_no_slow_rank",
        told_as="false-alarm",
    ),
    Mutant(
        id="straggler-longest-phase",
        exercise="4.11",
        mistake=(
            "the phase that takes longest is blamed, not the one that takes longer than elsewhere"
        ),
        text="key=lambda phase: parts(mine)[phase] - usual[phase])",
        becomes="key=lambda phase: parts(mine)[phase] + 0 * usual[phase])",
        caught_by="test_where_a_straggler_loses_its_time",
        told_as="phase",
    ),
    Mutant(
        id="report-time-of-the-last-rank",
        exercise="4.11",
        mistake="rates are by the last rank's time, not by the slowest's",
        text="/ max(r.seconds for r in self.ranks)\n        # ---",
        becomes="/ self.ranks[-1].seconds\n        # ---",
        caught_by="test_report_is_of_all_ranks",
        told_as="throughput",
    ),
]
