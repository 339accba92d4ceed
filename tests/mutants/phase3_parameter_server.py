"""Wrong implementations of exercises 3.22 to 3.24, and 3.26."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="server-round-robin",
        exercise="3.26",
        mistake="keys are dealt out in turn, whatever their size",
        text="        elements, keys, server = min(loads)\n",
        becomes="        elements, keys, server = loads[len(server_of) % servers]\n",
        more=(
            (
                "sorted(parameters, key=lambda key: -parameters[key].numel())",
                "parameters",
            ),
        ),
        caught_by="test_keys_are_placed_by_size",
        told_as="unbalanced",
    ),
    Mutant(
        id="server-all-on-first",
        exercise="3.26",
        mistake="one server holds everything",
        text="        elements, keys, server = min(loads)\n",
        becomes="        elements, keys, server = loads[0]\n",
        caught_by="test_keys_are_placed_by_size",
        told_as="unbalanced",
    ),
    Mutant(
        id="server-too-many-accepted",
        exercise="3.26",
        mistake="servers without a key are accepted",
        text="    if servers > len(parameters):\n",
        becomes="    if servers > 1000:\n",
        caught_by="test_impossible_roles_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="server-nccl-accepted",
        exercise="3.26",
        mistake="a backend that takes no tensors on the CPU is accepted, and fails at a message",
        text="    if not takes_cpu(group):\n",
        becomes="    if False:\n",
        caught_by="test_a_backend_that_takes_no_cpu_tensors_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="server-no-worker-accepted",
        exercise="3.26",
        mistake="a group without a worker is accepted",
        text="    if servers >= world_size:\n",
        becomes="    if servers > world_size:\n",
        caught_by="test_impossible_roles_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="server-pull-then-push-each",
        exercise="3.22",
        mistake="a worker's push is applied before the next one's pull: another version for each",
        text="""        for worker in list(server.live):
            request = server.receive(worker)
            if request.kind == PULL:
                server.answer(request)
        requests = [server.receive(worker) for worker in list(server.live)]
        server.update([r for r in requests if r.kind == PUSH])
""",
        becomes="""        for worker in list(server.live):
            request = server.receive(worker)
            if request.kind == PULL:
                server.answer(request)
                server.update([r for r in [server.receive(worker)] if r.kind == PUSH])
""",
        caught_by="test_rounds_equal_one_process",
        told_as="versions",
    ),
    Mutant(
        id="server-summed",
        exercise="3.22",
        mistake="gradients are added up and not divided",
        text=(
            "                value.sub_(push.gradients[key], alpha=self.lr * push.samples / "
            "total)\n"
        ),
        becomes="                value.sub_(push.gradients[key], alpha=self.lr)\n",
        caught_by="test_only_what_is_used_travels",
        told_as="summed",
    ),
    Mutant(
        id="server-unweighted",
        exercise="3.22",
        mistake="a worker with one sample counts like one with three",
        text=(
            "                value.sub_(push.gradients[key], alpha=self.lr * push.samples / "
            "total)\n"
        ),
        becomes=(
            "                value.sub_(push.gradients[key], alpha=self.lr * 1 / len(having))\n"
        ),
        caught_by="test_only_what_is_used_travels",
        told_as="unweighted-mean",
    ),
    Mutant(
        id="server-divided-by-all",
        exercise="3.22",
        mistake="divided by the samples of all, although fewer pushed the key",
        text="            total = sum(p.samples for p in having)\n",
        becomes="            total = sum(p.samples for p in pushes)\n",
        caught_by="test_only_what_is_used_travels",
        told_as="divided-by-all",
    ),
    Mutant(
        id="server-version-per-push",
        exercise="3.22",
        mistake="the version counts pushes, not updates: a round makes two of them",
        text="        self.version += bool(pushes)\n",
        becomes="        self.version += len(pushes)\n",
        caught_by="test_no_byte_for_other_keys",
        told_as="versions",
    ),
    Mutant(
        id="server-waits-for-all",
        exercise="3.22",
        mistake="a worker that has left is waited for",
        text="""        for worker in list(server.live):
            request = server.receive(worker)
            if request.kind == PULL:
                server.answer(request)
""",
        becomes="""        for worker in everybody:
            request = server.receive(worker)
            if request.kind == PULL:
                server.answer(request)
