"""Wrong implementations of exercise 3.10."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="overlap-starts-apart",
        exercise="3.10",
        mistake="the weights are not broadcast at the start",
        text="""        state = [*module.parameters(), *module.buffers()]
        expect_alike(state, group)
        broadcast_tensors(state, bucket_bytes, group)
""",
        becomes="",
        caught_by="test_all_ranks_start_with_the_first_ranks_state",
        told_as="start-differs",
    ),
    Mutant(
        id="overlap-starts-without-buffers",
        exercise="3.10",
        mistake="the buffers are not broadcast at the start",
        text="        state = [*module.parameters(), *module.buffers()]\n",
        becomes="        state = list(module.parameters())\n",
        caught_by="test_all_ranks_start_with_the_first_ranks_state",
        told_as="start-differs",
    ),
    Mutant(
        id="overlap-start-of-trainable-only",
        exercise="3.10",
        mistake="frozen parameters stay different",
        text="        state = [*module.parameters(), *module.buffers()]\n",
        becomes="        state = [*self.trainable, *module.buffers()]\n",
        caught_by="test_all_ranks_start_with_the_first_ranks_state",
        told_as="start-differs",
    ),
    Mutant(
        id="overlap-start-one-by-one",
        exercise="3.10",
        mistake="a message per tensor at the start",
        text="""        state = [*module.parameters(), *module.buffers()]
        expect_alike(state, group)
        broadcast_tensors(state, bucket_bytes, group)
""",
        becomes="""        for tensor in (*module.parameters(), *module.buffers()):
            broadcast_tensors([tensor], bucket_bytes, group)
""",
        caught_by="test_all_ranks_start_with_the_first_ranks_state",
        told_as="too-many-messages",
    ),
    Mutant(
        id="overlap-summed",
        exercise="3.10",
        mistake="the sum over the ranks, not the mean",
        text="        self.share = 1 / dist.get_world_size(group)\n",
        becomes="        self.share = 1.0\n",
        caught_by="test_gradients_are_means_over_the_ranks",
        told_as="summed",
    ),
    Mutant(
        id="overlap-divided-twice",
        exercise="3.10",
        mistake="divided before the reduction and once more after it",
        text="""        for handle in self.handles:
            if handle is not None:
                handle.wait()
""",
        becomes="""        for handle in self.handles:
            if handle is not None:
                handle.wait()
        for bucket in self.buckets:
            bucket.buffer.mul_(self.share)
""",
        caught_by="test_gradients_are_means_over_the_ranks",
        told_as="divided-twice",
    ),
    Mutant(
        id="overlap-never-waited",
        exercise="3.10",
        mistake="nobody waits for the handles",
        text="""        for handle in self.handles:
            if handle is not None:
                handle.wait()
""",
        becomes="",
        caught_by="test_gradients_are_means_over_the_ranks",
        told_as="never-waited",
    ),
    Mutant(
        id="overlap-last-waited-only",
        exercise="3.10",
        mistake="only the last bucket is waited for",
        text="""        for handle in self.handles:
            if handle is not None:
                handle.wait()
""",
        becomes="        self.handles[-1].wait()\n",
        caught_by="test_gradients_are_means_over_the_ranks",
        told_as="never-waited",
    ),
    Mutant(
        id="overlap-waits-at-next-step",
        exercise="3.10",
        mistake="backward returns while buckets are in flight; the next one waits for them",
        text="""        for handle in self.handles:
            if handle is not None:
                handle.wait()
""",
        becomes="""        for handle in getattr(self, 'earlier', []):
            handle.wait()
        self.earlier = self.handles
""",
        caught_by="test_every_byte_once_in_few_messages",
        told_as="never-waited",
    ),
    Mutant(
        id="overlap-forward-only",
        exercise="3.10",
        mistake="reduction is armed by the wrapper's forward: calling the module skips it",
        text="""        self._begin()
        self._take(index)
