"""A small stand-in of the Hugging Face hub: the endpoints that downloading a model uses, on a free local port.

    with HubStandIn() as hub:
        hub.add("org/name", folder)             # every file of the folder, at a commit of its own
        hub.private["org/name"] = "hf_token"    # this token is needed
        hub.url                                 # for HF_ENDPOINT
        hub.requests                            # (method, path, Range header) of everything asked so far

Large files are kept by sha256 and served through a redirect to another host name, as the hub does.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", "tokenizer.model")


@dataclass
class HubStandIn:
    """The server. `fault`, when set, may answer or cut short a download: (handler, path, content) -> handled."""

    private: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    fault: Callable[[_Handler, str, bytes], bool] | None = None
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def __enter__(self) -> HubStandIn:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.url, self.storage_url = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, repo: str, folder: Path, revision: str = "main") -> str:
        """Publish a folder as `repo` at `revision` and return the commit."""
        files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repos.setdefault(repo, {}).update({revision: files, commit: files})
        self.blobs |= {hashlib.sha256(c).hexdigest(): c for n, c in files.items() if n.endswith(LFS_SUFFIXES)}
        return commit

    def commit(self, repo: str, revision: str) -> str:
        """The commit that a revision stands for."""
        revisions = self.repos[repo]
        return next(r for r, files in revisions.items() if len(r) == 40 and files is revisions[revision])

    def downloaded(self) -> list[str]:
        """The names of the files whose content was asked for, in order."""
        return [path.split("/", 5)[5] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if blob := re.fullmatch(r"/cdn/(\w+)", path):
            return self.send_content(path, self.hub.blobs[blob[1]], {"ETag": f'"{blob[1]}"'})
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        if match is None:
            return self.fail(404, "")
        repo, revision = match[1], (file[2] if file else match[3]) or "main"
        token = self.hub.private.get(repo)
        if repo not in self.hub.repos or (token and self.headers.get("Authorization") != f"Bearer {token}"):
            return self.fail(401, "RepoNotFound")
        if repo in self.hub.gated:
            return self.fail(403, "GatedRepo")
        if revision not in self.hub.repos[repo]:
            return self.fail(404, "RevisionNotFound")
        files = self.hub.repos[repo][revision]
        if file:
            return self._file(repo, revision, file[3], files)
        return self._api(repo, revision, files, tree=match[2] == "tree")

    def _api(self, repo: str, revision: str, files: dict[str, bytes], *, tree: bool) -> None:
        listed = []
        for name, content in files.items():
            entry: dict[str, object] = {"size": len(content)}
            entry["oid" if tree else "blobId"] = hashlib.sha1(content).hexdigest()
            entry |= {"type": "file", "path": name} if tree else {"rfilename": name}
            if name.endswith(LFS_SUFFIXES):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(content), "pointerSize": 130}
            listed.append(entry)
        commit = self.hub.commit(repo, revision)
        document = listed if tree else {"id": repo, "modelId": repo, "sha": commit, "siblings": listed}
        self.send_content("", json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str, files: dict[str, bytes]) -> None:
        commit = {"X-Repo-Commit": self.hub.commit(repo, revision)}
        if name not in files:
            return self.fail(404, "EntryNotFound", commit)
        content = files[name]
        if not name.endswith(LFS_SUFFIXES):
            return self.send_content(name, content, {**commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})
        sha256 = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
        return self.reply(302, {**commit, **linked, "Location": f"{self.hub.storage_url}/cdn/{sha256}"})

    def send_content(self, path: str, content: bytes, headers: dict[str, str]) -> None:
        if self.command == "GET" and self.hub.fault and self.hub.fault(self, path, content):
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return self.reply(200, headers, content)
        start, stop = int(span[1]), min(int(span[2] or len(content)), len(content) - 1) + 1
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return self.reply(206, headers, content[start:stop])

    def fail(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self.reply(status, {"X-Error-Code": code, "X-Error-Message": f"{code} here", **(headers or {})})

    def reply(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Accept-Ranges": "bytes", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def cut(self, content: bytes, size: int) -> None:
        """Promise all of `content`, send `size` bytes of it, and hang up."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:size])
        self.wfile.flush()
        self.close_connection = True
        self.connection.close()


OPEN = """
import hashlib, json, sys
from mgtp.shardplan.errors import MgtpError
from mgtp.shardplan.sources import open_source
from mgtp.shardplan.sources.hub_errors import translate
model, revision, headers_only = json.loads(sys.argv[1])
try:
    source = open_source(model, revision=revision, headers_only=headers_only)
    found = {"tensors": {n: [t.dtype, t.shape] for n, t in source.tensors.items()}, "files": sorted(source.files)}
    found |= {name: getattr(source, name) for name in ("label", "fingerprint", "has_weights", "config")}
    found["notes"] = list(source.notes)
    if source.has_weights:
        rows = [source.rows(n, 0, t.shape[0]).tobytes() for n, t in sorted(source.tensors.items())]
        found["digest"] = hashlib.sha256(b"".join(rows)).hexdigest()
except MgtpError as error:
    found = {"error": error.message, "hint": error.hint, "code": error.exit_code}
print(json.dumps(found))
"""


def open_in_process(hub: HubStandIn, home: Path, arguments: list[Any], env: dict[str, str]) -> dict[str, Any]:
    """Open a model (model, revision, headers_only) in a fresh process: what it found, or its error, hint and exit code.

    `home` is the working directory and holds HF_HOME; `env` are further environment variables.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    result = subprocess.run(
        [sys.executable, "-c", OPEN, json.dumps(arguments)],
        env={**clean, **quiet, "HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), **env},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "Fetching" not in result.stderr  # no progress bars into a pipe
    found = json.loads(result.stdout)
    if "error" in found:
        assert "\n" not in found["error"]
        assert found["hint"]
    return found
