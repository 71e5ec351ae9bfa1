"""How each library is used for each feature: the same code runs in a sandbox and in plain Python outside.

Each use is the body of a function that returns plain data. `BASE` is the server's URL, and `failure(call)` the names of
the exception that a call raises. Bodies for asyncio are awaited.
"""

from __future__ import annotations

from typing import Final

DRIVER: Final = """
import asyncio, hashlib, json, textwrap

def names(error):
    found = [f"{type(error).__module__}.{type(error).__qualname__}"]
    return found + (names(error.reason) if isinstance(getattr(error, "reason", None), Exception) else [])

def failure(call):
    try:
        return ["no failure", repr(call())]
    except Exception as error:
        return names(error)

async def failure_of(awaitable):
    try:
        return ["no failure", repr(await awaitable)]
    except Exception as error:
        return names(error)

def blocks(count, size=65536):
    for number in range(count):
        yield bytes([number % 256]) * size

async def async_blocks(count, size=65536):
    for block in blocks(count, size):
        yield block

def measured(parts):
    digest, size = hashlib.sha256(), 0
    for part in parts:
        digest.update(part)
        size += len(part)
    return [size, digest.hexdigest()]

async def measured_of(parts):
    digest, size = hashlib.sha256(), 0
    async for part in parts:
        digest.update(part)
        size += len(part)
    return [size, digest.hexdigest()]

SHORT = ("/short", "/short-chunks", "/no-body", "/no-body/chunked")

answers = {}
for feature, body in USES.items():
    is_async = "await " in body or "async " in body
    source = ("async " if is_async else "") + "def use():\\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ")
    space = dict(globals())
    try:
        exec(source, space)
        answers[feature] = asyncio.run(space["use"]()) if is_async else space["use"]()
    except Exception as error:
        answers[feature] = {"raised": f"{type(error).__name__}: {error}"}
"""

URLLIB: Final = {
    "length": """
        from urllib.request import urlopen
        with urlopen(BASE + "/plain") as answer:
            return [answer.status, answer.reason, answer.headers.items(), answer.read().decode(), answer.url == BASE + "/plain"]
    """,
    "chunked": """
        from urllib.request import urlopen
        return urlopen(BASE + "/chunked").read().decode()
    """,
    "until close": """
        from urllib.request import urlopen
        return urlopen(BASE + "/until-close").read().decode()
    """,
    "compressed": """
        import gzip
        from urllib.request import Request, urlopen
        return gzip.decompress(urlopen(BASE + "/compressed/gzip").read()).decode()
    """,
    "JSON": """
        from urllib.request import urlopen
        return json.load(urlopen(BASE + "/json"))
    """,
    "a form": """
        from urllib.parse import urlencode
        from urllib.request import urlopen
        return json.load(urlopen(BASE + "/echo?q=%C3%A9", data=urlencode({"a": "1 2"}).encode()))
    """,
    "redirects": """
        from urllib.request import urlopen
        answer = urlopen(BASE + "/redirect/3")
        return [answer.url.removeprefix(BASE), json.load(answer)["path"]]
    """,
    "cookies": """
        from http.cookiejar import CookieJar
        from urllib.request import HTTPCookieProcessor, build_opener
        jar = CookieJar()
        opener = build_opener(HTTPCookieProcessor(jar))
        opener.open(BASE + "/set-cookie").read()
        return [sorted(each.name for each in jar), json.load(opener.open(BASE + "/echo"))["headers"]["Cookie"]]
    """,
    "authentication": """
        from urllib.request import HTTPBasicAuthHandler, HTTPPasswordMgrWithDefaultRealm, build_opener
        passwords = HTTPPasswordMgrWithDefaultRealm()
        passwords.add_password(None, BASE, "me", "secret")
        return build_opener(HTTPBasicAuthHandler(passwords)).open(BASE + "/auth").read().decode()
    """,
    "methods": """
        from urllib.request import Request, urlopen
        made = [urlopen(Request(BASE + "/echo", method=method)) for method in ("PUT", "DELETE", "PATCH", "OPTIONS")]
        return [json.load(answer)["method"] for answer in made]
    """,
    "no body": """
        from urllib.request import Request, urlopen
        head = urlopen(Request(BASE + "/plain", method="HEAD"))
        return [head.headers["Content-Length"], head.read().decode(), urlopen(BASE + "/nothing/204").read().decode()]
    """,
    "an error status": """
        from urllib.error import HTTPError
        from urllib.request import urlopen
        try:
            urlopen(BASE + "/status/404")
        except HTTPError as error:
            return [error.code, error.read().decode()]
    """,
    "lines": """
        from urllib.request import urlopen
        return [json.loads(line) for line in urlopen(BASE + "/lines")]
    """,
    "a long body down": """
        from urllib.request import urlopen
        answer = urlopen(BASE + "/large?bytes=3000001")
        return measured(iter(lambda: answer.read(50000), b""))
    """,
    "a long body up": """
        from urllib.request import Request, urlopen
        told = json.load(urlopen(Request(BASE + "/echo", data=blocks(20), method="POST", headers={"X-Test": "1"})))
        return [told["size"], told["digest"], told["headers"]["X-Test"]]
    """,
    "a file up": """
        import tempfile
        from urllib.request import Request, urlopen
        with tempfile.TemporaryFile() as file:
            file.write(b"z" * 700001)
            file.seek(0)
            return json.load(urlopen(Request(BASE + "/echo", data=file, headers={"Content-Length": "700001"})))["digest"]
    """,
    "a short answer": """
        from urllib.request import urlopen
        return [failure(lambda: urlopen(BASE + path).read()) for path in SHORT]
    """,
    "a hang-up": """
        from urllib.request import urlopen
        return failure(lambda: urlopen(BASE + "/hang-up"))
    """,
    "a connection that is reset": """
        from urllib.request import urlopen
        return [failure(lambda: urlopen(BASE + path).read()) for path in ("/reset", "/reset-in-body")]
    """,
    "a timeout": """
        from urllib.request import urlopen
        return [
            failure(lambda: urlopen(BASE + "/slow-head", timeout=0.3)),
            failure(lambda: urlopen(BASE + "/slow-body", timeout=0.3).read()),
        ]
    """,
    "no connection": """
        from urllib.request import urlopen
        return failure(lambda: urlopen(CLOSED))
    """,
}

