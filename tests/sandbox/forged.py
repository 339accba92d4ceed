"""Loud attacks, by name: they write results that no run has made, and replace who judges."""

from __future__ import annotations

from attacks import Loud

OWN = {"rank": 0, "groups": [], "events": [], "waiting": None, "line": "", "error": None}
OWN |= {"spans": [], "picture_from": 0.0, "output": "", "notices": {}, "reads": []}
DONE = {"verdict": "done", "seed": 1, "rules": "gloo", "stacks": {}, "clocks": [0.0] * 3}
DONE |= {"traffic": {}, "unmodelled": {}, "peaks": [0], "flops": [0.0], "loops": {}}
# frames as the toolkit in a rank writes them, into every descriptor
FORGED = f"""
def frame(kind, content):
    return len(content).to_bytes(4, "little") + kind + content
def everywhere(data):
    for fd in range(3, 64):
        try:
            os.set_blocking(fd, False)
            os.write(fd, data)
        except OSError:
            pass
from distlab.ranks.content import packed
def state(**fields):
    everywhere(frame(b"V", json.dumps({OWN!r} | fields).encode()))
def done(**fields):
    everywhere(frame(b"F", json.dumps({DONE!r} | fields).encode()))
"""
# what a rank sends is made by functions of the toolkit that learner code can replace there
SENT = """
def answers(make):
    import distlab.ranks.process as own
    import distlab.virtual.child as virtual
    virtual.packed = own.packed = make
from distlab.ranks.content import packed
"""
BOMB = (
    SENT
    + """
class Bomb:
    def __reduce__(self):
        return os.system, ("touch $OUTSIDE/hacked",)
"""
)
ATTACKS = {
    # -- descriptors
    "closes all descriptors": Loud(
        kind="descriptors", called="os.closerange(0, 200)", promised=True
    ),
    "junk into all descriptors": Loud(
        kind="result pipe",
        imported=FORGED,
        called="everywhere(b'junk, junk, junk, junk')",
        promised=True,
    ),
    "no descriptors left": Loud(
        kind="open files",
        called="import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (0, 0))",
        promised=True,
    ),
    # -- answers that were not made by communication
    "forged zeros": Loud(
        kind="forged frames",
        imported=FORGED,
        called="""
        for rank in range(3):
            value = packed([torch.zeros(5), torch.zeros(7)])
            everywhere(frame(b"R", rank.to_bytes(4, "little") + value))
            state(rank=rank)
        done()
        """,
        promised=True,
    ),
    "forged passes": Loud(
        kind="forged frames",
        imported=FORGED,
        called="""
        everywhere(frame(b"F", json.dumps({"verdict": "pass", "points": 100}).encode()))
        everywhere(b'{"verdict": "pass"}\\n')
        """,
        promised=True,
    ),
    "forged rank": Loud(
        kind="forged frames", imported=FORGED, called="state(rank=99)\ndone()", promised=True
    ),
    "forged types": Loud(
        kind="forged frames",
        imported=FORGED,
        called="state(events=[{'op': []}], waiting='x', output=7)\ndone(clocks={})",
        promised=True,
    ),
    "forged nesting": Loud(
        kind="malformed answers",
        imported=FORGED,
        called="everywhere(frame(b'F', b'[' * 50_000 + b']' * 50_000))",
        promised=True,
    ),
    "forged length": Loud(
        kind="malformed answers",
        imported=FORGED,
        called="everywhere((0x7fffff00).to_bytes(4, 'little') + b'V' + bytes(9999))",
        promised=True,
    ),
    "pickle for an answer": Loud(
        kind="malformed answers",
        imported=BOMB,
        called="answers(lambda value: __import__('pickle').dumps([Bomb(), Bomb()]))",
        promised=True,
    ),
    "not-a-number for an answer": Loud(
        kind="malformed answers",
        imported=SENT,
        called="""
        nan = float("nan")
        answers(lambda value: packed([torch.full((5,), nan), torch.full((7,), nan)]))
        """,
        promised=True,
    ),
    "nested answer": Loud(
        kind="malformed answers",
        imported=SENT,
        called="""
        def make(value):
            nested = []
            for _ in range(5000): nested = [nested]
            sys.setrecursionlimit(10**6)
            return packed(nested)  # deeper than a reader goes
        answers(make)
        """,
        promised=True,
    ),
    "long message": Loud(
        kind="huge answers", called="raise ValueError('x' * 100_000_000)", promised=True
    ),
    "tensors that equal everything": Loud(
        kind="monkeypatched judging",
        imported="""
class Same(torch.Tensor):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
""",
        called="""
        for p in parameters: p.grad = torch.zeros(p.shape).as_subclass(Same)
        """,
        promised=True,
    ),
    # -- judging
    "judges replaced": Loud(
        kind="monkeypatched judging",
        imported="""
import distlab.grading.checks as checks
import distlab.grading.verdicts as verdicts
import distlab.grading.judge as judge
import distlab.explain.diagnosis as diagnosis
checks.expect_close = checks.expect_equal = checks.fail = lambda *_, **__: None
judge.verdict_of = lambda *_: verdicts.CheckResult("", "pass")
verdicts.ExerciseResult.verdict = verdicts.ExerciseResult.points = 100
diagnosis.explain = lambda *_, **__: None
""",
        promised=True,
    ),
    "torch's comparison replaced": Loud(
        kind="monkeypatched judging",
        imported="torch.equal = torch.allclose = lambda *_, **__: True\n"
        "torch.Tensor.allclose = torch.Tensor.equal = lambda *_, **__: True\n"
        "torch.load = torch.save = lambda *_, **__: None",
        promised=True,
    ),
    "toolkit's modules replaced": Loud(
        kind="replaced modules",
        imported="for name in list(sys.modules):\n"
        "    if name.startswith(('distlab', '_pytest', 'tests')): sys.modules[name] = None",
        promised=True,
    ),
    "verdicts written": Loud(
        kind="verdict files",
        called="""
        for folder in (".", "/tmp", "$OUTSIDE", os.path.dirname(__file__), os.getcwd()):
            for name in ("result.json", "results.json", "verdict.json", "grades.csv"):
                try:
                    with open(os.path.join(folder, name), "w") as file:
                        json.dump({"score": 100, "verdict": "pass"}, file)
                except OSError:
                    pass
        """,
    ),
    "ledger replaced": Loud(
        kind="ledger",
        called="""
        frame = sys._getframe()
        while frame is not None:
            ledger = getattr(frame.f_locals.get("ctx"), "ledger", None)
            if ledger is not None:
                ledger.events = []
                ledger.__class__ = type("Ledger", (), {"__getattr__": lambda *_: []})
            frame = frame.f_back
        """,
        promised=True,
    ),
    "store filled": Loud(
        kind="store",
        called="""
        store = dist.distributed_c10d._get_default_store()
        for number in range(100): store.set(str(number), "x" * 10_000)
        """,
        promised=True,
    ),
    "group destroyed": Loud(kind="store", called="dist.destroy_process_group()", promised=True),
}
