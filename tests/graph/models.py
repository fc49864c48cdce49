"""Small random models for the graph tests: odd structure, weights as HF checkpoints on disk."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.checkpoint.load import Loaded, load_rank
from engine.checkpoint.source import CheckpointSource
from engine.config import ModelConfig, from_dir
from engine.graph.build import build
from engine.graph.interpret import Interpreter, StepInput
from engine.graph.ir import Graph
from engine.graph.passes import run_passes
from engine.runtime.state import RankState, new_state
from tests.unit.checkpoint_fixtures import edit_json, fp8_config

# 28 query heads in groups of 7 as in Qwen2.5-7B; the MLP is no multiple of 128; the vocabulary divides
# by no TP degree. Llama: 8 KV heads, so that it splits over 8 ranks; tied embeddings in one of them.
SHAPES = {
    "qwen2": dict(hidden_size=112, num_attention_heads=28, num_key_value_heads=4, head_dim=16,
                  intermediate_size=264, vocab_size=331, num_hidden_layers=2, tie_word_embeddings=False),
    "llama": dict(hidden_size=96, num_attention_heads=8, num_key_value_heads=8, head_dim=32,
                  intermediate_size=200, vocab_size=317, num_hidden_layers=3, tie_word_embeddings=True),
    "qwen2-gqa8": dict(hidden_size=64, num_attention_heads=16, num_key_value_heads=2, head_dim=16,
                       intermediate_size=232, vocab_size=203, num_hidden_layers=2,
                       tie_word_embeddings=True),
    # head_dim is not hidden / heads; 4 KV heads are replicated at TP 8.
    "qwen3": dict(hidden_size=80, num_attention_heads=16, num_key_value_heads=4, head_dim=32,
                  intermediate_size=216, vocab_size=301, num_hidden_layers=2, tie_word_embeddings=False),
    "mistral": dict(hidden_size=96, num_attention_heads=16, num_key_value_heads=2, head_dim=16,
                    intermediate_size=248, vocab_size=211, num_hidden_layers=2, sliding_window=None,
                    tie_word_embeddings=False),
    "llama-llama3": dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
                         intermediate_size=136, vocab_size=173, num_hidden_layers=2, tie_word_embeddings=True,
                         rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
                                              high_freq_factor=4.0, original_max_position_embeddings=32)),
    "qwen2-yarn": dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
                       intermediate_size=136, vocab_size=173, num_hidden_layers=2, tie_word_embeddings=False,
                       rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0,
                                            original_max_position_embeddings=16)),
}  # fmt: skip
FP8_KINDS = ("channel", "tensor", "scalar", "block")


def save_model(shape: str, folder: Path, seed: int = 0, overrides: dict | None = None):
    """A random transformers model with every parameter non-zero, saved to `folder`; returns it in fp32.

    Matrices have entries of 1.7 / sqrt(fan-in), so that activations and logits are of size 1 to 10.
    """
    import transformers

    name = shape.partition("-")[0].capitalize()
    config_class, model_class = (
        getattr(transformers, f"{name}{kind}") for kind in ("Config", "ForCausalLM")
    )
    values = {"max_position_embeddings": 256, "rms_norm_eps": 1e-5}
    config = config_class(**(values | (overrides or SHAPES[shape])))
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            size = 1.7 / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 0.15
            parameter.copy_(1 + 0.2 * noise if "norm" in name else size * noise)
    model.save_pretrained(folder)
    return model


def store_fp8(model, folder: Path, kind: str, block: int = 32) -> None:
    """Rewrite a saved model's linear layers in FP8 (kinds of `tests.unit.checkpoint_fixtures.fp8_config`) and give
    `model` the values that are now stored, so that it is the exact reference of the files."""
    from safetensors.torch import load_file, save_file

    stored = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in [n for n in stored if n.endswith("_proj.weight")]:
        w = stored[name].float()
        rows, cols = w.shape
        if kind == "block":
            tiles = torch.nn.functional.pad(w, (0, -cols % block, 0, -rows % block))
            tiles = tiles.unflatten(1, (-1, block)).unflatten(0, (-1, block))
            scale = tiles.abs().amax((1, 3)) / 448
            wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :cols]
            stored[f"{name}_scale_inv"] = scale
        else:
            scale = w.abs().amax(1, keepdim=True) if kind == "channel" else w.abs().amax().view(1)
            wide = scale = scale / 448
            stored[f"{name}_scale"] = scale[0] if kind == "scalar" else scale
        stored[name] = (w / wide).to(torch.float8_e4m3fn)
        with torch.no_grad():
            parameters[name].copy_(stored[name].float() * wide)
    save_file(stored, folder / "model.safetensors")
    edit_json(folder / "config.json", quantization_config=fp8_config(kind, block))


class Lockstep:
    """A model on the interpreter at one TP degree: prefill and decode, fused or not."""

    def __init__(
        self,
        folder: Path,
        tp: int,
        *,
        fused: bool = True,
        length: int = 64,
        slots: int = 3,
        quantization: str | None = None,
        dtype: torch.dtype = torch.float32,
        fp8_prefill: bool = False,
        fp8_kv: bool = False,
        algorithms: tuple[str, ...] = Graph.algorithms,
    ):
        """dtype: of the weights; activations are fp64 with fp64 weights, else fp32."""
        self.config: ModelConfig = from_dir(folder)
        self.tp, self.fused, self.fp8_prefill, self.fp8_kv = tp, fused, fp8_prefill, fp8_kv
        self.algorithms = algorithms
        graph = self.graph("prefill", length, "all")
        source = CheckpointSource(folder)
        self.weights: list[dict[str, Loaded]] = [
            load_rank(graph.weights, source, rank, "cpu", dtype, quantization) for rank in range(tp)
        ]
        self.states: list[RankState] = [
            new_state(
                self.config,
                tp,
                slots=slots,
                length=length,
                dtype=torch.float64 if dtype == torch.float64 else torch.float32,
                device="cpu",
                fp8_kv=fp8_kv,
            )
            for _ in range(tp)
        ]

    def graph(self, phase: str, rows: int, logits: str = "last") -> Graph:
        graph = build(
            self.config, phase=phase, rows=rows, tp=self.tp, logits=logits,
            fp8_prefill=self.fp8_prefill, fp8_kv=self.fp8_kv, algorithms=self.algorithms,
        )  # fmt: skip
        return run_passes(graph) if self.fused else graph

    def run(self, graph: Graph, step: StepInput):
        return Interpreter(graph, self.weights, self.states).run(step)

    def prefill(self, slot: int, ids: list[int], start: int = 0, logits: str = "last"):
        graph = self.graph("prefill", max(64, len(ids)), logits)
        prompt = torch.tensor(ids, dtype=torch.int32)
        return self.run(graph, StepInput(prompt=prompt, request=(slot, start, len(ids))))

    def decode(self, slots: list[int]):
        graph = self.graph("decode", len(slots))
        return self.run(graph, StepInput(row_slots=torch.tensor(slots, dtype=torch.int32)))

    def vocab_logits(self, output) -> torch.Tensor:
        return torch.cat(output.logits, dim=-1)[:, : self.config.vocab_size]
