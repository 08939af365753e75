"""What is said before a model is downloaded, against a hub of our own: a real server, and the hub's real client."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("transformers", reason="the torch extra is not installed")

from portadraft.models import resolve
from portadraft.tuner.download import announce
from tests.test_api import save_model

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "c" * 40
BESIDE = {  # what other programs read of a repository; loading does not
    "consolidated.safetensors": b"c" * 90_000,
    "pytorch_model.bin": b"b" * 80_000,
    "onnx/model.safetensors": b"o" * 70_000,
    "README.md": b"r" * 60_000,
}


@dataclass
class Hub:
    """A server of models: {id: {file: bytes}}; requests: paths asked for; sent: bytes of files by name; requests_of:
    what pull requests add, by model and reference.
    """

    models: dict[str, dict[str, bytes]]
    url: str = ""
    requests: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    requests_of: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        for model, files in self.models.items():
            if path in (f"/api/models/{model}", f"/api/models/{model}/revision/main"):
                siblings = [{"rfilename": n, "size": len(d), "blobId": _etag(d)} for n, d in files.items()]
                return 200, json.dumps({"id": model, "sha": COMMIT, "siblings": siblings}).encode(), {}
            if path == f"/api/models/{model}/refs":
                requests = [{"name": n, "ref": n, "targetCommit": COMMIT} for n in self.requests_of.get(model, {})]
                refs = {"branches": [], "converts": [], "tags": [], "pullRequests": requests}
                return 200, json.dumps(refs).encode(), {}
            for name, more in self.requests_of.get(model, {}).items():
                if unquote(path) == f"/api/models/{model}/revision/{name}":
                    siblings = [{"rfilename": n, "size": len(d), "blobId": _etag(d)} for n, d in (files | more).items()]
                    return 200, json.dumps({"id": model, "sha": COMMIT, "siblings": siblings}).encode(), {}
            if path.startswith(f"/api/models/{model}/tree/"):
                tree = [{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in files.items()]
                return 200, json.dumps(tree).encode(), {}
            for revision in ("main", COMMIT):
                name = path.removeprefix(f"/{model}/resolve/{revision}/")
                if name in files:
                    headers = {"ETag": f'"{_etag(files[name])}"', "X-Repo-Commit": COMMIT}
                    return 200, files[name], headers
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._send(body=False)

        def do_GET(self) -> None:
            self._send(body=True)

        def _send(self, body: bool) -> None:
            path = urlsplit(self.path).path
            hub.requests.append(path)
            status, data, headers = hub.answer(path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)
                if "/resolve/" in path:
                    hub.sent[path.split(f"/{COMMIT}/")[-1]] = len(data)

        def log_message(self, *_: Any) -> None: ...

    return Handler


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    save_model(tmp_path / "whole", max_position_embeddings=2048)
    files = {p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()}
    half = {**files, "model-00001-of-00002.safetensors": files["model.safetensors"],
            "model-00002-of-00002.safetensors": b"x" * 123}  # fmt: skip
    del half["model.safetensors"]
    names = [n for n in half if n.endswith(".safetensors")]
    half["model.safetensors.index.json"] = json.dumps({"weight_map": dict(zip("ab", names, strict=True))}).encode()
    pickled = {n: d for n, d in files.items() if not n.endswith(".safetensors")} | BESIDE
    del pickled["consolidated.safetensors"]
    hub = Hub({"me/tiny": files | BESIDE, "me/parts": half, "me/pickled": pickled})
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield hub
    server.shutdown()
    server.server_close()


def client(code: str, hub_url: str, home: Path, offline: bool = False, *arguments: str) -> Any:
    """Run a program whose hub is ours and whose cache is its own: the client reads both when it is imported."""
    env = os.environ | {
        "HF_ENDPOINT": hub_url, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": str(int(offline)),
        "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1", "XDG_DATA_HOME": str(home / "data"),
        "PORTADRAFT_CACHE": str(home / "cache"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    done = subprocess.run([sys.executable, *arguments] if arguments else [sys.executable, "-c", code],
                          capture_output=True, text=True, timeout=200, check=False, cwd=ROOT, env=env)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


ASK = """
import json
from portadraft.backends.sources import fetch
from portadraft.models import resolve
from portadraft.tuner.download import announce
source, said = resolve("{model}"), []
for _ in range(2):
    said.append(announce(source))
    folder = fetch(source)
{then}
print(json.dumps(said))
"""


def test_the_download_is_announced_as_it_then_is(hub: Hub, tmp_path: Path) -> None:
    """Files and bytes are those that loading fetches; afterwards nothing is said and nobody asked."""
    done = client(ASK.format(model="me/tiny", then=""), hub.url, tmp_path)
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert f"downloads {len(hub.sent)} files, {sum(hub.sent.values()) / 1e6:.1f} MB," in first
    assert "model.safetensors" in hub.sent and not set(hub.sent) & set(BESIDE)
    assert second is None
    hub.requests.clear()
    alone = "from portadraft.models import resolve; from portadraft.tuner.download import announce\n"
    alone += "print(announce(resolve('me/tiny')))"
    assert client(alone, hub.url, tmp_path).stdout.strip() == "None"
    assert hub.requests == []
    assert client(alone, "http://127.0.0.1:9", tmp_path, offline=True).stdout.strip() == "None"
    assert "could not be asked" in client(alone, "http://127.0.0.1:9", tmp_path / "new", offline=True).stdout


def test_a_download_that_was_broken_off_is_announced(hub: Hub, tmp_path: Path) -> None:
    then = '(folder / "model-00002-of-00002.safetensors").unlink()\nsaid.append(announce(source))'
    done = client(ASK.format(model="me/parts", then=then), hub.url, tmp_path)
    *_, last = json.loads(done.stdout.splitlines()[-1])
    assert f"not all on this machine: loading it downloads 1 (of {len(hub.sent)}) files, 0.0 MB" in last


def test_weights_that_are_not_read_are_not_counted(hub: Hub, tmp_path: Path) -> None:
    code = "from portadraft.models import resolve; from portadraft.tuner.download import announce\n"
    code += "print(announce(resolve('me/pickled')), '|', announce(resolve('me/nowhere')), '|', "
    code += "announce(resolve('me/vicuna')))"
    hub.models["me/vicuna"] = hub.models["me/pickled"]
    weights = {"model.safetensors": b"w" * 2_000_000}
    hub.requests_of = {"me/vicuna": {"refs/pr/12": weights, "refs/pr/3": weights, "refs/pr/1": {"notes.md": b"n"}}}
    pickled, nowhere, vicuna = client(code, hub.url, tmp_path).stdout.split("|")
    assert "no safetensors weights" in pickled and "save_pretrained" in pickled and "refs/pr" not in pickled
    assert "could not be asked" in nowhere
    assert "no safetensors weights" in vicuna and "'me/vicuna@refs/pr/3' (2.0 MB)" in vicuna


def test_folders_are_not_announced(hub: Hub, tmp_path: Path) -> None:
    assert announce(resolve(tmp_path / "whole")) is None


TUNE = """
import socket, sys
from typer.testing import CliRunner
from portadraft.cli.app import app
from huggingface_hub import constants