""",
        becomes="""        if not getattr(self, 'armed', False):
            return
        self._begin()
        self._take(index)
""",
        more=(
            (
                "        return self.module(*args, **kwargs)\n",
                """        self.armed = True
        return self.module(*args, **kwargs)
""",
            ),
            (
                "        self._flush()\n",
                """        self.armed = False
        self._flush()
""",
            ),
        ),
        caught_by="test_gradients_are_means_over_the_ranks",
        told_as="only-own",
    ),
    Mutant(
        id="overlap-missing-left-out",
        exercise="3.10",
        mistake="a bucket that lacks a gradient never leaves: the other ranks wait for it",
        text="""        for index in reversed(range(len(self.trainable))):
            if index not in self.arrived:
                self._take(index)
""",
        becomes="        pass\n",
        caught_by="test_missing_gradients_count_as_zero",
        told_as="mismatch",
    ),
    Mutant(
        id="overlap-missing-is-last-steps",
        exercise="3.10",
        mistake="where no gradient comes, the bucket sends what the last step has left in it",
        text="""        for index in reversed(range(len(self.trainable))):
            if index not in self.arrived:
                self._take(index)
""",
        becomes="""        for bucket in self.buckets[len(self.handles) :]:
            self.handles.append(self.hook(bucket))
        for index in reversed(range(len(self.trainable))):
            if index not in self.arrived:
                bucket, k = self.home[index]
                self.trainable[index].grad = bucket.views[k].fill_(1.0)
                self.arrived[index] = None
""",
        caught_by="test_missing_gradients_count_as_zero",
        told_as="wrong",
    ),
    Mutant(
        id="overlap-tied-twice",
        exercise="3.10",
        mistake="a tied parameter is reduced under each of its names",
        text="    found = [p for p in module.parameters() if p.requires_grad]\n",
        becomes="""    every = module.named_parameters(remove_duplicate=False)
    found = [p for _, p in every if p.requires_grad]
""",
        more=(
            (
                (
                    "        homes = {p: (b, k) for b in self.buckets for k, p in "
                    "enumerate(b.parameters)}\n"
                    "        self.home = [homes[p] for p in self.trainable]\n"
                ),
                """        homes = {p: [] for p in self.trainable}
        for bucket in self.buckets:
            for k, p in enumerate(bucket.parameters):
                homes[p].append((bucket, k))
        self.home = [homes[p].pop() for p in self.trainable]
""",
            ),
        ),
        caught_by="test_gradients_are_means_over_the_ranks",
        told_as="divided-twice",
    ),
    Mutant(
        id="overlap-frozen-sent",
        exercise="3.10",
        mistake="frozen parameters travel as zeros",
        text="    found = [p for p in module.parameters() if p.requires_grad]\n",
        becomes="    found = list(module.parameters())\n",
        more=(
            (
                (
                    "            "
                    "p.register_post_accumulate_grad_hook(functools.partial(weakly(self._ready)"
                    ", index))\n"
                ),
                """            if p.requires_grad:
                p.register_post_accumulate_grad_hook(functools.partial(weakly(self._ready), index))
""",
            ),
            (
                "    if not found:\n",
                "    if not any(p.requires_grad for p in found):\n",
            ),
        ),
        caught_by="test_every_byte_once_in_few_messages",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="overlap-after-backward",
        exercise="3.10",
        mistake="all buckets leave at the end of backward",
        text=(
            "        while len(self.handles) < len(self.buckets) and not "
            "self.missing[len(self.handles)]:\n"
            "            self.handles.append(self.hook(self.buckets[len(self.handles)]))\n"
        ),
        becomes="",
        more=(
            (
                """        for handle in self.handles:
            if handle is not None:
                handle.wait()
""",
                """        for bucket in self.buckets:
            self.handles.append(self.hook(bucket))
        for handle in self.handles:
            if handle is not None:
                handle.wait()
