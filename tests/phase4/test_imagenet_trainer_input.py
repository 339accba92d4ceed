"""One line names the fault of a run, before or without harm; and the contents of a plan."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from distlab.course.catalogue import root
from distlab.ranks import RankFailure
from solutions.phase4_production import watchdog
from solutions.phase4_production.config_sources import make_config, parse, read_yaml
from solutions.phase4_production.exit_codes import CRASHED, DONE, HUNG, MEANING, PREEMPTED, REFUSED
from solutions.phase4_production.preflight import check
from solutions.phase4_production.trainer_config import Config, ConfigError
from tests import forked_commands
from tests.forked_agents import processes_of
from tests.phase4.image_runs import STEPS, config_of, few_digits, fields_of, losses, records, train
from tests.phase4.launches import becomes, launched, new, said_in, wait_for

PACKAGE = "solutions.phase4_production"
RECIPES = sorted((root() / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_digits(tmp_path_factory.mktemp("digits"))


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, **environ}
    return subprocess.run(
        command, cwd=root(), capture_output=True, text=True, env=variables, timeout=300
    )


def launch(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """``launch_training.sh``, which refuses before it starts a rank."""
    return run(["./launch_training.sh", *arguments], **environ)


def test_launcher_takes_the_python_it_is_told() -> None:
    """.venv's otherwise: then the tests of one environment would run the trainer in another."""
    told = launch("--help", LAUNCH_PYTHON="/opt/some/python").stdout
    assert told.endswith("\nFields: /opt/some/python -m " + PACKAGE + ".imagenet_trainer --help\n")
    assert "LAUNCH_PYTHON (.venv/bin/python where there is one).\n" in told


# -- configuration --------------------------------------------------------------------------------
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(path: Path) -> None:
    assert make_config(path).epochs >= 1


