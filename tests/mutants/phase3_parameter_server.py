"""Wrong implementations of exercises 3.22 to 3.24, and 3.26."""

from distlab.grading.wrong import Mutant

PLACE, ROLES = "test_keys_are_placed_by_size", "test_impossible_roles_are_refused"
ROUNDS, USED = "test_rounds_equal_one_process", "test_only_what_is_used_travels"
OTHER, DEATH = "test_no_byte_for_other_keys", "test_a_dead_worker_stops_nobody"
UPDATE, WAIT = "test_no_update_is_lost", "test_nobody_waits_for_a_slow_worker"
CORRUPT = "test_a_dead_worker_corrupts_nothing"
AHEAD, BOUND = "test_nobody_reads_too_far_ahead", "test_the_bound_is_used_up"
PROTOCOL, TRAINING = "test_requests_follow_the_protocol", "test_training_uses_what_it_pulled"
TRAVEL = "test_only_chosen_keys_travel"
LEFT, GONE = "test_who_has_left_holds_nobody_back", "test_a_dead_worker_holds_nobody_back"
REFUSE, RELEASE = "test_fit_refuses_on_every_rank", "test_leaving_releases_who_waits"

LEAST = "        elements, keys, server = min(loads)\n"
SGD = """                value.sub_(push.gradients[key], alpha=self.lr * push.samples / total)
"""
HAVING = "            having = [p for p in pushes if key in p.gradients]\n"
COLLECT = "        requests = [server.receive(worker) for worker in list(server.live)]\n"
ROUND = "        server.update([r for r in requests if r.kind == PUSH])\n"
PULLS = """        for worker in list(server.live):
            request = server.receive(worker)
            if request.kind == PULL:
                server.answer(request)
"""
DROPS = "            return self._drop(worker, error)\n"
ANY = "        request = server.receive(server.live[0] if len(server.live) == 1 else None)\n"
APPLY = "            server.update([request])\n    # --- exercise 3.23: end\n"
ANSWER = "            server.answer(request)\n        elif request.kind == PUSH:\n            server.update([request])\n    # --- exercise 3.23: end\n"
SPEAKERS = "        speakers = [worker for worker in server.live if worker not in held]\n"
SLOWEST = "        slowest = min((clocks[worker] for worker in server.live), default=0)\n"
ALLOWED = "        for worker in [w for w in held if clocks[w] - staleness <= slowest]:\n"
CLOCK = "            clocks[request.worker] = request.clock + 1\n"

