"""Source text with which attacks begin. The same text runs in a sandbox and in a plain interpreter.

Both modes know `isolated` (bool), `set_result` and whatever inputs the test passes. Nothing here imports toolcell.
"""

BASICS = """
import errno, os

def attempt(action, *arguments, **named):
    '''"ok", or the name of what stopped it.'''
    try:
        action(*arguments, **named)
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
    except Exception as error:
        return type(error).__name__
    return "ok"
"""

RAW = (
    BASICS
    + """
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
BAD = 1  # an address nothing is mapped at: EFAULT shows that the kernel looked

def call(number, *arguments):
    '''Return value, or the name of the error. Every argument goes in as a full register.'''
    ctypes.set_errno(0)
    value = libc.syscall(ctypes.c_long(number), *[ctypes.c_ulong(each & (1 << 64) - 1) for each in arguments])
    return value if value != -1 else errno.errorcode.get(ctypes.get_errno(), ctypes.get_errno())

def in_child(action):
    '''What `action` returned in a forked child without a terminal, or the signal that ended it.'''
    import json
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if not isolated:
                os.setsid()
            os.write(write, json.dumps(action()).encode())
        finally:
            os._exit(0)
    os.close(write)
    text = b"".join(iter(lambda: os.read(read, 65536), b""))
    os.close(read)
    status = os.waitpid(child, 0)[1]
    return json.loads(text) if text else f"signal {os.WTERMSIG(status)}"
"""
)

BRIDGE = f"""{BASICS}
import signal, socket, stat, struct, time
import msgpack

def bridge_descriptor():
    '''Where the host's messages come in: a socket, or the first of two pipes.'''
    for descriptor in range(4096):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                return descriptor
        except OSError:
            pass
    return 3

def speaking_descriptor():
    '''Where messages to the host go in.'''
    return bridge_descriptor() if stat.S_ISSOCK(os.fstat(bridge_descriptor()).st_mode) else 4

class Pipes:
    '''What an attack does with a socket, done with two pipes. Shutting one direction ends it for good.'''

    def __init__(self):
        self.ends = [os.dup(bridge_descriptor()), os.dup(speaking_descriptor())]

    def recv(self, size):
        return os.read(self.ends[0], size)

    def sendall(self, data):
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.ends[1], rest):]

    def close(self):
        for each in self.ends:
            os.close(each)

    def shutdown(self, how):
        for number, kind in ((0, socket.SHUT_RD), (1, socket.SHUT_WR)):
            if how in (kind, socket.SHUT_RDWR):
                os.close(self.ends[number])
                os.close(3 + number)

if speaking_descriptor() == bridge_descriptor():
    bridge = socket.socket(fileno=os.dup(bridge_descriptor()))
else:
    bridge = Pipes()

def raw(body):
    return struct.pack(">I", len(body)) + body

def message(*fields):
    return raw(msgpack.packb(list(fields)))

def send(data):
    bridge.sendall(data)

def receive():
    '''The next message from the host, or None at the end.'''
    head = b""
    while len(head) < 4:
        piece = bridge.recv(4 - len(head))
        if not piece:
            return None
        head += piece
    body = b""
    while len(body) < struct.unpack(">I", head)[0]:
        body += bridge.recv(struct.unpack(">I", head)[0] - len(body))
    return msgpack.unpackb(body)

def stay():
    '''The last line: the guest package must not send anything after the attack. Outside, the end is the end.'''
    while isolated:
        signal.pause()

RESULT, DONE = 21, 24
CALL, CANCEL, LOG, PROGRESS, PART, PROBLEM = 17, 18, 19, 20, 22, 23
"""


def basics(source: str) -> str:
    return BASICS + source


def raw(source: str) -> str:
    return RAW + source


def over_the_bridge(source: str) -> str:
    return BRIDGE + source
