"""Shows files going in and out of a run, and what happens to scripts that pass a limit or try to escape."""

from toolcell import Limits, SyncRuntime

SCRIPTS = {
    "sum a file": "rows = [int(line) for line in open('numbers.txt')]\n"
    "open('report.csv', 'w').write(f'rows,sum\\n{len(rows)},{sum(rows)}\\n')\n"
    "set_result(sum(rows), files=['report.csv'])",
    "loop for ever": "print('starting')\nwhile True: pass",
    "use all memory": "blocks = []\nwhile True: blocks.append(bytes(1 << 20))",
    "fork for ever": "import os\nwhile True: os.fork()",
    "read a secret": "open('/etc/shadow').read()",
    "call home": "import socket\nsocket.create_connection(('1.1.1.1', 53))",
}

with SyncRuntime(limits=Limits(wall_s=1, memory_bytes=64 << 20, processes=16)) as runtime:
    for name, script in SCRIPTS.items():
        result = runtime.execute_code(script, files=[("numbers.txt", "\n".join(map(str, range(1000))))])
        print(f"{name:15} {result.outcome:14}", result.value if result.ok else result.error and result.error.message)
        for file in result.files:
            print(f"{'':15} {file.name} ({file.media_type}, {file.size} bytes): {file.data!r}")
