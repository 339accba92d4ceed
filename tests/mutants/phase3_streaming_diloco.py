"""Wrong implementations of exercise 3.34."""

from distlab.grading.wrong import Mutant

TURNS = "test_fragments_take_turns"
BITS = "test_four_bits_travel"
NUMBERS = "test_numbers_of_four_bits"
MESSAGES = "test_one_message_per_turn"
WAITS = "test_no_step_waits_for_the_gpu"
REFUSED = "test_bad_settings_are_refused"


def wrong(
    name: str,
    mistake: str,
    text: str,
    becomes: str,
    caught_by: str,
    told_as: str | tuple[str, ...],
    **more: object,
) -> Mutant:
    """One of this exercise."""
    return Mutant(
        id=f"streaming-{name}",
        exercise="3.34",
        mistake=mistake,
        text=text,
        becomes=becomes,
        caught_by=caught_by,
        told_as=told_as,
        **more,  # type: ignore[arg-type]
    )


MUTANTS = [
    wrong(
        "mixed-the-other-way",
        "α is the share of θ: with α = 0 the ranks would never agree",
        "            p.lerp_(common, 1 - self.mix)\n",
        "            p.lerp_(common, self.mix)\n",
        TURNS,
        "mixed-the-other-way",
    ),
    wrong(
        "not-mixed",
        "the steps since the message left are thrown away",
        "            p.lerp_(common, 1 - self.mix)\n",
        "            p.copy_(common)\n",
        TURNS,
        "not-mixed",
    ),
    wrong(
        "common-mixed",
        "θ is mixed with the rank's own values: it differs from rank to rank",
        "            p.lerp_(common, 1 - self.mix)\n",
        "            p.lerp_(common, 1 - self.mix)\n            common.copy_(p)\n",
        TURNS,
        "mixed-common",
    ),
    wrong(
        "uphill",
        "the difference has the wrong sign: the outer optimizer climbs",
        "(common - p).flatten()",
        "(p - common).flatten()",
        TURNS,
        "uphill",
    ),
    wrong(
        "classic-momentum",
        "heavy-ball momentum instead of Nesterov's",
        "            common.sub_(delta.add(velocity, alpha=self.momentum), alpha=self.lr)\n",
        "            common.sub_(velocity, alpha=self.lr)\n",
        TURNS,
        "classic-momentum",
    ),
    wrong(
        "velocity-lost",
        "the outer velocity does not last",
        "            velocity.mul_(self.momentum).add_(delta)\n"
        "            common.sub_(delta.add(velocity, alpha=self.momentum), alpha=self.lr)\n",
        "            common.sub_(delta, alpha=self.lr)\n",
        TURNS,
        "outer-momentum-lost",
    ),
    wrong(
        "all-at-once",
        "all fragments are sent at the end of the round: the peak is DiLoCo's",
        "(k + 1) * every // len(fragments) for k",
        "every for k",
        TURNS,
        "all-at-once",
    ),
    wrong(
        "late-difference",
        "the difference is taken when the fragment is received: no message travels beside compute",
        "            self._send(k)\n        arrived",
        "            self.under_way[k] = None\n        arrived",
        TURNS,
        "late-difference",
        more=(
            (
                "            self._send(k)\n        for",
                "            self.under_way[k] = None\n        for",
            ),
            (
                "        work, received = self.under_way.pop(k)\n",
                "        self._send(k)\n        work, received = self.under_way.pop(k)\n",
            ),
        ),
    ),
    wrong(
        "summed",
        "the differences of all ranks are added up and not divided",
        "            flat /= world_size\n",
        "",
        TURNS,
        "summed",
    ),
    wrong(
        "common-is-no-copy",
        "θ shares memory with the parameters: every difference is zero",
        "[p.detach().clone() for p in fragment]",
        "[p.detach() for p in fragment]",
        TURNS,
        "common-shares-memory",
    ),
    wrong(
        "first-turns-too-early",
        "a fragment is received before it was ever sent",
        "        arrived = [k for k in self._due(self.delay) if k in self.under_way]\n",
        "        arrived = self._due(self.delay)\n",
        TURNS,
        "exception",
    ),
    wrong(
        "finish-keeps-own",
        "finish() mixes as well: every rank ends with a model of its own",
        "                    p.copy_(c)\n",
        "                    p.lerp_(c, 1 - self.mix)\n",
        TURNS,
        "wrong",
    ),
    wrong(
        "finish-forgets-the-late",
        "finish() does not send the fragments that have had steps since their turn",
        "        late = [k for k in range(len(self.fragments)) if k not in self._due(0)]\n",
        "        late: list[int] = []\n",
        TURNS,
        "wrong",
    ),
    wrong(
        "finish-sends-all",
        "finish() sends a fragment again that had no step since: its momentum moves it",
        "        late = [k for k in range(len(self.fragments)) if k not in self._due(0)]\n",
        "        late = list(range(len(self.fragments)))\n",
        TURNS,
        "wrong",
    ),
    wrong(
        "finish-of-nothing",
        "finish() without a step sends all fragments: the momentum moves the model",
        "        if self.steps == 0:\n            return False\n",
        "",
        TURNS,
        "wrong",
    ),
    wrong(
        "finish-counts-on",
        "after finish() the turns go on as if nothing had been sent",
        "        self.steps = 0\n        return True\n",
        "        return True\n",
        TURNS,
        "wrong",
    ),
    wrong(
        "finish-one-by-one",
        "finish() waits for each fragment before it sends the next one",
        "        for k in late:\n            self._send(k)\n        for k in late:\n            self._receive(k)\n",
        "        for k in late:\n            self._send(k)\n            self._receive(k)\n",
        MESSAGES,
        "no-overlap",
    ),
    wrong(
        "waits-at-once",
        "the message is waited for as soon as it is sent: no step hides it",
        "        self.under_way[k] = work, flat\n",
        "        work.wait()\n        self.under_way[k] = work, flat\n",
        MESSAGES,
        "no-overlap",
    ),
    wrong(
        "one-message-per-tensor",
        "a message for every parameter",
        "            flat /= world_size\n            work = dist.all_reduce(flat, group=self.group, async_op=True)\n",
        "            flat /= world_size\n"
        "            *parts, last = flat.split([p.numel() for p in self.fragments[k]])\n"
        "            for part in parts:\n"
        "                dist.all_reduce(part, group=self.group)\n"
        "            work = dist.all_reduce(last, group=self.group, async_op=True)\n",
        MESSAGES,
        "too-many-messages",
    ),
    wrong(
        "eight-bits",
        "a code per byte: twice the bytes",
        "            work = dist.all_gather_into_tensor(flat, mine, group=self.group, async_op=True)\n",
        "            mine = torch.cat([mine, mine])\n"
        "            both = mine.new_empty(world_size * len(mine))\n"
        "            work = dist.all_gather_into_tensor(both, mine, group=self.group, async_op=True)\n"
        "            flat = both.view(world_size, 2, -1)[:, 0].reshape(-1)\n",
        MESSAGES,
        "too-many-bytes",
    ),
    wrong(
        "own-in-full",
        "a rank adds its own difference unrounded: θ differs from rank to rank",
        "            received = torch.stack([unpack_e3m0(row, sum(numels)) for row in ranks]).mean(0)\n",
        "            every = [unpack_e3m0(row, sum(numels)) for row in ranks]\n"
        "            pairs = zip(self.common[k], self.fragments[k], strict=True)\n"
        "            own = torch.cat([(c - p).flatten().float() for c, p in pairs])\n"
        "            every[dist.get_rank(self.group)] = own\n"
        "            received = torch.stack(every).mean(0)\n",
        BITS,
        ("wrong", "rounding"),  # by the numbers that are drawn
    ),
    wrong(
        "one-scale",
        "one power of two for the whole fragment: small blocks become zeros",
        "    largest = rows.abs().amax(1, keepdim=True)\n",
        "    largest = rows.abs().max().expand(len(rows), 1) if len(rows) else rows[:, :1]\n",
        NUMBERS,
        "wrong",
    ),
    wrong(
        "rounded-down",
        "every number becomes the level below it: steps are too short on the average",
        "    middles = (levels[1:] + levels[:-1]) / 2\n",
        "    middles = levels[1:]\n",
        NUMBERS,
        "wrong",
    ),
    wrong(
        "scale-rounded-up",
        "the power of two is above the largest number, not the nearest",
        "(exponent + 126 + (mantissa >= 0.75))",
        "(exponent + 127)",
        NUMBERS,
        "wrong",
    ),
    wrong(
        "scale-by-logarithm",
        "the power of two is the nearest exponent: from √2 on instead of 1.5 it is the larger one",
        "(mantissa >= 0.75)",
        "(mantissa >= 0.5**0.5)",
        NUMBERS,
        "wrong",
    ),
    wrong(
        "signs-lost",
        "absolute values are taken in place: a float32 vector of the caller loses its signs",
        "    levels = levels_on(x.device)\n",
        "    x.float().abs_()\n    levels = levels_on(x.device)\n",
        NUMBERS,
        "changed",
    ),
    wrong(
        "own-first",
        "each rank begins the sum with its own numbers: θ differs between ranks by rounding",
        "            received = torch.stack([unpack_e3m0(row, sum(numels)) for row in ranks]).mean(0)\n",
        "            ranks = ranks.roll(-dist.get_rank(self.group), 0)\n"
        "            received = torch.stack([unpack_e3m0(row, sum(numels)) for row in ranks]).mean(0)\n",
        "test_all_ranks_add_up_in_one_order",
        "ranks-differ",
    ),
    wrong(
        "unsigned",
        "the sign has no bit",
        " + 8 * (rows < 0)\n",
        "\n",
        NUMBERS,
        "wrong",
    ),
    wrong(
        "ties-to-smaller",
        "a number in the middle becomes the smaller level",
        "middles, right=True)",
        "middles)",
        NUMBERS,
        "wrong",
    ),
    wrong(
        "wraps-around",
        "the exponent's byte overflows for numbers beyond 2^127",
        ".clamp(1, 254)",
        ".clamp(1, 255)",
        NUMBERS,
        "nan",
    ),
    wrong(
        "hides-what-is-not-finite",
        "nan and inf become ordinary numbers: nobody sees that a rank has diverged",
        "    byte.masked_fill_(~largest.isfinite(), 255)\n",
        "",
        "test_what_is_not_finite_spoils_its_block_alone",
        "spoiled",
    ),
    wrong(
        "asks-whether-finite",
        "whether a number is not finite is asked on the host, which waits for its GPU",
        "    byte.masked_fill_(~largest.isfinite(), 255)\n",
        "    if not largest.isfinite().all():\n        byte.masked_fill_(~largest.isfinite(), 255)\n",
        WAITS,
        "host",
    ),
    wrong(
        "levels-from-the-host",
        "the levels are copied to the GPU each time: the host waits until they are there",
        "    levels = levels_on(x.device)\n",
        "    levels = torch.tensor([0.0, *(2.0**k for k in range(-6, 1))], device=x.device)\n",
        WAITS,
        "host",
    ),
    wrong(
        "sequential",
        "fragments are runs of neighbouring layers",
        "        dealt[index % fragments] += own\n",
        "        dealt[index * fragments // len(units)] += own\n",
        "test_units_are_dealt_out",
        "dealt",
    ),
    wrong(
        "tied-twice",
        "a parameter of two units is in two fragments",
        " and p not in seen]",
        "]",
        "test_units_are_dealt_out",
        "dealt",
    ),
    wrong(
        "frozen-dealt",
        "frozen parameters are in the fragments",
        "for p in unit.parameters() if p.requires_grad and p not in seen]",
        "for p in unit.parameters() if p not in seen]",
        "test_units_are_dealt_out",
        "dealt",
    ),
    wrong(
        "whole-world",
        "the mean is over all ranks, not over those of the group",
        "            work = dist.all_gather_into_tensor(flat, mine, group=self.group, async_op=True)\n",
        "            flat = mine.new_empty(dist.get_world_size() * len(mine))\n"
        "            work = dist.all_gather_into_tensor(flat, mine, async_op=True)\n",
        "test_a_group_keeps_to_itself",
        "wrong-group",
    ),
    wrong(
        "whole-world-in-full",
        "with 32 bits the sum is over all ranks, not over those of the group",
        "            work = dist.all_reduce(flat, group=self.group, async_op=True)\n",
        "            work = dist.all_reduce(flat, async_op=True)\n",
        "test_a_group_keeps_to_itself",
        ("hang", "wrong-group", "mismatch"),
    ),
    wrong(
        "in-the-parameters-dtype",
        "differences travel in the parameters' dtype: twice the bytes in float64",
        "(common - p).flatten().float()",
        "(common - p).flatten()",
        MESSAGES,
        "too-many-bytes",
    ),
    wrong(
        "late-refusal",
        "the fragments are looked at after the model was sent",
        "        held = [p for",
        "        super().__init__(model, every=every, group=group)\n        held = [p for",
        REFUSED,
        "late-check",
    ),
    wrong(
        "any-delay",
        "a delay of a whole round is accepted: the next turn comes before the message is received",
        "        if not (0 <= delay < every and",
        "        if not (0 <= delay and",
        REFUSED,
        "accepted",
    ),
    wrong(
        "parameters-left-out",
        "a parameter in no fragment is accepted: it stays each rank's own",
        "        if len(held) != len(trained) or set(held) != trained:\n",
        "        if len(held) != len(set(held)) or not set(held) <= trained:\n",
        REFUSED,
        "accepted",
    ),
]
