"""Assets: packages through a stand-in registry, a hub on 127.0.0.1."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import fetch
import pytest
from hub import FetchError, Hub

# Copies what a folder holds under the asked-for spec, or fails as pip does.
REGISTRY = """
import pathlib, shutil, sys
shelf, into, spec = sys.argv[1:]
found = list(pathlib.Path(shelf).glob(spec.replace("/", "+") + ".*"))
if not found:
  print("WARNING: slow", file=sys.stderr)
  sys.exit(f"ERROR: No matching distribution found for {spec}")
shutil.copy(found[0], into)
open(shelf + "/asked", "a").write(spec + "\\n")
"""


def digest(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()


def zipped(files: dict[str, bytes]) -> bytes:
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, "w") as archive:
    for name, content in files.items():
      archive.writestr(name, content)
  return buffer.getvalue()


def tarred(files: dict[str, bytes]) -> bytes:
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
    for name, content in files.items():
      member = tarfile.TarInfo(name)
      member.size = len(content)
      archive.addfile(member, io.BytesIO(content))
  return buffer.getvalue()


def an_asset(**fields) -> fetch.Asset:
  start = dict(
    name="thing",
    sets=["demo"],
    what="a thing",
    licence="CC0",
    source="pypi",
    package="pkg",
    version="1.0",
    size=1000,
    files=["pkg/data/*.json"],
    strip="pkg/data/",
  )
  return fetch.Asset(**(start | fields))


@dataclasses.dataclass
class Shelf:
  """A registry: archives by spec, and what was asked for."""

  folder: Path

  def put(self, name: str, content: bytes) -> str:
    (self.folder / name).write_bytes(content)
    return digest(content)

  def asked(self) -> list[str]:
    log = self.folder / "asked"
    return log.read_text().split() if log.exists() else []

  def fetch(self, *assets: fetch.Asset, into: Path):
    command = [sys.executable, "-c", REGISTRY, str(self.folder)]
    registries = {"pypi": command, "npm": command}
    fetch.fetch(assets, into, Hub(), registries)


@pytest.fixture
def shelf(tmp_path):
  (tmp_path / "shelf").mkdir()
  return Shelf(tmp_path / "shelf")


@pytest.fixture
def cache(tmp_path):
  return tmp_path / "cache"


WHEEL = {
  "pkg/__init__.py": b"raise SystemExit('never import me')",
  "pkg/data/a.json": b"[1]",
  "pkg/data/b.json": b"[2]",
  "pkg/data/deep/c.json": b"[3]",
  "pkg/data/b.txt": b"no",
}


def files_of(home: Path) -> dict[str, bytes]:
  paths = (path for path in home.rglob("*") if path.is_file())
  return {str(path.relative_to(home)): path.read_bytes() for path in paths}


def test_a_wheel_gives_the_listed_files_and_no_others(shelf, cache, capsys):
  pin = shelf.put("pkg==1.0.whl", zipped(WHEEL))
  shelf.fetch(an_asset(sha256=pin), into=cache)
  assert files_of(cache / "thing") == {"a.json": b"[1]", "b.json": b"[2]"}
  assert "Licence: CC0" in capsys.readouterr().out
  recorded = json.loads((cache / "assets.lock.json").read_text())
  assert recorded["thing"]["files"]["b.json"] == digest(b"[2]")


def test_an_npm_archive_and_an_archive_within_an_archive(shelf, cache):
  tgz = shelf.put("@org+tok@2.0.tgz", tarred({"package/models/t.json": b"{}"}))
  jar = zipped({"topics/q.txt": b"who?", "Main.class": b"\xca\xfe"})
  whl = shelf.put("pkg==1.0.whl", zipped({"pkg/x.jar": jar}))
  shelf.fetch(
    an_asset(
      name="tok",
      source="npm",
      package="@org/tok",
      version="2.0",
      sha256=tgz,
      files=["package/models/*.json"],
      strip="package/models/",
    ),
    an_asset(
      sha256=whl, inner="pkg/x.jar", files=["topics/q.txt"], strip="topics/"
    ),
    into=cache,
  )
  assert files_of(cache / "tok") == {"t.json": b"{}"}
  assert files_of(cache / "thing") == {"q.txt": b"who?"}


def test_a_second_run_asks_nothing_and_repairs_what_changed(shelf, cache):
  asset = an_asset(sha256=shelf.put("pkg==1.0.whl", zipped(WHEEL)))
  shelf.fetch(asset, into=cache)
  shelf.fetch(asset, into=cache)
  assert len(shelf.asked()) == 1
  (cache / "thing" / "a.json").write_bytes(b"[7]")
  shelf.fetch(asset, into=cache)
  (cache / "thing" / "b.json").unlink()
  shelf.fetch(asset, into=cache)
  assert len(shelf.asked()) == 3
  assert files_of(cache / "thing") == {"a.json": b"[1]", "b.json": b"[2]"}


def test_a_half_written_asset_is_done_again(shelf, cache):
  asset = an_asset(sha256=shelf.put("pkg==1.0.whl", zipped(WHEEL)))
  # Killed while it unpacked, and between the move and the record.
  half = cache / ".partial-thing" / "files" / "old.json"
  moved = cache / "thing" / "stale.json"
  for path in (half, moved):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half")
  shelf.fetch(asset, into=cache)
  assert sorted(files_of(cache / "thing")) == ["a.json", "b.json"]
  assert not (cache / ".partial-thing").exists()


def test_another_pin_replaces_what_an_older_one_brought(shelf, cache):
  old = shelf.put("pkg==1.0.whl", zipped(WHEEL))
  new = shelf.put("pkg==2.0.whl", zipped({"pkg/data/z.json": b"[9]"}))
  shelf.fetch(an_asset(sha256=old), into=cache)
  shelf.fetch(an_asset(version="2.0", sha256=new), into=cache)
  assert files_of(cache / "thing") == {"z.json": b"[9]"}


def test_a_wrong_hash_names_asset_and_both_hashes(shelf, cache):
  good = an_asset(name="good", sha256=shelf.put("pkg==1.0.whl", zipped(WHEEL)))
  found = shelf.put("evil==1.0.whl", zipped({"pkg/data/a.json": b"[666]"}))
  bad = an_asset(package="evil", sha256="0" * 64)
  with pytest.raises(FetchError) as error:
    shelf.fetch(good, bad, into=cache)
  assert re.match(
    rf"thing: wrong .* expected 0{{64}}, found {found}", str(error.value)
  )
  assert not (cache / "thing").exists()
  assert (cache / "good").is_dir()
  assert not list(cache.glob(".partial*"))


def test_a_registry_that_fails_is_one_line_naming_the_asset(shelf, cache):
  with pytest.raises(
    FetchError,
    match=r"^thing: the registry gave no pkg==1.0: ERROR: No matching.*1\.0$",
  ):
    shelf.fetch(an_asset(sha256="0" * 64), into=cache)


def test_a_missing_registry_tool_is_named(cache):
  registries = {"pypi": ["no-such-tool"], "npm": []}
  with pytest.raises(FetchError, match="^thing: 'no-such-tool'.*not installed"):
    fetch.fetch([an_asset(sha256="0")], cache, Hub(), registries)


def test_a_package_without_a_listed_file_installs_nothing(shelf, cache):
  pin = shelf.put("pkg==1.0.whl", zipped(WHEEL))
  asset = an_asset(sha256=pin, files=["pkg/data/*.json", "pkg/weights.bin"])
  with pytest.raises(
    FetchError, match="^thing: pkg holds no 'pkg/weights.bin'"
  ):
    shelf.fetch(asset, into=cache)
  assert not (cache / "thing").exists()


def test_a_name_that_leads_out_of_the_folder_is_refused(shelf, cache):
  pin = shelf.put("pkg==1.0.whl", zipped({"pkg/data/../../x.json": b"[]"}))
  asset = an_asset(sha256=pin, files=["pkg/data/*/*/x.json"])
  with pytest.raises(FetchError, match="leads out of"):
    shelf.fetch(asset, into=cache)
  assert not list(cache.rglob("x.json"))


def test_a_small_disk_is_refused_before_any_download(shelf, cache):
  asset = an_asset(sha256=shelf.put("pkg==1.0.whl", b""), size=10**18)
  with pytest.raises(
    FetchError, match=r"2000000000\.0 GB are needed in .* free"
  ):
    shelf.fetch(asset, into=cache)
  assert shelf.asked() == []


# --- hub -------------------------------------------------------------------


class FakeHub(http.server.BaseHTTPRequestHandler):
  """Serves `files`; `faults` happen once each, in the order of requests."""

  files: dict[str, bytes]
  faults: list[str]
  log: list[tuple[str, str | None, str | None]]  # path, Range, Authorization

  def do_GET(self):
    sought = self.headers["Range"]
    self.log.append((self.path, sought, self.headers["Authorization"]))
    path = self.path.split("?")[0]
    fault = self.faults.pop(0) if self.faults else ""
    if fault.isdigit():
      return self.send_error(int(fault))
    if fault.startswith("to "):
      self.send_response(302)
      self.send_header("Location", fault.removeprefix("to ") + self.path)
      return self.end_headers()
    if path not in self.files:
      return self.send_error(404)
    body = self.files[path]
    start = 0
    if sought and fault != "whole":
      start = int(sought.removeprefix("bytes=").removesuffix("-"))
      if start >= len(body):
        return self.send_error(416)
    self.send_response(206 if start else 200)
    self.send_header("Content-Length", str(len(body) - start))
    self.end_headers()
    cut = int(fault.removeprefix("cut ")) if fault.startswith("cut") else None
    self.wfile.write(body[start:cut])

  def log_message(self, *args):
    pass


@pytest.fixture
def serve(monkeypatch):
  """Returns what starts a hub; all of them stop with the test."""
  monkeypatch.setenv("no_proxy", "127.0.0.1")
  servers = []

  def start(**fields):
    handler = type("Handler", (FakeHub,), dict(files={}, faults=[], log=[]))
    for name, value in fields.items():
      setattr(handler, name, value)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    servers.append((server, thread))
    return handler, f"http://127.0.0.1:{server.server_port}"

  yield start
  for server, thread in servers:
    server.shutdown()
    thread.join()
    server.server_close()


WEIGHTS = bytes(range(256)) * 40
LISTING = "/api/models/org/model/revision/abc"
RESOLVE = "/org/model/resolve/abc/"


def a_hub(**changes) -> dict[str, bytes]:
  files = {"w.bin": WEIGHTS, "config.json": b"{}", "README.md": b"#"}
  siblings = [
    {"rfilename": name, "size": len(content)} for name, content in files.items()
  ]
  served = {RESOLVE + name: content for name, content in files.items()}
  served[LISTING] = json.dumps({"siblings": siblings}).encode()
  return served | changes


def hub_asset(**fields) -> fetch.Asset:
  start = dict(
    source="hub",
    package="org/model",
    version="abc",
    files=["*.json", "w.bin"],
    strip="",
  )
  return an_asset(**(start | fields))


def get(asset: fetch.Asset, cache: Path, url: str, **fields):
  fetch.fetch([asset], cache, Hub(url, **({"pause": 0.0} | fields)))


def test_hub_files_are_recorded_on_first_use_then_left_alone(serve, cache):
  hub, url = serve(files=a_hub())
  get(hub_asset(), cache, url)
  expected = {"w.bin": WEIGHTS, "config.json": b"{}"}
  assert files_of(cache / "thing") == expected
  recorded = json.loads((cache / "assets.lock.json").read_text())["thing"]
  assert recorded["files"] == {n: digest(c) for n, c in expected.items()}
  hub.log.clear()
  get(hub_asset(), cache, url)
  assert hub.log == []


def test_data_sets_have_their_own_addresses(serve, cache):
  files = {
    "/api/datasets/org/model/revision/abc": a_hub()[LISTING],
    "/datasets/org/model/resolve/abc/w.bin": WEIGHTS,
  }
  _, url = serve(files=files)
  get(hub_asset(source="hub-dataset", files=["w.bin"]), cache, url)
  assert files_of(cache / "thing") == {"w.bin": WEIGHTS}


def test_a_cut_off_body_goes_on_from_its_last_byte(serve, cache):
  hub, url = serve(files=a_hub(), faults=["", "cut 5000"])
  get(hub_asset(files=["w.bin"]), cache, url)
  assert files_of(cache / "thing") == {"w.bin": WEIGHTS}
  assert [entry[1] for entry in hub.log] == [None, None, "bytes=5000-"]


def test_a_killed_run_goes_on_from_its_last_byte(serve, cache):
  hub, url = serve(files=a_hub(), faults=["", "cut 5000"])
  with pytest.raises(FetchError, match="cut off at 5000 of 10240 bytes"):
    get(hub_asset(files=["w.bin"]), cache, url, tries=1)
  get(hub_asset(files=["w.bin"]), cache, url)
  assert files_of(cache / "thing") == {"w.bin": WEIGHTS}
  assert hub.log[-1][1] == "bytes=5000-"


@pytest.mark.parametrize("fault", ["whole", "416"])
def test_a_part_that_the_hub_does_not_continue_is_begun_anew(
  serve, cache, fault
):
  _, url = serve(files=a_hub(), faults=["", fault])
  (cache / "thing").mkdir(parents=True)
  (cache / "thing" / "w.bin.part").write_bytes(b"garbage")
  get(hub_asset(files=["w.bin"]), cache, url)
  assert files_of(cache / "thing") == {"w.bin": WEIGHTS}


def test_a_busy_hub_is_asked_again(serve, cache):
  hub, url = serve(files=a_hub(), faults=["503", "", "429", "500"])
  get(hub_asset(files=["w.bin"]), cache, url, tries=3)
  assert files_of(cache / "thing") == {"w.bin": WEIGHTS}
  assert len(hub.log) == 5


def test_retries_are_bounded_while_nothing_arrives(serve, cache):
  hub, url = serve(files=a_hub(), faults=["503"] * 9)
  with pytest.raises(FetchError, match="^thing: the hub at .* failed 3 times"):
    get(hub_asset(), cache, url, tries=3)
  assert len(hub.log) == 3


def test_progress_renews_the_retries(serve, cache):
  cuts = [f"cut {n}" for n in (1000, 2000, 3000, 4000)]
  hub, url = serve(files=a_hub(), faults=["", *cuts])
  get(hub_asset(files=["w.bin"]), cache, url, tries=2)
  assert files_of(cache / "thing") == {"w.bin": WEIGHTS}
  assert len(hub.log) == 6


def test_a_missing_repository_names_the_asset_and_is_not_retried(serve, cache):
  hub, url = serve()
  with pytest.raises(FetchError, match="^thing: the hub answers 404 Not Found"):
    get(hub_asset(), cache, url)
  assert len(hub.log) == 1


def test_a_gated_repository_says_what_to_do(serve, cache):
  _, url = serve(files=a_hub(), faults=["", "401"])
  with pytest.raises(FetchError, match="Accept the licence .* HF_TOKEN"):
    get(hub_asset(), cache, url)


def test_an_answer_that_is_no_listing_is_one_line(serve, cache):
  _, url = serve(files={LISTING: b"<html>please log in</html>"})
  with pytest.raises(FetchError, match="^thing: .* gave no list of files"):
    get(hub_asset(), cache, url)


def test_other_content_on_second_use_is_an_error(serve, cache):
  hub, url = serve(files=a_hub())
  get(hub_asset(files=["w.bin"]), cache, url)
  (cache / "thing" / "w.bin").unlink()
  hub.files[RESOLVE + "w.bin"] = other = b"other weights"
  hashes = f"{digest(WEIGHTS)}, found {digest(other)}"
  for _ in range(2):  # and nothing of it is taken for a start the next time
    with pytest.raises(FetchError, match=f"^thing: wrong .* {hashes}"):
      get(hub_asset(files=["w.bin"]), cache, url)
  assert files_of(cache / "thing") == {}


def test_a_changed_file_on_disk_is_an_error_that_names_it(serve, cache):
  _, url = serve(files=a_hub())
  get(hub_asset(files=["w.bin"]), cache, url)
  (cache / "thing" / "w.bin").write_bytes(b"flipped")
  with pytest.raises(
    FetchError, match=r"^thing: wrong .* Delete .*/w\.bin and"
  ):
    get(hub_asset(files=["w.bin"]), cache, url)


@pytest.mark.parametrize("origin", ["table", "hub"])
def test_a_hash_known_beforehand_holds_on_first_use(serve, cache, origin):
  siblings = [{"rfilename": "w.bin", "lfs": {"sha256": "f" * 64}}]
  listing = json.dumps({"siblings": siblings}).encode()
  told = {LISTING: listing} if origin == "hub" else {}
  known = {"w.bin": "f" * 64} if origin == "table" else {}
  _, url = serve(files=a_hub(**told))
  with pytest.raises(FetchError, match="expected f{64}, found"):
    get(hub_asset(files=["w.bin"], sha256=known), cache, url)
  assert files_of(cache / "thing") == {}


def test_another_revision_starts_afresh(serve, cache):
  other = {path.replace("abc", "def"): body for path, body in a_hub().items()}
  other["/org/model/resolve/def/w.bin"] = b"newer"
  _, url = serve(files=a_hub() | other)
  get(hub_asset(files=["w.bin"]), cache, url)
  get(hub_asset(files=["w.bin"], version="def"), cache, url)
  assert files_of(cache / "thing") == {"w.bin": b"newer"}


def test_the_token_stays_with_its_host(serve, cache, capfd):
  store, store_url = serve(files=a_hub())
  hub, url = serve(files=a_hub(), faults=["to ", "", f"to {store_url}"])
  get(hub_asset(files=["w.bin"]), cache, url, token="s3cret")
  assert files_of(cache / "thing") == {"w.bin": WEIGHTS}
  # The listing was redirected within the hub, the file to another host.
  assert [entry[2] for entry in hub.log] == ["Bearer s3cret"] * 3
  assert [entry[2] for entry in store.log] == [None]
  assert "s3cret" not in "".join(capfd.readouterr()) + repr(Hub(url, "s3cret"))
  assert b"s3cret" not in (cache / "assets.lock.json").read_bytes()


# --- table and command -----------------------------------------------------


def run(*args: str, **environment: str) -> subprocess.CompletedProcess:
  script = Path(fetch.__file__)
  return subprocess.run(
    [sys.executable, str(script), *args],
    capture_output=True,
    text=True,
    env=os.environ | environment,
  )


def test_every_entry_of_the_table_is_pinned_and_described():
  assets = fetch.load()
  for asset in assets.values():
    assert asset.source in {"pypi", "npm", "hub", "hub-dataset"}, asset.name
    assert asset.size > 0, asset.name
    assert asset.licence, asset.name
    assert asset.what, asset.name
    pins = {"": asset.sha256} if asset.packaged else asset.sha256
    assert all(re.fullmatch("[0-9a-f]{64}", pin) for pin in pins.values())
    if not asset.packaged:
      assert re.fullmatch("[0-9a-f]{40}", asset.version), asset.name
      assert set(pins) <= set(asset.files), asset.name
  assert {name for name, asset in assets.items() if "demo" in asset.sets} == {
    "smollm2-135m-instruct",
    "all-minilm-l6-v2",
    "wikipedia-leads",
    "world-factbook",
    "open-qa",
  }


def test_a_dry_run_prints_the_paper_s_table_and_fetches_nothing(tmp_path):
  done = run("--set=paper", "--dry-run", SESA_JAX_ASSETS=str(tmp_path / "no"))
  assert done.returncode == 0
  for said in ("Quark-LLM/SSP", "64.56 GB", "Apache-2.0", "f52bf8ec8c71"):
    assert said in done.stdout
  assert "[not verified: " in done.stdout
  assert not (tmp_path / "no").exists()


def test_the_command_fails_with_one_line_and_exit_code_1(serve, tmp_path):
  _, url = serve()
  done = run(
    "--only=e5-base-v2", SESA_JAX_ASSETS=str(tmp_path), HF_ENDPOINT=url
  )
  assert done.returncode == 1
  assert re.fullmatch(r"fetch: e5-base-v2: .* 404 .*\n", done.stderr)


def test_an_unknown_set_lists_the_sets():
  done = run("--set=demos")
  assert done.returncode == 2
  assert "'demo', 'paper', 'tokenizers'" in done.stderr
