"""Wrong implementations of exercise 3.10."""

from distlab.grading.wrong import Mutant

MEANS, START = (
    "test_gradients_are_means_over_the_ranks",
    "test_all_ranks_start_with_the_first_ranks_state",
)
TORCHS, ADDS = "test_weights_follow_torchs_ddp", "test_every_backward_adds_its_mean"
MISSING, AGREE = "test_missing_gradients_count_as_zero", "test_ranks_agree_on_the_order"
GROUP, BAD = "test_group_of_some_ranks", "test_bad_input_is_refused_before_any_message"
BYTES, LEAVE = (
    "test_every_byte_once_in_few_messages",
    "test_buckets_leave_before_the_last_gradient_exists",
)
TIME, HOOK = (
    "test_step_takes_what_the_overlap_leaves",
    "test_hook_reduces_every_bucket_in_order",
)
MEMORY = "test_gradients_and_buckets_are_one_copy"

SHARE = "        self.share = 1 / dist.get_world_size(group)\n"
MODULE = "        self.module, self.group = module, group\n"
STATE = """        state = [*module.parameters(), *module.buffers()]
        expect_alike(state, group)
        broadcast_tensors(state, bucket_bytes, group)
"""
FIRST_ORDER = "        self._use_order(reversed(range(len(self.trainable))))\n"
BUCKETS = "        self.buckets = make_buckets([self.trainable[i] for i in order], *self.limits)\n"
HOME = (
    "        places = {p: (b, k) for b in self.buckets for k, p in enumerate(b.parameters)}\n"
    "        self.home = [places[p] for p in self.trainable]\n"
)
READY = "        self._begin()\n        self._take(index)\n"
LAUNCH = """        while len(self.handles) < len(self.buckets) and not self.missing[len(self.handles)]:
            self.handles.append(self.hook(self.buckets[len(self.handles)]))
"""
APPEND = "            self.handles.append(self.hook(self.buckets[len(self.handles)]))\n"
FLUSH = """        for index in reversed(range(len(self.trainable))):
            if index not in self.arrived:
                self._take(index)
"""
FINISH = "        self._flush()\n"
WAIT = """        for handle in self.handles:
            if handle is not None:
                handle.wait()
"""
KNOWN = "        if self.order_known:\n            self._reset()\n            return\n"
ORDER = "        self._use_order(order_of_first_rank(list(self.arrived), device, self.group))\n"
FOUND = "    found = [p for p in module.parameters() if p.requires_grad]\n"
REGISTER = (
    "            p.register_post_accumulate_grad_hook(functools.partial(weakly(self._ready), index))\n"
)

