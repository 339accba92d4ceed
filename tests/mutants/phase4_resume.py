"""Wrong implementations of exercise 4.2."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="resume-one-step-again",
        exercise="4.2",
        mistake="the step that was just trained on is not counted, and done again",
        text="""            position.step += 1
            position.batch += 1
            yield batch
""",
        becomes="""            yield batch
            position.step += 1
            position.batch += 1
""",
        caught_by="test_interrupted_and_resumed_equals_uninterrupted",
        told_as="samples",
    ),
    Mutant(
        id="resume-epoch-skipped",
        exercise="4.2",
        mistake="the rest of the interrupted epoch is skipped",
        text="    while position.epoch < epochs:\n",
        becomes="""    position.epoch, position.batch = position.epoch + (position.batch > 0), 0
    while position.epoch < epochs:
""",
        caught_by="test_interrupted_and_resumed_equals_uninterrupted",
        told_as="samples",
    ),
    Mutant(
        id="resume-no-optimizer",
        exercise="4.2",
        mistake="the optimizer's moments are not restored",
        text="""        for name, part in self.parts.items():
            load_into(part, states[name])
""",
        becomes="""        for name, part in self.parts.items():
            if name != "optimizer":
                load_into(part, states[name])
""",
        caught_by="test_interrupted_and_resumed_equals_uninterrupted",
        told_as="optimizer",
    ),
    Mutant(
        id="resume-no-schedule",
        exercise="4.2",
        mistake="the schedule begins anew",
        text="""        for name, part in self.parts.items():
            load_into(part, states[name])
""",
        becomes="""        for name, part in self.parts.items():
            if name != "schedule":
                load_into(part, states[name])
""",
        caught_by="test_interrupted_and_resumed_equals_uninterrupted",
        told_as="schedule",
    ),
    Mutant(
        id="resume-no-scaler",
        exercise="4.2",
        mistake="the loss scale begins anew",
        text="""        for name, part in self.parts.items():
            load_into(part, states[name])
""",
        becomes="""        for name, part in self.parts.items():
            if name != "scaler":
                load_into(part, states[name])
""",
        caught_by="test_interrupted_and_resumed_equals_uninterrupted",
        told_as="scaler",
    ),
    Mutant(
        id="resume-no-streams",
        exercise="4.2",
        mistake="the random streams begin anew",
        text='        set_random_state(own["random"], self.device)\n',
        becomes="",
        caught_by="test_interrupted_and_resumed_equals_uninterrupted",
        told_as="random",
    ),
    Mutant(
        id="resume-streams-of-rank-0",
        exercise="4.2",
        mistake="all ranks go on with rank 0's random streams",
        text="        own = saved.own(rank)\n",
        becomes='        own = saved.own(rank) | {"random": saved.own(0)["random"]}\n',
        caught_by="test_interrupted_and_resumed_equals_uninterrupted",
        told_as="random",
    ),
    Mutant(
        id="resume-no-position",
        exercise="4.2",
        mistake="the sampler begins the epoch anew",
        text='        self.sampler.sampler.load_state_dict(own["sampler"])\n',
        becomes="",
        caught_by="test_interrupted_and_resumed_equals_uninterrupted",
        told_as="samples",
    ),
    Mutant(
        id="resume-batches-as-samples",
        exercise="4.2",
        mistake="batches are counted where the sampler counts samples",
        text="        consumed = position.batch * self.sampler.batch_size\n",
        becomes="        consumed = position.batch\n",
        caught_by="test_what_is_shared_and_what_is_own",
        told_as="samples",
    ),
    Mutant(
        id="resume-global-batch",
        exercise="4.2",
        mistake="the global batch is counted, every rank skips the others' samples, too",
        text="        consumed = position.batch * self.sampler.batch_size\n",
        becomes=(
            "        consumed = position.batch * self.sampler.batch_size * dist.get_world_size()\n"
        ),
        caught_by="test_what_is_shared_and_what_is_own",
        told_as="samples",
    ),
    Mutant(
        id="resume-epoch-not-named",
        exercise="4.2",
        mistake="the sampler is never told the epoch: the same order each time",
        text="        loader.batch_sampler.set_epoch(position.epoch)\n",
        becomes="",
        caught_by="test_loader_workers_go_on_with_the_same_samples",
        told_as="same-order",
    ),
    Mutant(
        id="resume-data-set-not-told",
        exercise="4.2",
        mistake=(
            "the data set never hears of the epoch: each sample has the same augmentation for ever"
        ),
        text="            loader.dataset.set_epoch(position.epoch)\n",
        becomes="            pass\n",
        caught_by="test_loader_workers_go_on_with_the_same_samples",
        told_as="same-noise",
    ),
    Mutant(
        id="resume-prefix",
        exercise="4.2",
        mistake="the names keep the wrapper's prefix",
        text="    prefix = wrapper_prefix(model)\n",
        becomes='    prefix = ""\n',
        caught_by="test_what_is_shared_and_what_is_own",
        told_as="prefix",
    ),
    Mutant(
        id="resume-one-wrapper",
        exercise="4.2",
        mistake="one wrapper is taken off, not two",
        text="    while [*model._modules] in",
        becomes="    if [*model._modules] in",
        caught_by="test_wrapped_and_plain_models_exchange_checkpoints",
        told_as="prefix",
    ),
    Mutant(
        id="resume-another-model",
        exercise="4.2",
        mistake="another model is found out after parts were loaded",
        text="""        for name, part in self.parts.items():
            if isinstance(part, nn.Module):
                check_model_state(part, states[name])
