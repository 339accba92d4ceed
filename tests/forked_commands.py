"""Run ``python …`` command lines in forks of the process of pytest, where torch is imported.

    done = forked_commands.run([sys.executable, "-m", "distlab", "hint", "1.4"], cwd=folder)

A new interpreter imports torch for 2 seconds first. ``Popen`` and ``run`` are used as those of
``subprocess``, for ``python -m MODULE``, ``python FILE`` and ``python -c CODE``. A program sees
what a new interpreter shows it: arguments, environment, folder, descriptors, standard streams,
``sys.path``, ``__main__``, signals, warnings, logging, new seeds; then what is done at the exit,
and the exit status. These are different:

- It has a session of its own, so that ``run`` can end all of it.
- Modules stay imported where the program would find the same files. They have read the environment
  then; what they have cached (``functools.cache``) is forgotten, other state of theirs is not.
- Options of the interpreter are refused. ``ps`` shows the command line of pytest.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.machinery
import io
import json
import logging
import multiprocessing.util
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distlab.host.processes import descendants, forget_descriptors

LOST_OUTPUT = 120  # the interpreter's status if what is left in stdout can't be written


class Popen(subprocess.Popen):
    """A command line of this interpreter, in a fork of this process."""

    def __init__(self, args: Sequence[str | os.PathLike[str]], **options: Any) -> None:
        command = [os.fspath(part) for part in args]
        if command[0] != sys.executable or len(command) < 2:
            raise ValueError(f"not a command line of {sys.executable}: {command}")
        if command[1].startswith("-") and command[1] not in ("-m", "-c"):
            raise ValueError(f"an option of the interpreter needs a new one: {command}")
        _paths()  # once, here
        super().__init__(command, **options)

    def _execute_child(
        self,
        args: list[str],
        executable: str | None,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: str | None,
        env: dict[str, str] | None,
        startupinfo: Any,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        *rest: Any,
    ) -> None:
        """In the place of fork and exec; the signature is that of CPython 3.10 to 3.14."""
        if cwd is not None and not Path(cwd).is_dir():
            raise FileNotFoundError(cwd)
        environment = dict(os.environ if env is None else env)
        ctypes.CDLL(None).fflush(None)  # else the child would write the same text once more
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                os.setsid()
                _connect((p2cread, c2pwrite, errwrite), pass_fds)
                status = become(args[1:], environment, cwd)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        while os.getpgid(self.pid) != self.pid:  # before, a signal to its group is one to pytest
            time.sleep(0.001)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def end_session(self) -> None:
        """Kill the program and all that it has started, unless that has left the session."""
        if self.poll() is None:
            for pid in [self.pid, *descendants(self.pid)]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def run(
    args: Sequence[str | os.PathLike[str]],
    *,
    input: str | None = None,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run(args, capture_output=True, text=True, …)``; without ``input`` there is
    no standard input. ``subprocess.TimeoutExpired`` after ``timeout`` seconds: all has ended then.
    """
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    streams = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **(streams | {"text": True} | options)) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.end_session()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@functools.cache
def _paths() -> list[str]:
    """``sys.path`` of a new interpreter, without the program's folder and PYTHONPATH."""
    code = "import json, sys; print(json.dumps(sys.path))"
    command = [sys.executable, "-I", "-c", code]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def _connect(streams: Sequence[int], kept: Sequence[int]) -> None:
    """Descriptors 0, 1 and 2 lead to ``streams`` (-1: stays), all others to nowhere."""
    copies = [fd if fd < 0 else os.dup(fd) for fd in streams]
    for number, fd in enumerate(copies):
        if fd >= 0:
            os.dup2(fd, number)
    forget_descriptors(kept)


def become(arguments: list[str], environment: dict[str, str], cwd: str | None) -> int:
    """In a fork: all that the interpreter does from its start to its end; the exit status."""
    gc.freeze()  # collects nothing of what belongs to pytest
    _forget_pytest()
    # torch makes its pool of threads anew at the first use after a fork, and not safely: autograd's
    # threads, of which fake tensors bring eight, would do it at the same time and abort
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(torch.get_num_threads())
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    _open_streams()
    kind = arguments[0] if arguments[0] in ("-m", "-c") else ""
    program, argv = (arguments[1], arguments[2:]) if kind else (arguments[0], arguments[1:])
    folder = {"-m": os.getcwd(), "-c": "", "": os.path.dirname(os.path.realpath(program))}[kind]
    extra = [os.path.abspath(p) for p in environment.get("PYTHONPATH", "").split(":") if p]
    sys.path[:] = [folder, *extra, *_paths()]
    sys.argv[:] = [kind or program, *argv]
    sys.orig_argv[:] = [sys.executable, *arguments]
    _forget_modules()
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    status, interrupted = _until_the_end(kind, program, main.__dict__)
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status


