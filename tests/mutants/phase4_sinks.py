"""Wrong implementations of exercise 4.12."""

from distlab.grading.wrong import mutants_of

LINE, RESUMED = (
    "test_each_line_is_on_its_way_when_it_is_written",
    "test_resumed_file_is_that_of_a_run_without_a_kill",
)
FULL, UNREADABLE = "test_full_disk_while_mending", "test_what_can_not_be_read_is_passed_over"
CURVES, SCRAPED = (
    "test_tensorboard_reads_the_curves",
    "test_prometheus_scrapes_the_last_values",
)
PORT = "test_endpoint_is_on_loopback_and_its_port_is_given_back"
LONG = "test_long_sentences_arrive"
ONE_RANK, BUSY = "test_one_rank_writes", "test_busy_port_is_refused_by_all_ranks"
WINDOW = "test_profile_is_of_its_window"
NAMED, OF_RUN = "test_bottleneck_is_named_with_its_share", "test_bottleneck_is_that_of_the_run"

KEPT = (
    '            kept = [r for r in read_json_lines(self.path) if r.get("step", -1) < first_step]\n'
)
OPEN = '        self.file = self.path.open("a", encoding="utf-8", buffering=1)\n'
ASIDE = '            aside = self.path.with_suffix(".aside")\n'
WRITTEN = (
    '            aside.write_text("".join(json.dumps(r) + "\\n" for r in kept), encoding="utf-8")\n'
)
SERVE = "start_http_server(port, addr=host, registry=self.registry)"
FIRST = "    if dist.get_rank(group) == 0:\n"
STOP = "        if self.profiler is not None and step > self.last:\n"
START = "        if self.profiler is None and self.first <= step <= self.last:\n"

mutant = mutants_of("4.12", "sinks")