""",
            ),
        ),
        caught_by="test_buckets_leave_before_the_last_gradient_exists",
        told_as="no-overlap",
    ),
    Mutant(
        id="overlap-one-bucket",
        exercise="3.10",
        mistake="one bucket for everything: it is complete when nothing is left to overlap",
        text="        self.limits = bucket_bytes, first_bucket_bytes\n",
        becomes="""        partition_all = 1 << 60
        self.limits = partition_all, partition_all
""",
        caught_by="test_buckets_leave_before_the_last_gradient_exists",
        told_as="no-overlap",
    ),
    Mutant(
        id="overlap-blocking",
        exercise="3.10",
        mistake="each bucket is waited for on the spot: backward stands still meanwhile",
        text="            self.handles.append(self.hook(self.buckets[len(self.handles)]))\n",
        becomes="""            work = self.hook(self.buckets[len(self.handles)])
            if work is not None:
                work.wait()
            self.handles.append(None)
""",
        caught_by="test_step_takes_what_the_overlap_leaves",
        told_as="no-overlap",
    ),
    Mutant(
        id="overlap-forward-order",
        exercise="3.10",
        mistake="buckets in the order of registration: the first is complete last",
        text="        self._use_order(reversed(range(len(self.trainable))))\n",
        becomes="        self._use_order(range(len(self.trainable)))\n",
        caught_by="test_buckets_leave_before_the_last_gradient_exists",
        told_as="no-overlap",
    ),
    Mutant(
        id="overlap-order-never-learned",
        exercise="3.10",
        mistake="the order that was observed is never used",
        text=(
            "        self._use_order(order_of_first_rank(list(self.arrived), device, self.group))\n"
        ),
        becomes="""        order_of_first_rank(list(self.arrived), device, self.group)
        self._reset()
""",
        caught_by="test_buckets_leave_before_the_last_gradient_exists",
        told_as="late-buckets",
    ),
    Mutant(
        id="overlap-order-every-step",
        exercise="3.10",
        mistake="the order is broadcast and the buckets are made anew after every backward",
        text="""        self._use_order(order_of_first_rank(list(self.arrived), device, self.group))
        self.order_known = True
""",
        becomes=(
            "        self._use_order(order_of_first_rank(list(self.arrived), device, self.group))\n"
        ),
        caught_by="test_every_byte_once_in_few_messages",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="overlap-own-order",
        exercise="3.10",
        mistake="every rank uses the order that it has seen itself",
        text=(
            "        self._use_order(order_of_first_rank(list(self.arrived), device, self.group))\n"
        ),
        becomes="""        order_of_first_rank(list(self.arrived), device, self.group)
        self._use_order(list(self.arrived))
""",
        caught_by="test_ranks_agree_on_the_order",
        told_as="mismatch",
    ),
    Mutant(
        id="overlap-as-complete",
        exercise="3.10",
        mistake="a bucket leaves as soon as it is complete, whichever it is",
        text=(
            "        while len(self.handles) < len(self.buckets) and not "
            "self.missing[len(self.handles)]:\n"
            "            self.handles.append(self.hook(self.buckets[len(self.handles)]))\n"
        ),
        becomes="""        if not self.missing[bucket.index]:
            self.handles.append(self.hook(bucket))
""",
        caught_by="test_ranks_agree_on_the_order",
        told_as="mismatch",
    ),
    Mutant(
        id="overlap-all-gather",
        exercise="3.10",
        mistake="gathers all gradients and adds them up: (W-1)N bytes instead of 2(W-1)/W N",
        text="            self.handles.append(self.hook(self.buckets[len(self.handles)]))\n",
        becomes="""            bucket = self.buckets[len(self.handles)]
            every = [
                torch.empty_like(bucket.buffer)
                for _ in range(dist.get_world_size(self.group))
            ]
            dist.all_gather(every, bucket.buffer, group=self.group)
            bucket.buffer.copy_(torch.stack(every).sum(0))
            self.handles.append(None)
