"""A stand-in for the Hugging Face hub on the loopback interface: what huggingface_hub asks of it to download and to upload."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories, each with one commit on main, and what was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []
        self.commits: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.url, self.private = "", False

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(f"{method} {path}")
        if found := re.fullmatch(r"/api/models/(\w[\w.-]*/\w[\w.-]*)(?:/revision/(.+))?", path):
            return self._info(found[1], found[2] or "main")
        if found := re.fullmatch(r"/api/models/(.+?)/tree/(.+)", path):
            files = self.repos[found[1]].items()
            return _json([{"type": "file", "path": n, "size": len(b), "oid": _oid(b)} for n, b in files])
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(method, self.repos[found[1]].get(found[3]))
        if path == "/api/repos/create":
            self.created.append(asked := json.loads(body))
            return _json({"url": f"{self.url}/{asked.get('organization', 'me')}/{asked['name']}"})
        if path == "/api/whoami-v2":
            return _json({"name": "me", "type": "user", "auth": {"type": "access_token"}})
        if path == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if re.fullmatch(r"/api/models/.+/preupload/main", path):
            files = json.loads(body)["files"]
            big = {one["path"]: "lfs" if one["path"].endswith(".safetensors") else "regular" for one in files}
            return _json(
                {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in big.items()]}
            )
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{self.url}/blob/{one['oid']}"}}
            return _json({"transfer": "basic", "objects": objects})
        if method == "PUT":
            self.blobs[path.removeprefix("/blob/")] = body
            return 200, {}, b""
        if re.fullmatch(r"/api/models/.+/commit/main", path):
            return self._commit([json.loads(line) for line in body.splitlines() if line], path)
        return 404, {}, b"{}"

    def _info(self, repo: str, revision: str) -> tuple[int, dict[str, str], bytes]:
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        return _json(
            {
                "id": repo,
                "sha": COMMIT,
                "private": self.private,
                "siblings": [{"rfilename": n} for n in self.repos[repo]],
            }
        )

    def _file(self, method: str, content: bytes | None) -> tuple[int, dict[str, str], bytes]:
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        head = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(content))}
        return 200, head, content if method == "GET" else b""

    def _commit(self, lines: list[dict[str, Any]], path: str) -> tuple[int, dict[str, str], bytes]:
        files: dict[str, bytes] = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            else:
                self.commits.append(value)
        repo = path.removeprefix("/api/models/").removesuffix("/commit/main")
        self.repos.setdefault(repo, {}).update(files)
        url = f"{self.url}/{repo}/commit/{COMMIT}"
        return _json({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Answer on a port of the loopback interface, `hub.url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, headers, content = hub.answer(self.command, urlsplit(self.path).path, body)
            self.send_response(code)
            for name, value in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = _any

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
