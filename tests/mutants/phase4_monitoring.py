"""Wrong implementations of exercise 4.10."""

from distlab.grading.wrong import mutants_of

PHASE_TIMES = "test_phases_add_up"
DATA, WIRE = "test_data_wait_is_what_the_loader_takes", "test_exposed_and_hidden_communication"
AT_ONCE, HOOKS = "test_communication_at_once_counts_once", "test_hooks_and_blocking_communication"
PLAIN, GPU = "test_messages_can_be_tracked", "test_slow_kernels_show_where_they_run"
PROFILE = "test_phases_show_in_a_profile"
RATES, BAD = "test_rates_and_utilisation", "test_bad_settings_are_refused"

MARK = """        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
"""
ELAPSED = "        return float(begin.elapsed_time(end)) / 1e3\n"
SETTLE = "        torch.cuda.synchronize(self.device)\n"
TRACED = "        with record_function(name) if torch.autograd._profiler_enabled() else NO_TRACE:\n"
HIDDEN = "hidden=covered(since_begin(self.flights) + waits) - exposed,"
NOTE = "            handle.get_future().add_done_callback(self._note)\n"

mutant = mutants_of("4.10", "monitor")

MUTANTS = [
    mutant(
        "host-clock",
        "BUGS 95: the host's clock tells when a kernel was launched, not when it was done",
        MARK,
        "        return time.perf_counter()\n",
        GPU,
        "not-synchronised",
        (ELAPSED, "        return float(end - begin)\n"),
    ),
    mutant(
        "synchronises-each-mark",
        "the device is waited for at every mark: right times of a slower training",
        MARK,
        "        torch.cuda.synchronize(self.device)\n        return time.perf_counter()\n",
        GPU,
        "synchronises-too-often",
        (ELAPSED, "        return float(end - begin)\n"),
    ),
    mutant(
        "never-settles",
        "BUGS 95: asks for times that the device has not come to",
        SETTLE,
        "        pass\n",
        GPU,
        "exception",
    ),
    mutant(
        "milliseconds",
        "events count milliseconds",
        ELAPSED,
        "        return float(begin.elapsed_time(end))\n",
        GPU,
        "not-synchronised",
    ),
    mutant(
        "last-of-a-name",
        "a phase that comes again in a step replaces its first time",
        "            self.spans.setdefault(name, []).append((begin, self.clock.mark()))\n",
        "            self.spans[name] = [(begin, self.clock.mark())]\n",
        PHASE_TIMES,
        "phase-time",
    ),
    mutant(
        "step-begins-at-first-phase",
        "what happens between two steps belongs to none",
        TRACED,
        "        if not any(self.spans.values()):\n            self.began = self.clock.mark()\n"
        + TRACED,
        PHASE_TIMES,
        "step-time",
    ),
    mutant(
        "not-in-the-profile",
        "a profiler's trace does not say which kernels belong to which phase",
        TRACED,
        "        with NO_TRACE:\n",
        PROFILE,
        "profile",
    ),
    mutant(
        "data-is-the-loop",
        "the body of the loop counts as waiting for data",
        "            if batch is nothing:\n                return\n            yield batch  # type: ignore[misc]\n",
        "                if batch is nothing:\n                    return\n"
        "                yield batch  # type: ignore[misc]\n",
        DATA,
        "data-wait",
    ),
    mutant(
        "first-batch-free",
        "the loader is asked for the first batch before the clock runs",
        "        iterator, nothing = iter(loader), object()\n",
        "        iterator, nothing = iter(list(loader)), object()\n",
        DATA,
        "data-wait",
    ),
    mutant(
        "all-exposed",
        "communication counts as exposed from its beginning",
        "        self.monitor.waits.append((begin, end))\n",
        "        self.monitor.waits.append((self.began, end))\n",
        WIRE,
        "exposed",
    ),
    mutant(
        "in-flight-until-waited",
        "communication counts as hidden until somebody waits, also when it arrived long before",
        NOTE,
        "            pass\n",
        WIRE,
        "hidden",
    ),
    mutant(
        "exposed-in-phase",
        "what backward waits for counts as backward and as communication",
        "{n: covered(since_begin(m) + waits) - exposed for n, m in self.spans.items()}",
        "{n: covered(since_begin(m)) for n, m in self.spans.items()}",
        WIRE,
        "phase-time",
    ),
    mutant(
        "summed",
        "two buckets on the wire at the same time count twice",
        "    for begin, end in sorted(intervals):\n"
        "        length += max(0.0, end - max(begin, reached))\n",
        "    for begin, end in sorted(intervals):\n        length += end - begin\n",
        AT_ONCE,
        "hidden",
    ),
    mutant(
        "first-to-last",
        "from the first beginning to the last end, gaps included",
        "        length += max(0.0, end - max(begin, reached))\n",
        "        length += max(0.0, end - (reached if reached > float('-inf') else begin))\n",
        HOOKS,
        "exposed",
        (
            "        waits = since_begin(self.waits)\n",
            "        waits = [(0.0, 0.0), *since_begin(self.waits)]\n",
        ),
    ),
    mutant(
        "blocking-hook-unseen",
        "a hook that returns None is taken to have cost nothing",
        "            self.waits.append((began, self.clock.mark()))\n",
        "            pass\n",
        HOOKS,
        "exposed",
    ),
    mutant(
        "future-needed",
        "a handle without a future is refused",
        "        with contextlib.suppress(AttributeError, RuntimeError):",
        "        with contextlib.suppress(RuntimeError):",
        PLAIN,
        "exception",
    ),
    mutant(
        "mfu-of-one-sample",
        "MFU of one sample instead of the step's",
        "            flops=self.flops_per_sample * samples,\n",
        "            flops=self.flops_per_sample,\n",
        RATES,
        "rate",
    ),
    mutant(
        "any-peak",
        "a peak of zero is accepted, and divided by",
        "(peak_flops is not None and peak_flops <= 0)",
        "(peak_flops is not None and peak_flops < 0)",
        BAD,
        "accepted",
    ),
]
