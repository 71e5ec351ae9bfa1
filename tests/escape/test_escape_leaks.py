"""What a guest could learn about its machine: PROMISES.md, "information"."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import pytest

import toolcell
from escape.attack import IS_CONTAINED, SECRET_PATTERN, Victim, full_only, outside, process_only
from escape.prologues import RAW, raw

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


def host_words() -> list[str]:
    """Paths and names of this machine that a guest must not learn."""
    repository = str(Path(toolcell.__file__).parents[2])
    words = {repository, sys.prefix, str(Path.home()), str(Path.cwd()), os.path.dirname(sys.executable)}
    if not sys.base_prefix.startswith("/usr"):
        words.add(sys.base_prefix)
    if len(platform.node()) > 4:
        words.add(platform.node())
    return sorted(word for word in words if len(word) > 5)


def disguised(words: list[str]) -> list[str]:
    """Return patterns that do not match themselves, because the guest's memory also holds what it searches for."""
    return [
        "".join(f"[{char}]" if index == 1 else re.escape(char) for index, char in enumerate(word)) for word in words
    ]


def test_the_hosts_environment_and_arguments_are_not_the_guests(victim: Victim) -> None:
    source = raw("""
libc.getenv.restype = ctypes.c_char_p
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
raw = []
while environ and environ[len(raw)]:
    raw.append(environ[len(raw)].decode())
import sys
set_result({"os": dict(os.environ), "raw": raw, "argv": [sys.argv, sys.orig_argv]})
""")
    plain = outside(source, environment={"VICTIM_SECRET": victim.secret}).value
    assert victim.secret in plain["os"].values()
    inside = victim.run(source).value
    user = {"USER"} if IS_CONTAINED else set()
    assert inside["os"].keys() <= {"HOME", "TMPDIR", "LANG", "PATH", "TZ", "LC_ALL", "LC_CTYPE", *user}
    assert victim.secret not in repr(inside)
    assert not any(word in repr(inside) for word in host_words())


INTROSPECTION = raw("""
import gc, re, sys, sysconfig, types
told = {
    "sys": {name: repr(getattr(sys, name)) for name in dir(sys) if name not in ("modules",)},
    "modules": {name: [repr(getattr(module, key, None)) for key in ("__file__", "__path__", "__spec__", "__cached__")]
                for name, module in list(sys.modules.items())},
    "sysconfig": [repr(sysconfig.get_config_vars()), repr(sysconfig.get_paths())],
    "cwd": os.getcwd(), "login": attempt(os.getlogin), "home": os.path.expanduser("~"), "uname": list(os.uname()),
}
codes, todo = set(), [code for each in gc.get_objects() for code in (getattr(each, "__code__", None),)
                      if isinstance(code, types.CodeType)]
while todo:
    code = todo.pop()
    codes.add(code.co_filename)
    todo += [each for each in code.co_consts if isinstance(each, types.CodeType)]
told["code"] = sorted(codes)
try:
    import json, asyncio, http.client
    json.loads("{")
except Exception as error:
    import traceback
    told["traceback"] = traceback.format_exc()
for number in (15, 31):
    libc.getauxval.restype = ctypes.c_char_p
    told[f"auxv {number}"] = repr(libc.getauxval(number))
text = repr(told)
set_result([len(text), {pattern: re.findall(".{0,40}" + pattern + ".{0,40}", text)[:3] for pattern in patterns}])
""")


def test_no_attribute_of_the_interpreter_names_a_place_of_the_host(victim: Victim) -> None:
    patterns = disguised(host_words())
    assert any(outside(INTROSPECTION, patterns=[*patterns, re.escape(os.path.dirname(os.__file__))]).value[1].values())
    size, found = victim.run(INTROSPECTION, patterns=patterns).value
    assert size > 20_000
    assert found == {pattern: [] for pattern in patterns}


@full_only("no folder can be walked there, and a script sees the paths of the cache")
def test_no_readable_file_names_a_place_of_the_host(victim: Victim) -> None:
    """Compiled modules, build settings and shared libraries hold the paths where they were built."""
    source = raw("""
import re
wanted = [re.compile(pattern.encode()) for pattern in patterns]
read, found = 0, {}
for top in tops:
    for folder, _, names in os.walk(top):
        for name in names:
            try:
                data = open(os.path.join(folder, name), "rb").read()
            except OSError:
                continue
            read += 1
            for pattern in wanted:
                match = pattern.search(data)
                if match:
                    found[os.path.join(folder, name)] = repr(match[0])
set_result([read, dict(list(found.items())[:20])])
""")
    folder = Path(sys.prefix)
    plain = outside(source, patterns=disguised([sys.prefix]), tops=[str(folder / "bin")]).value
    assert plain[1]
    read, found = victim.run(
        source,
        patterns=disguised([*host_words(), victim.secret]),
        tops=["/usr", "/lib", "/lib64", "/etc", "/toolcell", "/packages", "/sandbox", "/dev/shm", "/tmp"],
        limits={"cpu_s": 60},
    ).value
    assert read > 300
    assert found == {}


