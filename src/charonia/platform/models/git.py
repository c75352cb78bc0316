"""Models in Git repositories: one commit, fetched over HTTPS or SSH by git in an isolated process.

Repositories are not trusted, and git gets no setting from them or from this machine: one protocol, no hooks, filters,
redirects, credential helpers or submodules. Secrets reach git in variables and files, which other users cannot read.
Files of Git LFS come over HTTPS. Their hashes are in pointers; nothing else of a repository is read, nor .lfsconfig.

Source: git's documentation (git-config, git-fetch, git-ls-tree, gitattributes), OpenSSH's ssh_config;
Git LFS's specification of pointers, its batch API, and the authentication of servers over SSH.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from charonia.core.errors import ServingError, invalid, not_found, too_large, unavailable, unsupported
from charonia.http_call import NO_ANSWER, http_call, no_answer_reason
from charonia.platform.artifacts.blobs import demand_room
from charonia.platform.artifacts.manifest import FILES_MAX, safe_path
from charonia.platform.isolation.isolation import Isolation, PrivateFolders, SandboxAccess
from charonia.stores.location import parse_address
from charonia.stores.remote import HttpFile, RemoteFile

POINTER_BYTES_MAX = 1024

BATCH_MAX = 100
"""Files of one request."""

ANSWER_BYTES_MAX = 4 * 2**20

HEADERS_MAX = 16
"""Headers that a server may name for a download."""

SILENCE_S_MAX = 30.0

_MEDIA = "application/vnd.git-lfs+json"
_START = b"version https://git-lfs.github.com/spec/"
_FACTS = re.compile(rb"^oid sha256:([0-9a-f]{64})\nsize ([0-9]{1,15})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LfsServer:
    """Where a repository's files are.

    Attributes:
        url: Its address, which begins with https://.
        headers: Headers with which it lets the caller in.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)


def place_of(answer: object, what: str) -> LfsServer:
    """Return the address and headers that a server names. Raises ServingError: UNAVAILABLE if they are not valid."""
    found = answer if isinstance(answer, dict) else {}
    href, headers = found.get("href"), found.get("header") or {}
    if not isinstance(href, str) or not href.startswith("https://") or not isinstance(headers, dict):
        raise unavailable(f"{what}: expected an https:// address in the answer of its server, got none")
    if len(headers) > HEADERS_MAX or not all(isinstance(text, str) for text in headers.values()):
        raise unavailable(f"{what}: expected at most {HEADERS_MAX} headers in the answer of its server")
    return LfsServer(href, headers)


def pointers(found: Path) -> dict[Path, RemoteFile]:
    """Return hash and size of each file of which a folder, or a path, has only the pointer."""
    paths = [found] if found.is_file() else [path for path in found.rglob("*") if path.is_file()]
    result = {}
    for path in paths:
        text = path.read_bytes() if path.stat().st_size <= POINTER_BYTES_MAX else b""
        if text.startswith(_START):
            facts = _FACTS.search(text)
            if facts is None:
                raise invalid(f"'{path.name}' is not a valid pointer of Git LFS")
            result[path] = RemoteFile(path.name, int(facts[2]), facts[1].decode())
    return result


def fetch(
    server: LfsServer, found: Mapping[Path, RemoteFile], allow: Callable[[str], None], check: Callable[[], None]
) -> None:
    """Replace pointers by their files. Blocks.

    Args:
        allow: Raises for a URL that must not be read.
        check: Called repeatedly; an exception cancels the work.

    Raises:
        ServingError: UNAVAILABLE for a file that the server lacks, or another than the pointer names.
    """
    entries = list(found.items())
    for first in range(0, len(entries), BATCH_MAX):
        part = entries[first : first + BATCH_MAX]
        places = _places(server, [pointer for _, pointer in part], allow)
        for path, pointer in part:
            place = place_of(places.get(pointer.tag), f"Git LFS: '{path.name}'")
            allow(place.url)
            digest = hashlib.sha256()
            with path.open("wb") as file:
                source = HttpFile(parse_address(place.url), allow, place.headers)
                for piece in source.read(pointer, 0, pointer.size) if pointer.size else ():
                    digest.update(piece)
                    file.write(piece)
                    check()
            if digest.hexdigest() != pointer.tag:
                raise unavailable(f"Git LFS: '{path.name}': the server sent another file than the pointer names")


