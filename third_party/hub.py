"""Files of a model hub over HTTPS, resumed where they were cut off."""

from __future__ import annotations

import dataclasses
import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

URL = "https://huggingface.co"
BUSY = {408, 416, 425, 429, 500, 502, 503, 504}  # worth another try
OUTAGES = (
  urllib.error.URLError,
  http.client.HTTPException,
  ssl.SSLError,
  ConnectionError,
  TimeoutError,
)


class FetchError(Exception):
  """Why something could not be fetched, in one line for the user."""


class SameHostToken(urllib.request.HTTPRedirectHandler):
  """Keeps the token from any other host that the hub redirects to."""

  def redirect_request(self, req, *args, **kwargs):
    """Follows a redirect, onto which urllib takes no unredirected header."""
    new = super().redirect_request(req, *args, **kwargs)
    if new is not None and (new.type, new.host) == (req.type, req.host):
      new.unredirected_hdrs.update(req.unredirected_hdrs)
    return new


@dataclasses.dataclass(frozen=True)
class Hub:
  """A model hub: where it is, and how patiently it is asked."""

  endpoint: str = URL
  token: str = dataclasses.field(default="", repr=False)
  tries: int = 5  # in a row that bring no byte
  pause: float = 1.0  # seconds after the first of them, doubled after each

  def files(
    self, package: str, revision: str, folder: Path, *, dataset: bool = False
  ) -> dict[str, dict]:
    """Returns what the hub says of each file of a repository, by name.

    A file's `size`, and for a large file `lfs.sha256`, are what matters here.
    `folder` holds the answer for a moment.
    """
    kind = "datasets" if dataset else "models"
    path = f"/api/{kind}/{package}/revision/{revision}?blobs=true"
    part = folder / ".listing"
    part.unlink(missing_ok=True)
    self.get(path, part)
    try:
      siblings = json.loads(part.read_bytes())["siblings"]
      return {sibling["rfilename"]: sibling for sibling in siblings}
    except (ValueError, KeyError, TypeError):
      raise FetchError(f"{path} gave no list of files.") from None
    finally:
      part.unlink()

  def download(
    self,
    package: str,
    revision: str,
    name: str,
    part: Path,
    *,
    dataset: bool = False,
    show: Callable[[int], Any] = lambda done: None,
  ):
    """Completes `part`, which will be the file `name` of a repository."""
    prefix = "/datasets/" if dataset else "/"
    path = f"{prefix}{package}/resolve/{revision}/{quote(name)}"
    self.get(path, part, show)

  def get(
    self, path: str, part: Path, show: Callable[[int], Any] = lambda done: None
  ):
    """Completes `part` with retries, each of which goes on where it ends.

    Raises:
      FetchError: the hub refuses, or has failed `tries` times in a row.
    """
    failures, reached = 0, 0
    while True:
      try:
        return self._pull(path, part, show)
      except OUTAGES as error:
        code = getattr(error, "code", None)
        if code == 416:  # the part is longer than the file: not a part of it
          part.unlink(missing_ok=True)
        if code and code not in BUSY:
          denied = " Accept the licence on the hub, and set HF_TOKEN."
          raise FetchError(
            f"the hub answers {code} {error.reason} to {path}."
            f"{denied if code in (401, 403) else ''}"
          ) from None
        size = part.stat().st_size if part.exists() else 0
        failures = 1 if size > reached else failures + 1
        reached = size
        if failures >= self.tries:
          raise FetchError(
            f"the hub at {self.endpoint} failed {failures} times in a row at"
            f" {path}: {error}. The same command goes on from there."
          ) from None
        time.sleep(min(self.pause * 2 ** (failures - 1), 60))

  def _pull(self, path: str, part: Path, show: Callable[[int], Any]):
    """Tries once to complete `part` from the byte where it ends."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(self.endpoint.rstrip("/") + path)
    if self.token:
      request.add_unredirected_header("Authorization", f"Bearer {self.token}")
    if have:
      request.add_header("Range", f"bytes={have}-")
    opener = urllib.request.build_opener(SameHostToken)
    with opener.open(request, timeout=60) as response:
      have = have if response.status == 206 else 0  # else it is the whole file
      total = have + int(response.headers.get("Content-Length", 0))
      with part.open("ab" if have else "wb") as out:
        while chunk := response.read(1 << 20):
          have += out.write(chunk)
          show(have)
    if have < total:
      raise ConnectionError(f"cut off at {have} of {total} bytes")