MEMORY = raw("""
import re
class Info(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p), ("headers", ctypes.c_void_p)]
bases = []
Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
libc.dl_iterate_phdr(Callback(lambda info, size, data: bases.append(info.contents.address or 0) or 0), None)
libc.sbrk.restype = ctypes.c_void_p
libc.getauxval.restype = ctypes.c_ulong
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
stack, heap = libc.getauxval(31), libc.sbrk(0)
ranges = [(stack & ~4095) + offset for offset in (0,)]
read, write = os.pipe()
PAGE = 4096
def pages(first, last):
    '''What is mapped between two addresses: a write() from an unmapped one fails and harms nothing.'''
    found = []
    for address in range(first & ~(PAGE - 1), last, PAGE):
        if libc.write(write, address, PAGE) == PAGE:
            found.append(os.read(read, PAGE))
    return b"".join(found)
regions = [(stack - (1 << 20), stack + PAGE), (min(bases), heap)]
middle = sorted(base for base in bases if base > 1 << 44)
near = [id(object()), id([]), ctypes.addressof(ctypes.create_string_buffer(1 << 20))]
for base in middle + near:
    regions.append((base - (4 << 20), base + (6 << 20)))
regions.sort()
merged = []
for first, last in regions:
    if merged and first <= merged[-1][1]:
        merged[-1][1] = max(last, merged[-1][1])
    else:
        merged.append([first, last])
seen, found = 0, {}
for first, last in merged:
    data = pages(first, min(last, first + (512 << 20)))
    seen += len(data)
    for pattern in patterns:
        found.setdefault(pattern, []).extend(repr(each) for each in re.findall(pattern.encode(), data)[:3])
set_result([seen, found])
""")


def test_no_secret_of_the_host_is_in_the_guests_memory(victim: Victim) -> None:
    """The secret is in the host's environment and a hundred times on its heap. The guest reads all of its own memory."""
    patterns = [SECRET_PATTERN]
    plain = outside(MEMORY, patterns=patterns, environment={"VICTIM_SECRET": victim.secret}).value
    assert plain[1][SECRET_PATTERN]
    seen, found = victim.run(MEMORY, patterns=patterns, limits={"memory_bytes": 1 << 30}).value
    assert seen > 4 << 20
    assert found == {SECRET_PATTERN: []}


def test_no_path_of_the_host_is_in_the_guests_memory(victim: Victim) -> None:
    patterns = disguised(host_words())
    plain = outside(MEMORY, patterns=disguised([sys.executable])).value
    assert any(plain[1].values())
    _, found = victim.run(MEMORY, patterns=patterns, limits={"memory_bytes": 1 << 30}).value
    assert found == {pattern: [] for pattern in patterns}


def test_no_trace_of_another_run_is_in_the_guests_memory(victim: Victim) -> None:
    """Neither source nor inputs nor answers: sandboxes are siblings, and their parent never has these data."""
    token = "OTHERRUN-" + os.urandom(8).hex()
    earlier = "held = [data] * 3\nprint(data)\nset_result(call_tool('echo', {'text': data}))"
    assert victim.run(earlier, data=token).value == token
    patterns = disguised([token])
    assert outside(f"token = {token!r}\n{MEMORY}", patterns=patterns).value[1][patterns[0]]
    for _ in range(2):
        assert victim.run(MEMORY, patterns=patterns, limits={"memory_bytes": 1 << 30}).value[1] == {patterns[0]: []}


