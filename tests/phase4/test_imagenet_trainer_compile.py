"""``compile``: the same training, up to rounding; and one clear line where it can't be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch._inductor.config

from distlab.ranks import RankFailure
from tests.phase4.image_runs import config_of, few_digits, loss_curve, losses, train

COMPILER = os.environ.get("CXX") or "g++"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_digits(tmp_path_factory.mktemp("digits"))


@pytest.mark.skipif(
    not shutil.which(COMPILER), reason=f"torch.compile needs a C++ compiler: no {COMPILER} here"
)
def test_compiled_trains_like_eager(data: Path, tmp_path: Path) -> None:
    """Two steps of one rank. Its caches go with the test. It compiles without helpers, and for no
    vector units: to find out whether the compiler knows these takes six programs."""
    arguments = ["--max-steps=2"]
    eager = config_of(data, tmp_path / "eager", *arguments)
    compiled = config_of(data, tmp_path / "compiled", *arguments, "--compile")
    caches = tmp_path / "caches"
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        assert train(compiled, 1, environ=environ, timeout=500)["complete"]
    assert list(caches.rglob("*.so")), "nothing was compiled"
    assert loss_curve(compiled) == pytest.approx(losses(eager, 1), rel=1e-5)


def test_without_a_compiler_it_is_one_line(data: Path, tmp_path: Path) -> None:
    config = config_of(data, tmp_path, "--compile")
    with pytest.raises(RankFailure, match=r"there is no nowhere here: install one .* in CXX, or"):
        train(config, 1, environ={"CXX": "nowhere"})
