"""Text from a folder: its bytes are the tokens, and blocks of equally many tokens the samples.

    the text     the files of ``train`` (``val``) one after the other by name, a zero behind each
    sample i     tokens i·C … (i+1)·C - 1; the targets are those of i·C + 1 … (i+1)·C

A sample depends on its index alone. So it is the same on every rank and worker, after an
interruption, and at another world size. Bytes need no vocabulary, and take any language. A file is
read where a sample needs it, so the text may be larger than the memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .batches import DataError, Decoded, Sample

VOCABULARY = 256
END = b"\0"  # behind each file
SUFFIX = ".txt"


class TextBlocks(Dataset[Decoded]):
    """Blocks of ``length`` tokens with the tokens that come next; ``dataset[epoch, index]``."""

    def __init__(self, files: Sequence[Path], length: int) -> None:
        self.files, self.length = files, length
        self.ends = [*accumulate(path.stat().st_size + len(END) for path in files)]

    def __len__(self) -> int:
        return (self.ends[-1] - 1) // self.length

    def __getitem__(self, sample: Sample) -> Decoded:
        """(tokens, next tokens, index): both (length,) int64."""
        _, index = sample
        both = to_tokens(self.read(index * self.length, self.length + 1))
        return both[:-1], both[1:], index

    def read(self, first: int, count: int) -> bytes:
        """``count`` bytes of the text from byte ``first`` on, over the ends of files."""
        found = b""
        for number in range(bisect_right(self.ends, first), len(self.files)):
            begin = self.ends[number - 1] if number else 0
            with self.files[number].open("rb") as file:
                file.seek(first + len(found) - begin)
                found += (file.read(count - len(found)) + END)[: count - len(found)]
            if len(found) == count:
                break
        return found


class SyntheticText(Dataset[Decoded]):
    """Random tokens, to measure a trainer without data."""

    def __init__(self, length: int, count: int = 1 << 20) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCABULARY, (256, length + 1), generator=generator)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, sample: Sample) -> Decoded:
        """One of 256 blocks."""
        both = self.tokens[sample[1] % 256]
        return both[:-1], both[1:], sample[1]


def to_tokens(text: bytes) -> Tensor:
    """(len(text),) int64."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def open_text(folder: str | Path, split: str, length: int) -> TextBlocks:
    """The text of ``folder/split``, numbered alike on every rank.

    Raises DataError if there is no text, or less than one sample of it.
    """
    root = Path(folder) / split
    if not root.is_dir():
        raise DataError(f"there is no data folder {root}: texts (*{SUFFIX}) go in there")
    files = sorted(root.rglob(f"*{SUFFIX}"))
    if not files:
        raise DataError(f"{root} has no texts (*{SUFFIX})")
    blocks = TextBlocks(files, length)
    if not len(blocks):
        raise DataError(
            f"{root} has {blocks.ends[-1] - len(files)} bytes of text: length {length} needs "
            f"{length + 1} at least"
        )
    return blocks