@pytest.mark.slow
@full_only("the uts namespace is shared")
def test_the_name_of_the_hosts_domain_does_not_come_along() -> None:
    """A UTS namespace begins as a copy, so both host name and domain name must be overwritten."""
    renamed = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"flags = 0x04000000 | {0 if os.geteuid() == 0 else 0x10000000}\n"
        "assert libc.unshare(flags) == 0, ctypes.get_errno()\n"
        "assert libc.sethostname(b'secret-host', 11) == 0\n"
        "assert libc.setdomainname(b'secret-domain', 13) == 0\n"
    )
    source = f"""{RAW}
buffer = ctypes.create_string_buffer(65 * 6)
libc.uname(buffer)
set_result([buffer.raw[65 * number : 65 * number + 64].rstrip(b"\\0").decode() for number in (1, 5)])
"""
    if os.geteuid() == 0:  # an ordinary user would have to be mapped by somebody else first
        assert outside(renamed + source).value == ["secret-host", "secret-domain"]
        host = Victim(before=renamed)
        try:
            assert all("secret" not in name for name in host.run(source).value)
        finally:
            host.close()
    assert platform.node() not in victim_names(source)


def victim_names(source: str) -> list[str]:
    host = Victim()
    try:
        names: list[str] = host.run(source).value
        return names
    finally:
        host.close()


@process_only("a pipe has no peer whose identity could be asked for")
def test_identities_on_the_bridge_are_not_told(victim: Victim) -> None:
    """SO_PEERCRED would give the host's process id and user, and ancillary data would give its credentials."""
    source = raw("""
import socket, stat, struct
number = next(each for each in range(4096) if attempt(os.fstat, each) == "ok" and stat.S_ISSOCK(os.fstat(each).st_mode)) if isolated else None
one = socket.socket(fileno=os.dup(number)) if isolated else socket.socketpair()[0]
set_result({
    "peer": attempt(one.getsockopt, socket.SOL_SOCKET, socket.SO_PEERCRED, 12),
    "security": attempt(one.getsockopt, socket.SOL_SOCKET, socket.SO_PEERSEC, 100),
    "pidfd": attempt(one.getsockopt, socket.SOL_SOCKET, 77, 4),
    "credentials": attempt(one.setsockopt, socket.SOL_SOCKET, socket.SO_PASSCRED, 1),
    "names": [repr(one.getsockname()), repr(one.getpeername())],
})
""")
    assert outside(source).value["peer"] == "ok"
    told = victim.run(source).value
    assert (told["peer"], told["pidfd"], told["credentials"]) == ("EPERM", "EPERM", "EPERM")
    assert set(told["names"]) <= {"''", "b''"}


@full_only("a script can ask whether a path is there, how large a file is and when it was changed")
def test_links_and_sizes_tell_nothing_of_the_hosts_hardware(victim: Victim) -> None:
    """Landlock cannot refuse readlink() and stat(), so what they must not tell must not be in the file system."""
    found = [path for kind in ("block", "net", "bdi", "mem", "tty") for path in Path("/sys/class", kind).glob("*")]
    source = f"""{RAW}
set_result([path for path in paths if "ok" in (attempt(os.readlink, path), attempt(os.stat, path))])
"""
    paths = [str(path) for path in found[:200]]
    told = outside(source, paths=paths).value
    assert told != []
    assert {path for path in paths if os.path.lexists(path)} <= {*told}  # others come and go
    assert victim.run(source, paths=paths).value == []


def test_a_core_dump_is_never_written(victim: Victim) -> None:
    """A core dump would lie on the host's disk, or with a program that collects dumps."""
    source = f"""{RAW}
import resource, signal
child = os.fork()
if child == 0:
    if not isolated:
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    os.kill(os.getpid(), signal.SIGSEGV if not isolated else signal.SIGKILL)
    ctypes.string_at(0)
set_result([resource.getrlimit(resource.RLIMIT_CORE)[1], libc.prctl(3, 0, 0, 0, 0), os.WCOREDUMP(os.waitpid(child, 0)[1])])
"""
    assert outside(source).value[1] == 1  # dumpable
    assert victim.run(source).value == [0, 0, False]


def test_the_result_and_its_error_name_no_place_of_the_host(victim: Victim) -> None:
    sources = [
        "import json\njson.loads('{')",
        "open('/no/such/file')",
        "import no_such_module",
        "1 +",
        "call_tool('nothing')",
        "import ctypes\nctypes.CDLL('/no/such/library')",
        "import os\nos._exit(1)",
        "import time\ntime.sleep(60)",
    ]
    traced = (
        "import json, traceback\ntry:\n    json.loads('{')\nexcept ValueError:\n    set_result(traceback.format_exc())"
    )
    assert os.path.dirname(os.__file__) in outside(traced).value
    for source in sources:
        told = repr(victim.run(source, limits={"wall_s": 0.3}).result)
        assert [word for word in [*host_words(), victim.secret] if word in told] == []
