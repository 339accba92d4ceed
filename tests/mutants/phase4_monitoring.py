"""Wrong implementations of exercise 4.10."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="monitor-exception-not-timed",
        exercise="4.10",
        mistake="a phase that ends in an exception has no time",
        text="""            try:
                yield
            finally:
                self.spans.setdefault(name, []).append((begin, self.clock.mark()))
""",
        becomes="""            yield
            self.spans.setdefault(name, []).append((begin, self.clock.mark()))
""",
        caught_by="test_phases_in_each_other_and_exceptions",
        told_as="phase-time",
    ),
    Mutant(
        id="monitor-none-ends-the-loader",
        exercise="4.10",
        mistake="a batch that is None is taken for the loader's end",
        text="        iterator, nothing = iter(loader), object()\n",
        becomes="        iterator, nothing = iter(loader), None\n",
        caught_by="test_data_wait_is_what_the_loader_takes",
        told_as="batches",
    ),
    Mutant(
        id="monitor-current-device",
        exercise="4.10",
        mistake="the event is recorded in the stream of whichever device is the current one",
        text="        event.record(torch.cuda.current_stream(self.device))\n",
        becomes="        event.record()\n",
        caught_by="test_slow_kernels_show_where_they_run",
        told_as="other-device",
    ),
    Mutant(
        id="monitor-host-clock",
        exercise="4.10",
        mistake="the host's clock tells when a kernel was launched, not when it was done",
        text="""        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
""",
        becomes="        return time.perf_counter()\n",
        more=(
            (
                "        return float(begin.elapsed_time(end)) / 1e3\n",
                "        return float(end - begin)\n",
            ),
        ),
        caught_by="test_slow_kernels_show_where_they_run",
        told_as="not-synchronised",
    ),
    Mutant(
        id="monitor-synchronises-each-mark",
        exercise="4.10",
        mistake="the device is waited for at every mark: right times of a slower training",
        text="""        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
""",
        becomes="""        torch.cuda.synchronize(self.device)
        return time.perf_counter()
""",
        more=(
            (
                "        return float(begin.elapsed_time(end)) / 1e3\n",
                "        return float(end - begin)\n",
            ),
        ),
        caught_by="test_slow_kernels_show_where_they_run",
        told_as="synchronises-too-often",
    ),
    Mutant(
        id="monitor-never-settles",
        exercise="4.10",
        mistake="asks for times that the device has not come to",
        text="        torch.cuda.synchronize(self.device)\n",
        becomes="        pass\n",
        caught_by="test_slow_kernels_show_where_they_run",
        told_as="exception",
    ),
    Mutant(
        id="monitor-milliseconds",
        exercise="4.10",
        mistake="events count milliseconds",
        text="        return float(begin.elapsed_time(end)) / 1e3\n",
        becomes="        return float(begin.elapsed_time(end))\n",
        caught_by="test_slow_kernels_show_where_they_run",
        told_as="not-synchronised",
    ),
    Mutant(
        id="monitor-last-of-a-name",
        exercise="4.10",
        mistake="a phase that comes again in a step replaces its first time",
        text="            self.spans.setdefault(name, []).append((begin, self.clock.mark()))\n",
        becomes="            self.spans[name] = [(begin, self.clock.mark())]\n",
        caught_by="test_phases_add_up",
        told_as="phase-time",
    ),
    Mutant(
        id="monitor-step-begins-at-first-phase",
        exercise="4.10",
        mistake="what happens between two steps belongs to none",
        text=(
            "        with record_function(name) if torch.autograd._profiler_enabled() else "
            "NO_TRACE:\n"
        ),
        becomes="""        if not any(self.spans.values()):
            self.began = self.clock.mark()
        with record_function(name) if torch.autograd._profiler_enabled() else NO_TRACE:
""",
        caught_by="test_phases_add_up",
        told_as="step-time",
    ),
    Mutant(
        id="monitor-not-in-the-profile",
        exercise="4.10",
        mistake="a profiler's trace does not say which kernels belong to which phase",
        text=(
            "        with record_function(name) if torch.autograd._profiler_enabled() else "
            "NO_TRACE:\n"
        ),
        becomes="        with NO_TRACE:\n",
        caught_by="test_phases_show_in_a_profile",
        told_as="profile",
    ),
    Mutant(
        id="monitor-data-is-the-loop",
        exercise="4.10",
        mistake="the body of the loop counts as waiting for data",
        text="""            if batch is nothing:
                return
            yield batch  # type: ignore[misc]
""",
        becomes="""                if batch is nothing:
                    return
                yield batch  # type: ignore[misc]
