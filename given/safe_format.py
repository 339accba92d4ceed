"""A tree of tensors in one file that is safe to load: safetensors, with the tree in its header.

    8 bytes      length n of the header
    n bytes      header, JSON: dtype, shape and offsets of every tensor; metadata: the tree
    the rest     the tensors, row-major, one after the other, widest elements first

JSON has no tuples and no keys but strings, and resuming must not change a type. So a tuple is
``{"tuple": [...]}``, a dict ``{"dict": [[key, value], ...]}`` and a tensor ``{"tensor": name}``.
Loading reads numbers and text. Unlike a pickle, the file can't name any code to run.

Used by exercise 4.1; there is nothing to fill in here. Every file is written once, and is on the
disk when the function returns. Format: github.com/huggingface/safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

Tree = dict[str, Any]  # nested dicts, lists and tuples of tensors, numbers, strings, bools, None
READ_BYTES = 1 << 20  # bytes that are read and hashed at once
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def pack(tree: Tree) -> tuple[Any, dict[str, Tensor]]:
    """``tree`` as JSON data, and its tensors by name (their path in the tree).

    Tensors that are the same piece of memory (tied weights) get one name. Raises ValueError, with
    the path, for anything that is no tensor, number, string, bool, None, list, tuple or dict. It
    does so, too, for tensors whose values can't be written (sparse, on meta, of a dtype not in
    DTYPES).
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def walk(value: Any, path: str) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, dict):
            wrong = [key for key in value if not isinstance(key, (str, int))]
            if wrong:
                raise ValueError(f"{path or '/'} has the key {wrong[0]!r}: neither str nor int")
            return {"dict": [[key, walk(item, f"{path}/{key}")] for key, item in value.items()]}
        if type(value) in (list, tuple):
            items = [walk(item, f"{path}/{i}") for i, item in enumerate(value)]
            return {"tuple": items} if isinstance(value, tuple) else items
        if not isinstance(value, Tensor):
            raise ValueError(f"{path} is a {type(value).__name__}, which can't be saved safely")
        if value.layout != torch.strided or value.is_meta or value.dtype not in DTYPES:
            what = f"{value.dtype}, {value.layout}, on {value.device}"
            raise ValueError(f"{path} is a tensor that can't be saved ({what})")
        # equal address, dtype, shape and strides: the same memory; empty tensors have no address
        memory = value.data_ptr(), value.dtype, value.shape, value.stride(), value.device
        if value.numel() and memory in names:
            return {"tensor": names[memory]}
        name = path
        while name in tensors:  # the keys 1 and "1" give the same path
            name += "'"
        names[memory], tensors[name] = name, value.detach()
        return {"tensor": name}

    return walk(tree, ""), tensors


def unpack(data: Any, tensors: dict[str, Tensor]) -> Any:
    """The tree again; tensors with one name are one tensor."""
    if isinstance(data, list):
        return [unpack(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        return tensors[data["tensor"]]
    if "tuple" in data:
        return tuple(unpack(item, tensors) for item in data["tuple"])
    return {key: unpack(item, tensors) for key, item in data["dict"]}


def write_trees(folder: Path, trees: dict[str, Tree]) -> dict[str, dict[str, Any]]:
    """Write each tree to a new file in ``folder``, as safetensors, and flush it to the disk.

    ``trees``: by the file's name. Returns each file's size and hash,
    ``{"bytes": n, "sha256": hex}``, of the content that was to be written.
    """
    files = {name: encode(tree) for name, tree in trees.items()}
    with ThreadPoolExecutor(len(files)) as hashers:
        # hashing takes longest: it has a thread per file, beside this one, which writes and waits
        hashes = {name: hashers.submit(hash_of, blocks(*file)) for name, file in files.items()}
        for name, file in files.items():
            with open(folder / name, "xb") as opened:
                opened.writelines(blocks(*file))
                flush(opened)
    sizes = {name: len(front) + sum(t.nbytes for t in ts) for name, (front, ts) in files.items()}
    return {name: {"bytes": sizes[name], "sha256": hashes[name].result()} for name in files}


def encode(tree: Tree) -> tuple[bytes, list[Tensor]]:
    """The beginning of a file of ``tree``, and the tensors that follow, in their order."""
    data, tensors = pack(tree)
    # widest first, behind a header of 8·k bytes: each begins at a multiple of its element size
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {"__metadata__": {"tree": json.dumps(data)}}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = entry | {"data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [tensors[name] for name in order]


def blocks(front: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    """A file's content. If tensors must be copied for it, one copy at a time is alive."""
    yield front
    yield from map(bytes_of, tensors)


def hash_of(content: Iterable[bytes | memoryview]) -> str:
    """The SHA-256 of blocks that follow each other, in hexadecimal."""
    digest = hashlib.sha256()
    for block in content:
        digest.update(block)
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's elements in row-major order, on the CPU; copied only where they lie otherwise."""
    return memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def hash_of_file(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hash_of(iter(lambda: file.read(READ_BYTES), b""))


def read_tree(path: Path, device: torch.device | str = "cpu") -> Tree:
    """A tree that ``write_trees`` wrote, with the tensors on ``device``.

    On the CPU the file is mapped into memory: a tensor that is not used is not read.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
        return unpack(json.loads(file.metadata()["tree"]), tensors)


def flush(file: BinaryIO) -> None:
    """Return when all that was written to ``file`` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Return when the names in ``folder`` (files made, renamed, deleted) are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk."""
    with open(path, "xb") as file:
        file.write(content)
        flush(file)
