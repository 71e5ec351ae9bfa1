"""Attacks on the profile `container`: what a script tries, and the limits that it runs with."""

from __future__ import annotations

from typing import Any

TRY = """
import ctypes, errno, json, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def refused(action):
    try:
        return repr(action())
    except OSError as error:
        return errno.errorcode[error.errno]
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return result if result >= 0 else errno.errorcode[ctypes.get_errno()]
"""

READ_PLACES = """
places = [secret, '/etc/passwd', '/etc/shadow', '/proc/self/environ', '/proc/self/maps', '/proc/meminfo', '/dev/kmsg',
          *[f'/proc/{pid}/{name}' for pid in pids for name in ('mem', 'environ', 'maps', 'cmdline', 'root/etc/passwd', 'cwd')]]
folders = ['/', '/etc', '/proc', '/tmp', '/usr', '/sys', '/dev', '/home', '/root', folder, '..', '../..']
found = {
    'read': sorted({refused(lambda: os.open(place, os.O_RDONLY)) for place in places}),
    'listed': sorted({refused(lambda: os.listdir(place)) for place in folders}),
}
"""

CONTROL: dict[str, str] = {
    # The same without a sandbox: the attacks are real. Nothing here changes the host.
    "plain": TRY
    + """
found = {
    'read': open(secret).read(),
    'listed': bool(os.listdir(folder)),
    'signal': [refused(lambda: os.kill(pid, 0)) for pid in pids],
    'socket': refused(lambda: socket.create_connection(('127.0.0.1', port)).close()),
    'abstract': refused(lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + 'abstract-of-the-host')),
    'named': refused(lambda: socket.socket(socket.AF_UNIX).connect(folder + '/socket')),
}
json.dump(found, sys.stdout)
""",
    "neighbour": TRY
    + """
mine = {os.getpid()}
found = {
    'signalled': sorted({refused(lambda: os.kill(pid, number)) for pid in pids if pid not in mine for number in (0, 9)}),
    'read': sorted({refused(lambda: open(place).read()) for place in places}),
    'removed': sorted({refused(lambda: os.unlink(place)) for place in places}),
    'written': sorted({refused(lambda: open(place, 'w')) for place in places}),
    'moved': sorted({refused(lambda: os.rename(os.path.dirname(place), 'mine')) for place in places}),
}
set_result(found)
""",
}

SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "reading": (TRY + READ_PLACES + "set_result(found)", {}),
    "changing": (
        TRY
        + """
for action in (lambda: os.chmod(secret, 0o777), lambda: os.chown(secret, 1, 1), lambda: os.utime(secret, (1, 1)),
               lambda: os.chmod(folder, 0)):
    refused(action)
set_result(sorted({refused(action) for action in (
    lambda: open(secret, 'w'), lambda: open(secret, 'a'), lambda: os.truncate(secret, 0), lambda: os.unlink(secret),
    lambda: os.rename(secret, 'mine'), lambda: os.rename(secret, secret + '2'), lambda: os.link(secret, 'mine'),
    lambda: os.link(secret, secret + '2'), lambda: os.mkdir(folder + '/new'), lambda: os.mkfifo(folder + '/fifo'),
    lambda: os.symlink('x', folder + '/link'), lambda: open('/tmp/new', 'w'), lambda: open('/new', 'w'),
    lambda: open('/dev/shm/new', 'w'), lambda: os.setxattr(secret, 'user.x', b'x'), lambda: os.rmdir(folder),
    lambda: open('../new', 'w'), lambda: os.rename('.', '../moved'))}))
""",
        {},
    ),
    "links": (
        TRY
        + """
os.symlink(secret, 'link'); os.symlink(folder, 'away'); os.symlink('/proc/self/root', 'root')
set_result(sorted({refused(lambda: open(way).read()) for way in ('link', 'away/secret', 'root' + secret)}))
""",
        {},
    ),
    "signals": (
        TRY
        + """
others = [*pids, 1, os.getppid(), *range(2, 4000)]
ways = [lambda pid=pid, number=number: os.kill(pid, number) for pid in others if pid != os.getpid() for number in (0, 9)]
groups = [lambda pid=pid: os.killpg(pid, 9) for pid in pids if pid > 1]
refused(lambda: os.kill(-1, 9))  # refused, or reports success having reached nobody
set_result(sorted({refused(way) for way in [*ways, *groups]}))
""",
        {},
    ),
    "other processes": (
        TRY
        + """
import resource
set_result(sorted({str(refused(action)) for pid in [*pids, os.getppid()] for action in (
    lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0)), lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
    lambda: os.sched_setaffinity(pid, {0}), lambda: call(101, 16, pid, 0, 0), lambda: call(434, pid, 0),
    lambda: call(310, pid, 0, 0, 0, 0, 0), lambda: call(438, 3, 0, 0))}))
""",
        {},
    ),
    "sockets": (
        TRY
        + """
def connect(family, address):
    with socket.socket(family) as made: made.connect(address)
set_result(sorted({refused(action) for action in (
    lambda: connect(socket.AF_INET, ('127.0.0.1', port)), lambda: connect(socket.AF_INET6, ('::1', port)),
    lambda: connect(socket.AF_UNIX, folder + '/socket'), lambda: connect(socket.AF_UNIX, chr(0) + 'abstract-of-the-host'),
    lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW), lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))}))
""",
        {},
    ),
    "privileges": (
        TRY
        + """
held = (ctypes.c_uint32 * 6)()
call(125, ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref(held))
set_result({'capabilities': list(held), 'no_new_privs': libc.prctl(39, 0, 0, 0, 0),
            'refused': sorted({str(refused(action)) for action in (
                lambda: os.execv(sys.executable, ['x']), lambda: os.setuid(0), lambda: os.setuid(1),
                lambda: call(272, 0x10000000), lambda: os.chroot('.'), lambda: call(165, 0, 0, 0, 0, 0),
                lambda: os.mknod('device', 0o020666, os.makedev(1, 3)), lambda: call(157, 4, 1, 0, 0, 0),
                lambda: os.mkdir('closed', 0), lambda: os.umask(0o777))})})
""",
        {},
    ),
    "descriptors": (
        TRY + "set_result([n for n in range(3, 64) if refused(lambda: os.fstat(n)) != 'EBADF'])",
        {},
    ),
    "a daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(300)\n    os._exit(0)\nset_result(1)",
        {},
    ),
    "files that are left": (
        "import os\nopen('left', 'w').write('x'); os.mkdir('folder'); set_result(os.listdir('.'))",
        {},
    ),
    "files of the run before": ("import os\nset_result(os.listdir('.'))", {}),
    "wall clock": ("import time\ntime.sleep(60)", {"wall_s": 0.5}),
    "processor": ("import os\nos.fork()\nwhile True: pass", {"cpu_s": 0.5}),
    "memory": (
        "import time\nrows = []\nwhile True:\n    rows.append(bytearray(b'x') * (4 << 20)); time.sleep(0.02)",
        {},
    ),
    "shared memory": (
        "import mmap, time\nrows = []\nwhile True:\n    rows.append(mmap.mmap(-1, 4 << 20)); rows[-1].write(b'x' * (4 << 20)); time.sleep(0.02)",
        {},
    ),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {}),
    "threads": (
        "import threading, time\nfor _ in range(60): threading.Thread(target=time.sleep, args=(60,)).start()\ntime.sleep(9)",
        {},
    ),
    "one large file": (TRY + "set_result(refused(lambda: open('big', 'wb').write(bytes(12 << 20))))", {}),
    "many large files": (
        "import time\nfor n in range(400):\n    open(f'f{n}', 'wb').write(bytes(1 << 20)); time.sleep(0.02)",
        {},
    ),
    "many files": (
        "import time\nfor n in range(100_000):\n    open(f'f{n}', 'w').close()\n    if n % 50 == 0: time.sleep(0.02)",
        {},
    ),
    "everyday file work": (
        """
import shutil, tempfile, zipfile, json
open('a', 'w').write('a'); shutil.copy2('a', 'b')
with zipfile.ZipFile('z.zip', 'w') as z: z.write('b')
shutil.unpack_archive('z.zip', 'out'); shutil.copytree('out', 'out2')
with tempfile.TemporaryDirectory() as place: shutil.copy('a', place)
with tempfile.NamedTemporaryFile('w+') as file: file.write('x')
import sqlite3
with sqlite3.connect('base.db') as base: base.execute('create table t(x)'); base.execute('insert into t values (1)')
import zoneinfo, datetime, getpass, subprocess
set_result([open('out2/b').read(), base.execute('select x from t').fetchall(), getpass.getuser()])
""",
        {},
    ),
}
