"""Wrong implementations of exercise 4.2."""

from distlab.grading.wrong import mutants_of

EXACT = "test_interrupted_and_resumed_equals_uninterrupted"
WORKERS = "test_loader_workers_go_on_with_the_same_samples"
OWN = "test_what_is_shared_and_what_is_own"
FITS = "test_what_does_not_fit_is_refused"
ALONE = "test_a_single_process_needs_no_process_group"
WRAPPED = "test_wrapped_and_plain_models_exchange_checkpoints"

COUNT = """            position.step += 1
            position.batch += 1
            yield batch
"""
CONSUMED = "        consumed = position.batch * self.sampler.batch_size\n"
LOAD = """        for name, part in self.parts.items():
            load_into(part, states[name])
"""
STREAMS = '        set_random_state(own["random"], self.device)\n'
CHECK = """        for name, part in self.parts.items():
            if isinstance(part, nn.Module):
                check_model_state(part, states[name])
"""

mutant = mutants_of("4.2", "resume")


def forgets(part: str) -> str:
    """``restore`` that leaves one part as it is."""
    return f'''        for name, part in self.parts.items():
            if name != "{part}":
                load_into(part, states[name])
'''


MUTANTS = [
    mutant(
        "one-step-again",
        "BUGS 84: the step that was just trained on is not counted, and done again",
        COUNT,
        "            yield batch\n            position.step += 1\n            position.batch += 1\n",
        EXACT,
        "samples",
    ),
    mutant(
        "epoch-skipped",
        "BUGS 84: the rest of the interrupted epoch is skipped",
        "    while position.epoch < epochs:\n",
        "    position.epoch, position.batch = position.epoch + (position.batch > 0), 0\n"
        "    while position.epoch < epochs:\n",
        EXACT,
        "samples",
    ),
    mutant(
        "no-optimizer",
        "BUGS 85: the optimizer's moments are not restored",
        LOAD,
        forgets("optimizer"),
        EXACT,
        "optimizer",
    ),
    mutant(
        "no-schedule",
        "BUGS 85: the schedule begins anew",
        LOAD,
        forgets("schedule"),
        EXACT,
        "schedule",
    ),
    mutant(
        "no-scaler",
        "BUGS 85: the loss scale begins anew",
        LOAD,
        forgets("scaler"),
        EXACT,
        "scaler",
    ),
    mutant(
        "no-streams",
        "BUGS 85: the random streams begin anew",
        STREAMS,
        "",
        EXACT,
        "random",
    ),
    mutant(
        "streams-of-rank-0",
        "all ranks go on with rank 0's random streams",
        "        own = saved.own(rank)\n",
        '        own = saved.own(rank) | {"random": saved.own(0)["random"]}\n',
        EXACT,
        "random",
    ),
    mutant(
        "no-position",
        "BUGS 86: the sampler begins the epoch anew",
        '        self.sampler.sampler.load_state_dict(own["sampler"])\n',
        "",
        EXACT,
        "samples",
    ),
    mutant(
        "batches-as-samples",
        "BUGS 86: batches are counted where the sampler counts samples",
        CONSUMED,
        "        consumed = position.batch\n",
        OWN,
        "samples",
    ),
    mutant(
        "global-batch",
        "BUGS 86: the global batch is counted, every rank skips the others' samples, too",
        CONSUMED,
        "        consumed = position.batch * self.sampler.batch_size * dist.get_world_size()\n",
        OWN,
        "samples",
    ),
    mutant(
        "epoch-not-named",
        "the sampler is never told the epoch: the same order each time",
        "        loader.batch_sampler.set_epoch(position.epoch)\n",
        "",
        WORKERS,
        "same-order",
    ),
    mutant(
        "data-set-not-told",
        "the data set never hears of the epoch: each sample has the same augmentation for ever",
        "            loader.dataset.set_epoch(position.epoch)\n",
        "            pass\n",
        WORKERS,
        "same-noise",
    ),
    mutant(
        "prefix",
        "BUGS 91: the names keep the wrapper's prefix",
        "    prefix = wrapper_prefix(model)\n",
        '    prefix = ""\n',
        OWN,
        "prefix",
    ),
    mutant(
        "one-wrapper",
        "BUGS 91: one wrapper is taken off, not two",
        "    while [*model._modules] in",
        "    if [*model._modules] in",
        WRAPPED,
        "prefix",
    ),
    mutant(
        "another-model",
        "another model is found out after parts were loaded",
        CHECK,
        "",
        FITS,
        "accepted",
    ),
    mutant(
        "half-restored",
        "parts are loaded while others are still to be checked",
        CHECK,
        """        for name, part in self.parts.items():
            if not isinstance(part, nn.Module):
                load_into(part, states[name])
"""
        + CHECK,
        FITS,
        "half-restored",
    ),
    mutant(
        "any-world",
        "BUGS 92: a checkpoint of another world size is taken as if it fitted",
        "        if saved.world_size != world_size:\n",
        "        if False:\n",
        FITS,
        "accepted",
    ),
    mutant(
        "group-needed",
        "a single process has to make a process group to resume",
        "        if dist.is_initialized():\n",
        "        if True:\n",
        ALONE,
        "group-needed",
    ),
    mutant(
        "all-shared",
        "parts that differ from rank to rank are saved by rank 0 only",
        "        self.own = set(own) | generators\n",
        "        self.own = generators\n",
        OWN,
        "shared",
    ),
]
