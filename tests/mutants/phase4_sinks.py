"""Wrong implementations of exercise 4.12."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="sinks-thread-left",
        exercise="4.12",
        mistake="the endpoint's thread is not ended: only its socket is closed",
        text="        self.server.shutdown()\n        self.server.server_close()\n"
        "        self.thread.join()\n",
        becomes="        self.server.socket.close()\n",
        caught_by="test_endpoint_is_on_loopback_and_its_port_is_given_back",
        told_as=("thread-left", "exception", "port-kept"),
    ),
    Mutant(
        id="sinks-only-known-errors",
        exercise="4.12",
        mistake="errors that nobody thought of are raised on the first rank alone",
        text="        except Exception as error:",
        becomes="        except (OSError, ValueError) as error:",
        caught_by="test_busy_port_is_refused_by_all_ranks",
        told_as=("hang", "exception", "not-agreed"),
    ),
    Mutant(
        id="sinks-open-left",
        exercise="4.12",
        mistake="what was open before the error stays open: the port is taken for ever",
        text="            sinks.close()\n            problem",
        becomes="            problem",
        caught_by="test_busy_port_is_refused_by_all_ranks",
        told_as=("not-agreed", "exception"),
    ),
    Mutant(
        id="sinks-world-rank-0",
        exercise="4.12",
        mistake="rank 0 of the world writes: a group without it has no sink",
        text="    if dist.get_rank(group) == 0:\n",
        becomes="    if dist.get_rank() == 0:\n",
        caught_by="test_one_rank_writes",
        told_as="nobody-writes",
    ),
    Mutant(
        id="sinks-looks-slow",
        exercise="4.12",
        mistake="an uneven rank counts as a straggler although none was found",
        text='statistics.median_low(own) if record["stragglers"] else 0.0',
        becomes="statistics.median_low(own)",
        caught_by="test_bottleneck_is_named_with_its_share",
        told_as=("bottleneck", "share"),
    ),
    Mutant(
        id="sinks-buffered",
        exercise="4.12",
        mistake="lines wait in the process's buffer: a kill loses the last kilobytes",
        text='        self.file = self.path.open("a", encoding="utf-8", buffering=1)\n',
        becomes='        self.file = self.path.open("a", encoding="utf-8")\n',
        caught_by="test_each_line_is_on_its_way_when_it_is_written",
        told_as="not-on-disk",
    ),
    Mutant(
        id="sinks-nan-as-it-is",
        exercise="4.12",
        mistake="NaN is written as NaN, which is no JSON",
        text="v if v is not None and math.isfinite(v) else None for n, v",
        becomes="v for n, v",
        caught_by="test_each_line_is_on_its_way_when_it_is_written",
        told_as="not-json",
    ),
    Mutant(
        id="sinks-appends-to-half-a-line",
        exercise="4.12",
        mistake="the torn line stays, and the first new record is glued to it",
        text=(
            '            aside.write_text("".join(json.dumps(r) + "\\n" for r in kept), '
            'encoding="utf-8")\n'
        ),
        becomes=(
            "            lines = self.path.read_bytes().splitlines(keepends=True)\n"
            "            torn = [line for line in lines if not line.endswith(b'\\n')]\n"
            "            whole = ''.join(json.dumps(r) + '\\n' for r in kept)\n"
            "            aside.write_bytes(whole.encode() + b''.join(torn))\n"
        ),
        caught_by="test_resumed_file_is_that_of_a_run_without_a_kill",
        told_as="torn-line",
    ),
    Mutant(
        id="sinks-steps-twice",
        exercise="4.12",
        mistake="records of steps that the resumed run takes again stay",
        text=(
            '            kept = [r for r in read_json_lines(self.path) if r.get("step", -1) < '
            "first_step]\n"
        ),
        becomes="            kept = read_json_lines(self.path)\n",
        caught_by="test_resumed_file_is_that_of_a_run_without_a_kill",
        told_as="repeated-steps",
    ),
    Mutant(
        id="sinks-step-missing",
        exercise="4.12",
        mistake="off by one: the record of the last step before the checkpoint goes as well",
        text="< first_step]",
        becomes="< first_step - 1]",
        caught_by="test_resumed_file_is_that_of_a_run_without_a_kill",
        told_as="lost-records",
    ),
    Mutant(
        id="sinks-starts-anew",
        exercise="4.12",
        mistake="a resumed run overwrites the file of the one before",
        text='        self.file = self.path.open("a", encoding="utf-8", buffering=1)\n',
        becomes='        self.file = self.path.open("w", encoding="utf-8", buffering=1)\n',
        caught_by="test_resumed_file_is_that_of_a_run_without_a_kill",
        told_as="lost-records",
    ),
    Mutant(
        id="sinks-rewritten-in-place",
        exercise="4.12",
        mistake="the file is emptied before what is kept has been written",
        text='            aside = self.path.with_suffix(".aside")\n',
        becomes="            aside = self.path\n",
        caught_by="test_full_disk_while_mending",
        told_as="lost-records",
    ),
    Mutant(
        id="sinks-one-torn-line-spoils-all",
        exercise="4.12",
        mistake="reading ends at the first line that is no JSON",
        text="""        except ValueError:  # of JSON, and of UTF-8
            continue
