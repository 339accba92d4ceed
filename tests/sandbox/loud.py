"""Loud attacks, by name: they end, stop, fork, and take all that there is."""

from __future__ import annotations

from attacks import Loud

DAEMON = """
def detached(do):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (1, 2, 3, 10, 12, 15, 20, 21, 22):
                signal.signal(number, signal.SIG_IGN)
            do()
        os._exit(0)
    os.waitpid(pid, 0)
"""
RESPAWN = (
    DAEMON
    + """
def life():
    while True:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.pause()
        os.waitpid(pid, 0)
"""
)
ATTACKS = {
    # -- ends, stops and signals
    "kills all processes": Loud(kind="signals", called="os.kill(-1, 9)"),
    "kills its parent": Loud(kind="signals", called="os.kill(os.getppid(), 9)"),
    "kills the first process": Loud(kind="signals", called="os.kill(1, 9); os.kill(2, 9)"),
    "stops its parent": Loud(kind="signals", called="os.kill(os.getppid(), 19)"),
    "interrupts its parent": Loud(
        kind="signals", called="for n in (2, 15, 10, 12, 14, 13, 1): os.kill(os.getppid(), n)"
    ),
    "stops itself": Loud(kind="stopping", called="os.kill(os.getpid(), 19)", promised=True),
    "kills itself": Loud(kind="exit codes", called="os.kill(os.getpid(), 9)", promised=True),
    "leaves with 0": Loud(kind="exit codes", called="os._exit(0)", promised=True),
    "sys.exit": Loud(kind="exit codes", called="sys.exit(0)", promised=True),
    "leaves in a thread": Loud(
        kind="exit codes",
        called="threading.Thread(target=os._exit, args=(0,)).start(); threading.Event().wait()",
        promised=True,
    ),
    "atexit": Loud(
        kind="exit codes",
        imported="import atexit; atexit.register(os._exit, 0)",
        called="sys.exit(0)",
        promised=True,
    ),
    "becomes a program": Loud(
        kind="exit codes", called="os.execvp('sleep', ['sleep', '1000'])", promised=True
    ),
    # -- time
    "endless loop": Loud(kind="CPU", called="while True: pass", promised=True),
    "endless wait": Loud(kind="time-outs", called="signal.pause()", promised=True),
    "signals blocked": Loud(
        kind="time-outs",
        called="signal.pthread_sigmask(0, range(1, 65)); threading.Event().wait()",
        promised=True,
    ),
    "hang while imported": Loud(kind="time-outs", imported="time.sleep(1000)", promised=True),
    # -- processes
    "fork bomb": Loud(
        kind="fork bomb",
        called="""
        while True:
            try:
                os.fork()
            except OSError:
                signal.pause()
        """,
    ),
    "daemon": Loud(kind="daemons", imported=DAEMON, called="detached(signal.pause)", promised=True),
    "daemon that respawns": Loud(
        kind="daemons", imported=RESPAWN, called="detached(life)", promised=True
    ),
    "daemon that writes": Loud(
        kind="daemons",
        imported=DAEMON
        + """
def late():
    while True:
        try:
            open("$OUTSIDE/hacked", "w").close()
        except OSError:
            pass
        os.write(1, b"late")
""",
        called="detached(late)",
        promised=False,
    ),
    "goes on as the rank": Loud(kind="daemons", called="os.fork()", promised=True),
    "threads that run on": Loud(
        kind="threads",
        called="""
        for _ in range(20):
            threading.Thread(target=signal.sigwait, args=({12},), daemon=True).start()
        """,
        promised=True,
    ),
    # -- memory, disk, output
    "memory": Loud(
        kind="memory",
        called="kept = []\nwhile True: kept.append(bytearray(64 << 20))",
    ),
    "memory of children": Loud(
        kind="memory",
        called="""
        kept = []
        for _ in range(8):
            if os.fork() == 0:
                while True: kept.append(bytearray(64 << 20))
        signal.pause()
        """,
    ),
    "disk": Loud(
        kind="disk fill",
        called="""
        for number in range(9999):
            with open(f"/tmp/fill{number}", "wb") as file:
                for _ in range(16): file.write(bytes(1 << 20))
        """,
    ),
    "endless output": Loud(
        kind="output", called="while True: os.write(1, b'x' * 65536)", promised=True
    ),
    "no Unicode": Loud(
        kind="encoding", called="print('\\udcff'); raise ValueError('\\udcff\\x00')", promised=True
    ),
    "another locale": Loud(
        kind="encoding",
        imported="import locale",
        called="""
        os.environ.update(LANG="C", LC_ALL="C", PYTHONIOENCODING="ascii")
        locale.setlocale(locale.LC_ALL, "C")
        sys.stdout = open(1, "w", encoding="ascii", closefd=False)
        raise ValueError("äöü \\U0001f600")
        """,
        promised=True,
    ),
}
