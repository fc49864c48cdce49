"""`engine info`: what a bug report needs: versions, GPUs, links, caches."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import engine
from engine.console import Parser, run
from engine.errors import EngineError

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2")


def collect() -> dict[str, Any]:
    """All facts as a JSON-able dict. Imports torch; on a GPU it tries links and stream waits."""
    return {
        "versions": {
            "engine": engine.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpu cores": str(os.cpu_count()),
            "cuda (torch)": _cuda(),
            "nvidia driver": _driver(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "gpus": _gpus(),
        "links": _links(),
        "caches": _caches(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> str | None:
    import torch

    return torch.version.cuda


def _driver() -> str | None:
    """As the kernel module reports it; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Module\s+(\S+)", text) or re.search(r"\b(\d+\.\d+(\.\d+)?)\b", text)
    return found.group(1) if found else None


def _gpus() -> list[dict[str, Any]]:
    import torch

    from engine.runtime.stream_ops import probe_stream_waits

    gpus = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        gpus.append(
            {
                "index": i,
                "name": properties.name,
                "compute": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_gib": round(total / 2**30, 1),
                "free_gib": round(free / 2**30, 1),
                "stream_waits": asdict(probe_stream_waits(i)),
            }
        )
    return gpus


def _links() -> Any:
    """What engine.runtime.links says of peer access; None with fewer than two GPUs."""
    import torch

    if torch.cuda.device_count() < 2 or not importlib.util.find_spec("engine.runtime.links"):
        return None
    from engine.runtime import links

    return links.describe()


def _caches() -> dict[str, Any]:
    """Tuned kernel configurations in the tree, Triton's compiled kernels, the demo model."""
    from engine.tune import choose

    tuned: dict[str, dict[str, int | str]] = {}
    for file in sorted((Path(engine.__file__).parents[1] / "autotune_cache").glob("*/*.json")):
        try:
            content = json.loads(file.read_text())
            count: int | str = len(content["entries"])
            if content["_metadata"]["source_hash"] != choose.source_hash(file.stem):
                count = "stale"
        except (OSError, ValueError, KeyError, TypeError, EngineError):
            count = "unreadable"
        tuned.setdefault(file.parent.name, {})[file.stem] = count
    default = Path.home() / ".triton" / "cache"
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or default)
    kernels = sum(1 for _ in triton.iterdir()) if triton.is_dir() else 0
    from engine.demo import MODEL_FOLDER, cache_dir

    demo = cache_dir() / MODEL_FOLDER
    return {
        "autotune": tuned,
        "triton": {"folder": str(triton), "kernels": kernels},
        "demo_model": str(demo) if (demo / "config.json").is_file() else None,
    }


def _print(facts: dict[str, Any]) -> None:
    from engine.runtime.stream_ops import StreamWaits

    for name, version in facts["versions"].items():
        print(f"{name:<16} {version or 'not installed'}")
    print()
    if not facts["gpus"]:
        print("GPUs             none that torch can use: --device cpu works")
    for gpu in facts["gpus"]:
        print(
            f"GPU {gpu['index']:<12} {gpu['name']}, sm_{gpu['compute'].replace('.', '')}, "
            f"{gpu['multiprocessors']} multiprocessors, {gpu['free_gib']} of {gpu['memory_gib']} GiB free"
        )
        print(f"{'':<16} stream waits: {StreamWaits(**gpu['stream_waits'])}")
    if facts["links"] is not None:
        text = facts["links"] if isinstance(facts["links"], str) else json.dumps(facts["links"])
        print("links            " + text.replace("\n", "\n" + " " * 17))
    print()
    caches = facts["caches"]
    for gpu, ops in caches["autotune"].items():
        print(f"tuned for        {gpu}: " + ", ".join(f"{op} {n}" for op, n in ops.items()))
    if not caches["autotune"]:
        print("tuned for        nothing: kernel configurations come from the heuristics")
    print(f"Triton cache     {caches['triton']['kernels']} entries in {caches['triton']['folder']}")
    print(
        f"demo model       {caches['demo_model'] or 'not fetched yet (python -m engine.generate)'}"
    )


def main(argv: list[str] | None = None) -> int:
    """Exit code of the command."""

    def body() -> int:
        parser = Parser(prog="engine info", description=__doc__)
        parser.add_argument("--json", action="store_true", help="the same as one JSON object")
        args = parser.parse_args(argv)
        facts = collect()
        if args.json:
            print(json.dumps(facts, indent=1))
        else:
            _print(facts)
        return 0

    return run(body)


if __name__ == "__main__":
    sys.exit(main())