HTTP_CLIENT: Final = {
    "several on one connection": """
        from http.client import HTTPConnection
        connection = HTTPConnection(BASE.removeprefix("http://"))
        found = []
        for path in ("/plain", "/chunked", "/nothing/304", "/json"):
            connection.request("GET", path)
            found.append(connection.getresponse().read().decode())
        connection.close()
        return found
    """,
    "step by step": """
        from http.client import HTTPConnection
        connection = HTTPConnection(BASE.removeprefix("http://"), timeout=5)
        connection.putrequest("POST", "/echo")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.putheader("X-Test", "a")
        connection.endheaders()
        for number in range(300):
            connection.send(b"3\\r\\nabc\\r\\n")
        connection.send(b"0\\r\\nX-Trailer: 1\\r\\n\\r\\n")
        told = json.loads(connection.getresponse().read())
        return [told["size"], told["digest"], told["headers"]]
    """,
    "reading in part": """
        from http.client import HTTPConnection
        connection = HTTPConnection(BASE.removeprefix("http://"))
        connection.request("GET", "/large?bytes=1000000")
        answer = connection.getresponse()
        buffer = bytearray(1000)
        found = [len(answer.read(10)), answer.readinto(buffer), len(answer.peek(1)) > 0, len(answer.readline()), answer.isclosed()]
        connection.close()
        return found
    """,
    "a broken status line": """
        from http.client import BadStatusLine, HTTPConnection
        connection = HTTPConnection(BASE.removeprefix("http://"))
        connection.request("GET", "/garbage")
        try:
            connection.getresponse()
        except BadStatusLine:
            return "BadStatusLine"
    """,
    "a short answer": """
        from http.client import HTTPConnection
        connection = HTTPConnection(BASE.removeprefix("http://"))
        connection.request("GET", "/short")
        return failure(connection.getresponse().read)
    """,
    "no connection": """
        from http.client import HTTPConnection
        return failure(lambda: HTTPConnection(CLOSED.removeprefix("http://")).request("GET", "/"))
    """,
}

