"""Wrong implementations of phase 2 whose host waits for its GPU more often than it need."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="window-reads-each-loss",
        exercise="2.1",
        mistake="the loss of each micro-batch is read",
        text="        losses.append(loss.detach().double())\n",
        becomes="        losses.append(loss.double().item())\n",
        caught_by="test_a_window_waits_once_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="window-counts-on-the-host",
        exercise="2.2",
        mistake="the targets of each micro-batch are counted by the host",
        text="    count = torch.as_tensor(sum((targets != IGNORED).sum() for _, targets in window))\n",
        becomes="    count = torch.as_tensor(sum(int((targets != IGNORED).sum()) for _, targets in window))\n",
        caught_by="test_a_reduced_window_waits_four_times_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="norm-read-by-parts",
        exercise="2.3",
        mistake="the norm of each gradient is read",
        text="    squares = [torch.linalg.vector_norm(g, dtype=torch.float64) ** 2 for g in gradients]\n",
        becomes="    squares = [torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in gradients]\n",
        caught_by="test_the_norm_is_read_once",
        told_as="host",
    ),
    Mutant(
        id="overflow-asked-of-each",
        exercise="2.6",
        mistake="each gradient is asked whether it is finite",
        text="            extremes = torch.stack([value for g in gradients for value in torch.aminmax(g)])\n"
        "            overflow += ~extremes.isfinite().all()\n",
        becomes="            overflow += not all(g.isfinite().all() for g in gradients)\n",
        caught_by="test_unscaling_waits_once_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="pipeline-reads-each-loss",
        exercise="2.10",
        mistake="the last stage reads the loss of each micro-batch",
        text="            self.loss += output.detach()\n",
        becomes="            self.loss += output.item()\n",
        caught_by="test_a_pipelined_step_waits_once_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="router-reads-the-drops",
        exercise="2.24",
        mistake="the host looks whether a choice was dropped",
        text="        if self.training:\n",
        becomes="        if self.training and kept_NK.any():\n",
        caught_by="test_router_never_waits_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="experts-read-twice",
        exercise="2.25",
        mistake="both lists of sizes are read by themselves",
        text="    gives, gets = torch.stack([mine_E, theirs_E]).view(2, world_size, each).tolist()\n",
        becomes="    gives, gets = (sizes_E.view(world_size, each).tolist() for sizes_E in (mine_E, theirs_E))\n",
        caught_by="test_layer_waits_once_for_the_gpu",
        told_as="host",
    ),
    Mutant(
        id="batchnorm-reads-the-count",
        exercise="2.28",
        mistake="the host reads how many batches were tracked",
        text="            share = 1 / self.num_batches_tracked.double()\n",
        becomes="            share = 1 / max(self.num_batches_tracked.item(), 1)\n",
        caught_by="test_layer_never_waits_for_the_gpu",
        told_as="host",
    ),
]
