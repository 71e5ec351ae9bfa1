"""What a run could leave for the next run, or tell a concurrent one: PROMISES.md, "persistence"."""

from __future__ import annotations

import platform
import secrets
import threading
from pathlib import Path

import pytest

from escape.attack import IS_PROCESS, Victim, full_only, outside
from escape.prologues import BASICS, RAW

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

MARKS = {
    "a patched module": (
        "import json\njson.dumps = lambda value, **options: 'patched'",
        "import json\nset_result(json.dumps(1) == 'patched')",
    ),
    "a patched builtin": (
        "import builtins\nbuiltins.len = lambda value: 42",
        "set_result(len('') == 42)",
    ),
    "a patched type in C": (
        "import ctypes, gc\ngc.get_referents(str.__dict__)[0]['owned'] = property(lambda text: True)\nctypes.pythonapi.PyType_Modified(ctypes.py_object(str))",
        "set_result(hasattr('', 'owned'))",
    ),
    "a changed small number": (
        "import ctypes\nctypes.c_long.from_address(id(230) + 24).value = 231",
        "set_result(int('230') + 1 != int('231'))",
    ),
    "an import hook": (
        "import sys\nclass Hook:\n    def find_spec(self, name, path=None, target=None):\n        raise SystemExit('hooked')\nsys.meta_path.insert(0, Hook())",
        "import sys\nset_result(any(type(hook).__name__ == 'Hook' for hook in sys.meta_path))",
    ),
    "a module in the table": (
        "import sys, types\nsys.modules['left_behind'] = types.ModuleType('left_behind')",
        "import sys\nset_result('left_behind' in sys.modules)",
    ),
    "the environment": (
        "import os\nos.environ['LEFT'] = 'behind'",
        "import os, ctypes\nctypes.CDLL(None).getenv.restype = ctypes.c_char_p\nset_result('LEFT' in os.environ or bool(ctypes.CDLL(None).getenv(b'LEFT')))",
    ),
    "the path": (
        "import sys\nsys.path.insert(0, '/left')",
        "import sys\nset_result('/left' in sys.path)",
    ),
    "a signal handler": (
        "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "import signal\nset_result(signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)",
    ),
    "a thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), name='left', daemon=True).start()",
        "import threading\nset_result(any(thread.name == 'left' for thread in threading.enumerate()))",
    ),
    "a hook at exit": (
        "import atexit, sys\nsys.left = []\natexit.register(sys.left.append, 1)",
        "import sys\nset_result(hasattr(sys, 'left'))",
    ),
    "a hook at fork": (
        "import os, sys\nos.register_at_fork(after_in_child=lambda: setattr(sys, 'forked', True))\nsys.hooked = True",
        "import os, sys\nset_result(hasattr(sys, 'hooked') or hasattr(sys, 'forked'))",
    ),
    "a trace function": (
        "import sys, threading\nsys.settrace(lambda *event: None)\nthreading.setprofile(lambda *event: None)",
        "import sys, threading\nset_result(sys.gettrace() is not None or threading.getprofile() is not None)",
    ),
    "a file": (
        "for place in ('/tmp/left', '/dev/shm/left', 'left'):\n    open(place, 'w').write('x')",
        "import os\nset_result(any(os.path.exists(place) for place in ('/tmp/left', '/dev/shm/left', 'left')))",
    ),
    "the mask of new files": (
        "import os\nos.umask(0o123)",
        "import os\nset_result(os.umask(0) == 0o123)",
    ),
    "the working directory": (
        "import os\nos.mkdir('left')\nos.chdir('left')",
        "import os\nset_result(os.getcwd().endswith('left'))",
    ),
    "the process's name": (
        "import ctypes\nctypes.CDLL(None).prctl(15, b'left', 0, 0, 0)",
        "import ctypes\nname = ctypes.create_string_buffer(16)\nctypes.CDLL(None).prctl(16, name, 0, 0, 0)\nset_result(name.value == b'left')",
    ),
    "flags of its standard descriptors": (
        "import fcntl, os\nfor number in (0, 1, 2):\n    fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_APPEND | os.O_NONBLOCK)",
        "import fcntl, os\nset_result(any(fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_APPEND | os.O_NONBLOCK) for number in (0, 1, 2)))",
    ),
    "the seed of random": (
        "import random\nrandom.seed(7)",
        "import random\nset_result(random.random() == random.Random(7).random())",
    ),
}