REQUESTS: Final = {
    "length": """
        import requests
        answer = requests.get(BASE + "/plain", headers={"X-Test": "1"})
        return [answer.status_code, answer.reason, dict(answer.headers), answer.text, answer.encoding, answer.ok]
    """,
    "chunked": """
        import requests
        return requests.get(BASE + "/chunked").text
    """,
    "until close": """
        import requests
        return requests.get(BASE + "/until-close").text
    """,
    "compressed": """
        import requests
        return [requests.get(BASE + "/compressed/gzip").text, requests.get(BASE + "/compressed/deflate").text]
    """,
    "JSON": """
        import requests
        return [requests.get(BASE + "/json").json(), requests.post(BASE + "/echo", json={"a": [1, "é"]}).json()]
    """,
    "a form": """
        import requests
        return requests.post(BASE + "/echo", params={"q": "é"}, data={"a": "1 2"}).json()
    """,
    "multipart": """
        import requests
        files = {"one": ("one.txt", b"text", "text/plain"), "two": ("two.bin", b"x" * 400000)}
        told = requests.post(BASE + "/echo", files=files, data={"a": "1"}).json()
        return [told["size"] - 4 * 32 > 0, told["headers"]["Content-Type"].partition(";")[0]]
    """,
    "redirects": """
        import requests
        got, posted = requests.get(BASE + "/redirect/3"), requests.post(BASE + "/redirect/1/307", data=b"kept")
        stopped = requests.get(BASE + "/redirect/3", allow_redirects=False)
        turned = requests.post(BASE + "/redirect/1/303", data=b"dropped").json()
        too_many = failure(lambda: requests.get(BASE + "/redirect/40"))
        return [[each.status_code for each in got.history], got.json()["path"], posted.json()["start"],
                stopped.headers["Location"], turned["method"], too_many]
    """,
    "cookies": """
        import requests
        with requests.Session() as session:
            session.get(BASE + "/set-cookie")
            return [session.cookies.get_dict(), session.get(BASE + "/echo").json()["headers"]["Cookie"]]
    """,
    "authentication": """
        import requests
        return [requests.get(BASE + "/auth", auth=("me", "secret")).text, requests.get(BASE + "/auth").status_code,
                requests.get(BASE + "/echo", headers={"Authorization": "Bearer x"}).json()["headers"]["Authorization"]]
    """,
    "methods": """
        import requests
        called = (requests.put, requests.delete, requests.patch, requests.options)
        return [call(BASE + "/echo").json()["method"] for call in called]
    """,
    "no body": """
        import requests
        head, none = requests.head(BASE + "/plain"), requests.get(BASE + "/nothing/204")
        return [head.headers["Content-Length"], head.text, none.status_code, none.content == b""]
    """,
    "an error status": """
        import requests
        answer = requests.get(BASE + "/status/503")
        return [answer.status_code, answer.text, failure(answer.raise_for_status)]
    """,
    "lines": """
        import requests
        with requests.get(BASE + "/lines", stream=True) as answer:
            return [json.loads(line) for line in answer.iter_lines()]
    """,
    "a long body down": """
        import requests
        with requests.get(BASE + "/large?bytes=3000001", stream=True) as answer:
            return measured(answer.iter_content(50000))
    """,
    "a body that is not read": """
        import requests
        with requests.Session() as session:
            with session.get(BASE + "/large?bytes=3000001", stream=True) as answer:
                first = len(next(answer.iter_content(1000)))
            return [first, session.get(BASE + "/chunked").text]
    """,
    "a long body up": """
        import requests
        streamed, whole = requests.post(BASE + "/echo", data=blocks(20)), requests.put(BASE + "/echo", data=b"w" * 1000001)
        return [[told["size"], told["digest"]] for told in (streamed.json(), whole.json())]
    """,
    "a file up": """
        import tempfile, requests
        with tempfile.TemporaryFile() as file:
            file.write(b"z" * 700001)
            file.seek(0)
            return requests.post(BASE + "/echo", data=file).json()["digest"]
    """,
    "a short answer": """
        import requests
        return [failure(lambda: requests.get(BASE + path)) for path in SHORT]
    """,
    "a broken compression": """
        import requests
        return failure(lambda: requests.get(BASE + "/bad-gzip"))
    """,
    "a broken status line": """
        import requests
        return failure(lambda: requests.get(BASE + "/garbage"))
    """,
    "a hang-up": """
        import requests
        return failure(lambda: requests.get(BASE + "/hang-up"))
    """,
    "a connection that is reset": """
        import requests
        return [failure(lambda: requests.get(BASE + path)) for path in ("/reset", "/reset-in-body")]
    """,
    "an answer before the body is sent": """
        import requests
        return requests.post(BASE + "/hasty", data=b"x" * 4_000_000).text
    """,
    "a timeout": """
        import requests
        return [failure(lambda: requests.get(BASE + "/slow-head", timeout=0.3)),
                failure(lambda: requests.get(BASE + "/slow-body", timeout=(5, 0.3)))]
    """,
    "no connection": """
        import requests
        return failure(lambda: requests.get(CLOSED))
    """,
    "retries": """
        import requests
        from requests.adapters import HTTPAdapter, Retry
        with requests.Session() as session:
            session.mount("http://", HTTPAdapter(max_retries=Retry(2, status_forcelist=[503], backoff_factor=0)))
            return failure(lambda: session.get(BASE + "/status/503"))
    """,
    "threads": """
        import requests
        from concurrent.futures import ThreadPoolExecutor
        with requests.Session() as session, ThreadPoolExecutor(4) as pool:
            return [*pool.map(lambda n: len(session.get(BASE + f"/large?bytes={n * 50000}").content), range(8))]
    """,
}