def _forget_pytest() -> None:
    """Undo what pytest has changed, and what this process wants done at its own end."""
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    asyncio.set_event_loop_policy(None)  # a loop that runs in pytest does not run here
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    sys.displayhook, threading.excepthook = sys.__displayhook__, threading.__excepthook__
    sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_pytest")]
    vars(sys).pop("last_value", None)  # of a test that failed
    tempfile.tempdir = None  # where it is depends on the environment
    atexit._clear()
    weakref.finalize._registry.clear()  # folders that are removed at the end of pytest
    weakref.finalize._registered_with_atexit = False
    multiprocessing.util._finalizer_registry.clear()
    multiprocessing.util._run_after_forkers()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)


def _show_warning(
    message: Any, category: Any, name: str, line: int, file: Any = None, text: str | None = None
) -> None:
    (file or sys.stderr).write(warnings.formatwarning(message, category, name, line, text))


def _open_streams() -> None:
    """Streams as those of a new interpreter, for prints, warnings and logging."""
    named = (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    plain = next(filter(None, named), "C") in ("C", "POSIX", "C.UTF-8")
    mode = "surrogateescape" if plain else "strict"
    stdin = open(0, encoding="utf-8", errors=mode, closefd=False)  # noqa: SIM115 (until the end)
    sys.stdin = sys.__stdin__ = stdin
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    out, err = (
        io.TextIOWrapper(
            open(fd, "wb", 0 if at_once else -1, closefd=False),  # noqa: SIM115
            "utf-8",
            errors,
            line_buffering=fd == 2 or os.isatty(fd),
            write_through=at_once,
        )
        for fd, errors in ((1, mode), (2, "backslashreplace"))
    )
    sys.stdout = sys.__stdout__ = out
    sys.stderr = sys.__stderr__ = err
    warnings.resetwarnings()
    for ignored in (ResourceWarning, ImportWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", ignored)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    warnings.showwarning = _show_warning
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    for reference in logging._handlerList:
        handler = reference()
        if type(handler) is logging.StreamHandler:  # made when another stream was there
            handler.stream = err


def _forget_modules() -> None:
    """Without modules that the program would not find, or elsewhere, and without what was cached.

    Random numbers are drawn from new seeds.
    """
    importlib.invalidate_caches()
    installed = tuple({sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix)})
    own = {
        name: os.path.realpath(file)
        for name, module in sys.modules.items()
        if (file := getattr(module, "__file__", None)) and not file.startswith(installed)
    }
    places = {}
    for name in {name.partition(".")[0] for name in own}:
        spec = importlib.machinery.PathFinder.find_spec(name)
        found = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        places[name] = [os.path.realpath(place) for place in found if place]
    for name, file in own.items():
        found = places[name.partition(".")[0]]
        if not any(file == place or file.startswith(place + os.sep) for place in found):
            del sys.modules[name]
            continue
        for value in list(vars(sys.modules[name]).values()):
            if type(value) is functools._lru_cache_wrapper:  # some deprecated objects warn if asked
                value.cache_clear()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _until_the_end(kind: str, program: str, names: dict[str, Any]) -> tuple[int, bool]:
    """Run the program and end as Python does; the status, and whether it was interrupted."""
    status, interrupted = 0, False
    try:
        if kind == "-m":
            package = hasattr(sys.modules.get(program), "__path__")
            name = f"{program}.__main__" if package else program
            sys.modules.pop(name, None)  # it becomes __main__
            runpy._run_module_as_main(program)
        else:
            text: str | bytes = program
            if not kind:
                program = names["__file__"] = os.path.join(os.getcwd(), program)
                text = Path(program).read_bytes()
            exec(compile(text, "<string>" if kind else program, "exec"), names)
    except SystemExit as end:
        status = _status_of(end.code)
    except BaseException as error:
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
        trace = getattr(error.__traceback__, "tb_next", None)  # without this function
        sys.last_value = error
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    if not getattr(sys.stdout, "closed", True):
        try:
            sys.stdout.flush()
        except BaseException as error:
            status = LOST_OUTPUT
            print(f"Exception ignored in: {sys.stdout!r}", file=sys.stderr)
            traceback.print_exception(type(error), error, None)
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    return status, interrupted


def _status_of(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