MUTANTS = [
    mutant(
        "buffered",
        "lines wait in the process's buffer: a kill loses the last kilobytes",
        OPEN,
        '        self.file = self.path.open("a", encoding="utf-8")\n',
        LINE,
        "not-on-disk",
    ),
    mutant(
        "nan-as-it-is",
        "NaN is written as NaN, which is no JSON",
        "v if v is not None and math.isfinite(v) else None for n, v",
        "v for n, v",
        LINE,
        "not-json",
    ),
    mutant(
        "appends-to-half-a-line",
        "the torn line stays, and the first new record is glued to it",
        WRITTEN,
        "            lines = self.path.read_bytes().splitlines(keepends=True)\n"
        "            torn = [line for line in lines if not line.endswith(b'\\n')]\n"
        "            whole = ''.join(json.dumps(r) + '\\n' for r in kept)\n"
        "            aside.write_bytes(whole.encode() + b''.join(torn))\n",
        RESUMED,
        "torn-line",
    ),
    mutant(
        "steps-twice",
        "BUGS 84: records of steps that the resumed run takes again stay",
        KEPT,
        "            kept = read_json_lines(self.path)\n",
        RESUMED,
        "repeated-steps",
    ),
    mutant(
        "step-missing",
        "off by one: the record of the last step before the checkpoint goes as well",
        "< first_step]",
        "< first_step - 1]",
        RESUMED,
        "lost-records",
    ),
    mutant(
        "starts-anew",
        "a resumed run overwrites the file of the one before",
        OPEN,
        '        self.file = self.path.open("w", encoding="utf-8", buffering=1)\n',
        RESUMED,
        "lost-records",
    ),
    mutant(
        "rewritten-in-place",
        "BUGS 83: the file is emptied before what is kept has been written",
        ASIDE,
        "            aside = self.path\n",
        FULL,
        "lost-records",
    ),
    mutant(
        "one-torn-line-spoils-all",
        "reading ends at the first line that is no JSON",
        "        except ValueError:  # of JSON, and of UTF-8\n            continue\n",
        "        except ValueError:\n            break\n",
        UNREADABLE,
        "unreadable",
    ),
    mutant(
        "any-json",
        "a line that holds a number counts as a record",
        "        if isinstance(record, dict):\n",
        "        if record is not None:\n",
        UNREADABLE,
        "unreadable",
    ),
    mutant(
        "zero-for-unknown",
        "what is not known is drawn as 0",
        "[Summary.Value(tag=n, simple_value=v) for n, v in metrics.items() if v is not None]",
        "[Summary.Value(tag=n, simple_value=v or 0.0) for n, v in metrics.items()]",
        CURVES,
        "curves",
    ),
    mutant(
        "own-step-count",
        "curves are counted from 0 in the process, not by the run's steps",
        "        self.writer.file_writer.add_summary(Summary(value=known), step)\n",
        "        self.seen = getattr(self, 'seen', -1) + 1\n"
        "        self.writer.file_writer.add_summary(Summary(value=known), self.seen)\n",
        CURVES,
        "curves",
    ),
    mutant(
        "stale-gauge",
        "a gauge whose value is not known any more keeps its last one",
        "            self.gauges[name].set(math.nan if value is None else value)\n",
        "            if value is not None:\n                self.gauges[name].set(value)\n",
        SCRAPED,
        "stale",
    ),
    mutant(
        "adds-up",
        "gauges are incremented instead of set",
        "            self.gauges[name].set(math.nan if value is None else value)\n",
        "            self.gauges[name].inc(math.nan if value is None else value)\n",
        SCRAPED,
        "stale",
    ),
    mutant(
        "all-addresses",
        "the endpoint listens on every network interface, without a password",
        SERVE,
        'start_http_server(port, addr="0.0.0.0", registry=self.registry)',
        PORT,
        "exposed-port",
    ),
    mutant(
        "port-kept",
        "close() does not give the port back",
        "        self.server.shutdown()\n        self.server.server_close()\n        self.thread.join()\n",
        "        self.gauges.clear()\n",
        PORT,
        "port-kept",
    ),
    mutant(
        "busy-port-ignored",
        "a busy port is passed over: nobody learns that there are no metrics",
        "            raise ValueError(\n"
        '                f"no metrics on {host}:{port} ({error}): choose another port, or 0 for any"\n'
        "            ) from None\n",
        "            self.port = port\n            return\n",
        PORT,
        "busy",
    ),
    mutant(
        "every-rank",
        "BUGS 97: every rank prints and writes",
        FIRST,
        "    if dist.get_rank(group) >= 0:\n",
        ONE_RANK,
        "every-rank-writes",
    ),
    mutant(
        "every-rank-prints",
        "BUGS 97: one rank writes, but every rank shows its progress",
        "            sinks.sinks.append(Terminal(total_steps))\n",
        "            pass\n",
        ONE_RANK,
        "every-rank-writes",
        (
            "    if problem:\n        raise ValueError(problem)\n",
            "    sinks.sinks.append(Terminal(total_steps))\n"
            "    if problem:\n        raise ValueError(problem)\n",
        ),
    ),
    mutant(
        "first-rank-raises-alone",
        "the first rank ends with the error, the others wait for its broadcast",
        "            sinks.close()\n            problem = str(error) or type(error).__name__\n",
        "            raise ValueError(str(error)) from None\n",
        BUSY,
        "hang",
    ),
    mutant(
        "others-go-on",
        "the first rank raises after the broadcast, the others train without it",
        "    if problem:\n",
        "    if problem and dist.get_rank(group) == 0:\n",
        BUSY,
        "not-agreed",
    ),
    mutant(
        "cut-letter",
        "a sentence that was cut within a letter can't be decoded",
        '.decode(errors="ignore")',
        ".decode()",
        LONG,
        "not-agreed",
    ),
    mutant(
        "eight-bytes-a-letter",
        "the sentence travels as int64, 8 bytes for each",
        "torch.tensor(list(text), dtype=torch.uint8, device=device)",
        "torch.tensor(list(text), device=device)",
        LONG,
        "too-many-bytes",
    ),
    mutant(
        "window-one-short",
        "the window ends before its last step",
        STOP,
        "        if self.profiler is not None and step >= self.last:\n",
        WINDOW,
        "window",
        (START, "        if self.profiler is None and self.first <= step < self.last:\n"),
    ),
    mutant(
        "window-never-ends",
        "what is started is stopped at the end of the run only",
        STOP,
        "        if self.profiler is not None and step < self.first:\n",
        WINDOW,
        "window",
    ),
    mutant(
        "window-needs-its-first-step",
        "a run that is resumed inside of the window is not profiled",
        START,
        "        if self.profiler is None and step == self.first:\n",
        WINDOW,
        "window",
    ),
    mutant(
        "waiting-is-communication",
        "what is waited for a straggler counts as communication",
        '    exposed = "least_exposed" if record["stragglers"] else "exposed"\n',
        '    exposed = "exposed"\n',
        NAMED,
        "share",
    ),
    mutant(
        "memory-first",
        "full memory is named although time is wasted elsewhere",
        "kind=worst if median[worst] >= waste else needed",
        'kind=worst if median[worst] >= waste and needed != "memory" else needed',
        OF_RUN,
        "bottleneck",
    ),
    mutant(
        "warm-up-counts",
        "the first record counts, in which everything is slow",
        "for record in records[1:] or records]",
        "for record in records]",
        OF_RUN,
        "bottleneck",
    ),
    mutant(
        "mean-of-records",
        "one slow record of many decides",
        "{kind: statistics.median(s[kind] for s in shares) for kind in shares[0]}",
        "{kind: statistics.fmean(s[kind] for s in shares) for kind in shares[0]}",
        OF_RUN,
        "bottleneck",
    ),
]