""",
        caught_by="test_every_byte_once_in_few_messages",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="overlap-sent-twice",
        exercise="3.10",
        mistake="every bucket travels twice",
        text="            self.handles.append(self.hook(self.buckets[len(self.handles)]))\n",
        becomes=(
            "            dist.all_reduce(self.buckets[len(self.handles)].buffer.clone(), "
            "group=self.group)\n"
            "            self.handles.append(self.hook(self.buckets[len(self.handles)]))\n"
        ),
        caught_by="test_every_byte_once_in_few_messages",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="overlap-one-by-one",
        exercise="3.10",
        mistake="a bucket per parameter",
        text="        self.limits = bucket_bytes, first_bucket_bytes\n",
        becomes="        self.limits = 1, 1\n",
        caught_by="test_every_byte_once_in_few_messages",
        told_as="too-many-messages",
    ),
    Mutant(
        id="overlap-ranks-drift",
        exercise="3.10",
        mistake="the ranks round differently after the reduction and drift apart slowly",
        text="""        for handle in self.handles:
            if handle is not None:
                handle.wait()
""",
        becomes="""        for handle in self.handles:
            if handle is not None:
                handle.wait()
        for bucket in self.buckets:
            bucket.buffer.mul_(1 + 1e-7 * dist.get_rank(self.group))
""",
        caught_by="test_weights_follow_torchs_ddp",
        told_as="ranks-differ",
    ),
    Mutant(
        id="overlap-forgets-before",
        exercise="3.10",
        mistake="forward forgets the gradients of an earlier backward",
        text="        return self.module(*args, **kwargs)\n",
        becomes="""        self.zero_grad()
        return self.module(*args, **kwargs)
""",
        caught_by="test_every_backward_adds_its_mean",
        told_as="scaled",
    ),
    Mutant(
        id="overlap-group-ignored",
        exercise="3.10",
        mistake="the reduction runs in the default group, whatever group was given",
        text="        self.hook: Hook = functools.partial(all_reduce, group=group)\n",
        becomes="        self.hook: Hook = all_reduce\n",
        caught_by="test_group_of_some_ranks",
        told_as=("hang", "mismatch"),
    ),
    Mutant(
        id="overlap-delegates",
        exercise="3.10",
        mistake="torch's DistributedDataParallel does the work",
        text="""        state = [*module.parameters(), *module.buffers()]
        expect_alike(state, group)
        broadcast_tensors(state, bucket_bytes, group)
""",
        becomes="        self.module = nn.parallel.DistributedDataParallel(module)\n",
        caught_by="test_gradients_are_means_over_the_ranks",
        told_as="shortcut",
    ),
    Mutant(
        id="overlap-hook-ignored",
        exercise="3.10",
        mistake="the registered hook is never called",
        text="            self.handles.append(self.hook(self.buckets[len(self.handles)]))\n",
        becomes="""            bucket = self.buckets[len(self.handles)]
            self.handles.append(all_reduce(bucket, self.group))
""",
        caught_by="test_hook_reduces_every_bucket_in_order",
        told_as="hook-order",
    ),
    Mutant(
        id="overlap-hooks-handle-dropped",
        exercise="3.10",
        mistake="the handle that a hook returns is not waited for if it is no dist.Work",
        text="            if handle is not None:\n",
        becomes="            if isinstance(handle, dist.Work):\n",
        caught_by="test_hook_reduces_every_bucket_in_order",
        told_as="never-waited",
    ),
    Mutant(
        id="overlap-gradients-copied-out",
        exercise="3.10",
        mistake="the gradients are copied out of the buckets: 2N bytes",
        text="        self._flush()\n",
        becomes="""        self._flush()
        self.copies = [p.grad.clone() for p in self.trainable]