URLLIB3: Final = {
    "waiting to send": """
        import urllib3
        from urllib3.util import wait_for_read
        connection = urllib3.connection.HTTPConnection(BASE.removeprefix("http://").split(":")[0], int(BASE.split(":")[2]))
        connection.putrequest("POST", "/echo")
        connection.putheader("Content-Length", "4")
        connection.putheader("Expect", "100-continue")
        connection.endheaders()
        may_send = wait_for_read(connection.sock, 5)
        with connection.sock.makefile("rb", 0) as file:
            line = file.readline().decode()
            while file.readline() != b"\\r\\n":
                pass
        connection.send(b"body")
        with connection.sock.makefile("rb") as file:
            return [may_send, line, file.readline().decode()]
    """,
    "a pool": """
        import urllib3
        with urllib3.PoolManager() as pool:
            answers = [pool.request("GET", BASE + path) for path in ("/plain", "/chunked", "/until-close")]
            return [[each.status, each.data.decode()] for each in answers]
    """,
    "a stream": """
        import urllib3
        with urllib3.PoolManager() as pool:
            answer = pool.request("GET", BASE + "/large?bytes=3000001", preload_content=False)
            found = measured(answer.stream(50000))
            answer.release_conn()
            return found
    """,
    "a form with a file": """
        import urllib3
        fields = {"a": "1", "file": ("name.txt", "text")}
        return urllib3.request("POST", BASE + "/echo", fields=fields).json()["headers"]["Content-Type"].partition(";")[0]
    """,
    "a timeout": """
        import urllib3
        with urllib3.PoolManager() as pool:
            return failure(lambda: pool.request("GET", BASE + "/slow-head", timeout=urllib3.Timeout(connect=5, read=0.3), retries=False))
    """,
    "no connection": """
        import urllib3
        return failure(lambda: urllib3.request("GET", CLOSED, retries=False))
    """,
    "a short answer": """
        import urllib3
        return failure(lambda: urllib3.request("GET", BASE + "/short", retries=False))
    """,
}