""",
        more=(
            (
                """    # --- exercise 3.22: start
    # Step 5""",
                """    everybody = list(server.live)
    # --- exercise 3.22: start
    # Step 5""",
            ),
        ),
        caught_by="test_rounds_equal_one_process",
        told_as="hang",
    ),
    Mutant(
        id="server-dies-with-worker",
        exercise="3.22",
        mistake="a worker's broken connection ends the server",
        text="            return self._drop(worker, error)\n",
        becomes="            raise\n",
        caught_by="test_a_dead_worker_stops_nobody",
        told_as="exception",
    ),
    Mutant(
        id="server-dead-counts-as-zero",
        exercise="3.22",
        mistake="the mean is over the workers that there once were",
        text="        server.update([r for r in requests if r.kind == PUSH])\n",
        becomes="""        pushes = [r for r in requests if r.kind == PUSH]
        for push in pushes:
            push.samples *= len(pushes) / (len(server.live) + len(server.lost))
            push.gradients = {k: g * len(pushes) / (len(server.live) + len(server.lost))
                              for k, g in push.gradients.items()}
        server.update(pushes)
""",
        caught_by="test_a_dead_worker_stops_nobody",
        told_as="corrupted",
    ),
    Mutant(
        id="server-death-swallowed",
        exercise="3.22",
        mistake="the exception is swallowed, nobody learns of the death",
        text="        self.lost[worker] = str(error)\n",
        becomes="",
        caught_by="test_a_dead_worker_stops_nobody",
        told_as="death-unnoticed",
    ),
    Mutant(
        id="server-any-source-in-rounds",
        exercise="3.22",
        mistake="pushes come from any rank: a dead worker never shows",
        text="        requests = [server.receive(worker) for worker in list(server.live)]\n",
        becomes="        requests = [server.receive(None) for _ in list(server.live)]\n",
        caught_by="test_a_dead_worker_stops_nobody",
        told_as=("hang", "corrupted"),
    ),
    Mutant(
        id="server-asked-for-everything",
        exercise="3.26",
        mistake="a pull asks for all keys of every server and drops those that were not chosen",
        text="""        keys = set(keys)
        header""",
        becomes="""        wanted, keys = set(keys), set(self.parameters)
        header""",
        more=(
            (
                """            values |= cut(vector, like)
        return values
""",
                """            values |= cut(vector, like)
        return {k: v for k, v in values.items() if k in wanted}
""",
            ),
        ),
        caught_by="test_only_chosen_keys_travel",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="server-header-only-where-keys",
        exercise="3.26",
        mistake="a server without a chosen key hears nothing, and waits for that worker",
        text="""            mine = self._on(server, gradients)
            if mine:
""",
        becomes="""            mine = self._on(server, gradients)
            if not mine:
                handles.pop().wait() if gradients else handles.clear()
            if mine:
""",
        caught_by="test_requests_follow_the_protocol",
        told_as="never-waited",
    ),
    Mutant(
        id="server-own-weights",
        exercise="3.26",
        mistake="the worker computes with its own weights, not with those that it pulled",
        text="                    p.copy_(values[name])\n",
        becomes="",
        caught_by="test_training_uses_what_it_pulled",
        told_as="wrong",
    ),
    Mutant(
        id="server-never-leaves",
        exercise="3.26",
        mistake="a worker goes without a word",
        text="""    finally:
        client.leave()
""",
        becomes="""    finally:
        client.clock = 0
""",
        caught_by="test_training_uses_what_it_pulled",
        told_as="hang",
    ),
    Mutant(
        id="async-in-turn",
        exercise="3.23",
        mistake="workers are served in turn: a slow one stops the others",
        text=(
            "        request = server.receive(server.live[0] if len(server.live) == 1 else None)\n"
        ),
        becomes=(
            "        request = server.receive(server.live[server.version % len(server.live)])\n"
        ),
        caught_by="test_nobody_waits_for_a_slow_worker",
        told_as="hang",
    ),
    Mutant(
        id="async-lost-update",
        exercise="3.23",
        mistake="a push is applied to the values that the worker had read, not to the newest",
        text="""            server.answer(request)
        elif request.kind == PUSH:
            server.update([request])
    # --- exercise 3.23: end
""",
        becomes="""            server.answer(request)
            read[request.worker] = {k: v.clone() for k, v in server.values.items()}
        elif request.kind == PUSH:
            server.values.update(read[request.worker])
            server.update([request])
            read[request.worker] = {k: v.clone() for k, v in server.values.items()}
    # --- exercise 3.23: end
""",
        more=(
            (
                "    # --- exercise 3.23: start\n",
                """    read = {}
    # --- exercise 3.23: start
""",
            ),
        ),
        caught_by="test_no_update_is_lost",
        told_as="lost-update",
    ),
    Mutant(
        id="async-any-to-the-end",
        exercise="3.23",
        mistake="the last worker is received from any rank: its death never shows",
        text=(
            "        request = server.receive(server.live[0] if len(server.live) == 1 else None)\n"
        ),
        becomes="        request = server.receive(None)\n",
        caught_by="test_a_dead_worker_corrupts_nothing",
        told_as="hang",
    ),
    Mutant(
        id="async-collects-first",
        exercise="3.23",
        mistake="it waits for a push of every worker, as the synchronous one does",
        text="""            server.update([request])
    # --- exercise 3.23: end
""",
        becomes="""            pushes.append(request)
        if len({p.worker for p in pushes}) >= len(server.live):
            for push in pushes:
                server.update([push])
            pushes.clear()
    # --- exercise 3.23: end
""",
        more=(
            (
                "    # --- exercise 3.23: start\n",
                """    pushes = []
    # --- exercise 3.23: start
""",
            ),
        ),
        caught_by="test_nobody_waits_for_a_slow_worker",
        told_as="lost-update",
    ),
    Mutant(
        id="async-averaged",
        exercise="3.23",
        mistake="a single push is divided by the number of workers",
        text="""            server.update([request])
    # --- exercise 3.23: end
""",
        becomes="""            for gradient in request.gradients.values():
                gradient /= max(1, len(server.live))
            server.update([request])
    # --- exercise 3.23: end
""",
        caught_by="test_no_update_is_lost",
        told_as="lost-update",
    ),
    Mutant(
        id="async-wrong-version",
        exercise="3.23",
        mistake="the version that is named is not the one that is sent",
        text="""            server.answer(request)
        elif request.kind == PUSH:
            server.update([request])
    # --- exercise 3.23: end
""",
        becomes="""            server.version += 1
            server.answer(request)
            server.version -= 1
        elif request.kind == PUSH:
            server.update([request])
    # --- exercise 3.23: end
""",
        caught_by="test_no_update_is_lost",
        told_as="torn-read",
    ),
    Mutant(
        id="stale-unbounded",
        exercise="3.24",
        mistake="the bound is not enforced",
        text="        for worker in [w for w in held if clocks[w] - staleness <= slowest]:\n",
        becomes="        for worker in list(held):\n",
        caught_by="test_nobody_reads_too_far_ahead",
        told_as="too-stale",
    ),
    Mutant(
        id="stale-off-by-one",
        exercise="3.24",
        mistake="one push more than the bound",
        text="        for worker in [w for w in held if clocks[w] - staleness <= slowest]:\n",
        becomes=(
            "        for worker in [w for w in held if clocks[w] - staleness <= slowest + 1]:\n"
        ),
        caught_by="test_nobody_reads_too_far_ahead",
        told_as="too-stale",
    ),
    Mutant(
        id="stale-too-strict",
        exercise="3.24",
        mistake="a push less than the bound: it never runs ahead",
        text="        for worker in [w for w in held if clocks[w] - staleness <= slowest]:\n",
        becomes=(
            "        for worker in [w for w in held if clocks[w] - staleness < slowest or not "
            "clocks[w]]:\n"
        ),
        caught_by="test_the_bound_is_used_up",
        told_as="hang",
    ),
    Mutant(
        id="stale-left-counts",
        exercise="3.24",
        mistake="a worker that has left is still the slowest",
        text="        slowest = min((clocks[worker] for worker in server.live), default=0)\n",
        becomes="        slowest = min(clocks.values())\n",
        caught_by="test_who_has_left_holds_nobody_back",
        told_as="hang",
    ),
    Mutant(
        id="stale-released-by-push-only",
        exercise="3.24",
        mistake="held pulls are looked at when one pushes, not when one leaves",
        text="        for worker in [w for w in held if clocks[w] - staleness <= slowest]:\n",
        becomes="""        if request.kind == LEAVE:
            continue
        for worker in [w for w in held if clocks[w] - staleness <= slowest]:
""",
        caught_by="test_leaving_releases_who_waits",
        told_as="hang",
    ),
    Mutant(
        id="stale-against-fastest",
        exercise="3.24",
        mistake="compared with the fastest worker",
        text="        slowest = min((clocks[worker] for worker in server.live), default=0)\n",
        becomes="        slowest = max(clocks.values())\n",
        caught_by="test_nobody_reads_too_far_ahead",
        told_as="too-stale",
    ),
    Mutant(
        id="stale-any-among-silent",
        exercise="3.24",
        mistake="all others wait for one that died, and the server listens to any rank",
        text="        speakers = [worker for worker in server.live if worker not in held]\n",
        becomes="        speakers = server.live\n",
        caught_by="test_a_dead_worker_holds_nobody_back",
        told_as="hang",
    ),
    Mutant(
        id="stale-clock-not-moved",
        exercise="3.24",
        mistake="clocks stay at 0: everybody is always allowed",
        text="            clocks[request.worker] = request.clock + 1\n",
        becomes="",
        caught_by="test_nobody_reads_too_far_ahead",
        told_as="too-stale",
    ),
    Mutant(
        id="stale-negative-accepted",
        exercise="3.24",
        mistake="the worker does not know that its server has refused, and waits",
        text="    if staleness is not None and not staleness >= 0:\n",
        becomes=(
            "    if dist.get_rank(group) < servers and staleness is not None and staleness < 0:\n"
        ),
        caught_by="test_fit_refuses_on_every_rank",
        told_as="hang",
    ),
    Mutant(
        id="server-empty-key-not-received",
        exercise="3.26",
        mistake="the worker expects no message where the server sends an empty one",
        text="            if like:\n",
        becomes="            if vector.numel():\n",
        caught_by="test_a_worker_expects_empty_keys",
        told_as="hang",
    ),
    Mutant(
        id="server-global-ranks",
        exercise="3.26",
        mistake="servers are numbered in the world, not in the group",
        text="""            handles.append(dist.isend(header, group=self.group, group_dst=server))
            handles.append(dist.irecv(version""",
        becomes="""            handles.append(dist.isend(header, server))
            handles.append(dist.irecv(version""",
        caught_by="test_requests_follow_the_protocol",
        told_as="hang",
    ),
    Mutant(
        id="server-two-dtypes-accepted",
        exercise="3.26",
        mistake="keys of two dtypes are joined into one message: it has other bytes than expected",
        text="    if len(dtypes) > 1:\n",
        becomes="    if not dtypes:\n",
        caught_by="test_impossible_roles_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="fit-models-differ",
        exercise="3.24",
        mistake="the ranks' models are not compared: a message has another length",
        text="    expect_alike([*keys.values()], group)\n",
        becomes="",
        caught_by="test_models_that_differ_are_refused",
        told_as="mismatch",
    ),
    Mutant(
        id="fit-always-synchronous",
        exercise="3.24",
        mistake="every kind of fit() waits for all workers",
        text="    if staleness is None:\n",
        becomes="    if servers:\n",
        caught_by="test_fit_lets_nobody_wait_or_all",
        told_as="hang",
    ),
    Mutant(
        id="server-nan-of-nothing",
        exercise="3.22",
        mistake="a gradient of no samples is weighted by zero: NaN times zero is NaN",
        text="if key in p.gradients and p.samples]",
        becomes="if key in p.gradients]",
        more=(("for push in having:", "for push in having if total else ():"),),
        caught_by="test_only_what_is_used_travels",
        told_as="nan",
    ),
    Mutant(
        id="server-leaver-is-a-version",
        exercise="3.22",
        mistake="a round in which everybody leaves counts as an update",
        text="        server.update([r for r in requests if r.kind == PUSH])\n",
        becomes="        server.update(requests)\n",
        caught_by="test_leaving_after_a_pull",
        told_as="versions",
    ),
    Mutant(
        id="server-skips-behind-a-leaver",
        exercise="3.22",
        mistake="the list of workers shrinks while it is walked through: a push is lost",
        text="[server.receive(worker) for worker in list(server.live)]",
        becomes="[server.receive(worker) for worker in server.live]",
        caught_by="test_leaving_after_a_pull",
        told_as="push-lost",
    ),
    Mutant(
        id="client-one-server-after-the-other",
        exercise="3.26",
        mistake="a pull waits for one server's answer before it asks the next",
        text="            answers.append((like, version, vector))\n        for handle in handles:\n            handle.wait()\n",
        becomes="            answers.append((like, version, vector))\n            for handle in handles:\n                handle.wait()\n            handles.clear()\n",
        caught_by="test_requests_follow_the_protocol",
        told_as="one-by-one",
    ),
    Mutant(
        id="client-stale-gradients",
        exercise="3.26",
        mistake="gradients of before are pushed with those of the batch",
        text="                    p.grad = None\n",
        becomes="",
        caught_by="test_training_uses_what_it_pulled",
        told_as="old-gradients",
    ),
    Mutant(
        id="server-one-worker-after-the-other",
        exercise="3.22",
        mistake="a worker's push is taken before the next worker's pull is answered",
        text="""            if request.kind == PULL:
                server.answer(request)
        requests = [server.receive(worker) for worker in list(server.live)]
""",
        becomes="""            if request.kind == PULL:
                server.answer(request)
                requests.append(server.receive(worker))
""",
        more=(
            (
                "    while server.live:\n        for worker in list(server.live):\n",
                "    while server.live:\n        requests: list[Request] = []\n"
                "        for worker in list(server.live):\n",
            ),
        ),
        caught_by="test_no_byte_for_other_keys",
        told_as="hang",
    ),
    Mutant(
        id="server-any-error-is-a-loss",
        exercise="3.22",
        mistake="a broken receive from any worker is taken for the loss of nobody",
        text="                raise\n",
        becomes="                return Request(-1, LOST)\n",
        caught_by="test_requests_of_any_worker",
        told_as="hidden-error",
    ),
    Mutant(
        id="server-drops-old-pushes",
        exercise="3.23",
        mistake="a push whose worker is far behind is dropped as too old",
        text="""        elif request.kind == PUSH:
            server.update([request])
    # --- exercise 3.23: end""",
        becomes="""        elif request.kind == PUSH and server.version - request.clock < 8 * len(server.live):
            server.update([request])
    # --- exercise 3.23: end""",
        caught_by="test_nobody_waits_for_a_slow_worker",
        told_as="lost-update",
    ),
    Mutant(
        id="fit-zero-is-none",
        exercise="3.24",
        mistake="a staleness of 0 counts as not given: synchronous rounds",
        text="    if staleness is None:\n        serve_synchronous",
        becomes="    if not staleness:\n        serve_synchronous",
        caught_by="test_fit_trains_in_all_three_ways",
        told_as="wrong-server",
    ),
    Mutant(
        id="client-order-of-the-mapping",
        exercise="3.26",
        mistake="gradients are joined in the order of the mapping that push() got",
        text="for k in mine])",
        becomes="for k in gradients if k in mine])",
        caught_by="test_requests_follow_the_protocol",
        told_as="protocol",
    ),
    Mutant(
        id="client-stays-after-interrupt",
        exercise="3.26",
        mistake="train() leaves after an Exception, not after an interrupt",
        text="    finally:\n        client.leave()\n    return loss_value",
        becomes="    except Exception:\n        client.leave()\n        raise\n    client.leave()\n    return loss_value",
        caught_by="test_a_worker_that_fails_leaves",
        told_as="hang",
    ),
    Mutant(
        id="server-answers-the-dead",
        exercise="3.22",
        mistake="a worker that is gone when it is answered is not noted",
        text="        except RuntimeError as error:\n            self._drop(request.worker, error)",
        becomes="        except RuntimeError:\n            pass",
        caught_by="test_requests_of_any_worker",
        told_as="death-unnoticed",
    ),
    Mutant(
        id="server-empty-push-no-version",
        exercise="3.23",
        mistake="a push without gradients is no version",
        text="            server.update([request])\n    # --- exercise 3.23: end",
        becomes="            server.update([request] if request.keys else [])\n    # --- exercise 3.23: end",
        caught_by="test_nobody_waits_for_a_slow_worker",
        told_as="lost-update",
    ),
    Mutant(
        id="fit-compares-all",
        exercise="3.24",
        mistake="models are refused for frozen parameters of other shapes, too",
        text="expect_alike([*keys.values()], group)",
        becomes="expect_alike([*model.parameters()], group)",
        caught_by="test_fit_trains_in_all_three_ways",
        told_as="exception",
    ),
]
