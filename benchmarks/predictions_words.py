"""The paragraphs of ``docs/validation.md``."""

from __future__ import annotations

INTRODUCTION = """# Predictions against published runs

Written by `python -m benchmarks.predictions`. It sets {rows} published measurements beside
predictions of `distlab simulate`, and {simulated} of them can be simulated.
`published/measured.csv` has the measurements with their sources, and `published/predicted.json` the
predictions. An error is predicted over published, less 1: with a positive error the real run was
slower.

A prediction rests on numbers of three kinds, and each number has its source in the data files:

- *Measured.* The times of 920 kernels of one H100 (`benchmarks/kernels_h100.json`) give the shares
  of the peak rates that products, attention, convolutions and other kernels reach
  (`clusters/kernels/h100.yaml`). Published curves give the bandwidth of collectives over their
  size.
- *From vendors.* Peaks, memory, links, and the latencies in NCCL's source.
- *Fitted.* Kernels take longer in a cluster that trains for days than alone: power limits, other
  software, other versions. Three loads per GPU tell by how much, and one number tells how a step
  grows with each doubling of the nodes whose ranks wait for each other in every layer. With FSDP
  these are all nodes; stages of a pipeline and its copies meet less often, and do not count. The
  numbers are fitted to all runs of one project together. No number belongs to a single run.

The A100 and the H200 take the shares of the H100.

Programs that fuse operators are predicted so (`--fused`): a result that stays inside a fused kernel
is neither written to memory nor read again.

All layers of a language model are equal, and so are the batches of a step that accumulates. So few
of them are run, and the line through their times gives the rest. The same holds for the stages and
micro-batches of a pipeline. Tests compare with a run of all.

With fp8 (`--fp8`) the linear layers of all blocks multiply in 8 bits, at the rate that was measured
on an H100. A kernel casts each factor and writes its transpose. Everything else stays in 16 bits.

The memory rows are a formula of their source, which counts the layers alone. Their state is set
beside that of a stage without embedding. Their activations are set beside the most that the first
stage keeps after a forward, less its state. The SimAI rows are shares of a rate that their source
does not name. Its code divides them by the last one before it multiplies by the 48.5 GB/s that a
card reaches. So they are taken as shares of the line rate, 50 GB/s.

*Apart* is the error without the row's own data. A run that loads were fitted to is predicted with
the loads that come out without all runs of its model. A point of a curve is predicted from the rest
of the curve.
"""
AFTER = """
`distlab simulate` shows the column *9 in 10* of *apart* beside each rate, for the kind of its plan.
Collectives count from 4 MiB: below, latency decides, and no curve tells it.
"""
LEFT_OUT = """
All fitted rows come from one project. So the trainings of every other project are predicted without
any row of theirs: the first line has them together. Then each table of the fitted project is left
out as a whole: *apart* is with the constants that the other table of the same GPU gives alone.
"""
THIS_MACHINE = """
`distlab calibrate` measured one machine, and the same programs ran on virtual and on real ranks
there: the all-reduces of exercise 1.8, and training steps of exercise 1.5. Neither these programs
nor these sizes were used to calibrate. {calibrated}

{verdict} An error is predicted over measured, less 1. A round is what a user does: calibrate,
simulate, run. A row shows the round with the median error; the last column has the errors of all
rounds. They differ because the machine's pace does: other virtual machines share its cores. A
measurement comes from several fresh starts of the ranks. A start in which other programs of this
machine used more than a tenth of a processor does not count.

Training steps and the backend's all-reduces show means, as a user feels them. Root, direct and
chain have the medians that exercise 1.9 gives. The difference matters where the backend's
collectives are. Many of gloo's small collectives take 0.5 ms, and some of them 4 ms: in loops of
small all-reduces the median was 0.5 ms to 1 ms, and the mean 0.8 ms to 2.4 ms. So calibration takes
the mean of collectives. The 4 ms are a time slice. The thread that reads gloo's sockets polls while
another thread of its rank holds a connection (`Pair::handleEvents` in gloo/transport/tcp/pair.cc).
If that other thread has no core, it gets one when the slice ends. How many collectives wait depends
on what runs around them. Fewer of them wait where messages come between them, so calibration has
ranks of their own for messages.

Ranks keep the memory that they free, in calibration and here. Without that the C library gives it
back in some starts, and each call touches new pages: an exchange of 4 MB took 16 ms instead of
3 ms. A program of one's own can ask for the same by `MALLOC_TRIM_THRESHOLD_=2147483647` and
`MALLOC_MMAP_MAX_=0` in its environment.

`distlab simulate` refuses more ranks than cores. There a rank that is woken waits for a time slice
of up to 4 ms, in some runs and not in others. One effect of a CPU is not modelled: collectives
beside compute take processors from it.

Measured on {machine}; {date}. `python -m benchmarks.run validation` measures it anew.
"""

WORST = """
These rows have the largest errors. The reasons are what the sources and the data files tell. No run
was repeated to prove them.
"""
NOT_SIMULATED = """
These rows need what the simulator does not have, or what their source does not state.
"""
WHY = {
    "r203": "the load of attention is that of one project's kernels of 2023; this run is of 2025",
    "r151": "a V100 has no measured kernels: the roofline has one rate for all convolutions",
    "r266": "the source falls from 0.13 to 0.05 after 64 GPUs, then hardly; the formula is smooth",
    "r255": "the source has 0.50 with 16 GPUs and 0.53 with 32; the formula falls",
    "r143": "no convolution was measured on an A100: it takes the shares of the H100",
    "r185": "the A100's load of products comes from another cluster and program",
    "r275": "the source halves from 256 to 512 GPUs; the formula falls by less",
    "r270": "the source falls from 0.05 to 0.044 after 128 GPUs; the formula halves",
}
