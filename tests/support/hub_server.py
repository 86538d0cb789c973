"""A server of the Hugging Face Hub's protocol on loopback, as far as ``huggingface_hub`` asks for it.

Repositories are folders: what is in one is served at the commit that follows from its contents, on branch ``main`` or
by its hash. What was asked of the server is noted. It can be told to refuse, and to end a download in the middle of it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/(?P<kind>models|datasets)/(?P<name>.+)/(?P<what>revision|tree|preupload|commit)/(?P<at>[^/]+)")
_FILE = re.compile(r"/(?P<kind>datasets/)?(?P<name>[^/]+(?:/[^/]+)?)/resolve/(?P<at>[^/]+)/(?P<file>.+)")
_BATCH = re.compile(r"/(?P<name>.+)\.git/info/lfs/objects/batch")


@dataclass
class Hub:
    """The state of the server: ``folders`` by ``models/ORG/NAME`` or ``datasets/ORG/NAME``.

    ``gated`` repositories let nobody have files, ``private`` ones are there for who has ``token`` alone. ``asked`` are
    the paths of files that were sent, ``pushed`` the contents of commits by repository. ``torn`` is the byte of a
    file from which on nothing is sent, None for whole ones. ``status`` is the answer to whatever is asked of a
    repository.
    """

    folders: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    token: str = "hf_secretsecretsecret"
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    pushed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    created: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    torn: int | None = None
    status: int | None = None
    large: dict[str, bytes] = field(default_factory=dict)
    address: str = ""

    def commit(self, repository: str) -> str:
        """The hash of what a repository holds."""
        folder = self.folders[repository]
        contents = "".join(f"{name}{(folder / name).read_bytes()!r}" for name in self.names(repository))
        return hashlib.sha1(contents.encode()).hexdigest()

    def names(self, repository: str) -> list[str]:
        """The files of a repository."""
        folder = self.folders[repository]
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._file(head=True)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.status is not None:
            self._answer({}, self.hub.status)
        elif (found := _API.fullmatch(path)) and found["name"] in self.hub.created:
            self._tell(
                found, {name: len(content) for name, content in self.hub.pushed[found["name"]].items()}, "c" * 40
            )
        elif not (found := _API.fullmatch(path)):
            self._file(head=False)
        elif self._known(f"{found['kind']}/{found['name']}", found["at"]):
            repository = f"{found['kind']}/{found['name']}"
            folder = self.hub.folders[repository]
            sizes = {name: (folder / name).stat().st_size for name in self.hub.names(repository)}
            self._tell(found, sizes, self.hub.commit(repository))

    def _tell(self, found: re.Match[str], sizes: Mapping[str, int], commit: str) -> None:
        """What is in a repository, or what it is."""
        if found["what"] == "tree":
            self._answer([{"type": "file", "path": name, "size": sizes[name], "oid": "0" * 40} for name in sizes])
        else:
            self._answer({"id": found["name"], "sha": commit, "siblings": [{"rfilename": name} for name in sizes]})

    def do_POST(self) -> None:
        path, body = urlsplit(self.path).path, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self._is_known_user():
            self._answer({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization") or "me", asked["name"])))
            self.hub.created.setdefault(name, asked)
            self.hub.pushed.setdefault(name, {})
            self._answer({"url": f"{self.hub.address}/{name}"})
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif found := _BATCH.fullmatch(path):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.hub.address}/lfs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif (found := _API.fullmatch(path)) and found["what"] == "preupload":
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            self._answer({"files": modes})
        elif found and found["what"] == "commit":
            self._commit(found["name"], body)
        else:
            self._answer({"error": "not found"}, 404)

    def do_PUT(self) -> None:
        self.hub.large[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({})

    def _commit(self, name: str, body: bytes) -> None:
        files = self.hub.pushed[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        self._answer({"commitUrl": f"{self.hub.address}/{name}/commit/{'c' * 40}", "commitOid": "c" * 40})

    def _file(self, *, head: bool) -> None:
        found = _FILE.fullmatch(unquote(urlsplit(self.path).path))
        repository = f"{'datasets' if found and found['kind'] else 'models'}/{found['name'] if found else ''}"
        if found is None:
            self._answer({}, 404, {"X-Error-Code": "RepoNotFound"})
            return
        if not self._known(repository, found["at"]):
            return
        if repository in self.hub.gated:
            self._answer({}, 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
            return
        path = self.hub.folders[repository] / found["file"]
        if not path.is_file():
            self._answer({}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        content, start = path.read_bytes(), 0
        about = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": self.hub.commit(repository),
            "Accept-Ranges": "bytes",
        }
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(asked[1])
            self.hub.ranges.append(f"{found['file']} from {start}")
            about["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send_response(206 if asked else 200)
        for name, value in {**about, "Content-Length": str(len(content) - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.hub.asked.append(found["file"])
            self.wfile.write(content[start : self.hub.torn])
            self.close_connection = self.hub.torn is not None and self.hub.torn < len(content)

    def _is_known_user(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _known(self, repository: str, revision: str) -> bool:
        """Whether there is such a repository for who asks, and such a revision; otherwise the answer is given."""
        if repository not in self.hub.folders or (repository in self.hub.private and not self._is_known_user()):
            self._answer({}, 401, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", self.hub.commit(repository)):
            self._answer({}, 404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def _answer(self, content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving(home: Path, *, token: bool = False) -> Iterator[Hub]:
    """A hub without repositories, of which this process is a user whose cache is in ``home``, with a token or without.

    The library read its environment when it was imported, so its constants are replaced; a child process that imports
    it finds the same in the environment.
    """
    from huggingface_hub import close_session, constants

    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    cache, token_file = str(home / "hub"), str(home / "token")
    variables = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN_PATH": token_file,
    }
    replaced: dict[str, Any] = {
        "ENDPOINT": hub.address,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": cache,
        "HF_TOKEN_PATH": token_file,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }
    thread.start()
    try:
        environment = mock.patch.dict("os.environ", {**variables, **({"HF_TOKEN": hub.token} if token else {})})
        with environment, mock.patch.multiple(constants, **replaced):
            close_session()
            yield hub
    finally:
        close_session()
        server.shutdown()
        thread.join()
        server.server_close()
