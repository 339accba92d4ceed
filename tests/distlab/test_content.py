"""Results of ranks as bytes: nothing is lost, and other bytes are refused."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from distlab.ranks.content import HEAD, packed, unpacked

PLAIN: tuple[Any, ...] = (
    None, True, 10**40, 2.5, float("inf"), float("-inf"), "\ud800é", [1, 2.0, "x"], [],
    (1, (2, [3])),
    {"a": 1, 2: (3,), (4, 5): None}, OrderedDict(b=1, a=2), torch.Size([1, 2]), torch.bfloat16,
    torch.device("cuda", 1), {1, "2"}, 1 + 2j, b"\0ab", {"Tensor": [1]}, {"tuple": [2]},
)  # fmt: skip
TENSORS = {
    "transposed": lambda: torch.randn(3, 4).t(),
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "every second": lambda: torch.randn(10)[1::2],
    "block": lambda: torch.randn(4, 5)[1:3, 2:4],
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "empty": lambda: torch.zeros(0, 3),
    "scalar": lambda: torch.tensor(5),
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.randn(3).bfloat16(),
    "float8": lambda: torch.randn(3).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "not a number": lambda: torch.tensor([float("nan"), -0.0]),
    "leaf": lambda: torch.ones(2, requires_grad=True),
    "of a graph": lambda: torch.ones(2, requires_grad=True) * 2,
    "parameter": lambda: nn.Parameter(torch.ones(2), requires_grad=False),
}


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_data_comes_back(value: Any) -> None:
    """Also the types that JSON lacks, and entries that look like those of another type."""
    found = unpacked(packed(value))
    assert type(found) is type(value)
    assert found == value
    assert list(found) == list(value) if isinstance(value, dict) else True


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back(name: str) -> None:
    """Bit by bit, with type, dtype, shape, strides, and whether it wants a gradient."""
    value = TENSORS[name]()
    first, found = unpacked(packed([torch.arange(3), (value,)]))
    assert first.tolist() == [0, 1, 2]
    (found,) = found
    for about in ("dtype", "shape", "requires_grad"):
        assert getattr(found, about) == getattr(value, about)
    assert type(found) is type(value)
    assert found.stride() == value.stride()
    bits = (
        [t.detach().resolve_conj().contiguous().view(torch.uint8) for t in (found, value)]
        if (value.dim())
        else [found, value]
    )
    assert torch.equal(*bits)


def test_equal_results_have_equal_bytes() -> None:
    """Interleavings are compared by them, whichever objects are the same one."""
    word = "".join(["a", "b"])
    assert packed([word, word, torch.ones(2)]) == packed(["ab", "a" + "b"[:1], torch.ones(2)])


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (slice(1), "not slice"),
        ([{"a": print}], "not builtin_function_or_method"),
        (type("Number", (int,), {})(3), "not Number"),
        (torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "not Mine"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on meta"),
    ],
    ids=["slice", "function", "number", "subclass", "sparse", "meta"],
)
def test_other_types_are_named(value: Any, told: str) -> None:
    """In one line."""
    with pytest.raises(TypeError, match=told) as raised:
        packed(value)
    assert "\n" not in str(raised.value)


def _written(told: Any, memory: bytes = bytes(8)) -> bytes:
    text = json.dumps(told).encode()
    return len(text).to_bytes(HEAD, "little") + text + memory


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk, junk, junk",
        packed(torch.ones(3))[:-1],
        _written({"__reduce__": "os.system"}),
        _written({"tuple": [], "dict": []}),
        _written({}),
        _written({"dtype": "torch.load"}),
        _written({"Tensor": [0, 8, "torch.float32", [3], [1], False]}),
        _written({"Tensor": [0, 8, "torch.float32", [2], [-1], False]}),
        _written({"Tensor": [0, 8, "torch.int64", [1], [1], True]}),
        _written({"Tensor": [-8, 8, "torch.float32", [2], [1], False]}),
        _written({"Tensor": [4, 8, "torch.float32", [2], [1], False]}),
        _written({"Tensor": [0, 7, "torch.float32", [1], [1], False]}),
        b"\xff" * 30,
    ],
)
def test_other_bytes_are_refused(content: bytes) -> None:
    """With ValueError, whatever is wrong."""
    with pytest.raises(ValueError, match="no result of a rank"):
        unpacked(content)
