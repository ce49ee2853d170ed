"""A server of the page with exact maps on request, for this machine alone."""

import socket
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from .look import Look
from .maps import compute_maps, whole

ADDRESS = "127.0.0.1"
# limit of the path with its query; ours are shorter
MOST_CHARACTERS = 300
# a client that sends nothing for this long is disconnected
PATIENCE_SECONDS = 30
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


class Rejected(Exception):
    """A request that is rejected, with the status and the reason."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Explorer:
    """Answers to requests about some models and images in memory; nothing else can be reached."""

    def __init__(self, looks: Sequence[Look], page: str) -> None:
        self.looks = list(looks)
        self.page = page.encode()
        # torch uses all cores for one request already
        self._one_at_a_time = threading.Lock()

    def rows(self, question: dict[str, str]) -> bytes:
        """Return the maps of all layers as float32: from the patch at y, x (fractions), or from a token before the grid."""
        look = self.looks[whole_number(question, "model", len(self.looks))]
        image = whole_number(question, "image", len(look.images))
        token = whole_number(question, "token", 64) if "token" in question else None
        y, x = (0.5, 0.5) if token is not None else (part(question, "y"), part(question, "x"))
        answers = []
        with self._one_at_a_time:
            for record, layer in zip(look.records, look.layers, strict=True):
                is_patch = token is None or not layer.prefix
                query = layer.query_at(y, x) if is_patch or token is None else min(token, layer.prefix - 1)
                answers.append(whole(compute_maps(record, layer, torch.tensor([query]), image=image)))
        return b"".join(answers)


def whole_number(question: dict[str, str], name: str, end: int) -> int:
    text = question.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < end):
        raise Rejected(HTTPStatus.BAD_REQUEST, f"{name} must be a whole number from 0 to {end - 1}")
    return int(text)


def part(question: dict[str, str], name: str) -> float:
    try:
        value = float(question.get(name, ""))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise Rejected(HTTPStatus.BAD_REQUEST, f"{name} must be a number from 0 to 1")
    return value


class Handler(BaseHTTPRequestHandler):
    """A handler of two addresses: the page, and rows."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "nalaformer", ""
    timeout = PATIENCE_SECONDS
    server: "ExploreServer"

    def do_GET(self) -> None:
        try:
            self._check()
            address = urlsplit(self.path)
            if address.path == "/":
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.explorer.page)
            elif address.path == "/rows":
                found = parse_qs(address.query, max_num_fields=8)
                question = {name: values[0] for name, values in found.items() if len(values) == 1}
                self._answer(HTTPStatus.OK, "application/octet-stream", self.server.explorer.rows(question))
            else:
                raise Rejected(HTTPStatus.NOT_FOUND, "there are two addresses here: / and /rows")
        except Rejected as rejected:
            self._reject(rejected.status, str(rejected))
        except ValueError:
            self._reject(HTTPStatus.BAD_REQUEST, "the address cannot be read")

    def _check(self) -> None:
        # a page of another site may make this browser send requests under its own host name (DNS rebinding)
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in self.server.names:
            raise Rejected(HTTPStatus.MISDIRECTED_REQUEST, f"the host must be {self.server.names[0]}")
        if len(self.path) > MOST_CHARACTERS:
            raise Rejected(HTTPStatus.REQUEST_URI_TOO_LONG, f"an address has at most {MOST_CHARACTERS} characters")
        if self.headers.get("Content-Length", "0") != "0" or self.headers.get("Transfer-Encoding"):
            raise Rejected(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request has no body")

    def _reject(self, status: HTTPStatus, reason: str) -> None:
        # the rest of the request is not read
        self.close_connection = True
        self._answer(status, "text/plain; charset=utf-8", reason.encode())

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), **HEADERS}
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing, since every movement of the patch would be a line."""


class ExploreServer(ThreadingHTTPServer):
    """A server on this machine alone; port 0: a free one."""

    daemon_threads = True

    def __init__(self, explorer: Explorer, *, port: int = 0) -> None:
        super().__init__((ADDRESS, port), Handler)
        self.explorer = explorer
        chosen = self.server_address[1]
        self.names = [f"{ADDRESS}:{chosen}", f"localhost:{chosen}"]
        self.url = f"http://{self.names[0]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnects; report all other errors."""
        import sys

        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def refuse_used_port(port: int) -> None:
    """Check that the port is free before a model is loaded; 0 is always free."""
    try:
        socket.create_server((ADDRESS, port)).close()
    except OSError as error:
        raise ValueError(
            f"--port must name a port of {ADDRESS} that is free, got {port}: {error.strerror}; choose another, or omit the "
            "option for a free one"
        ) from error


def serve(explorer: Explorer, *, port: int, say: Callable[[str], None]) -> None:
    """Answer requests until Ctrl-C; `say` gets the address once it is open."""
    with ExploreServer(explorer, port=port) as server:
        try:
            say(server.url)
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            say("")
