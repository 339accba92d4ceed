"""A forked command line does what it does in an interpreter of its own."""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from pathlib import Path

import forked_commands
import pytest
import torch

from distlab.course.catalogue import load_course

LOOKS = """
import json, logging, os, signal, sys, tempfile, warnings
main = sys.modules["__main__"]
warnings.warn("shown", stacklevel=1)
warnings.warn("not shown", ImportWarning, stacklevel=1)
logging.warning("of the root")
logging.getLogger("other").info("too little")
print(json.dumps({
    "arguments": sys.argv, "original": sys.orig_argv, "path": sys.path, "folder": os.getcwd(),
    "environment": dict(os.environ), "main": __name__, "same": main.__dict__ is globals(),
    "file": globals().get("__file__"), "package": __package__,
    "spec": getattr(__spec__, "name", None), "pytest": "test_forked_commands" in sys.modules,
    "handlers": [repr(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "streams": [[s.encoding, s.errors, s.line_buffering, s.fileno(), s.isatty()]
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "filters": [[f[0], f[2].__name__] for f in warnings.filters],
    "finders": [type(f).__name__ for f in sys.meta_path if "importlib" in type(f).__module__],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.stdout is sys.__stdout__],
    "input": sys.stdin.read(), "temporary": tempfile.gettempdir(),
    "level": logging.root.level, "logging to": [repr(h) for h in logging.root.handlers[1:]],
}))
"""
ENDS = {
    "returns": "print('out'); import sys; print('err', file=sys.stderr)",
    "status": "raise SystemExit(3)",
    "negative": "raise SystemExit(-1)",
    "no status": "raise SystemExit",
    "message": "import sys; sys.exit('what was wrong')",
    "raises": "def f():\n    raise ValueError('odd')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError(1) from e",
    "syntax": "x = 1\ndef f(:\n",
    "interrupted": "raise KeyboardInterrupt",
    "killed": "import os; print('lost'); os.kill(os.getpid(), 9)",
    "terminated": "import os; os.kill(os.getpid(), 15)",
    "aborted": "import os; os.abort()",
    "at once": "import os; print('lost'); os._exit(7)",
    "atexit": "import atexit; atexit.register(print, 'first'); atexit.register(print, 'second')",
    "atexit after an error": "import atexit; atexit.register(print, 'end'); 1 / 0",
    "thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start(); print('main')",
    "thread raises": "import threading; t = threading.Thread(target=lambda: 1 / 0, name='t')\n"
    "t.start(); t.join()",
    "descriptors": "import os; os.write(1, b'raw '); print('text')\n"
    "os.system('echo from a shell; echo error >&2')",
    "text of C": "import ctypes; ctypes.CDLL(None).printf(b'by C')",
    "temporary": "import os, tempfile, weakref; t = tempfile.TemporaryDirectory()\n"
    "weakref.finalize(t, print, 'removed')",
    "child": "import subprocess, sys; print(subprocess.check_output([sys.executable, '-c',\n"
    " 'import sys; print(sys.argv)', 'x'], text=True))",
    "multiprocessing": "import multiprocessing as m\nq = m.get_context('fork').Process(\n"
    "target=print, args=('forked',)); q.start(); q.join(); print(q.exitcode)",
    "closed pipe": "import sys\nsys.stdout.close()",
    "full": "import sys\nsys.stdout = open('/dev/full', 'w')\nprint('text')",
}


def both(command: list[str], **options) -> tuple[subprocess.CompletedProcess[str], ...]:
    real = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        **({"stdin": subprocess.DEVNULL} if "input" not in options else {}) | options,
    )
    return real, forked_commands.run(command, **options)


@functools.cache
def flat(text: str) -> list[str]:
    """Lines, without those that point at a place in a traceback (they differ between versions)."""
    return [line for line in text.splitlines() if set(line) - set(" ^~")]


