"""Config + phase -> the unfused graph: the one place that knows what a decoder layer is."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from engine.config import ModelConfig, ShardShape
from engine.graph.ir import Dtype, Graph, Op, Phase, Sharding, Value, make_op, state
from engine.weights import Part, WeightSpec

Logits = Literal["last", "all", "none"]


def build(
    config: ModelConfig,
    *,
    phase: Phase,
    rows: int,
    tp: int,
    logits: Logits = "last",
    shard_of: int | None = None,
    fp8_prefill: bool = False,
    fp8_kv: bool = False,
    algorithms: tuple[str, ...] = Graph.algorithms,
) -> Graph:
    """Unfused graph of one step.

    phase: "decode" (rows = R sequences, one token each) or "prefill" (rows = T tokens of one sequence).
    logits (prefill): "last" samples the token after the last position; "all" gives logits of every
    position and samples nothing (prompt logprobs); "none" stops after the last layer's KV append
    (a chunk that is not the prompt's last).
    shard_of: give each of the `tp` ranks the shard of a larger TP degree (speed measurements on fewer
    GPUs; the ranks then hold only part of the model and the text is meaningless).
    fp8_prefill: quantizable weights are FP8, and prefill may multiply FP8 by FP8
    (passes/quantize_prefill.py).
    fp8_kv: the KV cache is e4m3 with scales (kernels/kv_fp8.py).
    algorithms: all-reduce algorithms to choose from (runtime/links.py: Transport).
    Raises EngineError when the model cannot be split over `tp` ranks.
    """
    graph = _Builder(config, phase, rows, tp, shard_of or tp, fp8_kv).build(logits)
    return replace(graph, fp8_prefill=fp8_prefill, algorithms=algorithms)


class _Builder:
    def __init__(
        self, config: ModelConfig, phase: Phase, rows: int, tp: int, degree: int, fp8_kv: bool
    ):
        self.config, self.phase, self.rows, self.tp = config, phase, rows, tp
        self.fp8_kv = fp8_kv
        self.degree = degree  # of the split; more than tp when measuring one rank's share
        self.shard: ShardShape = config.shard(degree)
        self.ops: list[Op] = []
        self.weights: dict[str, WeightSpec] = {}
        # Where row i of the step lives: decode reads slots and positions per row, prefill one request.
        where = "row_slots" if phase == "decode" else "request"
        shape = (rows,) if phase == "decode" else (3,)
        self.where = Value(where, shape, "i32", kind="input")

    def build(self, logits: Logits) -> Graph:
        hidden = self._embedding()
        for layer in range(self.config.num_layers):
            hidden = self._layer(layer, hidden)
        output = None if logits == "none" else self._head(hidden, logits)
        return Graph(
            self.phase, self.rows, self.tp, self.config.name, tuple(self.ops), self.weights, output
        )

    # Layers

    def _embedding(self) -> Value:
        cfg = self.config
        table = self._weight(
            "model.embed_tokens.weight",
            (cfg.vocab_size, cfg.hidden_size),
            axis=None,
            quantizable=False,
        )
        tokens = (
            state("tokens", (0,), "i32")
            if self.phase == "decode"
            else Value("prompt", (self.rows,), "i32", kind="input")
        )
        where = self.where if self.phase == "decode" else None
        out = Value("h0", (self.rows, cfg.hidden_size))
        self._emit("embedding", out, "embedding", None, tokens=tokens, table=table, where=where)
        return out

    def _layer(self, layer: int, hidden: Value) -> Value:
        cfg, sh = self.config, self.shard
        h, d = cfg.hidden_size, cfg.head_dim
        prefix = f"model.layers.{layer}"
        q_dim, kv_dim = sh.num_heads * d, sh.num_kv_heads * d

        x = self._norm(
            f"{prefix}.input_layernorm.weight", hidden, f"l{layer}.attn_norm", "qkv", layer
        )
        q_ranges = self._ranges(q_dim)
        kv_ranges = tuple(
            (start * d, start * d + kv_dim)
            for start in (cfg.kv_head_of_rank(rank, self.degree) for rank in range(self.tp))
        )
        heads = {"q": (cfg.num_heads, q_dim, q_ranges), "k": (cfg.num_kv_heads, kv_dim, kv_ranges)}
        heads["v"] = heads["k"]
        parts: dict[str, Value] = {}
        for role, (total, dim, ranges) in heads.items():
            name = f"{prefix}.self_attn.{role}_proj"
            weight = self._weight(f"{name}.weight", (total * d, h), 0, ranges, head_dim=d)
            bias = (
                self._weight(f"{name}.bias", (total * d,), 0, ranges, head_dim=d, quantizable=False)
                if cfg.attention_bias
                else None
            )
            parts[role] = Value(f"l{layer}.{role}", (self.rows, dim), sharding="sharded")
            self._emit(
                "linear", parts[role], "qkv", layer, {"role": role}, x=x, w=weight, bias=bias
            )
        heads_attrs = {"num_heads": sh.num_heads, "num_kv_heads": sh.num_kv_heads, "head_dim": d}
        if cfg.qk_norm:
            for role in ("q", "k"):
                name = f"{prefix}.self_attn.{role}_norm.weight"
                gain = self._weight(name, (d,), None, head_dim=d, quantizable=False)
                normed = Value(f"l{layer}.{role}_normed", parts[role].shape, sharding="sharded")
                self._emit(
                    "head_norm", normed, "qkv", layer,
                    {"role": role, "eps": cfg.rms_norm_eps, "head_dim": d}, x=parts[role], weight=gain,
                )  # fmt: skip
                parts[role] = normed
        cache: dict[str, Value] = {}
        for role in ("k", "v"):
            shape = (0, sh.num_kv_heads, 0, d)
            kind: Dtype = "fp8" if self.fp8_kv else "act"
            cache[f"{role}_cache"] = state(f"l{layer}.{role}_cache", shape, kind, "sharded")
            if self.fp8_kv:
                cache[f"{role}_scale"] = state(
                    f"l{layer}.{role}_scale", shape[:3], "f32", "sharded"
                )
        positions, table = state("positions", (0,), "i32"), state("cos_sin", (0, d), "f32")
        for role in ("q", "k"):
            rotated = Value(f"l{layer}.{role}_rot", parts[role].shape, sharding="sharded")
            self._emit(
                "rope", rotated, "qkv", layer, {"head_dim": d, "style": "half"},
                x=parts[role], table=table, positions=positions, where=self.where,
            )  # fmt: skip
            parts[role] = rotated
        self._emit(
            "kv_append", (), "qkv", layer, heads_attrs,
            k=parts["k"], v=parts["v"], **cache, positions=positions, where=self.where,
        )  # fmt: skip
        attn = Value(f"l{layer}.attn", (self.rows, q_dim), sharding="sharded")
        self._emit(
            "attention", attn, "attention", layer, {**heads_attrs, "scale": d**-0.5},
            q=parts["q"], **cache, positions=positions, where=self.where,
        )  # fmt: skip
        o_weight = self._weight(
            f"{prefix}.self_attn.o_proj.weight", (h, cfg.num_heads * d), 1, q_ranges
        )
        hidden = self._row_parallel(attn, o_weight, hidden, f"l{layer}.o", "o_proj", layer)

        x = self._norm(
            f"{prefix}.post_attention_layernorm.weight",
            hidden,
            f"l{layer}.mlp_norm",
            "gate_up",
            layer,
        )
        inter, ranges = sh.intermediate_size, self._ranges(sh.intermediate_size)
        gate_up = []
        for role in ("gate", "up"):
            weight = self._weight(
                f"{prefix}.mlp.{role}_proj.weight", (cfg.intermediate_size, h), 0, ranges
            )
            out = Value(f"l{layer}.{role}", (self.rows, inter), sharding="sharded")
            self._emit("linear", out, "gate_up", layer, {"role": role}, x=x, w=weight)
            gate_up.append(out)
        act = Value(f"l{layer}.act", (self.rows, inter), sharding="sharded")
        self._emit("silu_mul", act, "gate_up", layer, gate=gate_up[0], up=gate_up[1])
        down = self._weight(f"{prefix}.mlp.down_proj.weight", (h, cfg.intermediate_size), 1, ranges)
        return self._row_parallel(act, down, hidden, f"l{layer}.down", "down", layer)

    def _head(self, hidden: Value, logits: Logits) -> Value:
        cfg, sh = self.config, self.shard
        rows = self.rows
        if self.phase == "prefill" and logits == "last":
            rows = 1
            last = Value("last", (1, cfg.hidden_size))
            self._emit("gather_row", last, "lm_head", None, x=hidden, where=self.where)
            hidden = last
        x = self._norm("model.norm.weight", hidden, "final_norm", "lm_head", None)
        name = "model.embed_tokens.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        part = Part(name, (cfg.vocab_size, cfg.hidden_size), 0, self._ranges(sh.vocab_size))
        # The vocabulary projection stays 16-bit under --quantization fp8, as FP8 checkpoints have it.
        self.weights["lm_head.weight"] = WeightSpec("lm_head.weight", (part,))
        weight = Value(
            "lm_head.weight", (sh.vocab_size, cfg.hidden_size), "act", "sharded", "weight"
        )
        out = Value("logits", (rows, sh.vocab_size), "f32", "sharded")
        self._emit("linear", out, "lm_head", None, {"role": "lm_head"}, x=x, w=weight)
        if logits == "last":
            self._emit(
                "sample", Value("token", (rows,), "i32"), "sampling", None,
                {"vocab_size": cfg.vocab_size, "shard_size": sh.vocab_size},
                logits=out, tokens=state("tokens", (0,), "i32"),
                positions=state("positions", (0,), "i32"), where=self.where,
            )  # fmt: skip
        return out

    # Pieces

    def _norm(self, name: str, x: Value, out: str, stage: str, layer: int | None) -> Value:
        weight = self._weight(name, (self.config.hidden_size,), None, quantizable=False)
        y = Value(out, x.shape)
        self._emit(
            "rmsnorm", y, stage, layer, {"eps": self.config.rms_norm_eps}, x=x, weight=weight
        )
        return y

    def _row_parallel(
        self, x: Value, weight: Value, residual: Value, name: str, stage: str, layer: int
    ) -> Value:
        """A linear split along K: each rank has a partial sum of the whole output."""
        sharding: Sharding = "partial" if self.tp > 1 else "replicated"
        y = Value(name, residual.shape, sharding=sharding)
        self._emit("linear", y, stage, layer, {"role": stage}, x=x, w=weight)
        out = Value(f"{name}_res", residual.shape)
        self._emit("add", out, stage, layer, x=y, residual=residual)
        return out

    def _ranges(self, size: int) -> tuple[tuple[int, int], ...]:
        return tuple((rank * size, (rank + 1) * size) for rank in range(self.tp))

    def _weight(
        self,
        name: str,
        shape: tuple[int, ...],
        axis: int | None,
        ranges: tuple[tuple[int, int], ...] = (),
        head_dim: int = 0,
        quantizable: bool = True,
    ) -> Value:
        spec = WeightSpec(
            name, (Part(name, shape, axis, ranges, "natural", head_dim),), quantizable=quantizable
        )
        self.weights[name] = spec
        sharding: Sharding = "replicated" if axis is None else "sharded"
        return Value(name, spec.local_shape(), "act", sharding, "weight")

    def _emit(
        self,
        kind: str,
        outputs: Value | tuple[Value, ...],
        stage: str,
        layer: int | None,
        attrs: dict | None = None,
        **inputs: Value | None,
    ) -> None:
        self.ops.append(make_op(kind, outputs, stage, layer, attrs, **inputs))
