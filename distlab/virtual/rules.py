"""Rules of issue: gloo's, and NCCL's in the three ways in which PyTorch runs it.

=============  ======================================  =====================  =====================
rules          communicators of a group                made                   ``new_group``
=============  ======================================  =====================  =====================
gloo           none: each message is matched alone     with the group         members alone
nccl2          one for all that is issued              at its first use       splits the world's
legacy lazy    one, and one for each pair of ranks     at its first use       members alone
               that pass messages outside of a batch
legacy eager   one for all that is issued              with the group         splits the world's
=============  ======================================  =====================  =====================

NCCL runs what a rank issues on one communicator in the order of issue, and a communicator is made
when all its members have come. A split is made by all ranks of the world.

Sources, all in pytorch/pytorch:

- nccl2 (what ``"nccl"`` means in torch 2.15): ``distributed_c10d.py`` 2.15,
  ``_register_builtin_nccl_backend`` and ``_nccl2_device``, which binds a device;
  ``c10d/nccl2/ProcessGroupNCCLBackend.cpp``, ``ensureInitialized`` (first use) and ``send``, and
  ``c10d/nccl2/ProcessGroupNCCL.cpp``, ``split``.
- legacy (torch 2.8 to 2.14, later with ``TORCH_DIST_USE_NCCL2=0``):
  ``c10d/ProcessGroupNCCL.cpp`` 2.8, ``pointToPoint`` (``eagerInit_``, ``batchP2P``,
  ``getKeySendRecv``) and ``initNCCLComm``; ``eagerInit_`` is set by ``init_process_group``'s
  ``device_id``.
- splits: ``distributed_c10d.py`` 2.8 and 2.15, ``_new_process_group_helper``
  (``split_from``, ``perform_nocolor_split``).

``Work.wait`` on CUDA orders the compute stream behind the operation and returns at once. Virtual
ranks wait in it: with one compute stream, all that is issued later is ordered behind the wait, so
the same programs deadlock. Work of a GPU's host after a wait (the store, new communicators) waits
here as well. So a program that relies on a host that runs ahead is refused wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rules:
    """``nccl``: operations on a communicator run in the order of issue. ``pairs``: unbatched
    messages use a communicator of their two ranks. ``bound``: a device is bound, and groups are
    split from the world's. ``eager``: the world's communicator is made with its group."""

    name: str
    nccl: bool = True
    pairs: bool = False
    bound: bool = False
    eager: bool = False


GLOO = Rules(name="gloo", nccl=False)
NCCL = (
    Rules(name="nccl2", bound=True),
    Rules(name="legacy lazy", pairs=True),
    Rules(name="legacy eager", bound=True, eager=True),
)


def rules_named(name: str) -> tuple[Rules, ...]:
    """The rules of this name; ``"nccl"`` is all of NCCL's. Raises ValueError for any other."""
    found = {rules.name: (rules,) for rules in (GLOO, *NCCL)} | {"nccl": NCCL}
    if name not in found:
        raise ValueError(f"no rules {name!r}: choose from {', '.join(found)}")
    return found[name]