def _places(server: LfsServer, wanted: list[RemoteFile], allow: Callable[[str], None]) -> dict[str, object]:
    """Return the answer of the batch API for each hash, where there is a file."""
    allow(server.url)
    objects = [{"oid": pointer.tag, "size": pointer.size} for pointer in wanted]
    body = {"operation": "download", "transfers": ["basic"], "hash_algo": "sha256", "objects": objects}
    headers = {**server.headers, "Accept": _MEDIA, "Content-Type": _MEDIA}
    url, sent = f"{server.url.rstrip('/')}/objects/batch", json.dumps(body).encode()
    try:
        answer = http_call(
            "POST", url, headers, sent, timeout_s=SILENCE_S_MAX, bytes_max=ANSWER_BYTES_MAX, through_proxy=True
        )
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            raise unavailable(f"Git LFS: '{server.url}' answers {answer.status}")
        found: Any = json.loads(answer.body)
    except (*NO_ANSWER, RecursionError) as error:
        raise unavailable(f"Git LFS: '{server.url}' cannot be read: {no_answer_reason(error)}") from None
    listed = found.get("objects") if isinstance(found, dict) else None
    entries = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return {
        each["oid"]: actions.get("download")
        for each in entries
        if isinstance(each.get("oid"), str) and isinstance(actions := each.get("actions"), dict)
    }


FETCH_S_MAX = 1800.0
"""Time limit for all commands of one fetch."""

LOOK_S_MAX = 60.0
"""Time limit for a look at the commit of a branch."""

FETCHED_BYTES_MAX = 32 * 2**30
"""Most bytes that git writes, and that the files of a commit have."""

MEMORY_BYTES_MAX = 2 * 2**30
"""Address space of a process of git."""

LISTING_BYTES_MAX = 16 * 2**20
"""Longest list of a commit's files."""

MESSAGE_CHARS_MAX = 500

CHECK_S = 0.2
"""Interval between checks for a cancellation, and of the bytes on the disk."""

_HOST = r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*)"
_PORT = r"(?P<port>:[0-9]{1,5})?"
_USER = r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@"
_PATH = r"(?P<path>[A-Za-z0-9_.~+%][A-Za-z0-9_.~+%/-]*)"
_REST = r"(?:@(?P<ref>[A-Za-z0-9_][A-Za-z0-9_./+-]*))?(?:#(?P<folder>.+))?"
_FORMS = (
    re.compile(rf"(?:git\+)?(?P<scheme>https)://{_HOST}{_PORT}/{_PATH}{_REST}"),
    re.compile(rf"(?:git\+)?(?P<scheme>ssh)://(?:{_USER})?{_HOST}{_PORT}/{_PATH}{_REST}"),
    re.compile(rf"{_USER}{_HOST}:{_PATH}{_REST}"),
)

_HUB_FORM = re.compile(r"hf://(?P<path>\w[\w.-]*/\w[\w.-]*)(?P<rest>[@#].*)?", re.ASCII)

HUB_VARIABLE = "HF_ENDPOINT"
"""Variable with the address of a mirror of Hugging Face's hub, as for its own tools."""

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)

_HEADER = "Authorization: "

_UNSET = ("text", "eol", "ident", "filter", "working-tree-encoding")
"""Attributes that would change content at the checkout."""

_SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.symlinks": "false",
    "core.bigFileThreshold": "16m",
    "core.packedGitWindowSize": "32m",
    "core.packedGitLimit": "256m",
    "pack.threads": "1",
    "credential.helper": "",
    "fetch.recurseSubmodules": "false",
    "gc.auto": "0",
    "http.followRedirects": "false",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "transfer.fsckObjects": "true",
}

_SSH = (
    "ssh", "-F", "none", "-oBatchMode=yes", "-oStrictHostKeyChecking=yes", "-oGlobalKnownHostsFile=none",
    "-oIdentitiesOnly=yes", "-oIdentityAgent=none", "-oUpdateHostKeys=no", "-oClearAllForwardings=yes",
    "-oPermitLocalCommand=no", "-oConnectTimeout=30", "-oServerAliveInterval=15",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GitAddress:
    """A folder or file of a repository.

    Attributes:
        remote: The repository as git takes it.
        ref: Branch, tag or commit, "" for the default branch.
        folder: Folder or file in the repository, "" for all of it.
    """

    text: str
    scheme: str
    host: str
    port: str
    remote: str
    ref: str
    folder: str

    @property
    def name(self) -> str:
        """The last part of the address: of the folder or file if there is one, else of the repository."""
        return (self.folder or self.remote.removesuffix("/").removesuffix(".git")).replace(":", "/").split("/")[-1]

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}{self.port}/"

    @property
    def ssh(self) -> tuple[str, str]:
        """The host for ssh, with its user, and the path of the repository there."""
        rest = self.remote.removeprefix("ssh://")
        host, _, path = rest.partition("/" if self.remote != rest else ":")
        return host.removesuffix(self.port), path

    def at(self, commit: str) -> str:
        """Return the address of a commit, which can be added again."""
        prefix = "git+" if "://" in self.remote else ""
        return f"{prefix}{self.remote}@{commit}" + (f"#{self.folder}" if self.folder else "")


def is_git(text: str) -> bool:
    """Whether a source is in a Git repository: git+https://, git+ssh://, ssh://, hf://, USER@HOST:PATH, https://HOST/PATH.git."""
    found = _match(text)
    parts = found.groupdict() if found is not None else {"scheme": "https", "path": ""}
    return text.startswith(("git+", "hf://")) or parts.get("scheme") != "https" or parts["path"].endswith(".git")


def _match(text: str) -> re.Match[str] | None:
    """Match an address; a model of Hugging Face's hub is a Git repository there."""
    if (hub := _HUB_FORM.fullmatch(text)) is not None:
        text = f"{os.environ.get(HUB_VARIABLE) or 'https://huggingface.co'}/{hub['path']}{hub['rest'] or ''}"
    return next((match for form in _FORMS if (match := form.fullmatch(text)) is not None), None)


def parse_git(text: str) -> GitAddress:
    """Return the address that a text means. Raises ServingError: INVALID_ARG for any other text."""
    found = _match(text)
    if found is None or ".." in (found["ref"] or ""):
        raise invalid(
            "address of a Git repository: expected git+https://HOST/PATH[@REF][#FOLDER], git+ssh://USER@HOST/PATH[...] "
            "or USER@HOST:PATH[...], or hf://ORGANIZATION/MODEL[...], without a password",
            hint="a token or a key is a secret of the project",
        )
    parts = found.groupdict()
    scheme, port = parts.get("scheme") or "ssh", parts.get("port") or ""
    user = f"{parts['user']}@" if parts.get("user") else ""
    if parts.get("scheme"):
        remote = f"{scheme}://{user}{parts['host']}{port}/{parts['path']}"
    else:
        remote = f"{user}{parts['host']}:{parts['path']}"
    folder = safe_path(parts["folder"]) if parts["folder"] else ""
    return GitAddress(text, scheme, parts["host"], port, remote, parts["ref"] or "", folder)


