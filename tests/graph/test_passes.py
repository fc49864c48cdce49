"""Structure of the graphs: what each pass leaves behind, and that the verifier catches broken rewrites."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from engine.config import PRESETS, preset, with_layers
from engine.errors import EngineError
from engine.graph.build import build
from engine.graph.dump import dump_graph
from engine.graph.ir import Value
from engine.graph.passes import PASSES, run_passes
from engine.graph.plan import ALIGN, arena_outputs, plan, value_bytes
from engine.graph.verify import Checked, GraphError, verify

MODELS = [(name, tp) for name, config in PRESETS.items() for tp in config.valid_tp()]
PHASES = [("decode", 1, "last"), ("decode", 8, "last"), ("prefill", 64, "last"),
          ("prefill", 64, "none"), ("prefill", 64, "all")]  # fmt: skip


def graph_of(name, tp, phase, rows, logits="last", layers=3):
    config = with_layers(preset(name), layers)
    return build(config, phase=phase, rows=rows, tp=tp, logits=logits)


@pytest.mark.parametrize("phase,rows,logits", PHASES)
@pytest.mark.parametrize("name,tp", MODELS)
def test_every_preset_compiles_and_verifies(name, tp, phase, rows, logits):
    stages = []
    final = run_passes(
        graph_of(name, tp, phase, rows, logits), lambda stage, graph: stages.append((stage, graph))
    )
    assert [stage for stage, _ in stages] == ["build", *(p.__name__ for p in PASSES)]
    kinds = Counter(op.kind for op in final.ops)
    # A finished graph holds only what lowering knows.
    assert not set(kinds) & {"rope", "head_norm", "kv_append", "all_reduce", "sample", "add"} - (
        {"add"} if tp == 1 else set()
    )
    # A GEMV pushes in its epilogue: in decode always, in prefill those of the last row.
    separate = 0 if phase == "decode" else kinds["poll_residual"]
    assert kinds["push"] == separate - (
        2 if phase == "prefill" and logits == "last" and tp > 1 else 0
    )


@pytest.mark.parametrize("tp,rows,launches", [(1, 1, 5), (2, 1, 5), (2, 8, 7), (4, 2, 7)])
def test_launches_per_decode_layer(tp, rows, launches):
    """qkv, attention, o_proj, gate_up, down; with ranks to talk to, one poll after each of the last two sums,
    unless the messages are small enough for the next GEMV to poll them."""
    final = run_passes(graph_of("qwen2.5-7b", tp, "decode", rows))
    per_layer = Counter(op.layer for op in final.ops if op.layer is not None)
    assert per_layer == {0: launches, 1: launches, 2: launches}


@pytest.mark.parametrize("tp,launches", [(1, 6), (4, 8)])
def test_qk_norm_takes_rope_out_of_the_gemv(tp, launches):
    """One launch more a layer: the qkv GEMV stores, rope_append normalises a whole head. Gains follow the rows."""
    final = run_passes(graph_of("qwen3-8b", tp, "decode", 4))
    layer = [op for op in final.ops if op.layer == 1]
    assert len(layer) == launches
    qkv, rope = layer[:2]
    assert qkv.attrs["role"] == "qkv" and "epilogue" not in qkv.attrs and qkv.find("norm")
    assert rope.kind == "rope_append" and rope.attrs["style"] == "pairs"
    for role in ("q_norm", "k_norm"):
        (part,) = final.weights[rope.input(role).name].parts
        assert (part.layout, part.head_dim, part.shape) == ("rope_pairs", 128, (128,))


@pytest.mark.parametrize("phase,rows,logits", PHASES)
def test_exchange_sites_are_even_and_in_order(phase, rows, logits):
    """Two slots alternate by site, across replays too: so every graph has an even number of them."""
    final = run_passes(graph_of("qwen2.5-7b", 4, phase, rows, logits))
    sites = [op.attrs["site"] for op in final.ops if op.kind == "poll_residual" or op.polls]
    assert sites == list(range(len(sites))) and len(sites) % 2 == 0
    pushes = [op.attrs["site"] for op in final.ops
              if op.kind == "push" or op.attrs.get("epilogue") == "push"]  # fmt: skip
    assert pushes == sites


@pytest.mark.parametrize(
    "name,tp,rows", [("qwen2.5-7b", 2, 1), ("qwen2.5-1.5b", 4, 1), ("qwen3-8b", 2, 1)]
)
def test_consumers_poll_small_messages(name, tp, rows):
    """All of a step or none; site i is polled behind its push, by the GEMV whose norm reads the sum."""
    seen = {}
    final = run_passes(
        graph_of(name, tp, "decode", rows), lambda stage, graph: seen.update({stage: graph})
    )
    polls = [op for op in final.ops if op.polls]
    assert not any(op.kind == "poll_residual" for op in final.ops)
    assert [op.stage for op in polls] == ["gate_up", "qkv"] * 2 + ["gate_up", "lm_head"]
    assert [op.attrs["site"] for op in polls] == list(range(6))
    before = {
        op.attrs["site"]: op for op in seen["fuse_epilogue"].ops if op.kind == "poll_residual"
    }
    producers = final.producers()
    for op in polls:
        separate, send = before[op.attrs["site"]], final.ops[producers[op.input("message")]]
        assert op.outputs[-1] == separate.out and op.input("x") == separate.input("residual")
        assert send.attrs["site"] == op.attrs["site"] and "norm_eps" in op.attrs
        assert op.attrs["slots"] == send.attrs["slots"] == 3  # divides 6 sites
        assert op.is_wait and not op.is_send and send.is_send and not send.is_wait
    # What other programs of the launch still read is not where one of them writes the sum.
    offsets = plan(final, 2).offsets
    for op in polls:
        places = [
            (offsets[v], offsets[v] + value_bytes(v, 2))
            for v in (op.input("x"), *arena_outputs(op))
        ]
        assert all(a[1] <= b[0] or b[1] <= a[0] for a in places for b in places if a != b)


@pytest.mark.parametrize(
    "change", [dict(rows=8), dict(algorithms=("nccl",)), dict(layers=1), dict(phase="prefill")]
)
def test_polls_that_stay_launches(change):
    """Large messages, messages that NCCL carries, two exchanges a step (no third slot), prefill."""
    facts = {"phase": "decode", "rows": 1, "layers": 3, "algorithms": ("lamport",), **change}
    config = with_layers(preset("qwen2.5-7b"), facts.pop("layers"))
    final = run_passes(build(config, tp=2, **facts))
    assert not any(op.polls or "slots" in op.attrs for op in final.ops)
    assert sum(op.kind == "poll_residual" for op in final.ops) == 2 * config.num_layers


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("phase,rows", [("decode", 1), ("decode", 8), ("prefill", 64)])
def test_lm_head_leaves_logits_and_their_maxima(phase, rows, tp):
    """No launch reads the logits again to find the best of them; the rest of sampling stays as it was."""
    final = run_passes(graph_of("qwen2.5-7b", tp, phase, rows))
    kinds = [op.kind for op in final.ops]
    rest = ["argmax_finish"] if tp == 1 else ["argmax_push", "argmax_poll"]
    head = final.ops[-1 - len(rest)]
    assert kinds[-1 - len(rest) :] == ["linear", *rest] and "argmax_partial" not in kinds
    logits, best = head.outputs[:2]
    assert (head.attrs["role"], head.attrs["epilogue"]) == ("lm_head", "maxima")
    assert final.output == logits and logits.shape == (head.input("x").shape[0], 152064 // tp)
    assert final.ops[-len(rest)].input("best") == best
    assert (head.attrs["vocab_size"], head.attrs["shard_size"]) == (152064, 152064 // tp)
    assert head.input("where").name == ("row_slots" if phase == "decode" else "request")
    # Only the logits are in the arena, at its start.
    buffers = plan(final, 2)
    assert buffers.offsets[logits] == 0 and best not in buffers.offsets


def test_maxima_stay_a_launch_behind_a_gemm():
    """More rows than a GEMV takes."""
    final = run_passes(graph_of("qwen2.5-7b", 1, "decode", 16))
    head, partial, finish = final.ops[-3:]
    assert [op.kind for op in (head, partial, finish)] == [
        "linear",
        "argmax_partial",
        "argmax_finish",
    ]
    assert head.out == final.output == partial.input("logits")


def test_chunk_without_head_stops_after_the_last_kv_append():
    final = run_passes(graph_of("qwen2.5-7b", 1, "prefill", 64, "none"))
    assert final.output is None and final.ops[-1].kind == "rope_append" and final.ops[-1].layer == 2


def test_phases_agree_on_the_weights():
    """Decode and prefill run from one set of tensors."""
    graphs = [run_passes(graph_of("qwen2.5-72b", 2, *p)) for p in PHASES]
    for graph in graphs[1:]:
        assert graph.weights.items() <= graphs[0].weights.items()


def test_qkv_weights_are_merged_and_permuted():
    final = run_passes(graph_of("qwen2.5-72b", 8, "decode", 1))
    spec = final.weights["model.layers.0.self_attn.qkv_proj.weight"]
    assert [part.layout for part in spec.parts] == ["rope_pairs", "rope_pairs", "natural"]
    assert spec.local_shape(7) == (1024 + 2 * 128, 8192)
    assert spec.parts[0].ranges[7] == (7168, 8192) and spec.parts[1].ranges[7] == (896, 1024)
    gate_up = final.weights["model.layers.0.mlp.gate_up_proj.weight"]
    assert gate_up.combine == "interleave" and gate_up.local_shape(0) == (2 * 3696, 8192)


def test_kv_heads_replicate_by_whole_groups():
    """qwen2.5-3b: 16 query heads, 2 KV heads, TP 8: four ranks hold the same KV head."""
    final = run_passes(graph_of("qwen2.5-3b", 8, "decode", 1))
    spec = final.weights["model.layers.0.self_attn.qkv_proj.weight"]
    assert [r[0] // 128 for r in spec.parts[1].ranges] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_shard_of_gives_each_rank_the_larger_degrees_share():
    config = with_layers(preset("qwen2.5-72b"), 1)
    graph = run_passes(build(config, phase="decode", rows=1, tp=2, shard_of=8))
    assert graph.tp == 2
    assert graph.weights["model.layers.0.mlp.down_proj.weight"].local_shape(1) == (8192, 3696)
    with pytest.raises(EngineError, match="valid degrees: 1, 2, 4"):
        build(preset("qwen2.5-7b"), phase="decode", rows=1, tp=2, shard_of=8)


@pytest.mark.parametrize("phase,rows,logits", PHASES)
@pytest.mark.parametrize("tp", [1, 2])
def test_plan_never_overlaps_live_buffers(phase, rows, logits, tp):
    graph = run_passes(graph_of("qwen2.5-7b", tp, phase, rows, logits))
    buffers = plan(graph, 2)
    last = {value: uses[-1] for value, uses in graph.consumers().items()}
    if graph.output is not None:
        last[graph.output] = len(graph.ops)
    spans = [(buffers.offsets[v], buffers.offsets[v] + value_bytes(v, 2), i, last.get(v, i))
             for i, op in enumerate(graph.ops) for v in arena_outputs(op)]  # fmt: skip
    assert spans and all(start % ALIGN == 0 for start, *_ in spans)
    assert max(stop for _, stop, *_ in spans) <= buffers.arena_bytes
    for i, (start, stop, born, dies) in enumerate(spans):
        for other in spans[:i]:
            if other[3] >= born and dies >= other[2]:
                assert stop <= other[0] or other[1] <= start
    # Reuse: three layers need no more than about one layer's buffers (the logits aside).
    one = plan(run_passes(graph_of("qwen2.5-7b", tp, phase, rows, logits, layers=2)), 2).arena_bytes
    assert buffers.arena_bytes <= one * 1.01


@pytest.mark.parametrize("phase,rows", [("decode", 8), ("prefill", 64)])
@pytest.mark.parametrize("tp", [2, 8])
def test_a_poll_writes_nothing_that_its_push_still_reads(phase, rows, tp):
    """They overlap: a poll is not held up by the push's end."""
    config = with_layers(preset("qwen2.5-7b" if tp == 2 else "qwen2.5-72b"), 3)
    graph = run_passes(build(config, phase=phase, rows=rows, tp=tp, algorithms=("lamport",)))
    offsets = plan(graph, 2).offsets
    producers = graph.producers()

    def places(values):
        return [(offsets[v], offsets[v] + value_bytes(v, 2)) for v in values if v in offsets]

    polls = [op for op in graph.ops if op.kind == "poll_residual"]
    assert len(polls) == 6
    for op in polls:
        at = producers[op.input("message")]
        push = graph.ops[at]
        # Nothing between them, and the residual is from before the push: the poll waits for neither.
        assert graph.ops.index(op) == at + 1 and producers[op.input("residual")] < at
        read, written = places(push.inputs), places(arena_outputs(op))
        assert read and written
        assert all(a[1] <= b[0] or b[1] <= a[0] for a in read for b in written)


