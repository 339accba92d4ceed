"""The texts of ``docs/plan.md``."""

ABOUT = """# Which layout, how many days, how many GPU hours

Written by `python -m benchmarks.plan_page`, from runs of `distlab plan`. The command asks a
question that an engineer has before renting a machine:

```bash
distlab plan --model llama-70b --cluster dgx-h100 --gpus 512 --tokens 1e12
distlab plan --model gpt-7b --gpus 64 128 --tokens 3e11 --price 2.5   # the cost of more GPUs
```

1. It lists the layouts: strategy (`ddp`, ZeRO-1, ZeRO-2, FSDP, hybrid sharding over 1 to 8
   nodes), tensor, pipeline and context ranks, micro-batch, recomputation, schedule. GPUs,
   layers, heads, positions and the batch must divide.
2. A formula says how much memory and time each layout needs (`distlab/simulate/estimate.py`).
   It takes the kernels of few layers from the simulator. A layout may use 92 % of a GPU's
   memory. The allocator, NCCL and CUDA need the rest.
3. The simulator runs the best layouts, at most two of each way to share the model. It runs few
   layers, stages and batches, and lines give the rest ([validation.md](validation.md)). Its
   memory decides again whether a layout fits.
4. The table shows every row that no other row beats in days, GPU hours, memory, error, goodput,
   and in being simulated. Here the simulated rows that another one beats are shown, too.

`fsdp x512` has 512 copies that share one state; `tp8 pp4 1f1b ddp x16` has 16 copies on 8
tensor ranks x 4 stages. *Micro-batch* is sequences x number of micro-batches in a step of one
copy. The *error* is what predictions of published runs of exactly this kind had, for 9 of 10
runs. Where no such run is known, it is *unknown*.

**What is not simulated.** The simulator has no context parallelism, no FSDP and no ZeRO beside
tensor or pipeline parallelism. Rows marked *formula* have such layouts. Their numbers are the
formula's alone, and their error is unknown. For small models the tests find the formula's
memory within 10 % of the simulated one, and its time within 30 %. A row marked *formula* hides
no simulated row, and the picture shows the fastest simulated layout.

A global batch is the usual one for the size of the model (Brown et al. 2020, arXiv 2005.14165,
table 2.1; 4 million tokens for Llama: Touvron et al. 2023, arXiv 2307.09288), rounded to a
power of two sequences. `--batch` and `--length` set it. Weights are 16-bit with float32 copies
in the optimizer, or 32-bit under autocast for `ddp`, ZeRO-1 and ZeRO-2 without tensor and
pipeline ranks."""

CHOICES = """\
Exercise 3.21 chooses a strategy by the bytes that it sends, for one micro-batch and with 16-bit
optimizer states. `plan` takes the time of a step, chooses the micro-batch, and has 32-bit
states. So the two may differ, and neither is wrong: 3.21 asks for the simplest strategy that
fits. Only simulated rows without tensor and pipeline ranks are compared.
*None*: no strategy fits, because 3.21 recomputes nothing."""

GOODPUT = """\
A job stops when one of its GPUs fails. The more GPUs, the more often: M is the time of one GPU
between failures, divided by the number of GPUs. A checkpoint of 12 bytes per parameter takes δ
seconds, and the job saves after every τ seconds of work. Young (1974) says τ = sqrt(2δM); Daly
(2006) adds two terms for longer saves, and `plan` takes his τ. *Goodput* is the share of time
that makes progress which is kept: τ / (M · e^(R/M) · (e^((τ+δ)/M) - 1)) with R seconds per
restart (Daly 2006, equation 20). A test compares it with a job that fails at random moments.
The days and GPU hours of all tables include it.

`--failures` gives the hours of one GPU between failures. A GPU without a row below takes the
row with the most interruptions. `--storage` gives the GB/s that all GPUs write together. The
default is 20 GB/s for each 256 GPUs, which is assumed. `--restart` gives R; 600 s are assumed.
All of a save counts as lost time. A program that saves beside compute loses less."""
