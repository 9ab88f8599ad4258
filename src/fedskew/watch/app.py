"""The web server of `fedskew watch`: one page, the files it needs, and a stream of what changes. It only reads.

Who gets an answer: on a loopback address, browsers of this machine (the Host header is checked, so that another
site's name cannot be made to point here); with a token, those who have it. Requests of other origins are refused.
The page runs no inline script, has no style but its own and loads nothing from elsewhere; a header tells the browser to
refuse the rest.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from fedskew.deploy.status import STATUS
from fedskew.experiment.live import ACCURACY
from fedskew.report.page import FOLDER as REPORT
from fedskew.watch.entry import Entry, readable
from fedskew.watch.folder import INTERVAL, MOST_RUNS, Folder
from fedskew.watch.page import HERE, STYLE_HASH, page
from fedskew.watch.parts import parts_of

SCRIPTS = {"/charts.js": (REPORT / "charts.js").read_bytes(), "/watch.js": (HERE / "watch.js").read_bytes()}
COOKIE = "fedskew_watch"
ALIVE = 15.0  # seconds after which a stream without news says that it is there
MOST_STREAMS = 30  # pages that are open at a time
LOCAL = ("localhost", "127.0.0.1", "::1")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; "
    f"style-src '{STYLE_HASH}'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Guard:
    """Decides which requests are answered, and adds `HEADERS` to every response. An ASGI application around another.

    hosts: the names that the Host header may have; (): any, as the server's names are not known.
    token: what a browser must know; "": nothing.
    secure: whether the server uses TLS.
    """

    app: Any
    hosts: tuple[str, ...]
    token: str
    secure: bool

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                kept = [(k, v) for k, v in message["headers"] if k.decode("latin-1") not in HEADERS]
                message = message | {"headers": [*kept, *((k.encode(), v.encode()) for k, v in HEADERS.items())]}
            await send(message)

        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            refused = self._refused(scope)
            await (refused or self.app)(scope, receive, with_headers)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refused(self, scope: Any) -> Response | None:
        """The response to a request that is not answered; None if it is."""
        headers = Headers(scope=scope)
        host = host_of(f"//{headers.get('host', '')}")
        if self.hosts and host not in self.hosts:
            return PlainTextResponse("This name is not one of this server's.", 403)
        origin = headers.get("origin")
        site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "")
        followed_link = scope["path"] == "/" and mode == "navigate"  # the page itself, which that site cannot read
        if (origin is not None and urlsplit_netloc(origin) != headers.get("host")) or (
            site not in ("none", "same-origin") and not followed_link
        ):
            return PlainTextResponse("Requests of other origins are not answered.", 403)
        return self._without_token(scope, headers) if self.token else None

    def _without_token(self, scope: Any, headers: Headers) -> Response | None:
        """The response to a request that does not show the token. /?token=... sets a cookie that does."""
        given = QueryParams(scope["query_string"]).get("token")
        if scope["path"] == "/" and given is not None and same(given, self.token):
            leave = RedirectResponse("/", 303)
            leave.set_cookie(COOKIE, cookie_of(self.token), httponly=True, samesite="strict", secure=self.secure)
            return leave
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if same(bearer, self.token) or same(read_cookie(headers.get("cookie", "")), cookie_of(self.token)):
            return None
        return PlainTextResponse("Open the address with the token, as in /?token=...", 401)


def host_of(address: str) -> str:
    """The host in an address, without its port, in lower case; "" if there is none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def urlsplit_netloc(origin: str) -> str:
    """Host and port of an origin; "" if it has none, as the origin "null"."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def cookie_of(token: str) -> str:
    """What a browser keeps of the token: not the token itself."""
    return hashlib.sha256(b"fedskew watch " + token.encode()).hexdigest()


def read_cookie(text: str) -> str:
    """The value of this server's cookie; "" if there is none."""
    try:
        found = SimpleCookie(text).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def same(given: str, expected: str) -> bool:
    """Whether two texts are equal; takes the same time wherever they differ."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode(errors="replace"))


def make_app(
    folder: Folder,
    *,
    host: str = "127.0.0.1",
    token: str = "",
    secure: bool = False,
    over: Callable[[], bool] = lambda: False,
) -> Guard:
    """The application. `host` is the address it listens on; `over` says that it ends; the rest as in `Guard`."""
    open_streams = [0]

    async def first(request: Request) -> Response:
        rows = await to_thread.run_sync(folder.glance)
        return HTMLResponse(page(readable(folder.root.name), rows))

    async def script(request: Request) -> Response:
        return Response(SCRIPTS[request.url.path], media_type="text/javascript")

    async def events(request: Request) -> Response:
        if open_streams[0] >= MOST_STREAMS:
            return PlainTextResponse("Too many pages are open.", 503)
        return StreamingResponse(
            stream(folder, request.query_params.get("run", ""), open_streams, over), media_type="text/event-stream"
        )

    folder.glance()  # what takes longest the first time is done before the first page is asked for
    routes = [Route("/", first, methods=["GET"]), Route("/events", events, methods=["GET"])]
    routes += [Route(path, script, methods=["GET"]) for path in SCRIPTS]
    hosts = (*LOCAL, host.lower()) if is_loopback(host) else ()
    return Guard(Starlette(routes=routes), hosts, token, secure)


async def stream(
    folder: Folder, id: str, open_streams: list[int], over: Callable[[], bool] = lambda: False
) -> AsyncIterator[str]:
    """Server-sent events about the list and one run: first everything, then what changes, until the server ends."""
    sent = {"list": await to_thread.run_sync(dump_list, folder)}  # before anything that takes longer
    spoken = time.monotonic()
    open_streams[0] += 1
    try:
        yield f"event: list\ndata: {sent['list']}\n\n"
        while not over():
            found, whole = await to_thread.run_sync(snapshot, folder, id)
            for name, text in found.items():
                if sent.get(name) != text:
                    sent[name], spoken = text, time.monotonic()
                    yield f"event: {name}\ndata: {text}\n\n"
            if time.monotonic() - spoken > ALIVE:
                spoken = time.monotonic()
                yield ": still here\n\n"
            await anyio.sleep(INTERVAL if whole else 0.01)
    finally:
        open_streams[0] -= 1


def snapshot(folder: Folder, id: str) -> tuple[dict[str, str], bool]:
    """Events by name as JSON, and whether all records are read."""
    with folder.lock:
        found = {"list": _dump_list(folder)}
        run = folder.chosen(id)
        if run is None:
            return found, True
        row = run.row()
        if run.id not in folder.dumped or folder.dumped[run.id][0] != signature(folder, run):
            parts, whole = parts_of(folder, run, row)
            chosen = {"row": msgspec.to_builtins(row), "parts": list(parts)}
            # each part is an event of its own, so that only what changed is sent
            made = {"run": dump(chosen)}
            made |= {f"part-{name}": dump({"run": run.id} | part) for name, part in parts.items()}
            if not whole:
                return found | made, False
            folder.dumped = dict([*folder.dumped.items(), (run.id, (signature(folder, run), made))][-MOST_STREAMS:])
        return found | folder.dumped[run.id][1], True


def dump_list(folder: Folder) -> str:
    """The list of runs as JSON."""
    with folder.lock:
        return _dump_list(folder)


def _dump_list(folder: Folder) -> str:
    rows = folder.look()
    shown = [msgspec.to_builtins(row) for row in rows[:MOST_RUNS]]
    return dump({"runs": shown, "more": len(rows) - len(shown), "folder": readable(folder.root.name)})


def signature(folder: Folder, run: Entry) -> object:
    """Changes whenever something that the parts of a run are made of changes."""
    return run.seen, run.stamp(STATUS), run.stamp(ACCURACY), [one.seen for one in folder.together(run)]


def dump(value: object) -> str:
    """A value as JSON of one line, in ASCII: no letter of a name can end the line of an event."""
    return json.dumps(value, separators=(",", ":"))