def latest_commit(address: GitAddress, secret: str, scratch: Path, isolation: Isolation) -> str:
    """Return the commit of a branch or tag, without fetching it. Arguments and errors as for `checkout`."""
    names = [f"refs/heads/{address.ref}", f"refs/tags/{address.ref}^{{}}", f"refs/tags/{address.ref}"]
    with _git(address, secret, scratch, isolation, lambda: None, LOOK_S_MAX) as git:
        lines = git.run("ls-remote", address.remote, *(names if address.ref else ["HEAD"])).decode().splitlines()
    found = {name: commit for commit, _, name in (line.partition("\t") for line in lines)}
    commit = next((found[name] for name in (*names, "HEAD") if name in found), "")
    if not commit:
        raise not_found(f"'{address.text}': the repository has no such branch or tag")
    return commit


_FETCH = """\
cd "$0"; remote="$1"; ref="$2"; shift 2
git init --quiet --template=
git fetch --quiet --depth=1 --no-tags --no-recurse-submodules --no-auto-maintenance "$remote" "$ref"
commit="$(git rev-parse --verify 'FETCH_HEAD^{commit}')"
echo "$commit"
exec git ls-tree -r -l -z --full-tree "$commit" "$@"
"""
"""One script: to confine a process takes longer than most of these commands."""


@contextmanager
def checkout(
    address: GitAddress,
    secret: str,
    scratch: Path,
    isolation: Isolation,
    check: Callable[[], None],
    allow: Callable[[str], None],
) -> Iterator[tuple[Path, str]]:
    """Yield the path of the folder or file at one commit, and the commit.

    Args:
        secret: A token, USER:TOKEN, or a private key and lines of a known_hosts file; "" for none. Never quoted.
        scratch: An empty folder for repository and files.
        check: Called repeatedly; an exception cancels the work.
        allow: Raises for the URL of a server of Git LFS that must not be read.

    Raises:
        ServingError: NOT_FOUND, UNAVAILABLE for git's own failures; INVALID_ARG, UNSUPPORTED for what it has fetched.
        TooLargeError: The commit has too many files or bytes.
        StorageFullError: The disk is full.
    """
    with _git(address, secret, scratch, isolation, check, FETCH_S_MAX) as git:
        (scratch / "git" / "info").mkdir(parents=True)
        (scratch / "git" / "info" / "attributes").write_text(f"* {' '.join(f'!{name}' for name in _UNSET)}\n")
        where = ("--", address.folder) if address.folder else ()
        line, _, listing = git.fetch(address.remote, address.ref or "HEAD", *where).partition(b"\n")
        commit = line.decode()
        git.demand(_demand_files(address, listing))
        git.run("--literal-pathspecs", "checkout", "--quiet", commit, "--", address.folder or ".")
        found = scratch / "files" / address.folder
        absent = pointers(found)
        if absent:
            git.demand(sum(pointer.size for pointer in absent.values()))
            fetch(git.lfs_server(), absent, allow, git.check_time)
    yield found, commit


@contextmanager
def _git(
    address: GitAddress,
    secret: str,
    scratch: Path,
    isolation: Isolation,
    check: Callable[[], None],
    limit_s: float,
) -> Iterator["_Git"]:
    if shutil.which("git") is None:
        raise unavailable("git is not installed on the platform's machine", hint="install git, and ssh for git+ssh://")
    with isolation.room(None) as room:
        access, end_s = _access(address, secret, room), time.monotonic() + limit_s
        yield _Git(address, scratch, room, isolation, check, access, limit_s, end_s)