""",
        becomes="",
        caught_by="test_what_does_not_fit_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="resume-half-restored",
        exercise="4.2",
        mistake="parts are loaded while others are still to be checked",
        text="""        for name, part in self.parts.items():
            if isinstance(part, nn.Module):
                check_model_state(part, states[name])
""",
        becomes="""        for name, part in self.parts.items():
            if not isinstance(part, nn.Module):
                load_into(part, states[name])
        for name, part in self.parts.items():
            if isinstance(part, nn.Module):
                check_model_state(part, states[name])
""",
        caught_by="test_what_does_not_fit_is_refused",
        told_as="half-restored",
    ),
    Mutant(
        id="resume-any-world",
        exercise="4.2",
        mistake="a checkpoint of another world size is taken as if it fitted",
        text="        if saved.world_size != world_size:\n",
        becomes="        if False:\n",
        caught_by="test_what_does_not_fit_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="resume-group-needed",
        exercise="4.2",
        mistake="a single process has to make a process group to resume",
        text="        if dist.is_initialized():\n",
        becomes="        if True:\n",
        caught_by="test_a_single_process_needs_no_process_group",
        told_as="group-needed",
    ),
    Mutant(
        id="resume-all-shared",
        exercise="4.2",
        mistake="parts that differ from rank to rank are saved by rank 0 only",
        text="        self.own = set(own) | generators\n",
        becomes="        self.own = generators\n",
        caught_by="test_what_is_shared_and_what_is_own",
        told_as="shared",
    ),
    Mutant(
        id="resume-shares-memory",
        exercise="4.2",
        mistake="the optimizer takes the saved tensors themselves, and training changes them",
        text="        part.load_state_dict(copy.deepcopy(state))\n",
        becomes="        part.load_state_dict(state)\n",
        caught_by="test_groups_and_strange_models",
        told_as="aliased",
    ),
    Mutant(
        id="resume-new-parameters",
        exercise="4.2",
        mistake="the model gets new parameters, the optimizer steps the old ones",
        text="for name, value in state.items()})\n",
        becomes="for name, value in state.items()}, assign=True)\n",
        caught_by="test_groups_and_strange_models",
        told_as=("other-objects", "as-captured"),
    ),
    Mutant(
        id="resume-streams-first",
        exercise="4.2",
        mistake="random streams are put back before the parts, which draw numbers as they load",
        text='        set_random_state(own["random"], self.device)\n',
        becomes="",
        more=(
            (
                "        for name, part in self.parts.items():\n            load_into",
                '        set_random_state(own["random"], self.device)\n'
                "        for name, part in self.parts.items():\n            load_into",
            ),
        ),
        caught_by="test_groups_and_strange_models",
        told_as="random",
    ),
    Mutant(
        id="resume-world-for-group",
        exercise="4.2",
        mistake="rank and world size are those of the world",
        text="rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)\n",
        becomes="rank, world_size = dist.get_rank(), dist.get_world_size()\n",
        caught_by="test_groups_and_strange_models",
        told_as="exception",
    ),
    Mutant(
        id="resume-module-is-a-name",
        exercise="4.2",
        mistake="whatever has a child called module counts as a wrapper",
        text='    while [*model._modules] in (["module"], ["_orig_mod"]):\n'
        "        [(name, model)] = model._modules.items()\n",
        becomes='    while name := next((n for n in ("module", "_orig_mod") if hasattr(model, n)), ""):\n'
        "        model = getattr(model, name)\n",
        caught_by="test_groups_and_strange_models",
        told_as=("prefix", "exception", "as-captured"),
    ),
    Mutant(
        id="resume-seed-drawn-again",
        exercise="4.2",
        mistake="iter(loader) draws the epoch's seed once more in a run resumed within an epoch",
        text="""        if position.batch > 0:
            generator.set_state(before)
""",
        becomes="",
        caught_by="test_loader_workers_go_on_with_the_same_samples",
        told_as="moved",
    ),
    Mutant(
        id="resume-torchs-stream-alone",
        exercise="4.2",
        mistake="of a loader that has a generator torch's stream is put back",
        text="generator = loader.generator or torch.default_generator",
        becomes="generator = torch.default_generator",
        caught_by="test_loader_workers_go_on_with_the_same_samples",
        told_as="moved",
    ),
    Mutant(
        id="resume-own-model-unseen",
        exercise="4.2",
        mistake="a model that is a rank's own is not compared before anything is loaded",
        text="""            if isinstance(part, nn.Module):
                check""",
        becomes="""            if isinstance(part, nn.Module) and name not in self.own:
                check""",
        caught_by="test_what_does_not_fit_is_refused",
        told_as=("accepted", "half-restored"),
    ),
    Mutant(
        id="resume-first-child",
        exercise="4.2",
        mistake="a module whose first child is called module is a wrapper, whatever comes after it",
        text="""while [*model._modules] in (["module"], ["_orig_mod"]):
        [(name, model)] =""",
        becomes="""while [*model._modules][:1] in (["module"], ["_orig_mod"]):
        [(name, model), *_] =""",
        caught_by="test_wrapped_and_plain_models_exchange_checkpoints",
        told_as="prefix",
    ),
]