@pytest.mark.conforms("Q27", "Q25")
@pytest.mark.parametrize("mark", MARKS)
def test_a_run_finds_nothing_of_the_run_before_it(mark: str, victim: Victim) -> None:
    leave, look = MARKS[mark]
    both = f"{leave.replace('/dev/shm/left', 'shm')}\nexec({look!r})"
    if mark != "a hook at exit":
        both = both.replace("/tmp/left", "here")
    assert outside(both, may_fail=True).value is True or mark == "a changed small number"
    for _ in range(3):  # through every sandbox that was forked before and after
        victim.run(leave, limits={"wall_s": 1.0})  # some marks keep the guest itself from ending
        assert victim.run(look).value is False


def test_every_run_draws_its_own_randomness(victim: Victim) -> None:
    """All forks of a seeded parent would draw the same number."""
    source = f"""{BASICS}
import random, secrets, tempfile, uuid
draws = [random.random(), random.getrandbits(64), str(uuid.uuid4()), str(uuid.uuid1()), secrets.token_hex(8),
         os.urandom(8).hex(), next(tempfile._get_candidate_names()), random.SystemRandom().random()]
set_result(draws)
"""
    siblings = """
import os, random, _random
parent = _random.Random(1)
draws = []
for _ in range(2):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, str(parent.random()).encode())
        os._exit(0)
    os.wait()
    draws.append(os.read(read, 100).decode())
set_result(draws[0] == draws[1])
"""
    assert outside(siblings).value is True
    runs = [victim.run(source).value for _ in range(4)] + [
        each.value for each in victim.run_together([(source, {})] * 4)
    ]
    for column in zip(*runs, strict=True):
        assert len(set(column)) == len(runs)


@pytest.mark.slow
@full_only("packages are imported ahead only with preload=")
def test_numpy_draws_its_own_randomness_too() -> None:
    pytest.importorskip("numpy")
    source = "import numpy\nset_result([numpy.random.random(), numpy.random.default_rng().random()])"
    host = Victim(packages=["numpy"], preload=["numpy"], policy={"hash_seed": 1})
    try:
        runs = [host.run(source).value for _ in range(4)]
        assert all(len(set(column)) == 4 for column in zip(*runs, strict=True))
        if not IS_PROCESS:
            return
        # Once more when the zygote has loaded what it loads in idle moments: it touches randomness, too.
        loaded = "import sys\nset_result('toolcell_bridge.guest.determinism' in sys.modules)"
        assert any(host.run(loaded).value or threading.Event().wait(0.05) for _ in range(100))
        runs = [host.run(source).value for _ in range(8)][4:]
        assert all(len(set(column)) == 4 for column in zip(*runs, strict=True))
    finally:
        host.close()


TALK = {
    "record locks of shared files": """
        import fcntl, struct
        lock = lambda kind: struct.pack("hhqqi4x", kind, 0, 0, 0, 0)
        def say():
            for path, flags, kind in places:
                held.append(os.open(path, flags))
                attempt(fcntl.fcntl, held[-1], fcntl.F_SETLK, lock(kind))
                attempt(fcntl.fcntl, held[-1], 37, lock(kind))
        def hear():
            found = []
            for path, flags, _ in places:
                one = os.open(path, flags)
                for command in (fcntl.F_GETLK, 36):
                    try:
                        found.append(struct.unpack("hhqqi4x", fcntl.fcntl(one, command, lock(fcntl.F_WRLCK)))[0])
                    except OSError:
                        pass
            return any(kind != fcntl.F_UNLCK for kind in found)
        places = [(shared, os.O_RDONLY, fcntl.F_RDLCK), ("/dev/null", os.O_RDWR, fcntl.F_WRLCK)]""",
    "flock of shared files": """
        import fcntl
        def say():
            held.append(os.open(shared, os.O_RDONLY))
            attempt(fcntl.flock, held[-1], fcntl.LOCK_EX)
        def hear():
            return attempt(fcntl.flock, os.open(shared, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB) == "EAGAIN" """,
    "leases on shared files": """
        import fcntl
        def say():
            held.append(os.open(shared, os.O_RDONLY))
            attempt(fcntl.fcntl, held[-1], 1024, fcntl.F_RDLCK)
        def hear():
            # Whoever holds a file open for reading keeps others from a write lease, and shows that it does.
            return attempt(fcntl.fcntl, os.open(shared, os.O_RDONLY), 1024, fcntl.F_WRLCK) == "EAGAIN" """,
    "flags of descriptor 0": """
        import fcntl
        def say():
            fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_NONBLOCK)
        def hear():
            return bool(fcntl.fcntl(0, fcntl.F_GETFL) & os.O_NONBLOCK)""",
    "System V shared memory": """
        def say():
            held.append(libc.shmget(salt + 1, 4096, 0o1666))
        def hear():
            return libc.shmget(salt + 1, 0, 0) != -1""",
    "System V semaphores": """
        def say():
            held.append(libc.semget(salt + 2, 1, 0o1666))
        def hear():
            return libc.semget(salt + 2, 0, 0) != -1""",
    "System V queues": """
        def say():
            held.append(libc.msgget(salt + 3, 0o1666))
        def hear():
            return libc.msgget(salt + 3, 0) != -1""",
    "POSIX shared memory": """
        import _posixshmem
        def say():
            attempt(_posixshmem.shm_open, f"/toolcell-{salt}", os.O_CREAT | os.O_RDWR, mode=0o666)
        def hear():
            return attempt(_posixshmem.shm_open, f"/toolcell-{salt}", os.O_RDWR) == "ok" """,
    "an abstract socket": """
        import socket
        def say():
            try:
                held.append(socket.socket(socket.AF_UNIX))
                held[-1].bind(f"\\0toolcell-{salt}")
                held[-1].listen()
            except OSError:
                pass
        def hear():
            return attempt(lambda: socket.socket(socket.AF_UNIX).connect(f"\\0toolcell-{salt}")) == "ok" """,
    "the kernel's keyring": """
        def say():
            call(248, string(b"user"), string(b"toolcell-talk"), string(b"x"), 1, -4)
        def hear():
            return not isinstance(call(250, 10, -4, string(b"user"), string(b"toolcell-talk"), 0), str)""",
    "names of the machine": """
        def say():
            call(170, string(b"toolcell-talk"), 13)
        def hear():
            return os.uname().nodename == "toolcell-talk" """,
    "times of shared files": """
        def say():
            attempt(os.utime, shared, (1, 1))
            attempt(os.utime, "/dev/null", (1, 1))
        def hear():
            return any(1 in (os.stat(path).st_atime, os.stat(path).st_mtime) for path in (shared, "/dev/null"))""",
}