def _access(address: GitAddress, secret: str, room: PrivateFolders) -> dict[str, str]:
    """Return the variables with which git reaches the server, after the key is in the room."""
    settings = {**_SETTINGS, f"protocol.{address.scheme}.allow": "always"}
    variables = {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_SSH_VARIANT": "ssh",
        "LC_ALL": "C",
    }
    if os.environ.get("SSL_CERT_FILE"):
        variables["GIT_SSL_CAINFO"] = os.environ["SSL_CERT_FILE"]
    if address.scheme == "ssh":
        variables["GIT_SSH_COMMAND"] = _ssh(secret, room)
    elif secret:
        token = secret.strip()
        if not token.isascii() or not token.isprintable() or " " in token:
            raise invalid("secret for git+https://: expected TOKEN or USER:TOKEN in one line")
        pair = token if ":" in token else f"oauth2:{token}"  # GitHub, GitLab and Gitea take any name beside a token
        header = f"{_HEADER}Basic {base64.b64encode(pair.encode()).decode()}"
        settings[f"http.{address.url}.extraHeader"] = header
    variables["GIT_CONFIG_COUNT"] = str(len(settings))
    for number, (key, value) in enumerate(settings.items()):
        variables |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return variables


def _ssh(secret: str, room: PrivateFolders) -> str:
    """Return the command of ssh with a key and known hosts, which are written into the room."""
    key = _PRIVATE_KEY.search(secret)
    known = _PRIVATE_KEY.sub("", secret)
    if key is None or not any(line.strip() and not line.lstrip().startswith("#") for line in known.splitlines()):
        raise invalid(
            "secret for git+ssh://: expected a private key, and lines of a known_hosts file with the keys of the host",
            hint="`cat deploy_key known_hosts | charonia people put-secret NAME`",
        )
    files = {"key": key[0].replace("\r", ""), "known_hosts": known.replace("\r", "")}
    for name, text in files.items():
        with open(os.open(room.temporary / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(text + "\n")
    hosts = f'-oUserKnownHostsFile="{room.temporary / "known_hosts"}"'
    return shlex.join([*_SSH, "-i", str(room.temporary / "key"), hosts])


@dataclass(frozen=True, slots=True)
class _Git:
    """Runs git in one repository, confined and with limits."""

    address: GitAddress
    scratch: Path
    room: PrivateFolders
    isolation: Isolation
    check: Callable[[], None]
    variables: Mapping[str, str]
    limit_s: float
    end_s: float

    def run(self, *arguments: str) -> bytes:
        """Return the output of a command of git."""
        return self._run("git", "-C", str(self.scratch.absolute() / "files"), *arguments)

    def fetch(self, remote: str, ref: str, *where: str) -> bytes:
        """Fetch one commit, and return its hash in a line, then its files in the form of `git ls-tree -z`."""
        return self._run("/bin/sh", "-ec", _FETCH, str(self.scratch.absolute() / "files"), remote, ref, *where)

    def demand(self, total: int) -> None:
        """Check that so many bytes of files are accepted, and have room."""
        what = f"'{self.address.text}'"
        if total > FETCHED_BYTES_MAX:
            raise too_large(f"{what}: expected at most {FETCHED_BYTES_MAX} bytes, found {total}", hint=_SMALLER)
        demand_room(self.scratch, total, what=what)

    def lfs_server(self) -> LfsServer:
        """Return the server of Git LFS: below the repository, or the one that the host names over SSH."""
        if self.address.scheme != "ssh":
            remote = self.address.remote.removesuffix("/")
            header = next((value for value in self.variables.values() if value.startswith(_HEADER)), "")
            headers = {"Authorization": header.removeprefix(_HEADER)} if header else {}
            return LfsServer(f"{remote}{'' if remote.endswith('.git') else '.git'}/info/lfs", headers)
        ssh = shlex.split(self.variables["GIT_SSH_COMMAND"])
        port = ["-p", self.address.port.removeprefix(":")] if self.address.port else []
        target, path = self.address.ssh
        answer = self._run(*ssh, *port, target, f"git-lfs-authenticate {shlex.quote(path)} download")
        with contextlib.suppress(ValueError, RecursionError):
            return place_of(json.loads(answer), f"'{self.address.text}': Git LFS")
        raise unavailable(f"'{self.address.text}': Git LFS: the answer of its server is not JSON")

    def check_time(self) -> None:
        """Raise if the work is cancelled or takes too long."""
        self.check()
        if time.monotonic() > self.end_s:
            raise unavailable(f"'{self.address.text}': git has not ended after {self.limit_s:g} s")

    def _run(self, *command: str) -> bytes:
        """Return the output of a command."""
        scratch = self.scratch.absolute()
        files, output, errors = scratch / "files", scratch / "output", scratch / "errors"
        files.mkdir(exist_ok=True)
        own = {"GIT_DIR": str(scratch / "git"), "GIT_WORK_TREE": str(files)}
        access = SandboxAccess(write=[scratch], project=None)
        with (
            output.open("wb") as out,
            errors.open("wb") as err,
            subprocess.Popen(
                self.isolation.command(command, self.room, access),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**self.isolation.environment(self.room, installs=False), **self.variables, **own},
                cwd=self.room.home,
                start_new_session=True,
            ) as process,
        ):
            try:
                self._limit(process.pid)
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(CHECK_S)
                    self.check_time()
                    self._demand_bounds()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            raise self._failure(_start_of(errors, LISTING_BYTES_MAX).decode(errors="replace"))
        if output.stat().st_size > LISTING_BYTES_MAX:
            raise too_large(f"'{self.address.text}': expected at most {FILES_MAX} files, found more", hint=_SMALLER)
        return output.read_bytes()

    def _limit(self, process: int) -> None:
        limits = {resource.RLIMIT_AS: MEMORY_BYTES_MAX, resource.RLIMIT_FSIZE: FETCHED_BYTES_MAX}
        with contextlib.suppress(ProcessLookupError):
            for kind, most in limits.items():
                resource.prlimit(process, kind, (most, most))

    def _demand_bounds(self) -> None:
        demand_room(self.scratch, 0, what=f"'{self.address.text}'")
        total = 0
        for folder, _, names in os.walk(self.scratch):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_size
        if total > 2 * FETCHED_BYTES_MAX:  # the pack, and the files
            raise too_large(f"'{self.address.text}': expected at most {FETCHED_BYTES_MAX} bytes, found more")

    def _failure(self, text: str) -> ServingError:
        lines = ["".join(filter(str.isprintable, line)) for line in text.splitlines() if line.strip()]
        said = "; ".join(lines[-4:])[-MESSAGE_CHARS_MAX:]
        what = f"'{self.address.text}': git: {said}"
        if "couldn't find remote ref" in text or "not our ref" in text:
            return not_found(what, hint="REF is a branch, a tag or the full hash of a commit")
        if "terminal prompts disabled" in text or "Authentication failed" in text or "Permission denied" in text:
            return unavailable(what, hint="the repository needs a secret of the project that may read it")
        if "Host key verification failed" in text:
            return unavailable(what, hint="the secret needs the keys of the host, as `ssh-keyscan HOST` prints them")
        return unavailable(what)


_SMALLER = "name a folder of the repository: ADDRESS#FOLDER"


def _demand_files(address: GitAddress, listing: bytes) -> int:
    """Check the files of a commit before they are written, and return their bytes."""
    entries = [entry.partition(b"\t") for entry in listing.split(b"\0") if entry]
    if not entries:
        raise not_found(f"'{address.text}': the commit has no files at '{address.folder}'")
    if len(entries) > FILES_MAX:
        raise too_large(f"'{address.text}': expected at most {FILES_MAX} files, found {len(entries)}", hint=_SMALLER)
    total = 0
    for facts, _, name in entries:
        mode, kind, _, size = facts.split()
        path = safe_path(name.decode(errors="replace"))
        if kind != b"blob" or mode == b"120000":
            found = "a submodule" if kind == b"commit" else "a link"
            raise unsupported(f"'{address.text}': '{path}' is {found}, expected files", hint=_SMALLER)
        total += int(size)
    return total


def _start_of(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        return file.read(limit)