HTTPX: Final = {
    "length": """
        import httpx
        answer = httpx.get(BASE + "/plain", headers={"X-Test": "1"})
        return [answer.status_code, answer.reason_phrase, answer.http_version, answer.headers.multi_items(), answer.text]
    """,
    "chunked": """
        import httpx
        return httpx.get(BASE + "/chunked").text
    """,
    "until close": """
        import httpx
        return httpx.get(BASE + "/until-close").text
    """,
    "compressed": """
        import httpx
        return [httpx.get(BASE + "/compressed/gzip").text, httpx.get(BASE + "/compressed/deflate").text]
    """,
    "JSON": """
        import httpx
        return [httpx.get(BASE + "/json").json(), httpx.post(BASE + "/echo", json={"a": [1, "é"]}).json()]
    """,
    "a form": """
        import httpx
        return httpx.post(BASE + "/echo", params={"q": "é"}, data={"a": "1 2"}).json()
    """,
    "multipart": """
        import httpx
        files = {"one": ("one.txt", b"text", "text/plain"), "two": ("two.bin", b"x" * 400000)}
        told = httpx.post(BASE + "/echo", files=files, data={"a": "1"}).json()
        return [told["size"], told["headers"]["Content-Type"].partition(";")[0]]
    """,
    "redirects": """
        import httpx
        got = httpx.get(BASE + "/redirect/3", follow_redirects=True)
        posted = httpx.post(BASE + "/redirect/1/307", content=b"kept", follow_redirects=True)
        return [[each.status_code for each in got.history], got.json()["path"], posted.json()["start"],
                httpx.get(BASE + "/redirect/1").headers["Location"],
                failure(lambda: httpx.get(BASE + "/redirect/40", follow_redirects=True))]
    """,
    "cookies": """
        import httpx
        with httpx.Client() as client:
            client.get(BASE + "/set-cookie")
            return [dict(client.cookies), client.get(BASE + "/echo").json()["headers"]["Cookie"]]
    """,
    "authentication": """
        import httpx
        return [httpx.get(BASE + "/auth", auth=("me", "secret")).text, httpx.get(BASE + "/auth").status_code]
    """,
    "methods": """
        import httpx
        return [httpx.request(method, BASE + "/echo").json()["method"] for method in ("PUT", "DELETE", "PATCH", "OPTIONS")]
    """,
    "no body": """
        import httpx
        head, none = httpx.head(BASE + "/plain"), httpx.get(BASE + "/nothing/204")
        return [head.headers["Content-Length"], head.text, none.status_code, none.content == b""]
    """,
    "an error status": """
        import httpx
        answer = httpx.get(BASE + "/status/503")
        return [answer.status_code, answer.text, failure(answer.raise_for_status)]
    """,
    "lines": """
        import httpx
        with httpx.stream("GET", BASE + "/lines") as answer:
            return [json.loads(line) for line in answer.iter_lines()]
    """,
    "a long body down": """
        import httpx
        with httpx.stream("GET", BASE + "/large?bytes=3000001") as answer:
            return measured(answer.iter_bytes())
    """,
    "a body that is not read": """
        import httpx
        with httpx.Client() as client:
            with client.stream("GET", BASE + "/large?bytes=3000001") as answer:
                first = len(next(answer.iter_bytes(1000)))
            return [first, client.get(BASE + "/chunked").text]
    """,
    "a long body up": """
        import httpx
        streamed, whole = httpx.post(BASE + "/echo", content=blocks(20)), httpx.put(BASE + "/echo", content=b"w" * 1000001)
        return [[told["size"], told["digest"]] for told in (streamed.json(), whole.json())]
    """,
    "a short answer": """
        import httpx
        return [failure(lambda: httpx.get(BASE + path)) for path in SHORT]
    """,
    "a broken compression": """
        import httpx
        return failure(lambda: httpx.get(BASE + "/bad-gzip"))
    """,
    "a broken status line": """
        import httpx
        return failure(lambda: httpx.get(BASE + "/garbage"))
    """,
    "a hang-up": """
        import httpx
        return failure(lambda: httpx.get(BASE + "/hang-up"))
    """,
    "a connection that is reset": """
        import httpx
        return [failure(lambda: httpx.get(BASE + path)) for path in ("/reset", "/reset-in-body")]
    """,
    "an answer before the body is sent": """
        import httpx
        return httpx.post(BASE + "/hasty", content=b"x" * 4_000_000).text
    """,
    "a timeout": """
        import httpx
        return [failure(lambda: httpx.get(BASE + "/slow-head", timeout=0.3)),
                failure(lambda: httpx.get(BASE + "/slow-body", timeout=httpx.Timeout(5, read=0.3)))]
    """,
    "no connection": """
        import httpx
        return failure(lambda: httpx.get(CLOSED))
    """,
}