def refuse(self, address, *_):
    raise AssertionError(f"the network is used: {address}")

runner = CliRunner()
for offline in (False, True):
    if offline:
        constants.HF_HUB_OFFLINE = True
        socket.socket.connect = socket.socket.connect_ex = refuse
    done = runner.invoke(app, sys.argv[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    print("|", done.stderr, "|", done.stdout, end="")
"""


def test_tune_says_it_and_then_works_from_the_cache_alone(hub: Hub, tmp_path: Path) -> None:
    """The second time without a network: whoever connects to anything raises."""
    pytest.importorskip("skopt", reason="the tune extra is not installed")
    prompts = ("abc abc abc", "one two three one two", "0123456789 0123456")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts), "utf-8")
    done = client(
        "", hub.url, tmp_path, False,
        "-c", TUNE, "tune", "--model", "me/tiny", "--drafter", "lookup", "--predict-only", "--budget", "0.5s",
        "--dtype", "float32", "--device", "cpu", "-n", "16", "--context", "20", "--prompts", str(tmp_path / "p.jsonl"),
        "--json",
    )  # fmt: skip
    _, online, first, offline, second = (part.strip() for part in done.stdout.split("|"))
    assert "me/tiny is not on this machine: loading it downloads" in online
    assert offline == ""
    assert hub.requests
    for document in (first, second):
        assert json.loads(document)["best_drafter"] == "lookup"