""",
        becomes="""        except ValueError:
            break
""",
        caught_by="test_what_can_not_be_read_is_passed_over",
        told_as="unreadable",
    ),
    Mutant(
        id="sinks-any-json",
        exercise="4.12",
        mistake="a line that holds a number counts as a record",
        text="        if isinstance(record, dict):\n",
        becomes="        if record is not None:\n",
        caught_by="test_what_can_not_be_read_is_passed_over",
        told_as="unreadable",
    ),
    Mutant(
        id="sinks-zero-for-unknown",
        exercise="4.12",
        mistake="what is not known is drawn as 0",
        text="[Summary.Value(tag=n, simple_value=v) for n, v in metrics.items() if v is not None]",
        becomes="[Summary.Value(tag=n, simple_value=v or 0.0) for n, v in metrics.items()]",
        caught_by="test_tensorboard_reads_the_curves",
        told_as="curves",
    ),
    Mutant(
        id="sinks-own-step-count",
        exercise="4.12",
        mistake="curves are counted from 0 in the process, not by the run's steps",
        text="        self.writer.file_writer.add_summary(Summary(value=known), step)\n",
        becomes="""        self.seen = getattr(self, 'seen', -1) + 1
        self.writer.file_writer.add_summary(Summary(value=known), self.seen)
""",
        caught_by="test_tensorboard_reads_the_curves",
        told_as="curves",
    ),
    Mutant(
        id="sinks-stale-gauge",
        exercise="4.12",
        mistake="a gauge whose value is not known any more keeps its last one",
        text="            self.gauges[name].set(math.nan if value is None else value)\n",
        becomes="""            if value is not None:
                self.gauges[name].set(value)
""",
        caught_by="test_prometheus_scrapes_the_last_values",
        told_as="stale",
    ),
    Mutant(
        id="sinks-gauge-of-a-name-that-is-gone",
        exercise="4.12",
        mistake="a rank that is well again stays slow: a name that is missing keeps its last value",
        text='{**dict.fromkeys(self.gauges), "step": step, **metrics}.items()',
        becomes='{"step": step, **metrics}.items()',
        caught_by="test_prometheus_scrapes_the_last_values",
        told_as="stale",
    ),
    Mutant(
        id="sinks-removed-then-renamed",
        exercise="4.12",
        mistake="the old file is removed before the new one has its name: a kill between loses all",
        text="            os.replace(aside, self.path)\n",
        becomes="            self.path.unlink()\n            aside.rename(self.path)\n",
        caught_by="test_full_disk_while_mending",
        told_as="lost-records",
    ),
    Mutant(
        id="sinks-adds-up",
        exercise="4.12",
        mistake="gauges are incremented instead of set",
        text="            self.gauges[name].set(math.nan if value is None else value)\n",
        becomes="            self.gauges[name].inc(math.nan if value is None else value)\n",
        caught_by="test_prometheus_scrapes_the_last_values",
        told_as="stale",
    ),
    Mutant(
        id="sinks-all-addresses",
        exercise="4.12",
        mistake="the endpoint listens on every network interface, without a password",
        text="start_http_server(port, addr=host, registry=self.registry)",
        becomes='start_http_server(port, addr="0.0.0.0", registry=self.registry)',
        caught_by="test_endpoint_is_on_loopback_and_its_port_is_given_back",
        told_as="exposed-port",
    ),
    Mutant(
        id="sinks-port-kept",
        exercise="4.12",
        mistake="close() does not give the port back",
        text="""        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
""",
        becomes="        self.gauges.clear()\n",
        caught_by="test_endpoint_is_on_loopback_and_its_port_is_given_back",
        told_as="port-kept",
    ),
    Mutant(
        id="sinks-busy-port-ignored",
        exercise="4.12",
        mistake="a busy port is passed over: nobody learns that there are no metrics",
        text="""            raise ValueError(
                f"no metrics on {host}:{port} ({error}): choose another port, or 0 for any"
            ) from None
""",
        becomes="""            self.port = port
            return
""",
        caught_by="test_endpoint_is_on_loopback_and_its_port_is_given_back",
        told_as="busy",
    ),
    Mutant(
        id="sinks-every-rank",
        exercise="4.12",
        mistake="every rank prints and writes",
        text="    if dist.get_rank(group) == 0:\n",
        becomes="    if dist.get_rank(group) >= 0:\n",
        caught_by="test_one_rank_writes",
        told_as="every-rank-writes",
    ),
    Mutant(
        id="sinks-every-rank-prints",
        exercise="4.12",
        mistake="one rank writes, but every rank shows its progress",
        text="            sinks.sinks.append(Terminal(total_steps))\n",
        becomes="            pass\n",
        more=(
            (
                """    if problem:
        raise ValueError(problem)