@pytest.mark.parametrize("kind", ["file", "module", "code"])
def test_program_sees_what_a_new_interpreter_shows_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    (folder / "package").mkdir(parents=True)
    other.mkdir()
    (folder / "program.py").write_text(LOOKS)
    (folder / "package" / "program.py").write_text(LOOKS)
    (folder / "package" / "__init__.py").write_text("")
    command = {
        "file": [sys.executable, "../folder/program.py", "1", "-m"],
        "module": [sys.executable, "-m", "package.program", "1", "-m"],
        "code": [sys.executable, "-c", LOOKS, "1", "-m"],
    }[kind]
    cwd = other if kind == "file" else folder
    environment = {
        "HERE": "1",
        "PATH": "/bin",
        "TMPDIR": str(other),
        "PYTHONPATH": str(other),
        "LC_ALL": "C.UTF-8",
    }
    monkeypatch.setenv("NOT_HERE", "1")
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert tempfile.gettempdir() != str(other)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        real, forked = both(command, cwd=cwd, env=environment, input="typed\n")
    signal.signal(signal.SIGTERM, before)
    assert flat(forked.stderr) == flat(real.stderr)
    expected, seen = json.loads(real.stdout), json.loads(forked.stdout)
    for one in (expected, seen):
        one["filters"].sort()
    assert seen == expected
    assert (forked.returncode, forked.args) == (0, command)


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_as_in_a_new_interpreter(how: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ENDS[how])
    kept = torch.ones(1)
    weakref.finalize(kept, print, "of the parent")
    real, forked = both([sys.executable, str(program)])
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    assert flat(forked.stderr) == flat(real.stderr)


def test_module_that_is_not_there() -> None:
    real, forked = both([sys.executable, "-m", "no_such_module"])
    assert (forked.returncode, forked.stderr) == (real.returncode, real.stderr) != (0, "")


def test_a_module_that_is_imported_here_is_run_as_any_other() -> None:
    """Else runpy would warn of it."""
    assert "distlab.course.catalogue" in sys.modules
    command = [sys.executable, "-m", "distlab.course.catalogue"]
    done = forked_commands.run(command, cwd=Path(__file__).parent.parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_loop_that_runs_here_does_not_run_there() -> None:
    code = """
import asyncio
try:
    found = asyncio.get_event_loop()  # what tornado starts; newer Python has none yet
    print(found.is_running())
except RuntimeError:
    print(False)
"""

    async def started() -> subprocess.CompletedProcess[str]:
        return forked_commands.run([sys.executable, "-c", code], timeout=60)

    done = asyncio.run(started())
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_modules_found_elsewhere_are_imported_again(tmp_path: Path) -> None:
    """A copy of the course is taken, not what this process has imported; torch stays."""
    (tmp_path / "distlab").mkdir()
    (tmp_path / "distlab" / "__init__.py").write_text("print('the copy')\n")
    code = "import sys; print('torch' in sys.modules); import distlab; print(distlab.__file__)"
    done = forked_commands.run([sys.executable, "-c", code], cwd=tmp_path)
    assert done.stdout.split("\n")[:2] == ["True", "the copy"], done
    assert str(tmp_path) in done.stdout
    load_course()
    code = "from distlab.course.catalogue import load_course as f; print(f.cache_info().currsize)"
    done = forked_commands.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent)
    assert done.stdout == "0\n"
    assert load_course.cache_info().currsize


def test_descriptors_and_seeds_of_pytest_stay_here(tmp_path: Path) -> None:
    code = (
        "import os, random, torch\n"
        "def file(fd):\n"
        "    try: return os.readlink(f'/proc/self/fd/{fd}')\n"
        "    except OSError: return ''\n"
        "print([n for n in map(file, range(3, 99)) if n and n != '/dev/null'])\n"
        "print(random.random(), torch.rand(1).item())"
    )
    torch.manual_seed(0)
    with open(tmp_path / "open", "w"):
        done = [forked_commands.run([sys.executable, "-c", code]).stdout for _ in range(2)]
    assert [text.split("\n")[0] for text in done] == ["[]", "[]"]
    numbers = " ".join(text.split("\n")[1] for text in done).split()
    assert len(set(numbers)) == 4


def test_nothing_is_left_after_a_time_out(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, time\nprint('begun', flush=True)\n"
        "subprocess.Popen(['sleep', '1000'])\n"
        "if not os.fork():\n    os.setsid()\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)"
    )
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        forked_commands.run([sys.executable, "-c", code], timeout=1)
    assert caught.value.stdout in (b"begun\n", "begun\n")
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text()


def test_a_program_that_is_talked_to() -> None:
    code = "print(input(), flush=True)\nimport signal\nsignal.pause()"
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with forked_commands.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == "hello\n"
        assert process.poll() is None
        process.terminate()
        assert process.wait() == -signal.SIGTERM


@pytest.mark.parametrize("command", [["sh", "-c", "true"], [sys.executable, "-O", "x.py"]])
def test_other_commands_are_refused(command: list[str]) -> None:
    with pytest.raises(ValueError, match=r"not a command line|option of the interpreter"):
        forked_commands.run(command)
