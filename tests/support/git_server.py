"""Real git behind HTTPS and SSH on loopback, with one repository: group/models.git."""

import hashlib
import json
import os
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme
from tests.support.ports import free_port
from tests.support.process import eventually

AUTHOR = {
    **{f"GIT_{who}_{what}": "ada@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}


@dataclass
class GitServer:
    """A repository and the server before it.

    Attributes:
        authorization: The header that it requires, "" for none.
        seen: Requests, by method and path.
        moved: Where it redirects to, "" for nowhere.
        large: Files of Git LFS by hash.
        large_at: Where the server says that they are, "" for itself.
    """

    root: Path
    address: str = ""
    authorization: str = ""
    seen: list[str] = field(default_factory=list)
    moved: str = ""
    large: dict[str, bytes] = field(default_factory=dict)
    large_at: str = ""

    @property
    def repository(self) -> Path:
        return self.root / "group" / "models.git"

    def git(self, *arguments: str, folder: Path | None = None) -> str:
        command = ["git", "-C", str(folder or self.repository), *arguments]
        return subprocess.check_output(command, env={**os.environ, **AUTHOR}, text=True).strip()

    def pointer(self, content: bytes) -> bytes:
        """Keep a file for Git LFS, and return its pointer as `git lfs` writes it."""
        key = hashlib.sha256(content).hexdigest()
        self.large[key] = content
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{key}\nsize {len(content)}\n".encode()

    def large_answer(self, path: str, body: bytes) -> bytes:
        """Answer a request for Git LFS."""
        if not path.endswith("/batch"):
            return self.large.get(path.rpartition("/")[2], b"")
        place = self.large_at or f"{self.address.removeprefix('git+')}/info/lfs"
        header = {"Authorization": self.authorization} if self.authorization else {}
        found = [
            {**each, "actions": {"download": {"href": f"{place}/{each['oid']}", "header": header}}}
            if each["oid"] in self.large
            else {**each, "error": {"code": 404, "message": "Object does not exist"}}
            for each in json.loads(body)["objects"]
        ]
        return json.dumps({"transfer": "basic", "objects": found}).encode()

    def commit(self, files: Mapping[str, bytes], links: Mapping[str, str] = {}) -> str:  # never changed
        """Commit these files, and no others, to the branch main, and return the commit."""
        lines = [b"commit refs/heads/main", b"mark :1", b"committer ada <ada@example.org> now", b"data 0"]
        if (self.repository / "refs" / "heads" / "main").exists():
            lines.append(b"from refs/heads/main^0")
        lines.append(b"deleteall")
        modes = {**dict.fromkeys(files, "100644"), **dict.fromkeys(links, "120000")}
        contents = {**files, **{path: target.encode() for path, target in links.items()}}
        for path, content in contents.items():
            lines += [f"M {modes[path]} inline {path}".encode(), b"data %d" % len(content), content]
        command = ["git", "-C", str(self.repository), "fast-import", "--quiet", "--date-format=now"]
        stream = b"\n".join([*lines, b"get-mark :1", b""])
        return subprocess.check_output(command, input=stream, env={**os.environ, **AUTHOR}).decode().strip()


@contextmanager
def git_server(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitServer]:
    """Yield an empty repository behind HTTPS, with a certificate of an authority in SSL_CERT_FILE."""
    programs = subprocess.check_output(["git", "--exec-path"], text=True).strip() if shutil.which("git") else ""
    if not Path(programs, "git-http-backend").is_file():
        pytest.skip("git http-backend is not installed")
    served = GitServer(root)
    served.repository.mkdir(parents=True)
    served.git("init", "--quiet", "--bare", "--initial-branch=main")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.seen.append(f"{self.command} {self.path}")
            path, _, query = self.path.partition("?")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if served.moved:
                self._answer(302, {"Location": served.moved})
            elif served.authorization and self.headers.get("Authorization") != served.authorization:
                self._answer(401, {"WWW-Authenticate": "Basic"})
            elif "/info/lfs/" in path:
                self._answer(200, {}, served.large_answer(path, body))
            else:
                self._git(path, query, body)

        def _git(self, path: str, query: str, body: bytes) -> None:
            variables = {
                "GIT_PROJECT_ROOT": str(served.root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            }
            own = {**os.environ, **AUTHOR, **variables}
            output = subprocess.run(["git", "http-backend"], input=body, env=own, stdout=subprocess.PIPE, check=True)
            head, _, content = output.stdout.partition(b"\r\n\r\n")
            fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
            self._answer(int(fields.pop("Status", "200").split()[0]), fields, content)

        def _answer(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 # the name of the library

        def log_message(self, format: str, *args: object) -> None:
            pass

    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(root / "authority.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(root / "authority.pem"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    served.address = f"git+https://127.0.0.1:{server.server_port}/group/models.git"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def ssh_server(folder: Path, lfs: Mapping[str, object]) -> Iterator[tuple[int, str, str]]:
    """Yield the port of an SSH server, a private key that opens it, and a line for known_hosts.

    Args:
        lfs: What its `git-lfs-authenticate` answers.
    """
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or os.getuid() != 0:
        pytest.skip("sshd is not installed, or this is not root")
    Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    for name in ("host", "user"):
        subprocess.check_call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)])
    program_folder = folder / "bin"
    program_folder.mkdir()
    (program_folder / "git-lfs-authenticate").write_text(f"#!/bin/sh\necho {shlex.quote(json.dumps(lfs))}\n")
    (program_folder / "git-lfs-authenticate").chmod(0o755)
    (folder / "config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nPidFile none\n"
        f"SetEnv PATH={program_folder}:/usr/bin:/bin\n"
    )
    process = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "config")], stderr=sys.stderr)
    try:
        assert eventually(lambda: _is_open(port))
        host = (folder / "host.pub").read_text()
        yield port, (folder / "user").read_text(), f"[127.0.0.1]:{port} {host}"
    finally:
        process.terminate()
        process.wait()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
