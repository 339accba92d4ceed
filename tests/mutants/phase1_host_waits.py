"""Wrong implementations of phase 1 whose host waits for its GPU more often than it need."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="state-compared-on-the-host",
        exercise="1.3",
        mistake="whether a tensor has elements that are not finite is asked of each",
        text="            flat = tensor.clone(memory_format=torch.contiguous_format)\n",
        becomes="            flat = tensor.clone(memory_format=torch.contiguous_format)\n"
        "            if not flat.isfinite().all():\n"
        '                raise ValueError("the state is not finite")\n',
        caught_by="test_broadcast_does_not_wait_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="average-asks-each-gradient",
        exercise="1.4",
        mistake="each gradient is asked whether it is finite",
        text="    known = [num_samples] + [p.grad is not None for p in trainable]\n",
        becomes="    if any(p.grad is not None and p.grad.isnan().all().item() for p in trainable):\n"
        "        num_samples = 0\n"
        "    known = [num_samples] + [p.grad is not None for p in trainable]\n",
        caught_by="test_averaging_hardly_waits_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="step-asks-each-weight",
        exercise="1.5",
        mistake="each weight is asked whether it is finite",
        text="    optimizer.step()\n    pending.wait()\n",
        becomes="    optimizer.step()\n"
        "    if any(p.isnan().any() for p in model.parameters()):\n"
        '        raise ValueError("a weight is not finite")\n'
        "    pending.wait()\n",
        caught_by="test_a_step_hardly_waits_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="evaluation-reads-each-batch",
        exercise="1.6",
        mistake="loss and right answers are read in each batch",
        text='                loss_sum += F.cross_entropy(logits, targets, reduction="sum").double()\n'
        "                correct += (logits.argmax(1) == targets).sum()\n",
        becomes='                loss_sum += F.cross_entropy(logits, targets, reduction="sum").double().item()\n'
        "                correct += (logits.argmax(1) == targets).sum().item()\n",
        caught_by="test_evaluation_reads_sums_at_the_end",
        told_as="host",
    ),
]
