"""About a hundred small files that a learner should not hand in, and the verdict that each gets.

``SAMPLER``: code that exercise 1.1's file runs while it is imported, ``CALLED``: while its sampler
is made (both in a real rank), ``VIRTUAL``: in exercise 1.4's function on virtual ranks. ``WHOLE``:
the bytes of 1.1's file. Left out is what no process can survive that runs with the same rights:
SIGKILL or SIGSTOP to the grader or to all processes (``os.kill(-1, 9)``).
"""

from __future__ import annotations

# processes that stay: $DAEMON is run by a process without parent, terminal and signals
DAEMON = """
import os, signal, time
pid = os.fork()
if pid == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (1, 2, 3, 15, 20, 21, 22):
            signal.signal(number, signal.SIG_IGN)
        $DO
    os._exit(0)
os.waitpid(pid, 0)
"""
SLEEPS = "while True: time.sleep(1000)"


def daemon(code: str = SLEEPS) -> str:
    """Start a daemon that does this."""
    return DAEMON.replace("$DO", code.replace("\n", "\n        "))


RESPAWNS = """
def life():
    while True:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(1000)
        os.waitpid(pid, 0)
life()
"""
PAIR = """
def guard(other):
    while True:
        try:
            os.kill(other, 0)
        except OSError:
            mine = os.getpid()
            if os.fork() == 0:
                os.setsid()
                guard(mine)
        time.sleep(0.001)
mine = os.getpid()
os.fork() or guard(mine)
time.sleep(1000)
"""
HOPS = """
for hop in range(200):
    if os.fork():
        os._exit(0)
    os.setsid()
time.sleep(1000)
"""
SUBREAPER = """
import ctypes
ctypes.CDLL(None).prctl(36, 1)
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    os._exit(0)
time.sleep(1000)
"""
ERROR = "class E(Exception):\n    "