def test_the_digits_are_the_default() -> None:
    assert make_config(root() / "configs" / "digits.yaml") == Config()
    assert {path.stem for path in RECIPES} >= {"digits", "smoke", "resnet50_imagenet"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stratgy", "ddp"], "no field 'stratgy'; did you mean strategy?"),
        (["--strategy=fsdpp"], "strategy must be auto .* not 'fsdpp'; did you mean fsdp?"),
        (["--epochs", "many"], "epochs must be a whole number, not 'many'"),
        (["--epochs=0"], "epochs must be at least 1, got 0"),
        (["--epochs=[3"], r"epochs must be a whole number, not '\[3'"),
        (["--metrics-port=70000"], "metrics_port must be at most 65535"),
        (["--base-lr=0"], "base_lr must be positive"),
        (["--max-norm=.nan"], "max_norm must be positive, got nan"),
        (["--label-smoothing=1"], "label_smoothing must be from 0 to below 1"),
        (["--compression-ratio=2"], "compression_ratio must be at most 1"),
        (["--pattern=ring", "--compression=topk"], "both say how a bucket is reduced"),
        (["--pattern=ring", "--strategy=fsdp"], "use ddp or zero1"),
        (["--offload", "--strategy=zero1"], "offload needs strategy fsdp or hybrid"),
        (["--precision=fp16", "--compression=onebit"], "an overflow of fp16 would stay"),
        (["--parallel=torch", "--compression=topk"], "parallel torch takes compression none"),
        (["--parallel=torch", "--precision=fp16"], "use bf16"),
        (["--compile", "--strategy=fsdp"], "compile: the hooks of strategy fsdp"),
        (["--model=vit_b_16", "--image-size=20"], "does not divide into the patches of 16"),
        (["digits"], "expected --field value, got 'digits'"),
        (["--config"], "--config needs the name of a file"),
        (["--config", "nowhere.yaml"], "there is no configuration nowhere.yaml"),
        (["--config", "/"], "/ can't be read: Is a directory"),
        (["--conf", "my.yaml"], "no field 'conf'; did you mean config?"),
    ],
)
def test_a_wrong_field_is_one_sentence(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse(arguments)
    assert "\n" not in str(caught.value)


def test_a_file_sets_what_the_command_line_overrides(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("epochs: 3\nbase_lr: 1e-3\nmax_norm: null\n", encoding="utf-8")
    config, dry_run = parse([f"--config={path}", "--epochs", "5", "--dry-run"])
    assert dry_run
    assert (config.epochs, config.base_lr, config.max_norm) == (5, 1e-3, None)
    path.write_text("epoch: 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no field 'epoch'; did you mean epochs"):
        read_yaml(path)
    path.write_text("epochs: [3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read_yaml(path)


# -- the launcher ---------------------------------------------------------------------------------
def test_the_launcher_refuses_in_one_line(tmp_path: Path) -> None:
    smoke = ["--config", "configs/smoke.yaml"]
    missing = launch(*smoke, "--data", str(tmp_path / "nowhere"))
    assert missing.returncode == REFUSED
    assert missing.stderr.count("\n") == 1
    assert f"there is no data folder {tmp_path}/nowhere/train" in missing.stderr
    misspelt = launch(*smoke, "--epoch", "3")
    assert misspelt.stderr == (
        "launch_training: command line: there is no field 'epoch'; did you mean epochs?\n"
    )
    assert misspelt.returncode == REFUSED
    assert launch("2", "ddp").returncode == REFUSED
    assert launch().returncode == REFUSED


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE must be a number from 1 to 1024, not '0'"),
        ({"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE must be a number"),
        ({"NNODES": "4:"}, "NNODES must be a number of nodes, or LEAST:MOST, not '4:'"),
        ({"NNODES": "4:2"}, "NNODES 4:2: the least, 4, is above the most, 2"),
        ({"NODE_RANK": "-1"}, "NODE_RANK must be a number from 0"),
        ({"MAX_RESTARTS": "many"}, "MAX_RESTARTS must be a number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT must be a number from 1 to 65535"),
    ],
)
def test_settings_of_the_launcher_are_checked(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(["--data=synthetic"], environ)


def test_folders_that_can_not_be_written_are_refused_before_training(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for name in ("checkpoints", "logs"):
        fields = {"checkpoints": tmp_path, "logs": tmp_path, name: file / "x"}
        arguments = ["--data=synthetic", *(f"--{n}={v}" for n, v in fields.items())]
        with pytest.raises(ConfigError, match=f"{name} {file}/x can't be made: Not a directory"):
            check(arguments, {})


def test_missing_digits_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no data folder .*: make it with: .* {PACKAGE}.digits_"):
        check([], {})


def test_ranks_that_refuse_end_the_run_with_one_line(data: Path, tmp_path: Path) -> None:
    """No second attempt, no report of the agent's, whichever rank is faster."""
    config, out = config_of(data, tmp_path, "--memory-gb=0.0005"), tmp_path / "output"
    with launched(config, out, tmp_path / "agent", 2, NPROC_PER_NODE="2") as agent:
        assert agent.wait(150) == REFUSED, out.read_text()
    said = said_in(out)
    assert len(said) == 1, said
    assert said[0].startswith("imagenet_trainer: small_cnn does not fit into 500 kB on 2 ranks")


@pytest.mark.parametrize("which", ["MASTER_PORT", "metrics_port"])
def test_a_port_in_use_is_one_line(data: Path, which: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ["--config", "configs/smoke.yaml", "--data", str(data)]
        if which == "metrics_port":
            found = launch(*arguments, "--metrics-port", port)
        else:
            found = launch(*arguments, MASTER_PORT=port)
    assert found.returncode == CRASHED, "a process that is about to end may have it"
    assert found.stderr == (
        f"launch_training: {which} {port} can't be used: Address already in use\n"
    )


def test_a_dry_run_prints_the_plan(data: Path, tmp_path: Path) -> None:
    options = "--data", str(data), "--ema-decay=0.9", "--max-steps=9", "--dry-run"
    command, environ = becomes(["4", "auto", "32", *options], tmp_path)
    found = forked_commands.run(command, cwd=root(), env=environ, timeout=300)
    assert found.returncode == 0, found.stderr
    rows, table = found.stdout.split("\n\n")
    lines = dict(line.split(None, 1) for line in rows.splitlines())
    assert lines["world"] == "1 nodes x 4 ranks on cpu" or "cuda" in lines["world"]
    assert lines["batch"] == "32 = 8 per rank, in 1 micro-batches of 8"
    assert lines["steps"] == "54 = 18 epochs of 3, stops after 9"
    assert lines["strategy"].startswith("ddp, the course's")
    assert "per rank at the peak" in lines["memory"]
    assert lines["memory"].endswith("without the average of the weights; no limit")
    assert lines["messages"] == "564 kB sent per rank and step"  # 2·3/4 of 4·93,922 bytes
    assert {"ddp", "zero1", "zero2", "fsdp"} <= {line.split()[0] for line in table.splitlines()}


# -- data and memory ------------------------------------------------------------------------------
def test_unreadable_images_are_left_out_counted_and_named(data: Path, tmp_path: Path) -> None:
    """Others keep their positions: the loss of two ranks is that of one, with the same holes."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    bad = [sorted((copy / "train" / str(k)).iterdir())[k % 9] for k in range(8)]
    bad.append(sorted((copy / "val" / "3").iterdir())[0])
    for path in bad[:6]:
        path.write_bytes(path.read_bytes()[:40])  # torn
    bad[6].write_bytes(b"")
    for path in bad[7:]:
        path.write_text("not an image", encoding="utf-8")
    alone, config = config_of(copy, tmp_path / "1"), config_of(copy, tmp_path / "2")
    want = losses(alone, 1)
    found = train(config)
    assert found["unreadable"] == sorted(map(str, bad))
    assert [r["loss"] for r in records(config)] == pytest.approx(want, rel=2e-4)
    assert records(config)[-1]["images"] == 29
    assert f"left out, unreadable: {bad[0]}" in found["output"]


def test_a_batch_without_any_readable_image_trains_nothing(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    for path in (copy / "train").rglob("*.png"):
        path.write_bytes(b"")
    config = config_of(copy, tmp_path, "--max-steps=2")
    assert losses(config) == [None, None]
    assert train(config_of(data, tmp_path, "--max-steps=3"))["complete"]
    assert records(config)[-1]["loss"] < 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory-gb=0.0005"], "does not fit into 500 kB on 2 ranks with .* of 1: ddp .*"),
        (["--memory-gb=0.0005", "--strategy=auto"], "no strategy fits into 500 kB"),
        (["--memory-gb=0.0009", "--strategy=auto", "--compile"], "compile: the hooks of strategy"),
        (["--global-batch=1"], "a global batch of 1 is too small for 2 ranks"),
        (["--strategy=hybrid", "--node-size=3"], "2 ranks don't divide into nodes of 3"),
        (["--data=nowhere"], "there is no data folder nowhere/train"),
    ],
)
def test_what_can_not_run_is_refused_on_every_rank(
    data: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    config = config_of(data, tmp_path, *arguments)
    with pytest.raises(RankFailure, match=rf"raised \w+Error: .*{words}"):
        train(config)


def test_a_budget_picks_a_strategy_that_fits(data: Path, tmp_path: Path) -> None:
    config = config_of(data, tmp_path, "--strategy=auto", "--memory-gb=0.0015", "--max-steps=1")
    plan = train(config)["plan"]
    assert "limit 1.5 MB" in plan
    assert "ddp, the course's" not in plan


# -- checkpoints ----------------------------------------------------------------------------------
def test_a_checkpoint_of_something_else_is_refused_and_kept(data: Path, tmp_path: Path) -> None:
    """Another model, other classes, other data, another batch, another kind of strategy."""
    config = config_of(data, tmp_path, "--max-steps=1")
    train(config)
    kept = sorted((tmp_path / "checkpoints").rglob("*"))
    renamed, fewer = tmp_path / "renamed", tmp_path / "fewer"
    shutil.copytree(data, renamed)
    for split in ("train", "val"):
        (renamed / split / "7").rename(renamed / split / "seven")
    shutil.copytree(data, fewer)
    next((fewer / "train" / "7").iterdir()).unlink()
    for arguments, words in (
        (["--model=resnet18"], "is of another model: small_cnn, this run trains resnet18"),
        ([f"--data={renamed}"], "unlike the checkpoint, lacks 7 and has seven"),
        ([f"--data={fewer}"], "saved with a dataset_size of 90, resumed with 89"),
        (["--global-batch=32"], "saved with a batch_size of 16, resumed with 32"),
        (["--strategy=fsdp"], r"another kind of strategy \(whole, not shards\)"),
    ):
        with pytest.raises(RankFailure, match=words):
            train(config_of(data, tmp_path, *arguments))
        assert sorted((tmp_path / "checkpoints").rglob("*")) == kept


def test_the_program_refuses_alone_as_under_the_launcher() -> None:
    """Without an agent, without a group: a wrong field, a plan that can't be, no launcher."""
    program = [sys.executable, "-m", f"{PACKAGE}.imagenet_trainer"]
    for arguments, words in (
        (["--epoch=3"], "there is no field 'epoch'; did you mean epochs?"),
        (["--data=nowhere", "--dry-run"], "there is no data folder nowhere/train"),
        (["--data=synthetic"], "start it with ./launch_training.sh"),
    ):
        found = forked_commands.run([*program, *arguments], cwd=root(), timeout=300)
        assert found.returncode == REFUSED
        assert (found.stdout, found.stderr.count("\n")) == ("", 1), found.stderr
        assert words in found.stderr


def test_one_table_of_exit_codes() -> None:
    """The exercise's, the launcher's and the README's are those of ``exit_codes``."""
    assert (watchdog.EXIT_PREEMPTED, watchdog.EXIT_HUNG) == (PREEMPTED, HUNG)
    assert set(MEANING) == {DONE, CRASHED, HUNG, PREEMPTED, REFUSED}
    script = (root() / "launch_training.sh").read_text(encoding="utf-8")
    assert f"refused={REFUSED} preempted={PREEMPTED} " in script
    assert f"Exit status: 0 done, {REFUSED} refused" in script
    page = (root() / "solutions" / "phase4_production" / "README.md").read_text(encoding="utf-8")
    table = page.partition("| status | what happened |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    assert sorted(map(int, rows)) == sorted(MEANING)


def test_a_full_disk_ends_the_run_with_the_checkpoint_before_intact(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config_of(data, tmp_path, "--max-steps=1"))
    from given import safe_format

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safe_format, "flush", full)
    with pytest.raises(RankFailure, match="No space left on device"):
        train(config_of(data, tmp_path, "--max-steps=2"))
    monkeypatch.undo()
    found = train(config_of(data, tmp_path))
    assert "resumed after step 1" in found["output"]
    assert len(records(config_of(data, tmp_path))) == STEPS


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """A process that begins here can't make a file of more than 200 KiB."""
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 << 10, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))


@pytest.mark.parametrize("ranks", [1, 2], ids=["one new rank", "two forked ranks"])
def test_a_run_that_fails_ends_with_one_line(data: Path, tmp_path: Path, ranks: int) -> None:
    """The save fails, and the processes that decode end too."""
    config = config_of(data, tmp_path, "--save-every=1", "--workers=1")
    out, environ = tmp_path / "output", {"NPROC_PER_NODE": str(ranks), "MAX_RESTARTS": "0"}
    with contextlib.ExitStack() as stack:
        with small_files():
            if ranks == 1:
                command = ["./launch_training.sh", *fields_of(config)]
                agent = stack.enter_context(new(command, out, **environ))
            else:
                running = launched(config, out, tmp_path / "agent", ranks, **environ)
                agent = stack.enter_context(running)
        assert agent.wait(300) == CRASHED, "there may be room the next time"
        wait_for(lambda: not processes_of(out))
    said = [line for line in said_in(out) if line.startswith("imagenet_trainer")]
    assert len(said) == 1, out.read_text()
    assert "rank 0: OSError: [Errno 27] File too large" in said[0]


def test_yaml_files_use_plain_values_only() -> None:
    for path in RECIPES:
        values = yaml.safe_load(path.read_text(encoding="utf-8")).values()
        assert all(isinstance(value, (str, int, float, bool)) for value in values)