MUTANTS = [
    Mutant(
        id="overlap-starts-apart",
        exercise="3.10",
        bug="BUGS 18: the weights are not broadcast at the start",
        find=STATE,
        replace="",
        killed_by=START,
        cause="start-differs",
    ),
    Mutant(
        id="overlap-starts-without-buffers",
        exercise="3.10",
        bug="BUGS 19: the buffers are not broadcast at the start",
        find="        state = [*module.parameters(), *module.buffers()]\n",
        replace="        state = list(module.parameters())\n",
        killed_by=START,
        cause="start-differs",
    ),
    Mutant(
        id="overlap-start-of-trainable-only",
        exercise="3.10",
        bug="BUGS 18: frozen parameters stay different",
        find="        state = [*module.parameters(), *module.buffers()]\n",
        replace="        state = [*self.trainable, *module.buffers()]\n",
        killed_by=START,
        cause="start-differs",
    ),
    Mutant(
        id="overlap-start-one-by-one",
        exercise="3.10",
        bug="a message per tensor at the start",
        find=STATE,
        replace="        for tensor in (*module.parameters(), *module.buffers()):\n"
        "            broadcast_tensors([tensor], bucket_bytes, group)\n",
        killed_by=START,
        cause="too-many-messages",
    ),
    Mutant(
        id="overlap-summed",
        exercise="3.10",
        bug="BUGS 20: the sum over the ranks, not the mean",
        find=SHARE,
        replace="        self.share = 1.0\n",
        killed_by=MEANS,
        cause="summed",
    ),
    Mutant(
        id="overlap-divided-twice",
        exercise="3.10",
        bug="BUGS 21: divided before the reduction and once more after it",
        find=WAIT,
        replace=WAIT + "        for bucket in self.buckets:\n"
        "            bucket.buffer.mul_(self.share)\n",
        killed_by=MEANS,
        cause="divided-twice",
    ),
    Mutant(
        id="overlap-never-waited",
        exercise="3.10",
        bug="BUGS 22: nobody waits for the handles",
        find=WAIT,
        replace="",
        killed_by=MEANS,
        cause="never-waited",
    ),
    Mutant(
        id="overlap-last-waited-only",
        exercise="3.10",
        bug="BUGS 22: only the last bucket is waited for",
        find=WAIT,
        replace="        self.handles[-1].wait()\n",
        killed_by=MEANS,
        cause="never-waited",
    ),
    Mutant(
        id="overlap-waits-at-next-step",
        exercise="3.10",
        bug="BUGS 22: backward returns while buckets are in flight; the next one waits for them",
        find=WAIT,
        replace="        for handle in getattr(self, 'earlier', []):\n"
        "            handle.wait()\n"
        "        self.earlier = self.handles\n",
        killed_by=BYTES,
        cause="never-waited",
    ),
    Mutant(
        id="overlap-forward-only",
        exercise="3.10",
        bug="BUGS 23: reduction is armed by the wrapper's forward: calling the module skips it",
        find=READY,
        replace="        if not getattr(self, 'armed', False):\n            return\n" + READY,
        patches=[
            (
                "        return self.module(*args, **kwargs)\n",
                "        self.armed = True\n        return self.module(*args, **kwargs)\n",
            ),
            (FINISH, "        self.armed = False\n" + FINISH),
        ],
        killed_by=MEANS,
        cause="only-own",
    ),
    Mutant(
        id="overlap-missing-left-out",
        exercise="3.10",
        bug="BUGS 24: a bucket that lacks a gradient never leaves: the other ranks wait for it",
        find=FLUSH,
        replace="        pass\n",
        killed_by=MISSING,
        cause="mismatch",
    ),
    Mutant(
        id="overlap-missing-is-last-steps",
        exercise="3.10",
        bug="BUGS 24: where no gradient comes, the bucket sends what the last step has left in it",
        find=FLUSH,
        replace="        for bucket in self.buckets[len(self.handles) :]:\n"
        "            self.handles.append(self.hook(bucket))\n"
        "        for index in reversed(range(len(self.trainable))):\n"
        "            if index not in self.arrived:\n"
        "                bucket, place = self.home[index]\n"
        "                self.trainable[index].grad = bucket.views[place].fill_(1.0)\n"
        "                self.arrived[index] = None\n",
        killed_by=MISSING,
        cause="wrong",
    ),
    Mutant(
        id="overlap-tied-twice",
        exercise="3.10",
        bug="BUGS 25: a tied parameter is reduced under each of its names",
        find=FOUND,
        replace="    every = module.named_parameters(remove_duplicate=False)\n"
        "    found = [p for _, p in every if p.requires_grad]\n",
        patches=[
            (
                HOME,
                "        places = {p: [] for p in self.trainable}\n"
                "        for bucket in self.buckets:\n"
                "            for k, p in enumerate(bucket.parameters):\n"
                "                places[p].append((bucket, k))\n"
                "        self.home = [places[p].pop() for p in self.trainable]\n",
            )
        ],
        killed_by=MEANS,
        cause="divided-twice",
    ),
    Mutant(
        id="overlap-frozen-sent",
        exercise="3.10",
        bug="BUGS 26: frozen parameters travel as zeros",
        find=FOUND,
        replace="    found = list(module.parameters())\n",
        patches=[
            (REGISTER, "            if p.requires_grad:\n    " + REGISTER),
            ("    if not found:\n", "    if not any(p.requires_grad for p in found):\n"),
        ],
        killed_by=BYTES,
        cause="too-many-bytes",
    ),
    Mutant(
        id="overlap-after-backward",
        exercise="3.10",
        bug="BUGS 27: all buckets leave at the end of backward",
        find=LAUNCH,
        replace="",
        patches=[
            (
                WAIT,
                "        for bucket in self.buckets:\n"
                "            self.handles.append(self.hook(bucket))\n" + WAIT,
            )
        ],
        killed_by=LEAVE,
        cause="no-overlap",
    ),
    Mutant(
        id="overlap-one-bucket",
        exercise="3.10",
        bug="BUGS 27: one bucket for everything: it is complete when nothing is left to overlap",
        find="        self.limits = bucket_bytes, first_bucket_bytes\n",
        replace="        partition_all = 1 << 60\n"
        "        self.limits = partition_all, partition_all\n",
        killed_by=LEAVE,
        cause="no-overlap",
    ),
    Mutant(
        id="overlap-blocking",
        exercise="3.10",
        bug="BUGS 27: each bucket is waited for on the spot: backward stands still meanwhile",
        find=APPEND,
        replace="            work = self.hook(self.buckets[len(self.handles)])\n"
        "            if work is not None:\n"
        "                work.wait()\n"
        "            self.handles.append(None)\n",
        killed_by=TIME,
        cause="no-overlap",
    ),
    Mutant(
        id="overlap-forward-order",
        exercise="3.10",
        bug="BUGS 28: buckets in the order of registration: the first is complete last",
        find=FIRST_ORDER,
        replace="        self._use_order(range(len(self.trainable)))\n",
        killed_by=LEAVE,
        cause="no-overlap",
    ),
    Mutant(
        id="overlap-order-never-learned",
        exercise="3.10",
        bug="BUGS 28: the order that was observed is never used",
        find=ORDER,
        replace="        order_of_first_rank(list(self.arrived), device, self.group)\n"
        "        self._reset()\n",
        killed_by=LEAVE,
        cause="late-buckets",
    ),
    Mutant(
        id="overlap-order-every-step",
        exercise="3.10",
        bug="the order is broadcast and the buckets are made anew after every backward",
        find=ORDER + "        self.order_known = True\n",
        replace=ORDER,
        killed_by=BYTES,
        cause="too-many-bytes",
    ),
    Mutant(
        id="overlap-own-order",
        exercise="3.10",
        bug="every rank uses the order that it has seen itself",
        find=ORDER,
        replace="        order_of_first_rank(list(self.arrived), device, self.group)\n"
        "        self._use_order(list(self.arrived))\n",
        killed_by=AGREE,
        cause="mismatch",
    ),
    Mutant(
        id="overlap-as-complete",
        exercise="3.10",
        bug="a bucket leaves as soon as it is complete, whichever it is",
        find=LAUNCH,
        replace="        if not self.missing[bucket.index]:\n"
        "            self.handles.append(self.hook(bucket))\n",
        killed_by=AGREE,
        cause="mismatch",
    ),
    Mutant(
        id="overlap-all-gather",
        exercise="3.10",
        bug="BUGS 29: gathers all gradients and adds them up: (W-1)N bytes instead of 2(W-1)/W N",
        find=APPEND,
        replace="            bucket = self.buckets[len(self.handles)]\n"
        "            every = [\n"
        "                torch.empty_like(bucket.buffer)\n"
        "                for _ in range(dist.get_world_size(self.group))\n"
        "            ]\n"
        "            dist.all_gather(every, bucket.buffer, group=self.group)\n"
        "            bucket.buffer.copy_(torch.stack(every).sum(0))\n"
        "            self.handles.append(None)\n",
        killed_by=BYTES,
        cause="too-many-bytes",
    ),
    Mutant(
        id="overlap-sent-twice",
        exercise="3.10",
        bug="every bucket travels twice",
        find=APPEND,
        replace="            dist.all_reduce(self.buckets[len(self.handles)].buffer.clone(), "
        "group=self.group)\n" + APPEND,
        killed_by=BYTES,
        cause="too-many-bytes",
    ),
    Mutant(
        id="overlap-one-by-one",
        exercise="3.10",
        bug="a bucket per parameter",
        find="        self.limits = bucket_bytes, first_bucket_bytes\n",
        replace="        self.limits = 1, 1\n",
        killed_by=BYTES,
        cause="too-many-messages",
    ),
    Mutant(
        id="overlap-ranks-drift",
        exercise="3.10",
        bug="BUGS 30: the ranks round differently after the reduction and drift apart slowly",
        find=WAIT,
        replace=WAIT + "        for bucket in self.buckets:\n"
        "            bucket.buffer.mul_(1 + 1e-7 * dist.get_rank(self.group))\n",
        killed_by=TORCHS,
        cause="ranks-differ",
    ),
    Mutant(
        id="overlap-forgets-before",
        exercise="3.10",
        bug="forward forgets the gradients of an earlier backward",
        find="        return self.module(*args, **kwargs)\n",
        replace="        self.zero_grad()\n        return self.module(*args, **kwargs)\n",
        killed_by=ADDS,
        cause="scaled",
    ),
    Mutant(
        id="overlap-group-ignored",
        exercise="3.10",
        bug="the reduction runs in the default group, whatever group was given",
        find="        self.hook: Hook = functools.partial(all_reduce, group=group)\n",
        replace="        self.hook: Hook = all_reduce\n",
        killed_by=GROUP,
        cause="hang",
    ),
    Mutant(
        id="overlap-delegates",
        exercise="3.10",
        bug="torch's DistributedDataParallel does the work",
        find=STATE,
        replace="        self.module = nn.parallel.DistributedDataParallel(module)\n",
        killed_by=MEANS,
        cause="delegated",
    ),
    Mutant(
        id="overlap-hook-ignored",
        exercise="3.10",
        bug="the registered hook is never called",
        find=APPEND,
        replace="            bucket = self.buckets[len(self.handles)]\n"
        "            self.handles.append(all_reduce(bucket, self.group))\n",
        killed_by=HOOK,
        cause="hook-order",
    ),
    Mutant(
        id="overlap-hooks-handle-dropped",
        exercise="3.10",
        bug="BUGS 22: the handle that a hook returns is not waited for if it is no dist.Work",
        find="            if handle is not None:\n",
        replace="            if isinstance(handle, dist.Work):\n",
        killed_by=HOOK,
        cause="never-waited",
    ),
    Mutant(
        id="overlap-gradients-copied-out",
        exercise="3.10",
        bug="the gradients are copied out of the buckets: 2N bytes",
        find=FINISH,
        replace=FINISH + "        self.copies = [p.grad.clone() for p in self.trainable]\n",
        killed_by=MEMORY,
        cause="copies",
    ),
    Mutant(
        id="overlap-old-buckets-kept",
        exercise="3.10",
        bug="the buckets of the first backward are never let go",
        find=BUCKETS,
        replace="        self.former = getattr(self, 'buckets', [])\n" + BUCKETS,
        killed_by=MEMORY,
        cause="copies",
    ),
    Mutant(
        id="overlap-late-refusal",
        exercise="3.10",
        bug="the state is sent before the sizes are looked at: one rank alone would hang the others",
        find=FIRST_ORDER + STATE,
        replace=STATE + FIRST_ORDER,
        killed_by=BAD,
        cause="too-late",
    ),
    Mutant(
        id="overlap-any-module",
        exercise="3.10",
        bug="a module without trainable parameters is accepted",
        find="    if not found:\n",
        replace="    if found is None:\n",
        killed_by=BAD,
        cause="accepted",
    ),
    Mutant(
        id="overlap-sparse-accepted",
        exercise="3.10",
        bug="an embedding with sparse gradients is accepted, and fails in the middle of backward",
        find="        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:\n",
        replace="        if isinstance(layer, nn.EmbeddingBag) and layer.sparse:\n",
        killed_by=BAD,
        cause="accepted",
    ),
    Mutant(
        id="overlap-modules-differ",
        exercise="3.10",
        bug="the ranks' modules are not compared before they are sent",
        find="        expect_alike(state, group)\n",
        replace="",
        killed_by="test_modules_that_differ_are_refused",
        cause="mismatch",
    ),
]