""",
                """    sinks.sinks.append(Terminal(total_steps))
    if problem:
        raise ValueError(problem)
""",
            ),
        ),
        caught_by="test_one_rank_writes",
        told_as="every-rank-writes",
    ),
    Mutant(
        id="sinks-first-rank-raises-alone",
        exercise="4.12",
        mistake="the first rank ends with the error, the others wait for its broadcast",
        text="""            sinks.close()
            problem = str(error) or type(error).__name__
""",
        becomes="            raise ValueError(str(error)) from None\n",
        caught_by="test_busy_port_is_refused_by_all_ranks",
        told_as=("hang", "exception"),
    ),
    Mutant(
        id="sinks-others-go-on",
        exercise="4.12",
        mistake="the first rank raises after the broadcast, the others train without it",
        text="    if problem:\n",
        becomes="    if problem and dist.get_rank(group) == 0:\n",
        caught_by="test_busy_port_is_refused_by_all_ranks",
        told_as="not-agreed",
    ),
    Mutant(
        id="sinks-eight-bytes-a-letter",
        exercise="4.12",
        mistake="the sentence travels as int64, 8 bytes for each",
        text="torch.tensor(list(text), dtype=torch.uint8, device=device)",
        becomes="torch.tensor(list(text), device=device)",
        caught_by="test_long_sentences_arrive",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="sinks-window-one-short",
        exercise="4.12",
        mistake="the window ends before its last step",
        text="        if step > self.last:\n",
        becomes="        if step >= self.last:\n",
        more=(
            (
                "        if self.profiler is None and self.first <= step <= self.last:\n",
                "        if self.profiler is None and self.first <= step < self.last:\n",
            ),
        ),
        caught_by="test_profile_is_of_its_window",
        told_as="window",
    ),
    Mutant(
        id="sinks-window-never-ends",
        exercise="4.12",
        mistake="what is started is stopped at the end of the run only",
        text="        if step > self.last:\n",
        becomes="        if step < self.first:\n",
        caught_by="test_profile_is_of_its_window",
        told_as="window",
    ),
    Mutant(
        id="sinks-window-needs-its-first-step",
        exercise="4.12",
        mistake="a run that is resumed inside of the window is not profiled",
        text="        if self.profiler is None and self.first <= step <= self.last:\n",
        becomes="        if self.profiler is None and step == self.first:\n",
        caught_by="test_profile_is_of_its_window",
        told_as="window",
    ),
    Mutant(
        id="sinks-waiting-is-communication",
        exercise="4.12",
        mistake="what is waited for a straggler counts as communication",
        text='    exposed = "least_exposed" if record["stragglers"] else "exposed"\n',
        becomes='    exposed = "exposed"\n',
        caught_by="test_bottleneck_is_named_with_its_share",
        told_as="share",
    ),
    Mutant(
        id="sinks-memory-first",
        exercise="4.12",
        mistake="full memory is named although time is wasted elsewhere",
        text="kind=worst if median[worst] >= waste else needed",
        becomes='kind=worst if median[worst] >= waste and needed != "memory" else needed',
        caught_by="test_bottleneck_is_that_of_the_run",
        told_as=("bottleneck", "limits"),
    ),
    Mutant(
        id="sinks-warm-up-counts",
        exercise="4.12",
        mistake="the first record counts, in which everything is slow",
        text="for record in records[1:] or records]",
        becomes="for record in records]",
        caught_by="test_bottleneck_is_that_of_the_run",
        told_as="bottleneck",
    ),
    Mutant(
        id="sinks-mean-of-records",
        exercise="4.12",
        mistake="one slow record of many decides",
        text="{kind: statistics.median(s[kind] for s in shares) for kind in shares[0]}",
        becomes="{kind: statistics.fmean(s[kind] for s in shares) for kind in shares[0]}",
        caught_by="test_bottleneck_is_that_of_the_run",
        told_as="bottleneck",
    ),
    Mutant(
        id="json-zero-is-null",
        exercise="4.12",
        mistake="a number of 0 is written as null",
        text="v if v is not None and math.isfinite(v) else None",
        becomes="v if v and math.isfinite(v) else None",
        caught_by="test_each_line_is_on_its_way_when_it_is_written",
        told_as="wrong",
    ),
    Mutant(
        id="json-aside-appended",
        exercise="4.12",
        mistake="what is kept is appended to the file beside it, which a kill may have left",
        text='            aside.write_text("".join(json.dumps(r) + "\\n" for r in kept), encoding="utf-8")',
        becomes='            with aside.open("a") as out:\n                out.write("".join(json.dumps(r) + "\\n" for r in kept))',
        caught_by="test_full_disk_while_mending",
        told_as="repeated-steps",
    ),
]
