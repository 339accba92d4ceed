"""Lay the handwritten digits out as a folder of PNG files, as a data set of photographs would be.

    python -m solutions.phase4_production.digits_folder FOLDER

makes ``FOLDER/train/3/0007.png`` and so on: 1,437 images to train, 360 in ``val``, of 8×8 pixels.
The folder appears when it is complete.
"""

from __future__ import annotations

import sys
from pathlib import Path

from distlab.reference.workloads import digits

from .whole_folder import make_folder


def write_digits(folder: str | Path) -> Path:
    """Make ``folder`` unless it is there; safe when several processes call it at once."""
    from PIL import Image

    def fill(made: Path) -> None:
        for split in ("train", "val"):
            images, labels = digits(train=split == "train").tensors
            pixels = ((images + 1) * 127.5).round().byte().squeeze(1).numpy()
            for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
                drawings = made / split / str(label)
                drawings.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(drawings / f"{number:04}.png")

    return make_folder(folder, fill)


def main() -> None:
    """The folder named on the command line, ``.distlab/digits`` by default."""
    print(write_digits(sys.argv[1] if len(sys.argv) > 1 else ".distlab/digits"))


if __name__ == "__main__":
    main()