""",
        caught_by="test_gradients_and_buckets_are_one_copy",
        told_as="copies",
    ),
    Mutant(
        id="overlap-old-buckets-kept",
        exercise="3.10",
        mistake="the buckets of the first backward are never let go",
        text=(
            "        self.buckets = make_buckets([self.trainable[i] for i in order], "
            "*self.limits)\n"
        ),
        becomes="""        self.former = getattr(self, 'buckets', [])
        self.buckets = make_buckets([self.trainable[i] for i in order], *self.limits)
""",
        caught_by="test_gradients_and_buckets_are_one_copy",
        told_as="copies",
    ),
    Mutant(
        id="overlap-late-refusal",
        exercise="3.10",
        mistake=(
            "the state is sent before the sizes are looked at: one rank alone would hang the others"
        ),
        text="""        self._use_order(reversed(range(len(self.trainable))))
        state = [*module.parameters(), *module.buffers()]
        expect_alike(state, group)
        broadcast_tensors(state, bucket_bytes, group)
""",
        becomes="""        state = [*module.parameters(), *module.buffers()]
        expect_alike(state, group)
        broadcast_tensors(state, bucket_bytes, group)
        self._use_order(reversed(range(len(self.trainable))))
""",
        caught_by="test_bad_input_is_refused_before_any_message",
        told_as="too-late",
    ),
    Mutant(
        id="overlap-any-module",
        exercise="3.10",
        mistake="a module without trainable parameters is accepted",
        text="    if not found:\n",
        becomes="    if found is None:\n",
        caught_by="test_bad_input_is_refused_before_any_message",
        told_as="accepted",
    ),
    Mutant(
        id="overlap-sparse-accepted",
        exercise="3.10",
        mistake=(
            "an embedding with sparse gradients is accepted, and fails in the middle of backward"
        ),
        text="        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:\n",
        becomes="        if isinstance(layer, nn.EmbeddingBag) and layer.sparse:\n",
        caught_by="test_bad_input_is_refused_before_any_message",
        told_as="accepted",
    ),
    Mutant(
        id="overlap-waits-for-the-one-before",
        exercise="3.10",
        mistake="a bucket leaves only when the one before has arrived: backward stands still",
        text="            self.handles.append(self.hook(self.buckets[len(self.handles)]))\n",
        becomes="""            if self.handles and self.handles[-1] is not None:
                self.handles[-1].wait()
                self.handles[-1] = None
            self.handles.append(self.hook(self.buckets[len(self.handles)]))
""",
        caught_by="test_step_takes_what_the_overlap_leaves",
        told_as="late-buckets",
    ),
    Mutant(
        id="overlap-forgets-what-was-there",
        exercise="3.10",
        mistake="where no gradient comes, what p.grad held before is thrown away",
        text="            if index not in self.arrived:\n                self._take(index)\n",
        becomes="""            if index not in self.arrived:
                self.trainable[index].grad = None
                self._take(index)
""",
        caught_by="test_gradients_from_before_take_part",
        told_as="missing-rank",
    ),
    Mutant(
        id="overlap-kept-alive",
        exercise="3.10",
        mistake="the parameters' hooks keep the wrapper, its buckets and its group",
        text="functools.partial(weakly(self._ready), index)",
        becomes="functools.partial(self._ready, index)",
        caught_by="test_wrappers_live_and_die_one_by_one",
        told_as="kept-alive",
    ),
    Mutant(
        id="overlap-wrapped-twice",
        exercise="3.10",
        mistake="a module that is wrapped a second time is reduced by both wrappers",
        text="        claim(self.trainable, self)\n",
        becomes="",
        caught_by="test_wrappers_live_and_die_one_by_one",
        told_as="accepted",
    ),
    Mutant(
        id="overlap-modules-differ",
        exercise="3.10",
        mistake="the ranks' modules are not compared before they are sent",
        text="        expect_alike(state, group)\n",
        becomes="",
        caught_by="test_modules_that_differ_are_refused",
        told_as="mismatch",
    ),
]