# name: (code, verdict)
SAMPLER: dict[str, tuple[str, str]] = {
    "child that sleeps": ("import os, time\nif os.fork() == 0: time.sleep(1000)\n1 / 0", "error"),
    "twenty children": (
        "import os, time\nfor _ in range(20):\n    if os.fork() == 0: time.sleep(1000)\n1 / 0",
        "error",
    ),
    "tree of forks": (
        "import os, time\nfor _ in range(4): os.fork()\nif os.getsid(0) != os.getpid(): "
        "time.sleep(1000)\n1 / 0",
        "error",
    ),
    "daemon": (daemon() + "1 / 0", "error"),
    "daemon that is another program": (
        daemon("os.execvp('sleep', ['sleep', '1000'])") + "1 / 0",
        "error",
    ),
    "daemon that respawns": (daemon(RESPAWNS) + "1 / 0", "error"),
    "daemons that respawn each other": (daemon(PAIR) + "1 / 0", "error"),
    "daemon that forks and exits": (daemon(HOPS) + "1 / 0", "error"),
    "daemon that adopts": (daemon(SUBREAPER) + "1 / 0", "error"),
    "daemon beside a death": (daemon() + "os._exit(3)", "crash"),
    "daemon that prints": (daemon("while True: print('x'); time.sleep(0.01)") + "1 / 0", "error"),
    "subprocess in a session": (
        "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n1 / 0",
        "error",
    ),
    "shell in the background": ("import os\nos.system('nohup sleep 1000 &')\n1 / 0", "error"),
    "spawned": (
        "import os\nos.posix_spawnp('sleep', ['sleep', '1000'], os.environ)\n1 / 0",
        "error",
    ),
    "multiprocessing": (
        "import multiprocessing, time\n"
        "multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,)).start()\n"
        "1 / 0",
        "error",
    ),
    "child that outlives a death": (
        "import os, time\nif os.fork() == 0: time.sleep(1000)\nos._exit(3)",
        "crash",
    ),
    "another program": ("import os\nos.execvp('sleep', ['sleep', '1000'])", "crash"),
    "threads that never end": (
        "import threading, time\n"
        "for _ in range(50): threading.Thread(target=time.sleep, args=(1000,)).start()\n1 / 0",
        "error",
    ),
    "atexit that hangs": ("import atexit, time\natexit.register(time.sleep, 1000)\n1 / 0", "error"),
    "exit at exit": ("import atexit, os\natexit.register(os._exit, 0)\n1 / 0", "error"),
    "exit 0": ("import os\nos._exit(0)", "crash"),
    "exit in a thread": (
        "import os, threading, time\n"
        "threading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(1000)",
        "crash",
    ),
    "exit in __del__": (
        "import os\nclass D:\n    def __del__(self): os._exit(0)\ndel D().__class__",
        "crash",
    ),
    "exit in a signal": (
        "import os, signal\nsignal.signal(10, lambda *_: os._exit(0))\nos.kill(os.getpid(), 10)",
        "crash",
    ),
    "sys.exit": ("import sys\nsys.exit()", "crash"),
    "all descriptors closed": ("import os\nos.closerange(0, 100)", "crash"),
    "descriptors closed, then sleep": (
        "import os, time\nos.closerange(3, 100)\ntime.sleep(1000)",
        "crash",
    ),
    "output closed": ("import os\nos.close(1)\nos.close(2)\nprint('x')\n1 / 0", "error"),
    "dup over everything": (
        "import os\nfor fd in range(3, 60): os.dup2(1, fd)\n1 / 0",
        "crash",
    ),
    "junk in every descriptor": (
        "import os\nfor fd in range(3, 60):\n    try: os.write(fd, b'junk, junk, junk')\n"
        "    except OSError: pass\n1 / 0",
        "crash",
    ),
    "huge output": ("for _ in range(20000): print('x' * 99)\n1 / 0", "error"),
    "one huge line": ("print('x' * 10_000_000)\n1 / 0", "error"),
    "binary output": ("import os\nos.write(1, bytes(range(256)) * 9)\n1 / 0", "error"),
    "output that is no Unicode": ("print('\\udcff')\nraise ValueError('\\udcff')", "error"),
    "control characters": ("raise ValueError('\\x00\\x1b[2J\\x07')", "error"),
    "recursion": ("def f(): f()\nf()", "error"),
    "recursion without limit": (
        "import sys\nsys.setrecursionlimit(10**9)\n"
        "class A:\n    def __getattr__(self, name): return getattr(self, name)\nA().x",
        "crash",
    ),
    "trace function": (
        "import sys\ndef t(*_): raise ValueError('t')\nsys.settrace(t)\ndef f(): pass\nf()",
        "error",
    ),
    "excepthook": ("import sys\nsys.excepthook = sys.unraisablehook = None\n1 / 0", "error"),
    "os replaced": (
        "import os\nfor n in ('write', '_exit', 'close', 'getpid'): setattr(os, n, None)\n1 / 0",
        "error",
    ),
    "json replaced": ("import json\njson.dumps = json.loads = None\n1 / 0", "error"),
    "time replaced": ("import time\ntime.monotonic = time.sleep = lambda *_: 0\n1 / 0", "error"),
    "torch.save replaced": ("import torch\ntorch.save = None\n1 / 0", "error"),
    "torch.distributed replaced": (
        "import torch.distributed as d\nfor n in dir(d):\n    if n[0] != '_': setattr(d, n, None)\n"
        "1 / 0",
        "error",
    ),
    "modules dropped": ("import sys\nsys.modules.clear()\n1 / 0", "error"),
    "finders dropped": ("import sys\nsys.meta_path.clear()\nimport wave\n", "error"),
    "no stdout": ("import sys\nsys.stdout = sys.stderr = None\n1 / 0", "error"),
    "closed stdout": ("import sys\nsys.stdout.close()\n1 / 0", "error"),
    "odd stdout": (
        "import sys\nclass S:\n    def flush(self): raise SystemExit\nsys.stdout = S()\n1 / 0",
        "error",
    ),
    "__str__ raises": (ERROR + "def __str__(self): raise ValueError\nraise E", "error"),
    "__str__ is no string": (ERROR + "def __str__(self): return 7\nraise E", "error"),
    "__str__ leaves": (ERROR + "def __str__(self): raise SystemExit\nraise E", "error"),
    "args can't be sent": ("raise ValueError(object(), lambda: 0, {1: {2}})", "error"),
    "fields that are not ours": (
        ERROR + "cause = line = kind = rank = object()\nraise E('x')",
        "error",
    ),
    "sys.exit of an object": ("import sys\nsys.exit(object())", "crash"),
    "sys.exit without repr": (
        "import sys\nclass O:\n    def __repr__(self): raise ValueError\nsys.exit(O())",
        "crash",
    ),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "error"),
    "GeneratorExit": ("raise GeneratorExit", "error"),
    "BaseException": ("class B(BaseException): pass\nraise B", "error"),
    "error in __del__": (
        "class D:\n    def __del__(self): raise ValueError('del')\nD()\n1 / 0",
        "error",
    ),
    "name that is none": (
        "class M(type):\n    @property\n    def __name__(cls): raise ValueError\n"
        "class N(Exception, metaclass=M): pass\nraise N",
        "error",
    ),
    "error in a circle": (
        "a = ValueError('a')\nb = ValueError('b')\na.__context__, b.__context__ = b, a\nraise a",
        "error",
    ),
    "long message": ("raise ValueError('x' * 30_000_000)", "error"),
    "MemoryError": ("x = bytearray(1 << 60)", "error"),
    "other folder": ("import os\nos.chdir('/')\n1 / 0", "error"),
    "deletes itself": ("import os\nos.unlink(__file__)", "error"),
    "deletes its folder": (
        "import os, shutil\nshutil.rmtree(os.path.dirname(__file__))",
        "error",
    ),
    "writes itself anew": ("open(__file__, 'w').write('1 / 0')", "fail"),
    "mapping that is cut": (
        "import mmap, tempfile\nf = tempfile.TemporaryFile()\nf.truncate(4096)\n"
        "m = mmap.mmap(f.fileno(), 4096)\nf.truncate(0)\nm[0]",
        "crash",
    ),
    "null pointer": ("import ctypes\nctypes.string_at(0)", "crash"),
    "abort": ("import os\nos.abort()", "crash"),
    "no environment": ("import os\nos.environ.clear()\n1 / 0", "error"),
    "no more descriptors": (
        "import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (0, 0))\n1 / 0",
        "error",
    ),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", "crash"),
    "kills its group": ("import os\nos.killpg(0, 9)", "crash"),
    "stops itself": ("import os\nos.kill(os.getpid(), 19)", "hang"),
    "alarm": ("import signal, time\nsignal.alarm(1)\ntime.sleep(1000)", "crash"),
    "signals ignored": (
        "import signal, time\nfor n in (1, 2, 3, 10, 12, 15): signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(1000)",
        "hang",
    ),
    "signals blocked": (
        "import signal, time\nsignal.pthread_sigmask(0, range(1, 65))\ntime.sleep(1000)",
        "hang",
    ),
    "harmless signals to the grader": (
        "import os\nfor n in (17, 18, 23, 28): os.kill(os.getppid(), n)\n1 / 0",
        "error",
    ),
    "temporary files": (
        "import tempfile\nfor _ in range(9): tempfile.mkdtemp(), tempfile.mkstemp()\n1 / 0",
        "error",
    ),
    "default dtype": ("torch.set_default_dtype(torch.float64)", "error"),
    "default device": ("torch.set_default_device('meta')", "error"),
    "import of itself": ("from . import data_loader, template_data_loader\n1 / 0", "error"),
    "blank of another course": ("raise NotImplementedError('exercise 9.9')", "error"),
}
CALLED: dict[str, tuple[str, str]] = {
    "exit 0, called": ("import os\nos._exit(0)", "crash"),
    "daemon, called": (daemon(), "fail"),
    "children go on as the rank": ("import os\nos.fork()", "fail"),
    "descriptors closed, called": ("import os\nos.closerange(0, 100)", "crash"),
    "results replaced": ("import torch\ntorch.save = None", "fail"),
    "endless sleep": ("import time\ntime.sleep(1000)", "hang"),
    "no Unicode, called": ("print('\\udcff')", "fail"),
    "default dtype, called": ("torch.set_default_dtype(torch.float16)", "fail"),
    "deletes itself, called": ("import os\nos.unlink(__file__)", "error"),
}
VIRTUAL: dict[str, tuple[str, str]] = {
    "daemon on a virtual rank": (daemon(), "fail"),
    "respawning on a virtual rank": (daemon(RESPAWNS), "fail"),
    "virtual rank forks": ("import os\nos.fork()", "fail"),
    "virtual rank's child outlives it": (
        "import os, time\nif os.fork() == 0: time.sleep(1000)\nos._exit(3)",
        "crash",
    ),
    "virtual rank leaves": ("import os\nos._exit(0)", "crash"),
    "virtual rank becomes a program": ("import os\nos.execvp('sleep', ['sleep', '1000'])", "crash"),
    "virtual rank closes all": ("import os\nos.closerange(0, 100)", "crash"),
    "virtual rank stops": ("import os\nos.kill(os.getpid(), 19)", "hang"),
    "virtual rank's bytes": ("import os\nos.write(1, bytes(range(256)) * 999)\n1 / 0", "fail"),
    "virtual rank's __str__": (
        ERROR + "def __str__(self): raise ValueError\nraise E",
        "fail",
    ),
    "virtual rank's sys.exit": ("import sys\nsys.exit(object())", "crash"),
    "virtual rank's default device": ("torch.set_default_device('meta')", "fail"),
    "virtual rank's threads": (
        "import threading\nt = threading.Thread(target=dist.barrier)\nt.start()\nt.join()",
        "fail",
    ),
    "virtual rank's json": ("import json\njson.dumps = None\n1 / 0", "fail"),
}
WHOLE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "fail"),
    "no Python": (b"def f(:", "error"),
    "null bytes": (b"x = 1\0", "error"),
    "not UTF-8": (b"x = '\xff\xfe'", "error"),
    "deeply nested": (b"x = " + b"(" * 5000 + b")" * 5000, "error"),
    "long chain": (b"x = " + b"-" * 200_000 + b"1", "error"),
}