ASYNC_HTTPX: Final = {
    "several at once": """
        import httpx
        async with httpx.AsyncClient() as client:
            made = await asyncio.gather(*(client.get(BASE + path) for path in ("/plain", "/chunked", "/compressed/gzip")))
            return [each.text for each in made]
    """,
    "lines": """
        import httpx
        async with httpx.AsyncClient() as client, client.stream("GET", BASE + "/lines") as answer:
            return [json.loads(line) async for line in answer.aiter_lines()]
    """,
    "a long body up": """
        import httpx
        async with httpx.AsyncClient() as client:
            told = (await client.post(BASE + "/echo", content=async_blocks(20))).json()
            return [told["size"], told["digest"]]
    """,
    "a long body down": """
        import httpx
        async with httpx.AsyncClient() as client, client.stream("GET", BASE + "/large?bytes=3000001") as answer:
            return await measured_of(answer.aiter_bytes())
    """,
    "cookies and redirects": """
        import httpx
        async with httpx.AsyncClient(follow_redirects=True) as client:
            return (await client.get(BASE + "/redirect/3")).json()
    """,
    "a timeout": """
        import httpx
        async with httpx.AsyncClient(timeout=0.3) as client:
            return [await failure_of(client.get(BASE + "/slow-head")), await failure_of(client.get(BASE + "/slow-body"))]
    """,
    "a cancelled request": """
        import httpx
        async with httpx.AsyncClient(timeout=60) as client:
            found = await failure_of(asyncio.wait_for(client.get(BASE + "/slow-head"), 0.3))
            return [found, (await client.get(BASE + "/chunked")).text]
    """,
    "broken answers": """
        import httpx
        async with httpx.AsyncClient() as client:
            paths = (*SHORT, "/garbage", "/hang-up", "/bad-gzip", "/reset", "/reset-in-body")
            return [await failure_of(client.get(BASE + path)) for path in paths]
    """,
    "no connection": """
        import httpx
        async with httpx.AsyncClient() as client:
            return await failure_of(client.get(CLOSED))
    """,
}

