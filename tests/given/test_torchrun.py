"""The agent's exit status, and what it prints: real agents, whose ranks are small shell programs.

Each agent is forked from this process, which has torch already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed.run  # once here, not in every agent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from distlab.host.processes import is_ending
from given import torchrun as given_torchrun
from given.torchrun import Ending, torchrun

WORKS = 'echo $$ >> "$1/begun"; '  # each rank, each time it is started
ENDED = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
pytestmark = ENDED


class Agent:
    """An agent with two ranks that run ``program`` in a shell; ``$1`` is ``folder``."""

    def __init__(self, folder: Path, program: str, restarts: int, **options: object) -> None:
        self.folder = folder
        (folder / "program").write_text(WORKS + program)
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            status = 99
            try:
                with open(folder / "output", "ab", buffering=0) as output:
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
                os.environ["OMP_NUM_THREADS"] = "1"  # or torchrun tells that it sets it
                tempfile.tempdir = str(folder)  # torchrun's logs
                arguments = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
                arguments += ["--monitor-interval=0.05", "--no-python"]
                arguments += ["sh", str(folder / "program"), str(folder)]
                status = torchrun(arguments, name="test", **options)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def ranks(self) -> list[int]:
        """Every rank that was ever started."""
        file = self.folder / "begun"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def wait(self, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < end, f"it did not happen: {self.output()}"
            time.sleep(0.02)

    def status(self) -> int:
        """How it ended."""
        found: list[int] = []

        def ended() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            found.extend([status] if pid else [])
            return bool(pid)

        self.wait(ended)
        self.pid = 0
        return os.waitstatus_to_exitcode(found[0])

    def tell(self, number: signal.Signals, ranks: int = 2) -> None:
        """Send a signal to the agent when ``ranks`` ranks have begun, and said so."""
        self.wait(lambda: len(list(self.folder.glob("ready*"))) >= ranks)
        os.kill(self.pid, number)

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        for pid in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # a rank leads a session


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def begin(program: str, restarts: int = 0, **options: object) -> Agent:
        agents.append(Agent(tmp_path, program, restarts, **options))
        return agents[-1]

    yield begin
    for agent in agents:
        agent.end()


def test_a_final_status_comes_through_and_is_not_tried_again(start: Callable[..., Agent]) -> None:
    """Nothing is added to what the rank says, and the other rank is ended."""
    agent = start('[ "$RANK" = 1 ] && sleep 600; echo no >&2; exit 78', 3, final=[78], again=[75])
    assert agent.status() == 78
    assert agent.output() == "no\n"
    assert len(agent.ranks()) == 2


def test_a_crash_is_tried_again_and_reported(start: Callable[..., Agent]) -> None:
    agent = start('[ "$RANK" = 1 ] && sleep 600; exit 3', 1, final=[78], again=[75])
    assert agent.status() == 3
    assert len(agent.ranks()) == 4
    assert "exitcode  : 3" in agent.output()
    assert "Traceback" not in agent.output()


def test_ranks_that_saved_are_started_again_without_using_up_a_restart(
    start: Callable[..., Agent],
) -> None:
    """Three times with one restart; then they are done."""
    count = 'n=$(ls "$1" | grep -c "^left$RANK"); [ $n = 3 ] && exit 0; : > "$1/left$RANK-$n"; '
    agent = start(count + "exit 75", 1, final=[78], again=[75])
    assert agent.status() == 0
    assert agent.output() == ""
    assert len(agent.ranks()) >= 8  # an agent may end the second one before it says so


@pytest.mark.parametrize(
    ("how", "status"), [("kill -KILL $$", 137), ("kill -TERM $$", 143)], ids=["KILL", "TERM"]
)
def test_a_rank_that_a_signal_ended(start: Callable[..., Agent], how: str, status: int) -> None:
    agent = start(f'[ "$RANK" = 1 ] && sleep 600; {how}', final=[78], again=[75])
    assert agent.status() == status
    if status == 143:
        assert agent.output() == "test: a rank was ended by SIGTERM\n"
    else:
        assert "Signal 9 (SIGKILL)" in agent.output()


READY = ': > "$1/ready$RANK"; while :; do sleep 600 & wait; done'


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_leave_its_status_is_that_of_the_ranks(
    start: Callable[..., Agent], number: signal.Signals, interruptible: None
) -> None:
    """They get SIGTERM, whatever the agent got; it adds nothing to what they say."""
    saves = "trap 'echo saved; exit 75' TERM; "
    agent = start(saves + READY, 3, final=[78], again=[75])
    agent.tell(number)
    assert agent.status() == 75
    assert agent.output() == "saved\nsaved\n"
    assert len(agent.ranks()) == 2


def test_told_while_its_ranks_are_being_started(
    start: Callable[..., Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run already, the agent does not know them yet: they are told as well, and one signal is
    no second one, however little time is between two."""
    monkeypatch.setattr(given_torchrun, "SAME", 0.0)
    start_workers = LocalElasticAgent._start_workers

    def told_meanwhile(agent: LocalElasticAgent, group: object) -> dict[int, object]:
        started = start_workers(agent, group)
        while len(list(tmp_path.glob("ready*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        return started

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", told_meanwhile)
    agent = start("trap 'echo saved; exit 75' TERM; " + READY, 3, final=[78], again=[75])
    assert agent.status() == 75
    assert agent.output() == "saved\nsaved\n"
    assert len(agent.ranks()) == 2


@pytest.mark.parametrize("again", [[], [75]], ids=["nothing to save", "not yet begun"])
def test_told_to_leave_ranks_that_do_not_save(start: Callable[..., Agent], again: list) -> None:
    agent = start(READY, 3, again=again)
    agent.tell(signal.SIGTERM)
    if again:
        assert agent.status() == 75
        assert agent.output() == "test: ended by SIGTERM before the ranks had begun\n"
    else:
        assert agent.status() == 143
        assert agent.output() == "test: ended by SIGTERM\n"


def test_a_second_signal_ends_all_at_once(
    start: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that ignore the first one; what comes with it is the same signal."""
    monkeypatch.setattr(given_torchrun, "SAME", 600.0)
    patient = start("trap ': > \"$1/told$RANK\"' TERM; " + READY, 3, again=[75])
    patient.tell(signal.SIGTERM)
    patient.wait(lambda: len(list(patient.folder.glob("told*"))) == 2)
    os.kill(patient.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert os.waitpid(patient.pid, os.WNOHANG) == (0, 0)
    patient.end()
    patient.pid = 0
    for file in patient.folder.glob("[rto]*"):
        if file.is_file():
            file.unlink()
    monkeypatch.setattr(given_torchrun, "SAME", 0.0)
    agent = start("trap ': > \"$1/told$RANK\"' TERM; " + READY, 3, again=[75])
    agent.tell(signal.SIGTERM)
    agent.wait(lambda: len(list(agent.folder.glob("told*"))) == 2)
    os.kill(agent.pid, signal.SIGTERM)
    assert agent.status() == 143
    assert agent.output() == "test: SIGTERM again: ended at once, nothing was saved\n"
    agent.wait(lambda: not any(map(exists, agent.ranks())))


def test_a_signal_that_was_ignored_stays_ignored(start: Callable[..., Agent]) -> None:
    """``nohup`` means it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        agent = start("trap 'exit 75' TERM; " + READY, 3, again=[75])
    finally:
        signal.signal(signal.SIGHUP, before)
    agent.tell(signal.SIGHUP)
    time.sleep(0.2)
    assert os.waitpid(agent.pid, os.WNOHANG) == (0, 0)
    assert all(map(exists, agent.ranks()))


@pytest.mark.parametrize(("again", "status"), [([75], 75), ([], 143)])
def test_told_while_torch_is_being_imported(
    capfd: pytest.CaptureFixture[str], again: list[int], status: int
) -> None:
    """Before torchrun's loop there is nothing that an exception could end in order."""
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, Ending("test", [78], again).note)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    assert capfd.readouterr().err.startswith("test: ended by SIGTERM")


def test_agents_that_do_not_meet_end_with_a_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(arguments: list[str]) -> None:
        raise RendezvousConnectionError("The connection has failed.")

    monkeypatch.setattr(torch.distributed.run, "main", nobody)
    pid = os.fork()
    if not pid:
        os._exit(torchrun([], name="test"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    expected = "test: RendezvousConnectionError: The connection has failed.\n"
    assert capfd.readouterr().err == expected


def exists(pid: int) -> bool:
    """Whether it runs: one that has ended may still wait for the process that inherited it."""
    return not is_ending(pid)