def broken(graph, mutate):
    with pytest.raises(GraphError) as error:
        verify(mutate(graph))
    return str(error.value)


def test_verifier_finds_what_a_bad_pass_does():
    graph = run_passes(graph_of("qwen2.5-7b", 2, "decode", 1))

    def ops(change):
        return lambda g: replace(g, ops=tuple(change(list(g.ops))))

    def swap_value(index, role_index, value):
        def change(line):
            op = line[index]
            inputs = list(op.inputs)
            inputs[role_index] = value
            line[index] = replace(op, inputs=tuple(inputs))
            return line

        return change

    def with_outputs(index, outputs):
        return lambda line: [
            *line[:index],
            replace(line[index], outputs=outputs),
            *line[index + 1 :],
        ]

    assert "before it is defined" in broken(graph, ops(lambda line: [line[1], line[0], *line[2:]]))
    assert "defined twice" in broken(graph, ops(lambda line: [line[0], *line]))
    wrong = Value("h0", (1, 7))
    assert "before it is defined" in broken(graph, ops(swap_value(1, 0, wrong)))
    weight = next(v for v in graph.ops[1].inputs if v.kind == "weight")
    lost = replace(weight, name="model.layers.0.lost.weight")
    assert "no spec" in broken(graph, ops(swap_value(1, 1, lost)))
    shapes = replace(weight, shape=(weight.shape[0] + 16, weight.shape[1]))
    assert "its spec gives" in broken(graph, ops(swap_value(1, 1, shapes)))
    unknown = ops(lambda line: [replace(line[0], kind="teleport"), *line[1:]])
    assert "unknown kind" in broken(graph, unknown)
    index = next(i for i, op in enumerate(graph.ops) if op.attrs.get("epilogue") == "maxima")
    logits, best, *hidden = graph.ops[index].outputs
    wide = replace(best, shape=(1, 3))
    for outputs, message in (
        ((logits, wide, *hidden), "maxima of"),
        ((logits, *hidden), "outputs"),
    ):
        assert message in broken(graph, ops(with_outputs(index, outputs)))
    index = next(i for i, op in enumerate(graph.ops) if op.attrs.get("epilogue") == "push")
    message = replace(graph.ops[index].out, sharding="replicated")
    assert "replicated" in broken(graph, ops(with_outputs(index, (message,))))
    index = next(i for i, op in enumerate(graph.ops) if op.polls)
    poll = graph.ops[index]

    def swap_poll(**change):
        return ops(lambda line: [*line[:index], replace(poll, **change), *line[index + 1 :]])

    assert "1 outputs" in broken(graph, swap_poll(outputs=poll.outputs[:1]))
    narrow = (poll.out, replace(poll.outputs[1], shape=(1, 8)))
    assert "-> (1, 8)" in broken(graph, swap_poll(outputs=narrow))
    sends = {**poll.attrs, "epilogue": "push"}
    outputs = (Value("y", (1, poll.input("w").shape[0])), poll.outputs[1])
    assert "must not send" in broken(graph, swap_poll(attrs=sends, outputs=outputs))


