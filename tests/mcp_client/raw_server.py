"""A server without the SDK, that can break every rule: `python raw_server.py JSON`.

`pages`: lists of tools; the last page points to itself with `endless`. `many`: so many tools. `lists`: what `pages` is at each further
listing. `answer`: what `tools/call` returns; `says`: lines that it writes in place of an answer; `garbage`: how many
lines that are not JSON-RPC it writes first; `spawn`: starts a process of its own and writes its number to this file;
`dies`: a call ends it; `huge`: bytes of one line in place of an answer; `floods`: so many log messages before an answer;
`pings`: so many pings before an answer; `blanks`: so many blank lines; `asks`: so many questions, `with` this method,
and no answer before each of them has one; `deaf`: it reads nothing after a call, and sends so many pings; `announces`:
after a call, the list changed; `result`: a call's result as JSON text; `structure`: the value of an answer, with so
many empty lists; `part`: a part of which an answer has a thousand; `cursor`: the `nextCursor` of every page; `error`: what `error_at` this method is answered with, but for `first_is_slow`: the first such request
is answered rightly a little later; `last`: what it writes to stderr when it dies. `$NAME` in these two is a variable of its environment.
"""

import json
import os
import subprocess
import sys
import threading
import time

script = json.loads(sys.argv[1])
if "many" in script:
    tools = [
        {"name": f"t{i}", "description": "One of many", "inputSchema": {"type": "object"}}
        for i in range(script["many"])
    ]
    script["pages"] = [tools[start : start + 500] for start in range(0, len(tools), 500)]
listings = 0
QUESTION = {
    "message": "who?",
    "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}},
    "messages": [],
    "maxTokens": 1,
}


def send(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def answered(method: str, params: dict) -> object:
    global listings
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "raw", "version": "1"},
        }
    if method == "tools/list":
        number = int(params.get("cursor") or 0)
        if not number:
            listings += 1
        lists = [script.get("pages", [[]]), *script.get("lists", [])]
        pages = lists[min(listings, len(lists)) - 1]
        page = {"tools": pages[min(number, len(pages) - 1)]}
        if "cursor" in script:
            page["nextCursor"] = script["cursor"]
        elif number + 1 < len(pages) or script.get("endless"):
            page["nextCursor"] = str(number + (1 if script.get("endless") != "same" else number == 0))
        return page
    if method == "tools/call":
        if script.get("dies"):
            sys.stderr.write(os.path.expandvars(script.get("last", "it is over")) + "\n")
            os._exit(4)
        if "huge" in script:
            sys.stdout.write("x" * script["huge"])
            sys.stdout.flush()
            return None
        for number in range(script.get("floods", 0)):
            send({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": number}})
        sys.stdout.write("\n" * script.get("blanks", 0))
        for number in range(script.get("pings", 0)):
            send({"jsonrpc": "2.0", "id": f"p{number}", "method": "ping"})
        for number in range(script.get("asks", 0)):
            send(
                {
                    "jsonrpc": "2.0",
                    "id": f"q{number}",
                    "method": script.get("with", "elicitation/create"),
                    "params": script.get("question", QUESTION),
                }
            )
        said = [json.loads(sys.stdin.readline()) for number in range(script.get("asks", 0))]
        if said and "answer" not in script:
            return {"content": [], "structuredContent": {"said": said}}
        if "deaf" in script:
            for number in range(script["deaf"]):
                send({"jsonrpc": "2.0", "id": f"p{number}", "method": "ping"})
            time.sleep(3600)
        for line in script.get("says", []):
            print(line, flush=True)
        if "part" in script:
            return {"content": [script["part"]] * 1000}
        return script.get("answer", {"content": [{"type": "text", "text": "done"}]}) if "says" not in script else None
    return {}


waiting: list = []


def slow(request: dict) -> bool:
    """Answer this request rightly, when another one has been refused."""
    waiting.append(request)
    answer = {"content": [{"type": "text", "text": "done"}]}
    threading.Timer(0.3, send, ({"jsonrpc": "2.0", "id": request["id"], "result": answer},)).start()
    return True


if "spawn" in script:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    with open(script["spawn"], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
for number in range(script.get("garbage", 0)):
    print(f"garbage {number}", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request or "method" not in request:
        continue
    if request["method"] in ("server/discover", "ping"):
        send({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "no such method"}})
        continue
    if request["method"] == "tools/call" and "structure" in script:
        lists = ",".join(["[]"] * script["structure"])
        answer = '{"content": [], "structuredContent": {"lists": [' + lists + "]}}"
        order = ['"id": ' + str(request["id"]), '"result": ' + answer]
        order = order[::-1] if script.get("id_last") else order
        print('{"jsonrpc": "2.0", ' + ", ".join(order) + "}", flush=True)
        continue
    if request["method"] == "tools/call" and "result" in script:
        result = os.path.expandvars(script["result"])
        print(f'{{"jsonrpc": "2.0", "id": {request["id"]}, "result": {result}}}', flush=True)
        continue
    if request["method"] == script.get("error_at") and not (script.pop("first_is_slow", False) and slow(request)):
        send({"jsonrpc": "2.0", "id": request["id"], "error": script["error"]})
        continue
    if request in waiting:
        continue
    result = answered(request["method"], request.get("params") or {})
    if result is not None:
        send({"jsonrpc": "2.0", "id": request["id"], "result": result})
    if request["method"] == "tools/call" and script.get("announces"):
        send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
while "spawn" in script:
    time.sleep(3600)  # it ignores that its input was closed