MUTANTS = [
    Mutant(
        id="server-round-robin",
        exercise="3.26",
        bug="keys are dealt out in turn, whatever their size",
        find=LEAST,
        replace="        elements, keys, server = loads[len(place) % servers]\n",
        killed_by=PLACE,
        cause="unbalanced",
        patches=[("sorted(parameters, key=lambda key: -parameters[key].numel())", "parameters")],
    ),
    Mutant(
        id="server-all-on-first",
        exercise="3.26",
        bug="BUGS 70: one server holds everything",
        find=LEAST,
        replace="        elements, keys, server = loads[0]\n",
        killed_by=PLACE,
        cause="unbalanced",
    ),
    Mutant(
        id="server-too-many-accepted",
        exercise="3.26",
        bug="servers without a key are accepted",
        find="    if servers > len(parameters):\n",
        replace="    if servers > 1000:\n",
        killed_by=ROLES,
        cause="accepted",
    ),
    Mutant(
        id="server-no-worker-accepted",
        exercise="3.26",
        bug="a group without a worker is accepted",
        find="    if servers >= world_size:\n",
        replace="    if servers > world_size:\n",
        killed_by=ROLES,
        cause="accepted",
    ),
    Mutant(
        id="server-pull-then-push-each",
        exercise="3.22",
        bug="a worker's push is applied before the next one's pull: another version for each",
        find=PULLS + COLLECT + ROUND,
        replace="        for worker in list(server.live):\n"
        "            request = server.receive(worker)\n"
        "            if request.kind == PULL:\n"
        "                server.answer(request)\n"
        "                server.update([r for r in [server.receive(worker)] if r.kind == PUSH])\n",
        killed_by=ROUNDS,
        cause="versions",
    ),
    Mutant(
        id="server-summed",
        exercise="3.22",
        bug="BUGS 20: gradients are added up and not divided",
        find=SGD,
        replace=SGD.replace(" * push.samples / total", ""),
        killed_by=USED,
        cause="summed",
    ),
    Mutant(
        id="server-unweighted",
        exercise="3.22",
        bug="BUGS 35: a worker with one sample counts like one with three",
        find=SGD,
        replace=SGD.replace("push.samples / total", "1 / len(having)"),
        killed_by=USED,
        cause="unweighted-mean",
    ),
    Mutant(
        id="server-divided-by-all",
        exercise="3.22",
        bug="BUGS 82: divided by the samples of all, although fewer pushed the key",
        find="            total = sum(p.samples for p in having)\n",
        replace="            total = sum(p.samples for p in pushes)\n",
        killed_by=USED,
        cause="divided-by-all",
    ),
    Mutant(
        id="server-version-per-push",
        exercise="3.22",
        bug="the version counts pushes, not updates: a round makes two of them",
        find="        self.version += bool(pushes)\n",
        replace="        self.version += len(pushes)\n",
        killed_by=OTHER,
        cause="versions",
    ),
    Mutant(
        id="server-waits-for-all",
        exercise="3.22",
        bug="BUGS 81: a worker that has left is waited for",
        find=PULLS,
        replace=PULLS.replace("list(server.live)", "everybody"),
        killed_by=ROUNDS,
        cause="hang",
        patches=[
            (
                "    # --- exercise 3.22: start\n    # Step 5",
                "    everybody = list(server.live)\n    # --- exercise 3.22: start\n    # Step 5",
            )
        ],
    ),
    Mutant(
        id="server-dies-with-worker",
        exercise="3.22",
        bug="BUGS 81: a worker's broken connection ends the server",
        find=DROPS,
        replace="            raise\n",
        killed_by=DEATH,
        cause="exception",
    ),
    Mutant(
        id="server-dead-counts-as-zero",
        exercise="3.22",
        bug="BUGS 82: the mean is over the workers that there once were",
        find=ROUND,
        replace="        pushes = [r for r in requests if r.kind == PUSH]\n"
        "        for push in pushes:\n"
        "            push.samples *= len(pushes) / (len(server.live) + len(server.lost))\n"
        "            push.gradients = {k: g * len(pushes) / (len(server.live) + len(server.lost))\n"
        "                              for k, g in push.gradients.items()}\n"
        "        server.update(pushes)\n",
        killed_by=DEATH,
        cause="corrupted",
    ),
    Mutant(
        id="server-death-swallowed",
        exercise="3.22",
        bug="BUGS 82: the exception is swallowed, nobody learns of the death",
        find="        self.lost[worker] = str(error)\n",
        replace="",
        killed_by=DEATH,
        cause="death-unnoticed",
    ),
    Mutant(
        id="server-any-source-in-rounds",
        exercise="3.22",
        bug="pushes come from any rank: a dead worker never shows",
        find=COLLECT,
        replace="        requests = [server.receive(None) for _ in list(server.live)]\n",
        killed_by=DEATH,
        cause="hang",
    ),
    Mutant(
        id="server-asked-for-everything",
        exercise="3.26",
        bug="a pull asks for all keys of every server and drops those that were not chosen",
        find="        keys = set(keys)\n        header",
        replace="        wanted, keys = set(keys), set(self.parameters)\n        header",
        killed_by=TRAVEL,
        cause="too-many-bytes",
        patches=[
            (
                "            values |= cut(vector, like)\n        return values\n",
                "            values |= cut(vector, like)\n"
                "        return {k: v for k, v in values.items() if k in wanted}\n",
            )
        ],
    ),
    Mutant(
        id="server-header-only-where-keys",
        exercise="3.26",
        bug="a server without a chosen key hears nothing, and waits for that worker",
        find="            mine = self._on(server, gradients)\n            if mine:\n",
        replace="            mine = self._on(server, gradients)\n"
        "            if not mine:\n                handles.pop().wait() if gradients else handles.clear()\n            if mine:\n",
        killed_by=PROTOCOL,
        cause="never-waited",
    ),
    Mutant(
        id="server-own-weights",
        exercise="3.26",
        bug="the worker computes with its own weights, not with those that it pulled",
        find="                    p.copy_(values[name])\n",
        replace="",
        killed_by=TRAINING,
        cause="wrong",
    ),
    Mutant(
        id="server-never-leaves",
        exercise="3.26",
        bug="a worker goes without a word",
        find="    finally:\n        client.leave()\n",
        replace="    finally:\n        client.clock = 0\n",
        killed_by=TRAINING,
        cause="hang",
    ),
    Mutant(
        id="async-in-turn",
        exercise="3.23",
        bug="workers are served in turn: a slow one stops the others",
        find=ANY,
        replace="        request = server.receive(server.live[server.version % len(server.live)])\n",
        killed_by=WAIT,
        cause="hang",
    ),
    Mutant(
        id="async-lost-update",
        exercise="3.23",
        bug="BUGS 78: a push is applied to the values that the worker had read, not to the newest",
        find=ANSWER,
        replace="            server.answer(request)\n"
        "            read[request.worker] = {k: v.clone() for k, v in server.values.items()}\n"
        "        elif request.kind == PUSH:\n"
        "            server.values.update(read[request.worker])\n"
        "            server.update([request])\n"
        "            read[request.worker] = {k: v.clone() for k, v in server.values.items()}\n"
        "    # --- exercise 3.23: end\n",
        killed_by=UPDATE,
        cause="lost-update",
        patches=[
            ("    # --- exercise 3.23: start\n", "    read = {}\n    # --- exercise 3.23: start\n")
        ],
    ),
    Mutant(
        id="async-any-to-the-end",
        exercise="3.23",
        bug="the last worker is received from any rank: its death never shows",
        find=ANY,
        replace="        request = server.receive(None)\n",
        killed_by=CORRUPT,
        cause="hang",
    ),
    Mutant(
        id="async-collects-first",
        exercise="3.23",
        bug="it waits for a push of every worker, as the synchronous one does",
        find=APPLY,
        replace="            pushes.append(request)\n"
        "        if len({p.worker for p in pushes}) >= len(server.live):\n"
        "            for push in pushes:\n"
        "                server.update([push])\n"
        "            pushes.clear()\n"
        "    # --- exercise 3.23: end\n",
        killed_by=WAIT,
        cause="wrong",
        patches=[
            (
                "    # --- exercise 3.23: start\n",
                "    pushes = []\n    # --- exercise 3.23: start\n",
            )
        ],
    ),
    Mutant(
        id="async-averaged",
        exercise="3.23",
        bug="BUGS 82: a single push is divided by the number of workers",
        find=APPLY,
        replace="            for gradient in request.gradients.values():\n"
        "                gradient /= max(1, len(server.live))\n" + APPLY,
        killed_by=UPDATE,
        cause="lost-update",
    ),
    Mutant(
        id="async-wrong-version",
        exercise="3.23",
        bug="BUGS 79: the version that is named is not the one that is sent",
        find=ANSWER,
        replace="            server.version += 1\n"
        "            server.answer(request)\n"
        "            server.version -= 1\n"
        "        elif request.kind == PUSH:\n"
        "            server.update([request])\n"
        "    # --- exercise 3.23: end\n",
        killed_by=UPDATE,
        cause="torn-read",
    ),
    Mutant(
        id="stale-unbounded",
        exercise="3.24",
        bug="BUGS 80: the bound is not enforced",
        find=ALLOWED,
        replace="        for worker in list(held):\n",
        killed_by=AHEAD,
        cause="too-stale",
    ),
    Mutant(
        id="stale-off-by-one",
        exercise="3.24",
        bug="BUGS 80: one push more than the bound",
        find=ALLOWED,
        replace="        for worker in [w for w in held if clocks[w] - staleness <= slowest + 1]:\n",
        killed_by=AHEAD,
        cause="too-stale",
    ),
    Mutant(
        id="stale-too-strict",
        exercise="3.24",
        bug="a push less than the bound: it never runs ahead",
        find=ALLOWED,
        replace="        for worker in [w for w in held if clocks[w] - staleness < slowest or not clocks[w]]:\n",
        killed_by=BOUND,
        cause="hang",
    ),
    Mutant(
        id="stale-left-counts",
        exercise="3.24",
        bug="a worker that has left is still the slowest",
        find=SLOWEST,
        replace="        slowest = min(clocks.values())\n",
        killed_by=LEFT,
        cause="hang",
    ),
    Mutant(
        id="stale-released-by-push-only",
        exercise="3.24",
        bug="held pulls are looked at when one pushes, not when one leaves",
        find=ALLOWED,
        replace="        if request.kind == LEAVE:\n            continue\n" + ALLOWED,
        killed_by=RELEASE,
        cause="hang",
    ),
    Mutant(
        id="stale-against-fastest",
        exercise="3.24",
        bug="BUGS 80: compared with the fastest worker",
        find=SLOWEST,
        replace="        slowest = max(clocks.values())\n",
        killed_by=AHEAD,
        cause="too-stale",
    ),
    Mutant(
        id="stale-any-among-silent",
        exercise="3.24",
        bug="all others wait for one that died, and the server listens to any rank",
        find=SPEAKERS,
        replace="        speakers = server.live\n",
        killed_by=GONE,
        cause="hang",
    ),
    Mutant(
        id="stale-clock-not-moved",
        exercise="3.24",
        bug="clocks stay at 0: everybody is always allowed",
        find=CLOCK,
        replace="",
        killed_by=AHEAD,
        cause="too-stale",
    ),
    Mutant(
        id="stale-negative-accepted",
        exercise="3.24",
        bug="the worker does not know that its server has refused, and waits",
        find="    if staleness is not None and not staleness >= 0:\n",
        replace="    if dist.get_rank(group) < servers and staleness is not None and staleness < 0:\n",
        killed_by=REFUSE,
        cause="hang",
    ),
    Mutant(
        id="server-empty-key-not-received",
        exercise="3.26",
        bug="the worker expects no message where the server sends an empty one",
        find="            if like:\n",
        replace="            if vector.numel():\n",
        killed_by="test_a_worker_expects_empty_keys",
        cause="hang",
    ),
    Mutant(
        id="server-global-ranks",
        exercise="3.26",
        bug="servers are numbered in the world, not in the group",
        find="            handles.append(dist.isend(header, group=self.group, group_dst=server))\n            handles.append(dist.irecv(version",
        replace="            handles.append(dist.isend(header, server))\n            handles.append(dist.irecv(version",
        killed_by=PROTOCOL,
        cause="hang",
    ),
    Mutant(
        id="server-two-dtypes-accepted",
        exercise="3.26",
        bug="keys of two dtypes are joined into one message: it has other bytes than expected",
        find="    if len(dtypes) > 1:\n",
        replace="    if not dtypes:\n",
        killed_by="test_impossible_roles_are_refused",
        cause="accepted",
    ),
    Mutant(
        id="fit-models-differ",
        exercise="3.24",
        bug="the ranks' models are not compared: a message has another length",
        find="    expect_alike([*keys.values()], group)\n",
        replace="",
        killed_by="test_models_that_differ_are_refused",
        cause="mismatch",
    ),
    Mutant(
        id="fit-always-synchronous",
        exercise="3.24",
        bug="every kind of fit() waits for all workers",
        find="    if staleness is None:\n",
        replace="    if servers:\n",
        killed_by="test_fit_lets_nobody_wait_or_all",
        cause="hang",
    ),
]