WITHOUT_HARM = (
    "an abstract socket",
    "POSIX shared memory",
    "record locks of shared files",
    "flock of shared files",
    "leases on shared files",
    "System V shared memory",
    "System V semaphores",
    "System V queues",
)
"""Those that a plain process may try on this machine without a trace of it staying behind."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are x86-64's")
@pytest.mark.parametrize("channel", TALK)
def test_two_sandboxes_have_nothing_to_talk_through(channel: str, victim: Victim, tmp_path: Path) -> None:
    source = (
        RAW
        + """
keep, held = [], []
def string(text):
    keep.append(ctypes.create_string_buffer(text))
    return ctypes.addressof(keep[-1])
"""
        + TALK[channel].replace("\n        ", "\n")
    )
    salt = secrets.randbelow(1 << 30)  # others may be running the same attack on this machine
    if channel in WITHOUT_HARM:
        alone = (
            source.replace('"/dev/null", os.O_RDWR, fcntl.F_WRLCK', "shared, os.O_RDONLY, fcntl.F_RDLCK")
            + TWO_PROCESSES
        )
        own = tmp_path / "shared"  # a lease is for a file's owner
        own.touch()
        assert outside(alone, shared=str(own), salt=salt).value is True

    speaker = (
        source
        + """
call_tool("meet", {"place": "before", "count": 2})
say()
call_tool("meet", {"place": "said", "count": 2})
call_tool("meet", {"place": "heard", "count": 2})
set_result("said")
"""
    )
    listener = (
        source
        + """
before = hear()
call_tool("meet", {"place": "before", "count": 2})
call_tool("meet", {"place": "said", "count": 2})
set_result([before, hear()])
call_tool("meet", {"place": "heard", "count": 2})
"""
    )
    shared = victim.run("import os\nset_result(os.__file__)").value
    said, heard = victim.run_together([(each, {"shared": shared, "salt": salt}) for each in (speaker, listener)])
    assert said.value == "said"
    assert heard.value == [False, False]


TWO_PROCESSES = """
read, write = os.pipe()
back, answer = os.pipe()
if os.fork() == 0:
    say()
    os.write(write, b"!")
    os.read(back, 1)
    os._exit(0)
os.read(read, 1)
set_result(hear())
os.write(answer, b"!")
os.wait()
for clean in (lambda: libc.shmctl(libc.shmget(salt + 1, 0, 0), 0, 0), lambda: libc.semctl(libc.semget(salt + 2, 0, 0), 0, 0),
              lambda: libc.msgctl(libc.msgget(salt + 3, 0), 0, 0), lambda: os.unlink(f"/dev/shm/toolcell-{salt}")):
    attempt(clean)
"""