""",
        caught_by="test_data_wait_is_what_the_loader_takes",
        told_as="data-wait",
    ),
    Mutant(
        id="monitor-first-batch-free",
        exercise="4.10",
        mistake="the loader is asked for the first batch before the clock runs",
        text="        iterator, nothing = iter(loader), object()\n",
        becomes="        iterator, nothing = iter(list(loader)), object()\n",
        caught_by="test_data_wait_is_what_the_loader_takes",
        told_as="asked-ahead",
    ),
    Mutant(
        id="monitor-all-exposed",
        exercise="4.10",
        mistake="communication counts as exposed from its beginning",
        text="        self.monitor.waits.append((begin, end))\n",
        becomes="        self.monitor.waits.append((self.began, end))\n",
        caught_by="test_exposed_and_hidden_communication",
        told_as="exposed",
    ),
    Mutant(
        id="monitor-in-flight-until-waited",
        exercise="4.10",
        mistake=(
            "communication counts as hidden until somebody waits, also when it arrived long before"
        ),
        text="            handle.get_future().add_done_callback(self._note)\n",
        becomes="            pass\n",
        caught_by="test_exposed_and_hidden_communication",
        told_as="hidden",
    ),
    Mutant(
        id="monitor-exposed-in-phase",
        exercise="4.10",
        mistake="what backward waits for counts as backward and as communication",
        text="{n: covered(since_begin(m) + waits) - exposed for n, m in self.spans.items()}",
        becomes="{n: covered(since_begin(m)) for n, m in self.spans.items()}",
        caught_by="test_exposed_and_hidden_communication",
        told_as="phase-time",
    ),
    Mutant(
        id="monitor-summed",
        exercise="4.10",
        mistake="two buckets on the wire at the same time count twice",
        text="""    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, reached))
""",
        becomes="""    for begin, end in sorted(intervals):
        length += end - begin
""",
        caught_by="test_communication_at_once_counts_once",
        told_as="hidden",
    ),
    Mutant(
        id="monitor-first-to-last",
        exercise="4.10",
        mistake="from the first beginning to the last end, gaps included",
        text="        length += max(0.0, end - max(begin, reached))\n",
        becomes=(
            "        length += max(0.0, end - (reached if reached > float('-inf') else begin))\n"
        ),
        more=(
            (
                "        waits = since_begin(self.waits)\n",
                "        waits = [(0.0, 0.0), *since_begin(self.waits)]\n",
            ),
        ),
        caught_by="test_hooks_and_blocking_communication",
        told_as="phase-time",
    ),
    Mutant(
        id="monitor-blocking-hook-unseen",
        exercise="4.10",
        mistake="a hook that returns None is taken to have cost nothing",
        text="            self.waits.append((began, self.clock.mark()))\n",
        becomes="            pass\n",
        caught_by="test_hooks_and_blocking_communication",
        told_as="exposed",
    ),
    Mutant(
        id="monitor-future-needed",
        exercise="4.10",
        mistake="a handle without a future is refused",
        text="        with contextlib.suppress(AttributeError, RuntimeError):",
        becomes="        with contextlib.suppress(RuntimeError):",
        caught_by="test_messages_can_be_tracked",
        told_as="exception",
    ),
    Mutant(
        id="monitor-mfu-of-one-sample",
        exercise="4.10",
        mistake="MFU of one sample instead of the step's",
        text="            flops=self.flops_per_sample * samples,\n",
        becomes="            flops=self.flops_per_sample,\n",
        caught_by="test_rates_and_utilisation",
        told_as="rate",
    ),
    Mutant(
        id="monitor-any-peak",
        exercise="4.10",
        mistake="a peak of zero is accepted, and divided by",
        text="(peak_flops is not None and peak_flops <= 0)",
        becomes="(peak_flops is not None and peak_flops < 0)",
        caught_by="test_bad_settings_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="monitor-second-wait-flies-again",
        exercise="4.10",
        mistake="each wait counts the whole flight, also one in a later step",
        text="        if not self.counted:\n",
        becomes="        if True:\n",
        caught_by="test_messages_can_be_tracked",
        told_as="hidden",
    ),
    Mutant(
        id="monitor-hook-in-flight-late",
        exercise="4.10",
        mistake="the flight of a hook begins when the hook returns, not when it was called",
        text="                return Flight(self, handle, began)\n",
        becomes="                return self.track(handle)\n",
        caught_by="test_hooks_and_blocking_communication",
        told_as="hidden",
    ),
    Mutant(
        id="monitor-loss-kept",
        exercise="4.10",
        mistake="the last loss is kept, and with it the graph of its step",
        text="        self.steps += 1\n        self._begin(now)\n",
        becomes="        self.steps += 1\n        self.loss = loss\n        self._begin(now)\n",
        caught_by="test_messages_can_be_tracked",
        told_as="kept",
    ),
    Mutant(
        id="monitor-steps-with-a-gap",
        exercise="4.10",
        mistake="the next step begins when step returns: what step itself takes is in none",
        text="        self._begin(now)\n        return",
        becomes="        self._begin(self.clock.mark())\n        return",
        caught_by="test_phases_add_up",
        told_as="step-time",
    ),
    Mutant(
        id="monitor-interrupt-not-counted",
        exercise="4.10",
        mistake="communication that ends in an interrupt is not counted",
        text="        try:\n            yield\n        finally:\n            self.waits.append((begin, self.clock.mark()))",
        becomes="        try:\n            yield\n        except Exception:\n            self.waits.append((begin, self.clock.mark()))\n            raise\n        self.waits.append((begin, self.clock.mark()))",
        caught_by="test_phases_in_each_other_and_exceptions",
        told_as="exposed",
    ),
]