def test_dump_is_short_and_complete():
    """80 layers fold to two, in prefill to those and the last two; every pass has its section; both phases and the
    plan are there."""
    text = dump_graph(preset("qwen2.5-72b"), 2)
    for transform in PASSES:
        assert text.count(f"== after {transform.__name__}") == 2
    assert "layers 2..79: as above" in text and "arena of" in text
    assert len(text.splitlines()) < 1000


def test_verifier_that_has_seen_the_graph_finds_the_same():
    """What it checked before a pass excuses only what the pass left alone."""
    graph = run_passes(graph_of("qwen2.5-7b", 2, "decode", 1))
    line = list(graph.ops)
    weight = next(v for v in line[1].inputs if v.kind == "weight")
    spec = graph.weights[weight.name]
    halved = replace(spec, parts=spec.parts[:1])
    for wrong, message in (
        (replace(graph, ops=(line[1], line[0], *line[2:])), "before it is defined"),
        (replace(graph, ops=(line[0], *line)), "defined twice"),
        (replace(graph, ops=(replace(line[0], kind="teleport"), *line[1:])), "unknown kind"),
        (replace(graph, weights={**graph.weights, weight.name: halved}), "its spec gives"),
        (replace(graph, output=replace(graph.output, name="other")), "never defined"),
    ):
        checked = Checked()
        verify(graph, checked)
        verify(replace(graph, ops=tuple(line)), checked)
        with pytest.raises(GraphError, match=message):
            verify(wrong, checked)