AIOHTTP: Final = {
    "length": """
        import aiohttp
        async with aiohttp.ClientSession() as session, session.get(BASE + "/plain", headers={"X-Test": "1"}) as answer:
            return [answer.status, answer.reason, [*map(list, answer.headers.items())], await answer.text()]
    """,
    "several at once": """
        import aiohttp
        async def text(path):
            async with session.get(BASE + path) as answer:
                return await answer.text()
        async with aiohttp.ClientSession() as session:
            paths = ("/plain", "/chunked", "/compressed/gzip", "/compressed/deflate", "/until-close", "/nothing/204")
            return await asyncio.gather(*map(text, paths))
    """,
    "one after another": """
        import aiohttp
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            found = []
            for path in ("/plain", "/chunked", "/nothing/304", "/until-close", "/json"):
                async with session.get(BASE + path) as answer:
                    found.append(await answer.text())
            return found
    """,
    "JSON": """
        import aiohttp
        async with aiohttp.ClientSession() as session, session.post(BASE + "/echo", json={"a": [1, "é"]}) as answer:
            return await answer.json()
    """,
    "a form": """
        import aiohttp
        async with aiohttp.ClientSession() as session:
            async with session.post(BASE + "/echo", params={"q": "é"}, data={"a": "1 2"}) as answer:
                return await answer.json()
    """,
    "multipart": """
        import aiohttp
        form = aiohttp.FormData()
        form.add_field("one", b"text", filename="one.txt", content_type="text/plain")
        form.add_field("two", b"x" * 400000, filename="two.bin")
        async with aiohttp.ClientSession() as session, session.post(BASE + "/echo", data=form) as answer:
            told = await answer.json()
            return [told["size"], told["headers"]["Content-Type"].partition(";")[0]]
    """,
    "redirects": """
        import aiohttp
        async with aiohttp.ClientSession() as session:
            async with session.get(BASE + "/redirect/3") as answer:
                found = [[each.status for each in answer.history], (await answer.json())["path"]]
            async with session.post(BASE + "/redirect/1/307", data=b"kept") as answer:
                return [*found, (await answer.json())["start"]]
    """,
    "cookies": """
        import aiohttp
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            await (await session.get(BASE + "/set-cookie")).read()
            async with session.get(BASE + "/echo") as answer:
                return (await answer.json())["headers"]["Cookie"]
    """,
    "authentication": """
        import aiohttp
        async with aiohttp.ClientSession() as session:
            async with session.get(BASE + "/auth", headers={"Authorization": "Basic bWU6c2VjcmV0"}) as answer:
                return await answer.text()
    """,
    "methods": """
        import aiohttp
        async with aiohttp.ClientSession() as session:
            made = [await session.request(method, BASE + "/echo") for method in ("PUT", "DELETE", "PATCH", "OPTIONS")]
            return [(await answer.json())["method"] for answer in made]
    """,
    "no body": """
        import aiohttp
        async with aiohttp.ClientSession() as session, session.head(BASE + "/plain") as answer:
            return [answer.headers["Content-Length"], await answer.text()]
    """,
    "an error status": """
        import aiohttp
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            return await failure_of(session.get(BASE + "/status/503"))
    """,
    "lines": """
        import aiohttp
        async with aiohttp.ClientSession() as session, session.get(BASE + "/lines") as answer:
            return [json.loads(line) async for line in answer.content]
    """,
    "a long body down": """
        import aiohttp
        async with aiohttp.ClientSession() as session, session.get(BASE + "/large?bytes=3000001") as answer:
            return await measured_of(answer.content.iter_chunked(50000))
    """,
    "a body that is not read": """
        import aiohttp
        async with aiohttp.ClientSession() as session:
            async with session.get(BASE + "/large?bytes=3000001") as answer:
                first = len(await answer.content.readexactly(1000))
            async with session.get(BASE + "/chunked") as answer:
                return [first, await answer.text()]
    """,
    "a long body up": """
        import aiohttp
        async with aiohttp.ClientSession() as session:
            async with session.post(BASE + "/echo", data=async_blocks(20)) as answer:
                told = await answer.json()
                return [told["size"], told["digest"]]
    """,
    "waiting to send": """
        import aiohttp
        async with aiohttp.ClientSession() as session, session.post(BASE + "/echo", data=b"x", expect100=True) as answer:
            return (await answer.json())["size"]
    """,
    "broken answers": """
        import aiohttp
        async def read(path):
            async with session.get(BASE + path) as answer:
                return await answer.read()
        async with aiohttp.ClientSession() as session:
            paths = (*SHORT, "/hang-up", "/bad-gzip", "/reset", "/reset-in-body")
            return [await failure_of(read(path)) for path in paths]
    """,
    "a timeout": """
        import aiohttp
        async def read(path, **limits):
            async with session.get(BASE + path, timeout=aiohttp.ClientTimeout(**limits)) as answer:
                return await answer.read()
        async with aiohttp.ClientSession() as session:
            return [await failure_of(read("/slow-head", total=0.3)), await failure_of(read("/slow-body", total=0.3)),
                    await failure_of(read("/slow-head", sock_read=0.3)), await failure_of(read("/slow-body", sock_read=0.3))]
    """,
    "no connection": """
        import aiohttp
        async with aiohttp.ClientSession() as session:
            return await failure_of(session.get(CLOSED))
    """,
}

PANDAS: Final = {
    "a table": """
        import pandas
        return pandas.read_csv(BASE + "/csv").to_dict("list")
    """,
    "a compressed table": """
        import pandas
        return pandas.read_csv(BASE + "/csv-gzip").to_dict("list")
    """,
    "headers": """
        import pandas
        return pandas.read_json(BASE + "/echo", storage_options={"X-Test": "1"}, typ="series")["headers"]["X-Test"]
    """,
    "an error status": """
        import pandas
        return failure(lambda: pandas.read_csv(BASE + "/status/404"))
    """,
}

LIBRARIES: Final = {
    "urllib": URLLIB,
    "http.client": HTTP_CLIENT,
    "requests": REQUESTS,
    "urllib3": URLLIB3,
    "httpx": HTTPX,
    "async httpx": ASYNC_HTTPX,
    "httpx2": {feature: body.replace("import httpx\n", "import httpx2 as httpx\n") for feature, body in HTTPX.items()},
    "aiohttp": AIOHTTP,
    "pandas": PANDAS,
}
PACKAGES: Final = {"pandas": ["numpy", "pandas"], "urllib3": ["urllib3"], "async httpx": ["httpx"]}
"""What a sandbox needs for them, where that is not called as the library is."""
ALL_PACKAGES: Final = sorted(
    {each for name in LIBRARIES for each in PACKAGES.get(name, [name])} - {"urllib", "http.client"}
)
"""One environment for all tests of libraries."""
